"""The supply of batches that an island trains on: of our models, windows of the text, in an order of the run's seed.

An island leases a range of the text and reads one pass over it, from the position that the broker holds. While no range
can be leased, it reads private passes, and does not report them to the broker.

Shapes in names: B sequences of a batch, T tokens of a sequence (bytes, without a tokenizer), N windows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from archipelago.broker.config import RunConfig
from archipelago.broker.ranges import POSITIONS_MAX, ReadPosition
from archipelago.islands.data.ranges import gather, require_fit, windows
from archipelago.islands.data.tokenizer import Tokens

#: Passes from this number on are private. The broker leases only smaller ones (`broker.ranges.PASSES_MAX`).
PRIVATE_PASSES = 1 << 41
#: After this many leases in a row with nothing left to read, an island reads on without a lease.
LEASES_TRIED = 8


class Supply(ABC):
    """An endless supply of batches, for one thread. Batches are trees of arrays, all of the same shapes.

    Attributes:
        tokens: The tokens of all batches that `next` returned last.
    """

    tokens: int = 0

    @abstractmethod
    def next(self, steps: int) -> Any:
        """Return the next `steps` batches: one tree whose arrays have an axis of steps in front."""

    @abstractmethod
    def sample(self, steps: int) -> Any:
        """Return batches as `next` does, to compile with. They are not used up, and their values do not matter."""

    @abstractmethod
    def positions(self) -> tuple[ReadPosition, ...]:
        """Return how far each leased range was read."""

    def held(self) -> list[str]:
        """Return the ranges in `positions()`."""
        return [position.range for position in self.positions()]

    @abstractmethod
    def forget(self, ranges: Collection[str]) -> None:
        """Forget leases that have ended or were lost."""


@dataclass
class _Pass:
    """A pass over a range.

    Attributes:
        range: The range's name.
        pass_number: The number of the pass.
        starts: Where its windows begin, in the order of use. [N]
        position: How many of them were read.
    """

    range: str
    pass_number: int
    starts: NDArray[np.int64]
    position: int

    @property
    def is_leased(self) -> bool:
        """Whether contributions report the position in this pass."""
        return self.pass_number < PRIVATE_PASSES

    @property
    def has_ended(self) -> bool:
        """Whether all windows were read."""
        return self.position >= len(self.starts)

    def read_position(self) -> ReadPosition:
        """Return the position as a contribution reports it. A pass that has ended has none."""
        return ReadPosition(self.range, self.pass_number, 0 if self.has_ended else self.position, self.has_ended)


class Batches(Supply):
    """An endless supply of batches of a text, for one thread. It never waits for a lease.

    Args:
        train: The training text, [tokens] of an unsigned dtype.
        config: The run's config.
        lease: Returns this island's next range and the position to start from, or None if no range is free now.
        fallback: A number that differs between islands, not negative. Islands without a lease read different private
            passes.

    Attributes:
        tokens: The tokens of the batches that `next` returned last.

    Raises:
        DataError: The text is too short for the ranges.
    """

    def __init__(
        self, train: Tokens, config: RunConfig, lease: Callable[[], ReadPosition | None], fallback: int = 0
    ) -> None:
        self._train, self._config, self._lease, self._private = train, config, lease, fallback
        self._pass: _Pass | None = None
        self._positions: dict[str, ReadPosition] = {}  # by range, as leased; all but the newest have ended
        require_fit(train, config.data.sequence_length, config.data.shards)

    def next(self, steps: int) -> Tokens:
        """Return the next `steps` batches: [steps, B, T + 1] of the text's dtype."""
        batch, length = self._config.data.batch_size, self._config.data.sequence_length
        out = np.empty((steps * batch, length + 1), dtype=self._train.dtype)
        self.tokens = steps * self._config.tokens_per_step
        if self._pass and not self._pass.is_leased and (lease := self._lease()):
            self._begin(lease)  # a private pass ends as soon as there is a lease
        filled = 0
        while filled < len(out):
            current = self._pass if self._pass and not self._pass.has_ended else self._another()
            starts = current.starts[current.position : current.position + len(out) - filled]
            current.position += len(starts)
            self._note_position(current)
            out[filled : filled + len(starts)] = gather(self._train, starts, length)
            filled += len(starts)
        return out.reshape(steps, batch, length + 1)

    def sample(self, steps: int) -> Tokens:
        """Return batches of zeros, in the shape and dtype of those of `next`."""
        data = self._config.data
        return np.zeros((steps, data.batch_size, data.sequence_length + 1), self._train.dtype)

    def _another(self) -> _Pass:
        """Begin a pass that has windows left. Try leases first, then a private pass."""
        for _ in range(LEASES_TRIED):
            if (lease := self._lease()) is None:
                break
            begun = self._begin(lease)
            if not begun.has_ended:
                return begun
        number, name = divmod(self._private, self._config.data.shards)
        self._private += 1
        return self._begin(ReadPosition(str(name), PRIVATE_PASSES + number % PRIVATE_PASSES, 0))

    def _begin(self, at: ReadPosition) -> _Pass:
        """Begin a pass. It has no windows left if its position is beyond them, as after a change of the config."""
        self._pass = begun = self._pass_at(at)
        begun.position = min(begun.position, len(begun.starts))
        if begun.is_leased:
            self._positions.pop(begun.range, None)  # an older pass over it has ended, or it would still be leased
        self._note_position(begun)
        return begun

    def _pass_at(self, at: ReadPosition) -> _Pass:
        data, (pass_number, position) = self._config.data, at.cursor
        starts = windows(self._train.size, data.shards, data.sequence_length, self._config.seed, at.range, pass_number)
        return _Pass(at.range, pass_number, starts, position)

    def _note_position(self, current: _Pass) -> None:
        if current.is_leased:
            self._positions[current.range] = current.read_position()

    # -- reports to the broker ---------------------------------------------------------------------------------------

    def positions(self) -> tuple[ReadPosition, ...]:
        """Return the position in each leased pass that is not forgotten: the newest POSITIONS_MAX, in order of leasing.

        A pass that has ended has no position, as after `parse_positions`.
        """
        return tuple(self._positions.values())[-POSITIONS_MAX:]

    def forget(self, ranges: Collection[str]) -> None:
        """Forget leases that have ended or were lost. The rest of a pass whose lease was lost is not read."""
        for name in ranges:
            position = self._positions.pop(name, None)
            if position and not position.ended:
                self._pass = None
