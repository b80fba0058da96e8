"""The batches of a task, as the worker takes them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from archipelago.broker.config import OWN_TOKENS_PER_STEP_MAX
from archipelago.broker.ranges import ReadPosition, parse_positions
from archipelago.islands.data.batches import Supply
from archipelago.islands.tasks.file import NamedTask
from archipelago.islands.tasks.shards import Shard, TaskRun

#: The kinds of numpy dtypes that are not numbers: objects, texts and times. Records are not numbers either.
_NO_NUMBERS = "OSUMm"

log = logging.getLogger(__name__)


class TaskBatches(Supply):
    """The supply of batches of one island.

    Attributes:
        tokens: The tokens of the batches that `next` returned last.
    """

    def __init__(self, named: NamedTask, run: TaskRun, batches: Any) -> None:
        """Note the task, and what its `batches` gave."""
        self._task, self._run = named, run
        self._iterator: Iterator[Any] | None = None
        self._given = batches
        self._first: tuple[Any, Shard | None, int] | None = None
        self._structure: Any = None
        self._shapes: list[tuple[tuple[int, ...], Any]] = []
        self._told = False
        self.tokens = 0

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
        if self._run.current is None and not self._told:
            log.warning("the task %r does not read by `run.shards`: a restart may repeat data", self._task.name)
        self._told = True
        return stacked

    def sample(self, steps: int) -> Any:
        """Return the first batch as often as asked. It is not used up."""
        batch, _, _ = self._peek()
        return jax.tree.map(lambda x: np.stack([x] * steps), batch)

    # -- shards -------------------------------------------------------------------------------------------------------

    def places(self) -> tuple[ReadPosition, ...]:
        """Return how far each leased shard was read."""
        return self._run.places()

    def forget(self, shards: Collection[str]) -> None:
        """Forget leases that have ended or were lost."""
        self._run.forget(shards)

    def state(self) -> dict[str, int | str]:
        """Return how far each leased shard was read. Other iterables have no position."""
        return {"places": " ".join(map(str, self.places()))}

    def restore(self, state: Mapping[str, int | str]) -> None:
        """Continue from a `state()`, so that no batch before the checkpoint is read again."""
        if places := parse_positions(str(state.get("places", ""))):
            self._run.restore(places)
            self._given = self._task.call("batches", self._task.task.batches, self._run)
            self._iterator = self._first = None

    # -- drawing ------------------------------------------------------------------------------------------------------

    def _peek(self) -> tuple[Any, Shard | None, int]:
        """Return the next batch, its shard and its tokens, and keep them."""
        if self._first is None:
            batch = self._checked(self._drawn())
            self._first = batch, self._run.current, self._tokens_of(batch)
        return self._first

    def _drawn(self) -> Any:
        if self._iterator is None:
            if not hasattr(self._given, "__iter__"):
                given = type(self._given).__name__
                raise self._task.wrong("batches", f"gives {given!r} instead of an iterable", "Yield batches.")
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


def _in_words(shapes: list[tuple[tuple[int, ...], Any]]) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in shapes[:4]) + (", …" if len(shapes) > 4 else "")
