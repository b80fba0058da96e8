"""The computation of an island over several hosts: the leader says what it does next, and the others do the same.

All processes run the same programs in the same order, on their own shards. What a computation needs from the run, such
as batches and snapshots, comes with the leader's messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from archipelago.broker.codecs import CODECS, Parts, Vector
from archipelago.broker.errors import WireError
from archipelago.broker.manifest import Manifest
from archipelago.islands.computation import Computation
from archipelago.islands.hosts.frames import Frame, unfit
from archipelago.islands.hosts.seat import Seat
from archipelago.islands.hosts.team import Team
from archipelago.islands.inner import InnerState
from archipelago.islands.sync.arrays import put

#: Batches, and the optimiser's state, may have this many bytes in addition to those of the model's copies.
SPARE_BYTES = 1 << 30
#: The bytes of one element of the optimiser's state of the largest optimisers, and of parameters and references.
ELEMENT_BYTES = 32


def most_bytes(manifest: Manifest) -> int:
    """Return the most bytes of a message."""
    return SPARE_BYTES + ELEMENT_BYTES * manifest.elements


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

    def copies(self) -> dict[str, Any]:
        """Return the inner state and the references in the host's memory, gathered one array at a time."""
        return {"inner": self._on_host(self.inner)._asdict(), "references": self._on_host(self.replica.references)}

    def examples(self) -> dict[str, Any]:
        """Return the shapes of a checkpoint's arrays, which the leader reads into its host's memory."""
        found: dict[str, Any] = jax.tree.map(
            lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape), super().examples()
        )
        return found

    def restore_all(self, arrays: Sequence[Any]) -> None:
        """Continue from parameters, optimiser state and references of the host's memory, in order."""
        count = len(jax.tree.leaves(self.inner))
        placed = _placed(arrays[:count], self.inner)
        self.inner = jax.tree.unflatten(jax.tree.structure(self.inner), placed)
        held = jax.tree.unflatten(jax.tree.structure(self.replica.references), arrays[count:])
        self.replica.restore(held)

    def _on_host(self, tree: Any) -> Any:
        assert self.placement is not None  # noqa: S101 - several hosts have several devices
        return jax.tree.map(lambda leaf: np.array(self.placement.whole(leaf)), tree)  # type: ignore[union-attr]


def _placed(values: Sequence[Any], like: Any) -> list[Any]:
    """Return values of the host's memory where arrays are."""
    return [put(np.asarray(value), own.sharding) for value, own in zip(values, jax.tree.leaves(like), strict=True)]


class LeadingComputation(SharedComputation):
    """The computation in the leader's process."""

    def __init__(self, team: Team, *about: Any) -> None:
        super().__init__(*about)
        self._team = team

    def begin(self, vectors: Sequence[Vector]) -> None:
        """Start from one vector of each fragment, in all processes."""
        self._team.tell("begin", (), [vector_N.copy() for vector_N in vectors])
        super().begin(vectors)

    def step(self, batches_n: Any, schedule_step: int, length: int) -> jax.Array:
        """Dispatch inner steps in all processes."""
        self._team.tell("step", (schedule_step, length), _arrays(batches_n))
        return super().step(batches_n, schedule_step, length)

    def try_steps(self, batches_n: Any, length: int) -> None:
        """Compile in all processes."""
        self._team.tell("try", (length,), _arrays(batches_n))
        super().try_steps(batches_n, length)

    def measure(self, fragment: int, codec: str) -> Parts:
        """Measure a fragment in all processes. The leader has the encoded bytes."""
        self._team.tell("measure", (fragment, codec))
        return super().measure(fragment, codec)

    def adopt(self, fragment: int, new_N: Vector, steps: int) -> None:
        """Adopt a fragment in all processes."""
        self._team.tell("adopt", (fragment, steps), (new_N.copy(),))  # the link may change it later
        super().adopt(fragment, new_N, steps)

    def optimizer_leaves(self) -> list[Any]:
        """Return copies of the inner optimiser's arrays, which all processes gather."""
        self._team.tell("give")
        return super().optimizer_leaves()

    def use_optimizer(self, leaves: Sequence[Any]) -> None:
        """Replace the inner optimiser's arrays in all processes."""
        held = [np.asarray(leaf) for leaf in leaves]
        self._team.tell("take", (), held)
        super().use_optimizer(held)

    def copies(self) -> dict[str, Any]:
        """Return the inner state and the references, which all processes gather."""
        self._team.tell("copies")
        return super().copies()

    def restore_optimizer(self, optimizer: Any) -> None:
        """Continue from the optimiser's state of a checkpoint, in all processes."""
        self.use_optimizer(jax.tree.leaves(optimizer))

    def restore(self, inner: Mapping[str, Any], references: Sequence[Mapping[str, Any]]) -> None:
        """Continue from the inner state and the references of a checkpoint, in all processes."""
        state = InnerState(dict(inner["params"]), inner["optimizer"])
        arrays = [np.asarray(leaf) for leaf in jax.tree.leaves((state, [dict(found) for found in references]))]
        self._team.tell("restore", (), arrays)
        self.restore_all(arrays)


