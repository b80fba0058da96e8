"""The processes of one island in JAX, connected by `jax.distributed`.

What the leader says and shares goes over the processors of all hosts, by gloo, so that it never waits for an
accelerator. If a process is lost, a computation of the others fails, or JAX aborts them. Either way they end.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh, NamedSharding
from numpy.typing import NDArray

from archipelago.broker.errors import ConfigError, HostError
from archipelago.islands.sync.arrays import spec
from archipelago.islands.team.protocol import Team

if TYPE_CHECKING:
    from archipelago.islands.team.hosts import HostRank

#: JAX aborts all processes when one of them has been silent for this long.
SILENCE_SECONDS = 15
#: How long the processes wait for each other at an orderly end. On a loaded machine, queued steps take a while.
SHUTDOWN_SECONDS = 60


def connect(here: HostRank, about: Mapping[str, str], seconds: float) -> JaxTeam:
    """Connect the JAX of all processes. Call this before anything that uses a device.

    Afterwards `jax.devices()` are those of all processes.

    Args:
        about: What all processes must have alike, by its name in words. All give the same names.
        seconds: JAX aborts this process if some have not come in that time.

    Raises:
        HostError: JAX cannot connect them (`hosts.missing`).
        ConfigError: The processes disagree, or have different devices (`hosts.disagree`). All of them raise it.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # type: ignore[no-untyped-call]
    jax.config.update("jax_enable_preemption_service", False)  # type: ignore[no-untyped-call] # it would take SIGTERM
    try:
        jax.distributed.initialize(
            here.address,
            here.hosts,
            here.rank,
            cluster_detection_method="deactivate",
            initialization_timeout=math.ceil(seconds),
            heartbeat_timeout_seconds=SILENCE_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except RuntimeError as error:
        raise HostError(
            f"JAX cannot connect the hosts of this island at {here.address} ({str(error).splitlines()[0][:200]})",
            "Is the port of --coordinator free on host 0, and open to the others? Start all hosts again.",
            code="hosts.missing",
        ) from None
    team, counts = JaxTeam(), Counter(device.device_kind for device in jax.local_devices())
    devices = " and ".join(f"{count} of {kind}" for kind, count in sorted(counts.items()))
    for what, own in {**about, "devices": devices}.items():
        if not team.is_same(f"{what} {own}"):
            raise ConfigError(
                f"the hosts of this island disagree: this one has {what} {own}, and another one has not",
                "Install the same versions, and start all hosts with the same flags and as many devices.",
                code="hosts.disagree",
            )
    return team


class JaxTeam(Team):
    """The processes of one island, which JAX has connected."""

    def __init__(self) -> None:
        """Take one device of each process, on the hosts if JAX uses them."""
        try:
            devices = jax.devices("cpu")
        except RuntimeError:
            devices = jax.devices()
        #: Whether messages go over the devices that compute.
        self._is_shared = devices[0] in jax.devices()
        firsts = [next(device for device in devices if device.process_index == p) for p in range(jax.process_count())]
        mesh = Mesh(np.array(firsts), ("process",))
        whole = NamedSharding(mesh, spec())
        self.rank, self.size = jax.process_index(), jax.process_count()
        self._own, self._rows = firsts[self.rank], NamedSharding(mesh, spec("process"))
        self._add_up = jax.jit(lambda rows: rows.sum(axis=0, dtype=rows.dtype), out_shardings=whole)

    def _sum(self, numbers: Sequence[int]) -> Sequence[int]:
        found: list[int] = self._summed(np.array(numbers, np.int32)).tolist()
        return found

    def _summed(self, own_N: NDArray[Any]) -> NDArray[Any]:
        """Add a vector of each process, on one device of each, and wait: messages could overtake each other."""
        shape = (self.size, *own_N.shape)
        row = jax.device_put(own_N[None], self._own)
        sums = self._add_up(jax.make_array_from_single_device_arrays(shape, self._rows, [row]))
        return np.asarray(sums.addressable_data(0))

    def settled(self, tree: Any) -> Any:
        """Return arrays, once they are computed if messages go over the same devices.

        On processors, a computation and a message of several processes could wait for each other's threads for ever.
        """
        return jax.block_until_ready(tree) if self._is_shared else tree  # type: ignore[no-untyped-call]

    def share_bytes(self, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
        words = np.zeros(-(-data.size // 4), np.uint32)
        if self.leads:
            words.view(np.uint8)[: data.size] = data
        shared = self._summed(words)
        return data if self.leads else shared.view(np.uint8)[: data.size]

    def share(self, arrays: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Return the arrays of the leader, in one message. The others give arrays of these shapes and dtypes."""
        held = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
        shared = self.share_bytes(np.concatenate(held))
        parts = np.split(shared, np.cumsum([part.size for part in held])[:-1])
        return [part.view(array.dtype).reshape(array.shape) for part, array in zip(parts, arrays, strict=True)]


def whole(leaf: Any) -> NDArray[Any]:
    """Return a copy of an array in the memory of this host. All processes gather one that is spread over them."""
    if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        leaf = process_allgather(leaf, tiled=True)
    return np.array(leaf)
