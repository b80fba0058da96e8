"""The batches of a task: shards of its data, each read by one island at a time, and batches as the worker takes them.

Where a shard was read to follows what was merged.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from archipelago.broker.config import OWN_TOKENS_PER_STEP_MAX
from archipelago.broker.errors import ConfigError, MismatchError
from archipelago.broker.ranges import RANGES_MAX, ReadPosition
from archipelago.islands.data.batches import RangeReading, Shard, Supply, range_order
from archipelago.islands.tasks.task import NamedTask

#: The kinds of numpy dtypes that are not numbers: objects, texts and times. Records are not numbers either.
_NO_NUMBERS = "OSUMm"

log = logging.getLogger(__name__)


class Leases(Protocol):
    """What leases shards: the link of an island, or a baseline that has all of them."""

    def offer(self, ranges: Sequence[str], /) -> None:
        """Set the ranges that may be leased, in the order of preference."""

    def lease(self, *, asks: bool = False) -> ReadPosition | None:
        """Return the next leased range, or None if none is free now. With `asks`, wait for an answer of the broker."""

    def register_shards(self, count: int, /) -> int:
        """Register how many shards the data has, and return what other islands have registered."""


class TaskRun:
    """What the `batches` of a task may ask: who reads, and shards of the data.

    Attributes:
        island: The name of the island.
        seed: A random seed that differs between islands, and between restarts of one.
    """

    def __init__(self, island: str, seed: int, run_seed: int = 0, link: Leases | None = None) -> None:
        """Note where shards are leased. Without a `link`, they are read without leases, as a check of the task does."""
        self.island, self.seed = island, seed
        self._run_seed, self._link = run_seed, link
        self._thread = threading.get_ident()
        self._is_sharded = False
        #: The shards that are read. The first one waits for an answer of the broker.
        self.reading = RangeReading(lambda: self.lease(asks=self.reading.current is None), run_seed, seed)

    def shards(self, count: int) -> Iterator[Shard]:
        """Yield shards of the data without an end, pass after pass. No other island reads a leased shard meanwhile.

            for shard in run.shards(64):
                mine = np.random.default_rng(shard.seed).permutation(len(data))[shard.number :: shard.of]
                yield from batches_of(data[mine])[shard.position :]

        Draw the batches of a shard before the next shard, in the thread that trains: the position in a shard counts
        the batches that the island trained on.

        Args:
            count: How many shards the data has. It must be the same on all islands.

        Raises:
            ConfigError: There cannot be that many, all of them are empty, this was called before, this is another
                thread, or other islands of the run have another number of shards (`task.shards`).
        """
        if not hasattr(count, "__index__") or not 1 <= count <= RANGES_MAX:
            raise ConfigError(f"a task cannot have {count!r} shards", f"Give 1 to {RANGES_MAX:,}.", code="task.shards")
        if self._is_sharded:
            raise ConfigError(
                "`run.shards` was called twice, and the shards of both calls have the same numbers",
                "Call it once. Let a shard hold a part of each data set.",
                code="task.shards",
            )
        self._is_sharded = True
        known = self._link.register_shards(count) if self._link is not None else count
        if known != count:
            raise MismatchError(
                "shards", known, count,
                "A shard is another part of the data now. Restore the number in `run.shards`, or begin another run.",
                code="task.shards",
                what=f"the data of this task has {count:,} shards, and {known:,} in the run",
            )  # fmt: skip
        self.offer(range_order(count, self._run_seed))
        empty: set[int] = set()
        while len(empty) < count:
            if threading.get_ident() != self._thread:
                raise ConfigError(
                    "`run.shards` was used in another thread than the one that trains",
                    "A position counts the batches that the island trained on, so a loader that reads ahead cannot "
                    "lease shards. Read them in the generator itself.",
                    code="task.shards",
                )
            yield (shard := self.reading.begin(count))
            shard.ended = True
            (empty.add if shard.is_empty else empty.discard)(shard.number)
        raise ConfigError(
            f"none of the {count:,} shards of the data gives a batch",
            "Cut the data into fewer shards (`run.shards`), or make the batches smaller.",
            code="task.shards",
        )

    def offer(self, ranges: Sequence[str]) -> None:
        """Set the ranges that this island may lease, in its order of preference. `shards` does it for a generator."""
        if self._link is not None:
            self._link.offer(ranges)

    def lease(self, *, asks: bool = False) -> ReadPosition | None:
        """Return the next leased range, and the position in it; None if none is leased yet."""
        return self._link.lease(asks=asks) if self._link is not None else None


class TaskBatches(Supply):
    """The supply of batches of one island."""

    def __init__(self, named: NamedTask, run: TaskRun, batches: Any) -> None:
        super().__init__(run.reading)
        self._task = named
        self._iterator: Iterator[Any] | None = None
        self._given = batches
        self._first: tuple[Any, Shard | None, int] | None = None
        self._structure: Any = None
        self._shapes: list[tuple[tuple[int, ...], Any]] = []
        self._told = False

    def next(self, steps: int) -> Any:
        """Return the next batches, stacked. Raises ConfigError (`task.batches`) for wrong ones, and at their end."""
        stacked: Any = None
        self.tokens = 0
        for step in range(steps):
            batch, shard, tokens = self._peek()
            self._first = None
            if shard is not None:
                shard.read()
            self.tokens += tokens
            if stacked is None:
                stacked = jax.tree.map(lambda x: np.empty((steps, *x.shape), x.dtype), batch)
            # The next batch may be drawn into the same arrays, so this one is copied first.
            for whole, part in zip(jax.tree.leaves(stacked), jax.tree.leaves(batch), strict=True):
                whole[step] = part
        if self.reading.current is None and not self._told:
            _warn_of_repeats(self._task.name)
        self._told = True
        return stacked

    def sample(self, steps: int) -> Any:
        """Return the first batch as often as asked. It is not used up."""
        batch, _, _ = self._peek()
        return jax.tree.map(lambda x: np.stack([x] * steps), batch)

    def forget(self, ranges: Collection[str]) -> None:
        """Forget leases that have ended or were lost. The rest of a pass whose lease was lost is read all the same."""
        for name in self.reading.forget(ranges):
            log.warning("the lease of shard %s was lost; another island may read it too", name)

    # -- drawing ------------------------------------------------------------------------------------------------------

    def _peek(self) -> tuple[Any, Shard | None, int]:
        """Return the next batch, its shard and its tokens, and keep them."""
        if self._first is None:
            batch = self._checked(self._drawn())
            self._first = batch, self.reading.current, self._tokens_of(batch)
        return self._first

    def _drawn(self) -> Any:
        if self._iterator is None:
            self._iterator = self._task.call("batches", iter, self._given)
        end = object()
        batch = self._task.call("batches", next, self._iterator, end)
        if batch is end:
            raise self._task.wrong(
                "batches",
                "have ended before the run",
                "Make them endless: begin again at the end of the data, as `run.shards` does.",
            )
        return batch

    def _checked(self, batch: Any) -> Any:
        """Return a batch as arrays of the host. Raises ConfigError for one that has no arrays, or other shapes."""
        leaves, structure = self._task.call("batches", jax.tree.flatten, batch)
        arrays = self._task.call("batches", lambda: [np.asarray(leaf) for leaf in leaves])
        wrong = [array.dtype for array in arrays if array.dtype.kind in _NO_NUMBERS or array.dtype.names]
        if not arrays or wrong:
            given = f"an array of {wrong[0]}" if wrong else "a batch without arrays"
            raise self._task.wrong("batches", f"give {given}", "Yield trees of arrays of numbers.")
        shapes = [(array.shape, array.dtype) for array in arrays]
        if self._structure is None:
            self._structure, self._shapes = structure, shapes
        elif (structure, shapes) != (self._structure, self._shapes):
            raise self._task.wrong(
                "batches",
                f"have changed: {_in_words(shapes)} after {_in_words(self._shapes)}",
                "All batches need the same tree, shapes and dtypes: leave out or pad the last batch of an epoch.",
            )
        return jax.tree.unflatten(structure, arrays)

    def _tokens_of(self, batch: Any) -> int:
        tokens = self._task.task.tokens
        if callable(tokens):
            tokens = self._task.call("tokens", tokens, batch)
            if not hasattr(tokens, "__index__") and not getattr(tokens, "shape", None) == ():
                raise self._task.wrong("tokens", f"gives {tokens!r}", "Return a whole number.")
        elif tokens is None:
            shape = jax.tree.leaves(batch)[0].shape
            tokens = shape[0] if shape else 1
        count = self._task.call("tokens", int, tokens)
        if not 0 <= count <= OWN_TOKENS_PER_STEP_MAX:
            raise self._task.wrong("tokens", f"gives {count:,}", f"Give 0 to {OWN_TOKENS_PER_STEP_MAX:,} for a batch.")
        return max(1, count)


@functools.cache  # once in a process, which may play many islands (`bench parity`)
def _warn_of_repeats(task: str) -> None:
    log.warning("the task %r does not read by `run.shards`: a restart may repeat data", task)


def _in_words(shapes: list[tuple[tuple[int, ...], Any]]) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in shapes[:4]) + (", …" if len(shapes) > 4 else "")