def follow(seat: Seat, computation: SharedComputation, manifest: Manifest, sample: Any) -> int:
    """Do what the leader says until the island ends, and return the exit status.

    Args:
        seat: The connection to the leader.
        computation: This process's part.
        manifest: The run.
        sample: A batch, whose tree is that of the leader's batches.

    Raises:
        WireError: The leader says what no leader says (`hosts.message`).
    """
    structure: Any = jax.tree.structure(sample)

    def batches(frame: Frame) -> Any:
        if len(frame.arrays) != structure.num_leaves:
            raise unfit(f"{frame.kind} has {len(frame.arrays)} arrays of a batch")
        return jax.tree.unflatten(structure, frame.arrays)

    def fragment(frame: Frame) -> int:
        found = frame.number(0)
        if not 0 <= found < len(manifest.sizes):
            raise unfit(f"there is no fragment {found}")
        return found

    def begin(frame: Frame) -> None:
        if [x.shape for x in frame.arrays] != [(size,) for size in manifest.sizes]:
            raise unfit("the parameters are those of another run")
        computation.begin(frame.arrays)

    def adopt(frame: Frame) -> None:
        p = fragment(frame)
        if [x.shape for x in frame.arrays] != [(manifest.sizes[p],)]:
            raise unfit(f"a snapshot has another size than fragment {p}")
        computation.adopt(p, frame.arrays[0], frame.number(1))

    def measure(frame: Frame) -> None:
        if frame.text(1) not in CODECS:
            raise unfit(f"there is no codec {frame.text(1)[:40]!r}")
        computation.measure(fragment(frame), frame.text(1))

    def require_alike(frame: Frame, tree: Any) -> None:
        if [(x.shape, x.dtype) for x in frame.arrays] != [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]:
            raise unfit("the state is that of another model")

    def take(frame: Frame) -> None:
        require_alike(frame, computation.inner.optimizer)
        computation.use_optimizer(frame.arrays)

    def restore(frame: Frame) -> None:
        require_alike(frame, (computation.inner, computation.replica.references))
        computation.restore_all(frame.arrays)

    doings: dict[str, Callable[[Frame], Any]] = {
        "begin": begin,
        "try": lambda frame: computation.try_steps(batches(frame), frame.number(0)),
        "step": lambda frame: computation.step(batches(frame), frame.number(0), frame.number(1)),
        "measure": measure,
        "adopt": adopt,
        "give": lambda frame: computation.optimizer_leaves(),
        "take": take,
        "copies": lambda frame: computation.copies(),
        "restore": restore,
    }
    while (frame := seat.next()).kind != "end":
        if frame.kind not in doings:
            raise WireError(f"the leader says {frame.kind[:40]!r}, which nothing knows", code="hosts.message")
        doings[frame.kind](frame)
    return frame.number(1)


def _arrays(batches_n: Any) -> list[Any]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(batches_n)]
