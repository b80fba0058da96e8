"""The supply of batches that an island trains on: of our models, windows of the text, in an order of the run's seed.

An island leases a range of the text and reads one pass over it, from the position that the broker holds. While no range
can be leased, it reads private passes, and does not report them to the broker.

Shapes in names: B sequences of a batch, T tokens of a sequence (bytes, without a tokenizer), N windows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from archipelago.broker.config import RunConfig
from archipelago.broker.errors import DataError
from archipelago.broker.ranges import POSITIONS_MAX, ReadPosition
from archipelago.islands.data.tokenizer import Tokens

#: Passes from this number on are private. The broker leases only smaller ones (`broker.ranges.PASSES_MAX`).
PRIVATE_PASSES = 1 << 41


@dataclass
class Shard:
    """One pass over one shard of a task's data, or over one range of the text.

    Attributes:
        number: The number of the shard, from 0.
        of: How many shards there are.
        pass_number: The number of the pass, from 0. Passes without a lease have large numbers.
        position: The batches of this pass that are merged already. Skip them.
        seed: A seed for the order of the data in this pass. All readers of the pass have the same.
        ended: Whether all of the pass was drawn.
    """

    number: int
    of: int
    pass_number: int
    position: int
    seed: int
    ended: bool = field(default=False, repr=False)
    _read: int = field(default=0, repr=False)

    @property
    def is_leased(self) -> bool:
        """Whether the run keeps account of this pass. Without a lease, other islands may read the same data."""
        return self.pass_number < PRIVATE_PASSES

    def read_position(self) -> ReadPosition:
        """Return the position in this pass, or the beginning of the next one, as contributions report it."""
        if self.ended:
            return ReadPosition(str(self.number), self.pass_number + 1, 0)
        return ReadPosition(str(self.number), self.pass_number, self.position + self._read)

    def read(self, count: int = 1) -> None:
        """Count what the island trains on: batches, or windows of the text."""
        self._read += count

    @property
    def is_empty(self) -> bool:
        """Whether the whole pass has given nothing."""
        return self.ended and self.position + self._read == 0


class RangeReading:
    """The passes that an island reads one after the other: leased ones, and private ones while none can be leased.

    Args:
        lease: Returns the next range and the position to start from, or None if no range is free now.
        private: A number that differs between islands, not negative, so that they read different private passes.

    Attributes:
        current: The pass that is read now.
    """

    def __init__(self, lease: Callable[[], ReadPosition | None], seed: int, private: int = 0) -> None:
        self._lease, self._seed, self._private = lease, seed, private
        self._held: dict[str, Shard] = {}  # leased passes that are read, or whose end is not merged yet
        self.current: Shard | None = None

    def begin(self, ranges: int) -> Shard:
        """Begin the next pass: a leased one, or a private one. `ranges` is the number of all ranges."""
        if (leased := self.begin_leased(ranges)) is not None:
            return leased
        number, name = divmod(self._private, ranges)
        self._private += 1
        return self._begin(ReadPosition(str(name), PRIVATE_PASSES + number % PRIVATE_PASSES, 0), ranges)

    def begin_leased(self, ranges: int) -> Shard | None:
        """Begin a leased pass; None if no range is free, or the ends of too many passes are not merged yet."""
        at = self._lease() if len(self._held) < POSITIONS_MAX else None
        return None if at is None else self._begin(at, ranges)

    def _begin(self, at: ReadPosition, ranges: int) -> Shard:
        number, (pass_number, position) = int(at.range), at.cursor
        seed = int(np.random.SeedSequence((self._seed, number, pass_number)).generate_state(1)[0])
        self.current = shard = Shard(number, ranges, pass_number, position, seed)
        if shard.is_leased:  # an older pass over the range has ended, or it would still be leased
            self._held.pop(at.range, None)
            self._held[at.range] = shard
        return shard

    def positions(self) -> tuple[ReadPosition, ...]:
        """Return how far each leased pass was read, in order of leasing."""
        return tuple(shard.read_position() for shard in self._held.values())

    def forget(self, ranges: Collection[str]) -> list[str]:
        """Forget leases that have ended or were lost, and return those that were lost before the end of the pass."""
        forgotten = [(name, self._held.pop(name)) for name in ranges if name in self._held]
        return [name for name, shard in forgotten if not shard.ended]


class Supply(ABC):
    """An endless supply of batches, for one thread. Batches are trees of arrays, all of the same shapes.

    Attributes:
        tokens: The tokens of all batches that `next` returned last.
    """

    def __init__(self, reading: RangeReading) -> None:
        self.reading, self.tokens = reading, 0

    @abstractmethod
    def next(self, steps: int) -> Any:
        """Return the next `steps` batches: one tree whose arrays have an axis of steps in front."""

    @abstractmethod
    def sample(self, steps: int) -> Any:
        """Return batches as `next` does, to compile with. They are not used up, and their values do not matter."""

    def positions(self) -> tuple[ReadPosition, ...]:
        """Return how far each leased range was read."""
        return self.reading.positions()

    @abstractmethod
    def forget(self, ranges: Collection[str]) -> None:
        """Forget leases that have ended or were lost."""


class Batches(Supply):
    """An endless supply of batches of a text, for one thread. It never waits for a lease.

    Args:
        train: The training text, [tokens] of an unsigned dtype.
        lease: Returns this island's next range and the position to start from, or None if no range is free now.
        fallback: A number that differs between islands, not negative. Islands without a lease read different private
            passes.

    Raises:
        DataError: The text is too short for the ranges.
    """

    def __init__(
        self, train: Tokens, config: RunConfig, lease: Callable[[], ReadPosition | None], fallback: int = 0
    ) -> None:
        super().__init__(RangeReading(lease, config.seed, fallback))
        self._train, self._config = train, config
        self._starts = np.empty(0, np.int64)  # where the windows begin that are left of the current pass
        require_fit(train, config.data.sequence_length, config.data.shards)

    def next(self, steps: int) -> Tokens:
        """Return the next `steps` batches: [steps, B, T + 1] of the text's dtype."""
        batch, length = self._config.data.batch_size, self._config.data.sequence_length
        out = np.empty((steps * batch, length + 1), dtype=self._train.dtype)
        self.tokens = steps * self._config.tokens_per_step
        shard = self.reading.current
        if shard is not None and not shard.is_leased and (leased := self.reading.begin_leased(shard.of)):
            self._begin(leased)  # a private pass ends as soon as there is a lease
        filled = 0
        while filled < len(out):
            starts = self._taken(len(out) - filled)
            out[filled : filled + len(starts)] = gather(self._train, starts, length)
            filled += len(starts)
        return out.reshape(steps, batch, length + 1)

    def sample(self, steps: int) -> Tokens:
        """Return batches of zeros, in the shape and dtype of those of `next`."""
        data = self._config.data
        return np.zeros((steps, data.batch_size, data.sequence_length + 1), self._train.dtype)

    def _taken(self, most: int) -> NDArray[np.int64]:
        """Return where the next windows begin, at least one."""
        while not len(self._starts):
            self._begin(self.reading.begin(self._config.data.shards))
        starts, self._starts = self._starts[:most], self._starts[most:]
        shard = self.reading.current
        assert shard is not None  # noqa: S101 - there were windows left of it
        shard.read(len(starts))
        if not len(self._starts):
            shard.ended = True
        return starts

    def _begin(self, shard: Shard) -> None:
        """Find the windows of a pass. None are left if its position is beyond them, as after a change of the config."""
        data, seed = self._config.data, self._config.seed
        starts = windows(self._train.size, data.shards, data.sequence_length, seed, shard.number, shard.pass_number)
        self._starts = starts[shard.position :]
        if not len(self._starts):
            shard.ended = True

    def forget(self, ranges: Collection[str]) -> None:
        """Forget leases that have ended or were lost. The rest of a pass whose lease was lost is not read."""
        if self.reading.forget(ranges):
            self._starts = self._starts[:0]


