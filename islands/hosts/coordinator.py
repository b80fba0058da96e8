"""JAX over several hosts, with a coordinator that outlives the leader by some seconds.

`jax.distributed.initialize` puts the coordinator into the leader's process. When that dies, JAX aborts all others at
once, before they can say why they end. So the coordinator has a process of its own, which ends after the leader.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from archipelago.islands.hosts.membership import Membership
from archipelago.islands.hosts.ports import await_free

#: How long the coordinator outlives the leader. The others say what happened within this time.
LINGER_SECONDS = 5.0
#: The processes have come together already, so JAX waits for their start only.
START_SECONDS = 120
#: JAX notices a lost process after this time. `team` notices it long before.
JAX_SILENCE_SECONDS = 120
#: How long the processes wait for each other at an orderly end. On a loaded machine, queued steps take a while.
SHUTDOWN_SECONDS = 60

_PROGRAM = f"""
import sys, time
from jax._src.lib import _jax
service = _jax.get_distributed_runtime_service(
    sys.argv[1], int(sys.argv[2]), heartbeat_timeout={JAX_SILENCE_SECONDS}, shutdown_timeout={SHUTDOWN_SECONDS})
sys.stdin.read()
time.sleep({LINGER_SECONDS})
service.shutdown()
"""


class Coordinator:
    """The process of JAX's coordinator. The leader starts it. It ends by itself after the leader."""

    def __init__(self, place: Membership) -> None:
        """Start it, once the coordinator of an earlier start has ended. Raises ConfigError (`hosts.port`)."""
        port = place.jax_address.rpartition(":")[2]
        await_free(int(port), 2 * LINGER_SECONDS)
        bind = f"[::]:{port}"
        command = [sys.executable, "-P", "-c", _PROGRAM, bind, str(place.hosts)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def close(self) -> None:
        """Let it end."""
        if self._process.stdin is not None:
            self._process.stdin.close()


def connect(place: Membership) -> None:
    """Connect this process's JAX to the others. Call this before anything that uses a device.

    JAX aborts the process if the others do not connect within START_SECONDS.
    """
    import jax
    from jax._src import distributed
    from jax._src.lib import _jax  # type: ignore[attr-defined]

    if _platforms(jax.config.jax_platforms) == ["cpu"]:  # type: ignore[attr-defined]
        _set("jax_cpu_collectives_implementation", "gloo")
    if place.local_devices is not None:
        visible = ",".join(map(str, place.local_devices))
        _set("jax_cuda_visible_devices", visible)
        _set("jax_rocm_visible_devices", visible)
    state = distributed.global_state
    state.coordinator_address, state.process_id, state.num_processes = place.jax_address, place.rank, place.hosts
    state.client = _jax.get_distributed_runtime_client(
        place.jax_address,
        place.rank,
        init_timeout=START_SECONDS,
        shutdown_timeout=SHUTDOWN_SECONDS,
        heartbeat_timeout=JAX_SILENCE_SECONDS,
        use_compression=True,
        shutdown_on_destruction=False,
    )
    state.client.connect()


def leave() -> None:
    """Disconnect from the others at an orderly end, where all of them do the same.

    Otherwise JAX would abort a process that takes longer to end than the coordinator.
    """
    from jax._src import distributed

    if distributed.global_state.client is not None:
        with suppress(RuntimeError):  # one of the others has been lost meanwhile
            distributed.global_state.client.shutdown()
    forget_others()


def forget_others() -> None:
    """Let this process end without waiting for the others, which may not be there any more."""
    from jax._src import distributed

    distributed.global_state.client = None


def _set(name: str, value: str) -> None:
    import jax

    jax.config.update(name, value)  # type: ignore[no-untyped-call]


def _platforms(chosen: str | None) -> Sequence[str]:
    return (chosen or "").split(",")
