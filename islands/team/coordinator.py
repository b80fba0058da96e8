"""JAX over several hosts, with a coordinator that outlives the leader by some seconds, and the ports of both.

`jax.distributed.initialize` puts the coordinator into the leader's process. When that dies, JAX aborts all others at
once, before they can say why they end. So the coordinator has a process of its own, which ends after the leader.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from contextlib import suppress

from archipelago.broker.errors import ConfigError
from archipelago.islands.team.ranks import HostRank

POLL_SECONDS = 0.1

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


def start_coordinator(here: HostRank) -> subprocess.Popen[bytes]:
    """Start the process of JAX's coordinator, once that of an earlier start has ended. It ends after this process.

    Raises:
        ConfigError: Its port cannot be used (`hosts.port`).
    """
    port = here.jax_address.rpartition(":")[2]
    await_free(int(port), 2 * LINGER_SECONDS)
    command = [sys.executable, "-P", "-c", _PROGRAM, f"[::]:{port}", str(here.hosts)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def connect(here: HostRank) -> str:
    """Connect this process's JAX to the others. Call this before anything that uses a device.

    JAX aborts the process if the others do not connect within START_SECONDS. Afterwards `jax.devices()` are those of
    all processes.

    Returns:
        The number and kind of this process's devices.
    """
    import jax
    from jax._src import distributed
    from jax._src.lib import _jax  # type: ignore[attr-defined]

    if jax.config.jax_platforms == "cpu":  # type: ignore[attr-defined]
        jax.config.update("jax_cpu_collectives_implementation", "gloo")  # type: ignore[no-untyped-call]
    state = distributed.global_state
    state.coordinator_address, state.process_id, state.num_processes = here.jax_address, here.rank, here.hosts
    state.client = _jax.get_distributed_runtime_client(
        here.jax_address,
        here.rank,
        init_timeout=START_SECONDS,
        shutdown_timeout=SHUTDOWN_SECONDS,
        heartbeat_timeout=JAX_SILENCE_SECONDS,
        use_compression=True,
        shutdown_on_destruction=False,
    )
    state.client.connect()
    devices = jax.local_devices()
    return f"{len(devices)} of {devices[0].device_kind}"


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


# -- ports -------------------------------------------------------------------------------------------------------------


def listening(port: int) -> socket.socket:
    """Return a socket that listens on a port, for IPv6 and IPv4. Raises ConfigError (`hosts.port`)."""
    try:
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    except (OSError, ValueError):
        pass
    try:
        return socket.create_server(("", port))
    except OSError as error:
        raise ConfigError(
            f"the leader of this island cannot listen on port {port} ({error.strerror or error})",
            "Choose another port for --coordinator, or end the process that has this one.",
            code="hosts.port",
        ) from None


def await_free(port: int, seconds: float) -> None:
    """Wait until nothing listens on a port. Raises ConfigError (`hosts.port`) if something still does after `seconds`.

    JAX would share the port with the coordinator of an island that has just ended, and hosts would reach either.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            listening(port).close()
        except ConfigError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(POLL_SECONDS)
        else:
            return
