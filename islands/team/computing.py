"""The computation of an island over several hosts: the leader says what it does next, and the others do the same.

All processes run the same programs in the same order, on their own part of each array. What a computation needs from
the run, such as batches and snapshots, comes with the leader's messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from archipelago.broker.codecs import Parts, Vector
from archipelago.broker.manifest import Manifest
from archipelago.islands.computation import Computation
from archipelago.islands.sync.arrays import Tensors, put
from archipelago.islands.sync.replica import Replica
from archipelago.islands.team.leader import HostLeader
from archipelago.islands.team.messages import Frame, unfit


class SharedComputation(Computation):
    """A computation over several hosts. Each method is called in all processes, in the same order."""

    def optimizer_leaves(self) -> list[Any]:
        """Return copies of the inner optimiser's arrays in the host's memory, gathered one at a time."""
        return jax.tree.leaves(self._on_host(self.inner.optimizer))

    def optimizer_like(self) -> Any:
        """Return the inner optimiser's state in the host's memory. What is spread over hosts is zeros."""
        return jax.tree.map(
            lambda x: np.asarray(x) if x.is_fully_replicated else np.zeros(x.shape, x.dtype), self.inner.optimizer
        )

    def use_optimizer(self, leaves: Sequence[Any]) -> None:
        """Replace the inner optimiser's arrays by values of the host's memory."""
        super().use_optimizer(_placed(leaves, self.inner.optimizer))

    def _on_host(self, tree: Any) -> Any:
        assert self.placement is not None  # noqa: S101 - several hosts have several devices
        return jax.tree.map(lambda leaf: np.array(self.placement.whole(leaf)), tree)  # type: ignore[union-attr]


def _placed(values: Sequence[Any], like: Any) -> list[Any]:
    """Return values of the host's memory where arrays are."""
    return [put(np.asarray(value), own.sharding) for value, own in zip(values, jax.tree.leaves(like), strict=True)]


class LeadingReplica(Replica):
    """The replica in the leader's process. It measures and adopts in all processes."""

    def __init__(self, leader: HostLeader, *about: Any, **more: Any) -> None:
        super().__init__(*about, **more)
        self._leader = leader

    def measure(self, fragment: int, tensors: Mapping[str, Any], codec: str = "") -> Parts:
        """Measure a fragment in all processes. The leader has the encoded bytes."""
        self._leader.tell("measure", (fragment, codec))
        return super().measure(fragment, tensors, codec)

    def adopt(self, fragment: int, tensors: Mapping[str, Any], new_N: Vector) -> Tensors:
        """Adopt a fragment's snapshot in all processes."""
        self._leader.tell("adopt", (fragment,), [new_N])
        return super().adopt(fragment, tensors, new_N)


class LeadingComputation(SharedComputation):
    """The computation in the leader's process."""

    def __init__(self, leader: HostLeader, *about: Any, **more: Any) -> None:
        self._leader = leader
        super().__init__(*about, **more)

    def _new_replica(self, manifest: Manifest) -> Replica:
        return LeadingReplica(self._leader, manifest, self._templates, donates=True)

    def begin(self, vectors: Sequence[Vector]) -> None:
        """Start from one vector of each fragment, in all processes."""
        self._leader.tell("begin", (), vectors)
        super().begin(vectors)

    def step(self, batches_n: Any, schedule_step: int, length: int) -> jax.Array:
        """Dispatch inner steps in all processes."""
        self._leader.tell("step", (schedule_step, length), jax.tree.leaves(batches_n))
        return super().step(batches_n, schedule_step, length)

    def try_steps(self, batches_n: Any, length: int) -> None:
        """Compile in all processes."""
        self._leader.tell("try", (length,), jax.tree.leaves(batches_n))
        super().try_steps(batches_n, length)

    def optimizer_leaves(self) -> list[Any]:
        """Return copies of the inner optimiser's arrays, which all processes gather."""
        self._leader.tell("give")
        return super().optimizer_leaves()

    def use_optimizer(self, leaves: Sequence[Any]) -> None:
        """Replace the inner optimiser's arrays in all processes."""
        held = [np.asarray(leaf) for leaf in leaves]
        self._leader.tell("take", (), held)
        super().use_optimizer(held)


def follow(next_frame: Callable[[], Frame], computation: SharedComputation, sample: Any) -> int:
    """Do what the leader says until the island ends, and return the exit status.

    Args:
        next_frame: Waits for the next message of the leader.
        computation: This process's part.
        sample: A batch, whose tree is that of the leader's batches.

    Raises:
        WireError: The leader says what no leader says (`hosts.message`).
    """
    structure: Any = jax.tree.structure(sample)

    def batches(frame: Frame) -> Any:
        return jax.tree.unflatten(structure, frame.arrays)

    def measure(fragment: int, codec: str) -> None:
        computation.replica.measure(fragment, computation.named(), codec)

    def adopt(fragment: int, new_N: Vector) -> None:
        computation.replace(computation.replica.adopt(fragment, computation.named(), new_N))

    doings: dict[str, Callable[[Frame], Any]] = {
        "begin": lambda frame: computation.begin(frame.arrays),
        "try": lambda frame: computation.try_steps(batches(frame), frame.number(0)),
        "step": lambda frame: computation.step(batches(frame), frame.number(0), frame.number(1)),
        "measure": lambda frame: measure(frame.number(0), frame.text(1)),
        "adopt": lambda frame: adopt(frame.number(0), frame.arrays[0]),
        "give": lambda frame: computation.optimizer_leaves(),
        "take": lambda frame: computation.use_optimizer(frame.arrays),
    }
    while (frame := next_frame()).kind != "end":
        try:
            doings[frame.kind](frame)
        except (IndexError, KeyError, TypeError, ValueError) as error:
            fault = f"the leader says {frame.kind!r}, which does not fit ({type(error).__name__}: {error})"
            raise unfit(fault[:500]) from error
    return frame.number(1)
