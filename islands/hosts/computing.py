"""The computation of an island over several hosts: the leader says what it does next, and the others do the same.

All processes run the same programs in the same order, on their own part of each array. What a computation needs from
the run, such as batches and snapshots, comes with the leader's messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from archipelago.broker.codecs import CODECS, Parts
from archipelago.broker.manifest import Manifest
from archipelago.islands.computation import Computation
from archipelago.islands.hosts.leader import HostLeader
from archipelago.islands.hosts.messages import Frame, Value, unfit
from archipelago.islands.inner import InnerState
from archipelago.islands.mesh.placement import OwnSequences
from archipelago.islands.sync.arrays import put
from archipelago.islands.sync.connection.snapshots import Arrival

#: In the place of the size of a whole batch, for an array that each host gets as it is.
WHOLE = -1


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

    def __init__(self, leader: HostLeader, *about: Any) -> None:
        super().__init__(*about)
        self._leader = leader

    def begin(self, arrivals: Sequence[Arrival]) -> None:
        """Start from one snapshot of each fragment, in all processes."""
        self._leader.tell("begin", (), [arrival.params_N for arrival in arrivals])
        super().begin(arrivals)

    def step(self, batches_n: Any, schedule_step: int, length: int) -> jax.Array:
        """Dispatch inner steps in all processes."""
        self._tell_batches("step", (schedule_step, length), batches_n)
        return super().step(batches_n, schedule_step, length)

    def try_steps(self, batches_n: Any, length: int) -> None:
        """Compile in all processes."""
        self._tell_batches("try", (length,), batches_n)
        super().try_steps(batches_n, length)

    def _tell_batches(self, kind: str, values: Sequence[Value], batches_n: Any) -> None:
        """Tell the others of batches. Each gets the sequences of its own devices, and the size of a whole batch."""
        placement, leaves = self.placement, [np.asarray(leaf) for leaf in jax.tree.leaves(batches_n)]
        assert placement is not None  # noqa: S101 - several hosts have several devices

        def frame(process: int) -> Frame:
            rows = [placement.sequences_of(leaf.shape, process) for leaf in leaves]
            sizes = [WHOLE if own is None else leaf.shape[1] for own, leaf in zip(rows, leaves, strict=True)]
            arrays = [leaf if own is None else leaf[:, own] for own, leaf in zip(rows, leaves, strict=True)]
            return Frame(kind, (*values, *sizes), tuple(arrays))

        self._leader.tell_each(frame)

    def measure(self, fragment: int, codec: str) -> Parts:
        """Measure a fragment in all processes. The leader has the encoded bytes."""
        self._leader.tell("measure", (fragment, codec))
        return super().measure(fragment, codec)

    def adopt(self, arrival: Arrival) -> None:
        """Adopt a fragment in all processes."""
        self._leader.tell("adopt", (arrival.snapshot.fragment,), [arrival.params_N])
        super().adopt(arrival)

    def optimizer_leaves(self) -> list[Any]:
        """Return copies of the inner optimiser's arrays, which all processes gather."""
        self._leader.tell("give")
        return super().optimizer_leaves()

    def use_optimizer(self, leaves: Sequence[Any]) -> None:
        """Replace the inner optimiser's arrays in all processes."""
        held = [np.asarray(leaf) for leaf in leaves]
        self._leader.tell("take", (), held)
        super().use_optimizer(held)

    def copies(self) -> dict[str, Any]:
        """Return the inner state and the references, which all processes gather."""
        self._leader.tell("copies")
        return super().copies()

    def restore_optimizer(self, optimizer: Any) -> None:
        """Continue from the optimiser's state of a checkpoint, in all processes."""
        self.use_optimizer(jax.tree.leaves(optimizer))

    def restore(self, inner: Mapping[str, Any], references: Sequence[Mapping[str, Any]]) -> None:
        """Continue from the inner state and the references of a checkpoint, in all processes."""
        state = InnerState(dict(inner["params"]), inner["optimizer"])
        arrays = [np.asarray(leaf) for leaf in jax.tree.leaves((state, [dict(found) for found in references]))]
        self._leader.tell("restore", (), arrays)
        self.restore_all(arrays)


def follow(next_frame: Callable[[], Frame], computation: SharedComputation, manifest: Manifest, sample: Any) -> int:
    """Do what the leader says until the island ends, and return the exit status.

    Args:
        next_frame: Waits for the next message of the leader.
        computation: This process's part.
        manifest: The run.
        sample: A batch, whose tree is that of the leader's batches.

    Raises:
        WireError: The leader says what no leader says (`hosts.message`).
    """
    structure: Any = jax.tree.structure(sample)

    def batches(frame: Frame, first: int) -> Any:
        """Return the batches of a message whose values from `first` on are the sizes of a whole batch."""
        if len(frame.arrays) != structure.num_leaves:
            raise unfit(f"{frame.kind} has {len(frame.arrays)} arrays of a batch")
        leaves = [own_sequences(array, frame.number(first + at)) for at, array in enumerate(frame.arrays)]
        return jax.tree.unflatten(structure, leaves)

    def own_sequences(array: Any, size: int) -> Any:
        placement = computation.placement
        if size == WHOLE or placement is None:
            return array
        if array.ndim < 2 or not 0 < size <= array.shape[1] * placement.shape.batch_parts:
            raise unfit(f"a batch of {size} sequences is none of this mesh")
        found = OwnSequences(array, size)
        rows = placement.sequences_of(found.shape, jax.process_index())
        if rows is None or rows.size != array.shape[1]:
            raise unfit(f"{array.shape[1]} sequences of {size} are not those of this host")
        return found

    def fragment(frame: Frame) -> int:
        found = frame.number(0)
        if not 0 <= found < len(manifest.sizes):
            raise unfit(f"there is no fragment {found}")
        return found

    def vectors(frame: Frame, sizes: Sequence[int]) -> list[Any]:
        if [(x.shape, x.dtype) for x in frame.arrays] != [((size,), np.dtype(np.float32)) for size in sizes]:
            raise unfit(f"{frame.kind} has arrays of other sizes than {sizes}")
        return list(frame.arrays)

    def adopt(frame: Frame) -> None:
        p = fragment(frame)
        computation.adopt_vector(p, *vectors(frame, manifest.sizes[p : p + 1]))

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
        "begin": lambda frame: computation.begin_at(vectors(frame, manifest.sizes)),
        "try": lambda frame: computation.try_steps(batches(frame, 1), frame.number(0)),
        "step": lambda frame: computation.step(batches(frame, 2), frame.number(0), frame.number(1)),
        "measure": measure,
        "adopt": adopt,
        "give": lambda frame: computation.optimizer_leaves(),
        "take": take,
        "copies": lambda frame: computation.copies(),
        "restore": restore,
    }
    while (frame := next_frame()).kind != "end":
        if frame.kind not in doings:
            raise unfit(f"the leader says {frame.kind!r}, which nothing knows")
        doings[frame.kind](frame)
    return frame.number(1)