_PLACES_STREAM, _WINDOWS_STREAM, _OFFSETS_STREAM, _ORDER_STREAM = 0, 1, 2, 3


def _random(count: int, *entropy: int) -> NDArray[np.uint64]:
    """Return `count` random 64-bit numbers that depend on `entropy` alone."""
    return np.asarray(np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(count), dtype=np.uint64)


def _permutation(keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    return np.argsort(keys, kind="stable")


def range_order(ranges: int, seed: int) -> list[str]:
    """Return the names of all ranges in the order in which every island tries to lease them."""
    return [str(int(number)) for number in _permutation(_random(ranges, _ORDER_STREAM, seed))]


def windows(size: int, ranges: int, length: int, seed: int, number: int, pass_number: int) -> NDArray[np.int64]:
    """Return where the windows of a pass over a range begin, in random order.

    The windows of all ranges tile the text from a random offset below T, which differs between passes. Neighbouring
    windows share one token: the last target of the first is the first input of the second. Of S ranges, each has every
    S-th window.

    Args:
        size: The number of tokens of the text, at least T · (ranges + 1).
        length: T. A window has T + 1 tokens.

    Returns:
        int64 [N], where N is at least one.
    """
    offset = int(_random(1, _OFFSETS_STREAM, seed, pass_number)[0]) % length
    # The ranges are permuted. Otherwise the same ranges would always have the windows that do not divide evenly.
    first = int(_permutation(_random(ranges, _PLACES_STREAM, seed, pass_number))[number])
    mine = np.arange(first, (size - offset - 1) // length, ranges, dtype=np.int64)
    # The last 0 once counted how often a pass was read again. Without it, the order would be another.
    return offset + mine[_permutation(_random(mine.size, _WINDOWS_STREAM, seed, number, pass_number, 0))] * length


def gather(text: Tokens, starts_N: NDArray[np.int64], length: int) -> Tokens:
    """Copy the windows of T + 1 tokens that begin at `starts_N`, as [N, T + 1]."""
    windows_NxT1: Tokens = np.asarray(text)[starts_N[:, None] + np.arange(length + 1)]
    return windows_NxT1


def held_out(text: Tokens, sequences: int, length: int) -> Tokens:
    """Copy evenly spaced windows of a held-out text that do not overlap.

    Returns:
        [N, T + 1] of the text's dtype, where N is `sequences` or as many as fit.

    Raises:
        DataError: Not a single one fits (`data.too-small`).
    """
    room = text.size - 1
    count = min(sequences, room // length)
    if count < 1:
        raise DataError(
            f"the held-out text of {text.size:,} {unit(text)} is shorter than one sequence of {length:,}",
            "Lower data.sequence_length, or train on a larger corpus.",
            code="data.too-small",
        )
    return gather(text, np.arange(count, dtype=np.int64) * room // count, length)


def unit(text: Tokens) -> str:
    """Return the word for the elements of a text."""
    return "bytes" if text.dtype == np.uint8 else "tokens"


def require_fit(text: Tokens, length: int, ranges: int) -> None:
    """Raise DataError (`data.too-small`) unless a text has a window for each range."""
    if text.size < length * (ranges + 1):
        raise DataError(
            f"{text.size:,} {unit(text)} of training text are too few for {ranges:,} ranges (data.shards) of "
            f"sequences of {length:,} tokens (data.sequence_length)",
            f"Lower data.shards to at most {max(1, text.size // length - 1):,}, lower data.sequence_length, "
            "or train on a larger corpus.",
            code="data.too-small",
        )
