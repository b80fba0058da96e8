"""The batches of an island: windows of the text, in an order that depends on the run's seed.

An island leases a shard and reads one pass over it, from the position that the broker holds. While no shard can
be leased, it reads its last shard again (a repeat) or a private pass. It does not report such reading to the broker.

Shapes in names: B sequences of a batch, T tokens of a sequence (bytes, without a tokenizer), N windows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from archipelago.broker.config import BYTES, RunConfig
from archipelago.broker.errors import ConfigError, DataError, WireError
from archipelago.broker.ranges import POSITIONS_MAX, ReadPosition, parse_positions
from archipelago.islands.data.sharding import gather, require_fit, shard_number, unit, windows
from archipelago.islands.data.supply import Supply
from archipelago.islands.data.tokenizer import Tokens

#: Passes from this number on are private. The broker leases only smaller ones (`broker.ranges.PASSES_MAX`).
PRIVATE_PASSES = 1 << 41
#: After this many leases in a row with nothing left to read, an island reads on without a lease.
LEASES_TRIED = 8
_START = re.compile(r"([^\s:]{1,80}):([0-9]{1,18}):([0-9]{1,18}):([0-9]{1,18})")


@dataclass(frozen=True)
class _Start:
    """The start of a pass over a shard. As text it is `SHARD:PASS:POSITION:REPEAT`, for instance `17:0:96:0`.

    Attributes:
        shard: The shard's name.
        pass_number: The number of the pass.
        position: The number of windows before the start.
        repeat: How many times the island has read this pass before, without a lease.
    """

    shard: str
    pass_number: int
    position: int
    repeat: int = 0

    @property
    def is_leased(self) -> bool:
        """True if contributions report the position in this pass."""
        return self.repeat == 0 and self.pass_number < PRIVATE_PASSES

    def __str__(self) -> str:
        return f"{self.shard}:{self.pass_number}:{self.position}:{self.repeat}"


@dataclass(frozen=True)
class _Pass:
    """A pass over a shard.

    Attributes:
        start: Where it began.
        starts: Where its windows begin, in the order of use. [N]
    """

    start: _Start
    starts: NDArray[np.int64]

    def place(self, position: int) -> ReadPosition:
        """Return the place after `position` windows, as a contribution reports it."""
        ended = position >= len(self.starts)
        return ReadPosition(self.start.shard, self.start.pass_number, 0 if ended else position, ended)


class Batches(Supply):
    """An endless supply of batches, for one thread. It never waits for a lease.

    Args:
        train: The training text, [tokens] of an unsigned dtype.
        config: The run's config.
        lease: Returns this island's next shard and the position to start from, or None if no shard is free now.
        fallback: A number that differs between islands, not negative. Islands that begin without a lease read different
            private passes.

    Attributes:
        repeats: The passes that were read again because no shard could be leased.
        tokens: The tokens of the batches that `next` returned last.

    Raises:
        DataError: The text is too short for the shards.
        ConfigError: The text is tokenised, and the model has a vocabulary of bytes (`config.vocabulary`).
    """

    def __init__(
        self, train: Tokens, config: RunConfig, lease: Callable[[], ReadPosition | None], fallback: int = 0
    ) -> None:
        self._train, self._config, self._lease, self._fallback = train, config, lease, fallback
        self._pass: _Pass | None = None
        self._position = 0
        self._places: dict[str, ReadPosition] = {}  # by shard, in the order of leasing; all but the newest have ended
        self.repeats = self.tokens = 0
        if train.dtype != np.uint8 and config.model.vocabulary == BYTES:
            raise ConfigError(
                "the corpus is tokenised, and the model reads bytes only (model.vocabulary)",
                "Set --model.vocabulary to the `vocabulary` in the corpus's corpus.json.",
                code="config.vocabulary",
            )
        require_fit(train, config.data.sequence_length, config.data.shards)

    def next(self, steps: int) -> Tokens:
        """Return the next `steps` batches: [steps, B, T + 1] of the text's dtype."""
        batch, length = self._config.data.batch_size, self._config.data.sequence_length
        out = np.empty((steps * batch, length + 1), dtype=self._train.dtype)
        self.tokens = steps * self._config.tokens_per_step
        self._prefer_a_lease()
        filled = 0
        while filled < len(out):
            starts = self._take(len(out) - filled)
            out[filled : filled + len(starts)] = gather(self._train, starts, length)
            filled += len(starts)
        return out.reshape(steps, batch, length + 1)

    def sample(self, steps: int) -> Tokens:
        """Return batches of zeros, in the shape and dtype of those of `next`."""
        data = self._config.data
        return np.zeros((steps, data.batch_size, data.sequence_length + 1), self._train.dtype)

    # -- reports to the broker ---------------------------------------------------------------------------------------

    def places(self) -> tuple[ReadPosition, ...]:
        """Return the position in each leased pass that is not forgotten: the newest POSITIONS_MAX, in order of leasing.

        A pass that has ended has no position, as after `parse_positions`.
        """
        return tuple(self._places.values())[-POSITIONS_MAX:]

    def forget(self, shards: Collection[str]) -> None:
        """Forget leases that have ended or were lost. The rest of a pass whose lease was lost is not read."""
        for shard in shards:
            place = self._places.pop(shard, None)
            if place and not place.ended and self._pass:
                self._position = len(self._pass.starts)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, int | str]:
        """Return the position of the supply, for a checkpoint."""
        return {
            "text": self._text_name(),
            "now": str(self._now() or ""),
            "repeats": self.repeats,
            "places": " ".join(map(str, self._places.values())),
        }

    def restore(self, state: Mapping[str, int | str]) -> None:
        """Continue from a `state()` of the same text and config.

        Raises:
            DataError: The state is of another text or config, or damaged (`data.bad-position`).
        """
        if state.get("text") != self._text_name():
            raise _unfit(f"belongs to another text than {self._text_name()}: {state.get('text', 'unknown')}")
        try:
            now, repeats = str(state["now"]), int(state["repeats"])
            places = [parse_positions(word)[0] for word in str(state["places"]).split()]
            restored = self._pass_from(self._parse(now)) if now else None
        except (KeyError, ValueError, WireError, DataError) as fault:
            raise _unfit(f"cannot be read ({fault})") from fault
        position = restored.start.position if restored else 0
        if repeats < 0 or (restored and position > len(restored.starts)):
            raise _unfit(f"({now}) is outside the text")
        self._pass, self._position, self.repeats = restored, position, repeats
        self._places = {place.range: place for place in places}

    def _text_name(self) -> str:
        data, size = self._config.data, f"{self._train.size} {unit(self._train)}"
        return f"{size} in {data.shards} shards of sequences of {data.sequence_length} tokens, seed {self._config.seed}"

    def _now(self) -> _Start | None:
        if self._pass is None:
            return None
        start = self._pass.start
        return _Start(start.shard, start.pass_number, self._position, start.repeat)

    def _parse(self, text: str) -> _Start:
        found = _START.fullmatch(text)
        if not found:
            raise DataError(
                f"{text[:80]!r} does not name a pass",
                "A pass is written SHARD:PASS:POSITION:REPEAT.",
                code="data.bad-position",
            )
        shard_number(found[1], self._config.data.shards)
        return _Start(found[1], int(found[2]), int(found[3]), int(found[4]))

    # -- passes ------------------------------------------------------------------------------------------------------

    def _take(self, most: int) -> NDArray[np.int64]:
        """Return the next `starts` of a pass: int64 [N], at least one and at most `most`, all of one pass."""
        current = self._pass
        if current is None or self._position >= len(current.starts):
            current = self._begin_another()
        starts = current.starts[self._position : self._position + most]
        self._position += len(starts)
        self._note_place()
        return starts

    def _prefer_a_lease(self) -> None:
        """Leave a pass without a lease as soon as there is a lease."""
        if self._pass and not self._pass.start.is_leased and (start := self._leased()):
            self._begin(start)

    def _begin_another(self) -> _Pass:
        """Begin a pass that has windows left. Try leases first, then a pass without a lease."""
        for _ in range(LEASES_TRIED):
            if (start := self._leased()) is None:
                break
            begun = self._begin(start)
            if self._position < len(begun.starts):
                return begun
        return self._begin(self._without_lease())

    def _leased(self) -> _Start | None:
        place = self._lease()
        return _Start(place.range, *place.cursor) if place else None

    def _without_lease(self) -> _Start:
        """Return the pass to read without a lease: the last one again, or a private one at the beginning."""
        if self._pass:
            last = self._pass.start
            return _Start(last.shard, last.pass_number, 0, last.repeat + 1)
        number, shard = divmod(self._fallback, self._config.data.shards)
        return _Start(str(shard), PRIVATE_PASSES + number % PRIVATE_PASSES, 0)

    def _begin(self, start: _Start) -> _Pass:
        """Begin a pass. It has no windows left if its position is beyond them, as after a change of the config."""
        self._pass = begun = self._pass_from(start)
        self._position = min(start.position, len(begun.starts))
        self.repeats += start.repeat > 0
        if start.is_leased:
            self._places.pop(start.shard, None)  # an older pass over this shard has ended, or it would still be leased
        self._note_place()
        return begun

    def _pass_from(self, start: _Start) -> _Pass:
        data, seed = self._config.data, self._config.seed
        which = (seed, start.shard, start.pass_number, start.repeat)
        return _Pass(start, windows(self._train.size, data.shards, data.sequence_length, *which))

    def _note_place(self) -> None:
        if self._pass and self._pass.start.is_leased:
            self._places[self._pass.start.shard] = self._pass.place(self._position)


def _unfit(fault: str) -> DataError:
    return DataError(
        f"the saved position in the text {fault}",
        "The checkpoint belongs to another run or corpus. Start this island without it.",
        code="data.bad-position",
    )
