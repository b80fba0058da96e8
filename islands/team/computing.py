"""The computation of an island over several hosts: the leader says what it does next, and the others do the same.

All processes run the same programs in the same order, on their own part of each array. What a computation needs from
the run, such as batches and snapshots, follows the leader's messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from archipelago.broker.codecs import CODECS, Parts, Vector
from archipelago.broker.manifest import Manifest
from archipelago.islands.computation import Computation
from archipelago.islands.sync.arrays import Tensors, put
from archipelago.islands.sync.replica import Replica
from archipelago.islands.team.jax_team import JaxTeam
from archipelago.islands.team.protocol import Said, Work


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

    def __init__(self, team: JaxTeam, *about: Any, **more: Any) -> None:
        super().__init__(*about, **more)
        self._team = team

    def measure(self, fragment: int, tensors: Mapping[str, Any], codec: str = "") -> Parts:
        """Measure a fragment in all processes. The leader has the encoded bytes."""
        self._team.tell(Work.MEASURE, fragment, codec=list(CODECS).index(codec))
        return super().measure(fragment, tensors, codec)

    def prepare(self, fragment: int, new_N: Vector) -> Vector:
        """Leave a snapshot in the memory of the host, from which all processes get it."""
        return new_N

    def adopt(self, fragment: int, tensors: Mapping[str, Any], new_N: Vector) -> Tensors:
        """Adopt a fragment's snapshot in all processes."""
        self._team.tell(Work.ADOPT, fragment)
        self._team.share([new_N])
        return super().adopt(fragment, tensors, new_N)


class LeadingComputation(SharedComputation):
    """The computation in the leader's process."""

    def __init__(self, team: JaxTeam, *about: Any, **more: Any) -> None:
        self._team = team
        super().__init__(*about, **more)

    def _new_replica(self, manifest: Manifest) -> Replica:
        return LeadingReplica(self._team, manifest, self._templates, donates=True)

    def begin(self, vectors: Sequence[Vector]) -> None:
        """Start from one vector of each fragment, in all processes."""
        self._team.tell(Work.BEGIN)
        for vector_N in vectors:
            self._team.share([vector_N])
        super().begin(vectors)

    def step(self, batches_n: Any, schedule_step: int, length: int) -> jax.Array:
        """Dispatch inner steps in all processes."""
        self._tell_batches(Work.STEP, batches_n, step=schedule_step, steps=length)
        return super().step(batches_n, schedule_step, length)

    def try_steps(self, batches_n: Any, length: int) -> None:
        """Compile in all processes."""
        self._tell_batches(Work.TRY, batches_n, steps=length)
        super().try_steps(batches_n, length)

    def _tell_batches(self, work: Work, batches_n: Any, **numbers: int) -> None:
        leaves = jax.tree.leaves(batches_n)
        self._team.tell(work, len(leaves[0]), **numbers)
        self._team.share(leaves)

    def optimizer_leaves(self) -> list[Any]:
        """Return copies of the inner optimiser's arrays, which all processes gather."""
        self._team.tell(Work.GIVE_STATE)
        return super().optimizer_leaves()

    def use_optimizer(self, leaves: Sequence[Any]) -> None:
        """Replace the inner optimiser's arrays in all processes."""
        self._team.tell(Work.TAKE_STATE)
        held = [self._team.share([np.asarray(leaf)])[0] for leaf in leaves]
        super().use_optimizer(held)


def follow(team: JaxTeam, computation: SharedComputation, sample: Any, stopped: Callable[[], bool]) -> Said:
    """Do what the leader says until the island ends, and return its last message.

    Args:
        team: The processes.
        computation: This process's part.
        sample: A batch like those of the leader.
        stopped: Whether a signal has arrived in this process.
    """
    sizes = computation.replica.sizes

    def batches(steps: int) -> Any:
        leaves, structure = jax.tree.flatten(sample)
        shared = team.share([np.zeros((steps, *leaf.shape[1:]), leaf.dtype) for leaf in leaves])
        return jax.tree.unflatten(structure, shared)

    def vector(fragment: int) -> Vector:
        return team.share([np.zeros(sizes[fragment], np.float32)])[0]

    def do(said: Said) -> None:
        match said.work:
            case Work.BEGIN:
                computation.begin([vector(fragment) for fragment in range(len(sizes))])
            case Work.TRY:
                computation.try_steps(batches(said.about), said.steps)
            case Work.STEP:
                computation.step(batches(said.about), said.step, said.steps)
            case Work.MEASURE:
                computation.replica.measure(said.about, computation.named(), list(CODECS)[said.codec])
            case Work.ADOPT:
                fragment = said.about
                computation.replace(computation.replica.adopt(fragment, computation.named(), vector(fragment)))
            case Work.GIVE_STATE:
                computation.optimizer_leaves()
            case Work.TAKE_STATE:
                leaves = jax.tree.leaves(computation.inner.optimizer)
                computation.use_optimizer([team.share([np.zeros(leaf.shape, leaf.dtype)])[0] for leaf in leaves])

    return team.hear(do, stopped)
