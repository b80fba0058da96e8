"""The processes of one island in JAX, connected by `jax.distributed`.

What the leader says and shares goes over the processors of all hosts, by gloo, so that it never waits for an
accelerator. If a process is lost, a computation of the others fails, or JAX aborts them. Either way they end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh, NamedSharding
from numpy.typing import NDArray

from archipelago.islands.sync.arrays import spec
from archipelago.islands.team.meeting import disagreement
from archipelago.islands.team.protocol import Team
from archipelago.islands.team.ranks import HostRank

#: The processes have come together already, so JAX waits for them to load only, on loaded machines.
START_SECONDS = 300
#: JAX aborts all processes when one of them has been silent for this long.
SILENCE_SECONDS = 15
#: How long the processes wait for each other at an orderly end. On a loaded machine, queued steps take a while.
SHUTDOWN_SECONDS = 60


def connect(here: HostRank) -> JaxTeam:
    """Connect the JAX of all processes. Call this before anything that uses a device.

    Afterwards `jax.devices()` are those of all processes.

    Raises:
        ConfigError: The processes have different devices (`hosts.disagree`). All of them raise it.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # type: ignore[no-untyped-call]
    jax.config.update("jax_enable_preemption_service", False)  # type: ignore[no-untyped-call] # it would take SIGTERM
    jax.distributed.initialize(
        here.jax_address,
        here.hosts,
        here.rank,
        cluster_detection_method="deactivate",
        initialization_timeout=START_SECONDS,
        heartbeat_timeout_seconds=SILENCE_SECONDS,
        shutdown_timeout_seconds=SHUTDOWN_SECONDS,
    )
    counts = Counter((device.process_index, device.device_kind) for device in jax.devices())
    own, *others = [
        (rank, " and ".join(f"{count} of {kind}" for (of, kind), count in sorted(counts.items()) if of == rank))
        for rank in range(here.hosts)
    ]
    for rank, found in others:
        if found != own[1]:
            raise disagreement("devices", own[1], rank, found)
    return JaxTeam()


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
        """Return the bytes of the leader. The others give as many."""
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
