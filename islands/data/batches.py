"""Batches of an island: a pure function of the text, the run's seed, and the passes over shards that the island began.

The training text is cut into windows, and these are dealt out to shards, so that each shard is a sample of the whole
text: a shard of neighbouring windows would be all of one kind, and the islands would unlearn it with the next. An
island **leases** a shard and reads one **pass** over it, from the cursor on that the broker holds; over all shards,
the windows of one pass tile the text. What it reads without a lease, because there is none to be had, is its own
affair and moves no cursor: a shard once more (a **repeat**), or a **private** pass. Held-out text goes through
`held_out` only. A corpus of examples is read the same way: each of them is a window, wherever text is an array of
examples [examples, T + 1] instead of tokens.

Random numbers are raw PCG64 output, whose stream NumPy promises to keep (unlike that of `Generator.permutation`): all
islands must find the same permutation, whichever NumPy they have.

Shapes in names: B sequences a batch, T tokens (bytes, without a tokenizer) a sequence, N windows.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
from numpy.typing import NDArray

from archipelago.broker.config import BYTES, RunConfig
from archipelago.broker.corpus_shards import PLACES_MAX, Place, parse_places, shard_name
from archipelago.broker.errors import ConfigError, DataError, WireError
from archipelago.islands.data.tokenizer import Tokens

PRIVATE_PASSES = 1 << 41
"""Passes from here on are leased by nobody (`broker.data.PASSES_MAX` is below): where islands begin without a lease."""
LEASES_TRIED = 8
"""Leases in a row with nothing left to read, after which an island goes on without one."""
_PLACES_STREAM, _WINDOWS_STREAM, _OFFSETS_STREAM, _ORDER_STREAM = 0, 1, 2, 3
_BEGUN = re.compile(r"([^\s:]{1,80}):([0-9]{1,18}):([0-9]{1,18}):([0-9]{1,18})(!?)")


def _random(count: int, *entropy: int) -> NDArray[np.uint64]:
    """`count` random 64-bit numbers that depend on `entropy` alone."""
    return np.asarray(np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(count), dtype=np.uint64)


def _permutation(keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    return np.argsort(keys, kind="stable")


def shard_order(shards: int, seed: int, corpus: str = "") -> list[str]:
    """The names of all shards in the order in which islands like to lease them; the same on every island."""
    return [shard_name(corpus, int(number)) for number in _permutation(_random(shards, _ORDER_STREAM, seed))]


def alone(shards: int, seed: int) -> Callable[[], Place]:
    """Leases for who reads all shards alone, pass after pass."""
    endless = (Place(shard, number, 0) for number in count() for shard in shard_order(shards, seed))
    return lambda: next(endless)


def shared_out(shards: int, seed: int, number: int, of: int) -> Callable[[], Place]:
    """Leases for one of several who share all shards out among them, pass after pass."""
    mine = shard_order(shards, seed)[number::of]
    endless = (Place(shard, pass_number, 0) for pass_number in count() for shard in mine)
    return lambda: next(endless)


def _number(shard: str, shards: int) -> int:
    """The number of the shard of that name, `17` or `CORPUS/17`. Raises DataError for one that is not there."""
    digits = shard.rpartition("/")[2]
    if not re.fullmatch("0|[1-9][0-9]{0,6}", digits) or int(digits) >= shards:
        raise DataError(f"there is no shard {shard!r} among {shards:,}", "Shards are named 0, 1, 2 … or CORPUS/0 …")
    return int(digits)


def windows(
    size: int, shards: int, length: int, seed: int, shard: str, pass_number: int, repeat: int = 0
) -> NDArray[np.int64]:
    """Where the windows of T + 1 tokens of a pass over `shard` begin, in random order; int64 [N], at least one.

    In each pass the windows of all shards tile the text of `size` tokens, from another random offset below T on, and
    every shards-th of them belongs to one shard. Neighbours share the one token that is the last target of one and the
    first input of the other. Needs `size` of at least T · (shards + 1). Raises DataError for a shard that is not there.
    """
    offset = int(_random(1, _OFFSETS_STREAM, seed, pass_number)[0]) % length
    return offset + examples((size - offset - 1) // length, shards, seed, shard, pass_number, repeat) * length


def examples(count: int, shards: int, seed: int, shard: str, pass_number: int, repeat: int = 0) -> NDArray[np.int64]:
    """Which of `count` examples, or windows, are in a pass over `shard`, in random order; int64 [N].

    Every shards-th, so those of all shards are each of them once. Raises DataError for a shard that is not there.
    """
    number = _number(shard, shards)
    # From a permuted place: else the windows at the end, where they do not divide evenly, were always the same shards'.
    place = int(_permutation(_random(shards, _PLACES_STREAM, seed, pass_number))[number])
    mine = np.arange(place, count, shards, dtype=np.int64)
    return mine[_permutation(_random(mine.size, _WINDOWS_STREAM, seed, number, pass_number, repeat))]


def gather(text: Tokens, starts_N: NDArray[np.int64], length: int) -> Tokens:
    """The windows of T + 1 tokens that begin at `starts_N`, or examples by number; a copy, text's dtype [N, T + 1]."""
    if text.ndim == 2:
        return np.asarray(text)[starts_N]
    windows_NxT1: Tokens = np.asarray(text)[starts_N[:, None] + np.arange(length + 1)]
    return windows_NxT1


def held_out(text: Tokens, sequences: int, length: int) -> Tokens:
    """Evenly spaced, non-overlapping windows of a held-out text; its dtype, [N, T + 1], N = min(sequences, what fits).

    Of a corpus of examples, whole examples. Raises DataError when not one fits.
    """
    if text.ndim == 2:
        _require_fit(text, length)
        count = min(sequences, len(text))
        return gather(text, np.arange(count, dtype=np.int64) * len(text) // count, length)
    room = text.size - 1
    count = min(sequences, room // length)
    if count < 1:
        raise DataError(
            f"the held-out text of {_amount(text)} is shorter than one sequence of {length:,} tokens",
            "Lower data.sequence_length, or train on a larger corpus.",
        )
    return gather(text, np.arange(count, dtype=np.int64) * room // count, length)


def _amount(text: Tokens) -> str:
    """How long a text is, in words."""
    return f"{text.size:,} {_unit(text)}"


def _unit(text: Tokens) -> str:
    return "bytes" if text.dtype == np.uint8 else "tokens"


def _require_fit(text: Tokens, length: int, shards: int = 1) -> None:
    """Raises DataError unless a corpus of examples has ones of T + 1 bytes, and at least one for each shard."""
    count, size = text.shape
    if size != length + 1:
        raise DataError(
            f"the corpus is made of examples of {size:,} bytes, and data.sequence_length is {length:,}",
            f"Set --data.sequence-length {size - 1}: an example is a sequence and its last target.",
        )
    if count < shards:
        raise DataError(
            f"{count:,} examples are too few for {shards:,} shards (data.shards)",
            f"Lower data.shards to at most {max(1, count):,}, or train on a larger corpus.",
        )


@dataclass(frozen=True)
class _Point:
    """A point in a pass over a shard. As text `SHARD:PASS:POSITION:REPEAT`, for instance `17:0:96:0`."""

    shard: str
    pass_number: int
    position: int
    """windows before it"""
    repeat: int = 0
    """how many times the island has gone over this pass before, on its own"""
    at_once: bool = False
    """begun before the one in hand had run out, which was read without a lease; as text, `!` at the end"""

    @property
    def is_leased(self) -> bool:
        """Whether the broker is told how far the pass has come."""
        return self.repeat == 0 and self.pass_number < PRIVATE_PASSES

    def __str__(self) -> str:
        return f"{self.shard}:{self.pass_number}:{self.position}:{self.repeat}{'!' if self.at_once else ''}"


@dataclass(frozen=True)
class _Pass:
    """The pass that is being read."""

    begun: _Point
    starts: NDArray[np.int64]
    """where its windows begin, in the order of use; [N] tokens, or numbers of examples"""

    def place(self, position: int) -> Place:
        """How far it has come after `position` windows, as a contribution says it."""
        ended = position >= len(self.starts)
        return Place(self.begun.shard, self.begun.pass_number, 0 if ended else position, ended)


class Batches:
    """An endless supply of batches. Never waits: with no shard to lease it goes over the one it has again.

    `train` is the training text, [tokens] of any unsigned dtype, or examples, uint8 [examples, T + 1]. `lease` returns
    the next shard of this island and where to read on in it, or None when there is none to be had right now. `fallback`
    (not negative) sets islands that begin without a lease apart. For one thread.

    Raises DataError when the text has too few tokens for a window in each shard, or examples of another size, and
    ConfigError when it is made of tokens and the model knows bytes only.
    """

    def __init__(self, train: Tokens, config: RunConfig, lease: Callable[[], Place | None], fallback: int = 0) -> None:
        self._train, self._config, self._lease, self._fallback = train, config, lease, fallback
        self._pass: _Pass | None = None
        self._position = 0
        self._places: dict[str, Place] = {}  # by shard, in the order of leasing; all but the newest have ended
        self._queue: deque[_Point] = deque()
        self.repeats = 0
        """passes over a shard again because nothing could be leased"""
        self.on_begin: Callable[[str], None] | None = None
        """told of every pass that is begun, as `begin` takes it, before its first window is used"""
        shards, length = config.data.shards, config.data.sequence_length
        if train.dtype != np.uint8 and config.model.vocabulary == BYTES:
            raise ConfigError(
                "the corpus is made of tokens, and the model knows bytes only (model.vocabulary)",
                "Set --model.vocabulary to that of the corpus's tokenizer, as its corpus.json says it.",
            )
        if train.ndim == 2:
            _require_fit(train, length, shards)
        elif train.size < length * (shards + 1):
            raise DataError(
                f"{_amount(train)} of training text are too few for {shards:,} shards (data.shards) of sequences "
                f"of {length:,} tokens (data.sequence_length)",
                f"Lower data.shards to at most {max(1, train.size // length - 1):,}, lower data.sequence_length, "
                "or train on a larger corpus.",
            )

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """Of what `next` returns: of the text."""
        return self._train.dtype

    def next(self, steps: int) -> Tokens:
        """The next `steps` batches: [steps, B, T + 1], of the text's dtype."""
        batch, length = self._config.data.batch_size, self._config.data.sequence_length
        out = np.empty((steps * batch, length + 1), dtype=self._train.dtype)
        self._leave_own_pass()
        filled = 0
        while filled < len(out):
            starts = self._take(len(out) - filled)
            out[filled : filled + len(starts)] = gather(self._train, starts, length)
            filled += len(starts)
        return out.reshape(steps, batch, length + 1)

    # -- what is said to the broker about it -------------------------------------------------------------------------

    def places(self) -> tuple[Place, ...]:
        """How far each leased pass was handed out that is not forgotten: the newest PLACES_MAX, in order of leasing.

        One that has ended has no position, as after `parse_places`.
        """
        return tuple(self._places.values())[-PLACES_MAX:]

    def held(self) -> list[str]:
        """The shards in `places()`."""
        return [place.shard for place in self.places()]

    def forget(self, shards: Collection[str]) -> None:
        """These leases have ended or were lost. What is left of a pass that was lost is not read."""
        for shard in shards:
            place = self._places.pop(shard, None)
            if place and not place.ended and self._pass:
                self._position = len(self._pass.starts)

    # -- doing it again ----------------------------------------------------------------------------------------------

    def begin(self, text: str) -> None:
        """Begins the pass that `on_begin` was told of, before any lease, once the present one has run out.

        May be called ahead: they come in order. Raises DataError for a text that names no pass over this text.
        """
        self._queue.append(self._parse(text))

    def state(self) -> dict[str, int | str]:
        """Where the supply is, for a checkpoint."""
        return {
            "text": self._text_name(),
            "now": str(self._now() or ""),
            "repeats": self.repeats,
            "places": " ".join(map(str, self._places.values())),
            "queue": " ".join(map(str, self._queue)),
        }

    def restore(self, state: Mapping[str, int | str]) -> None:
        """Goes on from where `state()` was taken, with the same text and config. Raises DataError for any other."""
        if state.get("text") != self._text_name():
            raise self._unfit(f"is in another text than {self._text_name()}: {state.get('text', 'unknown')}")
        try:
            now, repeats = str(state["now"]), int(state["repeats"])
            places = [parse_places(word)[0] for word in str(state["places"]).split()]
            queue = deque(map(self._parse, str(state["queue"]).split()))
            restored = self._pass_at(self._parse(now)) if now else None
        except (KeyError, ValueError, WireError, DataError) as fault:
            raise self._unfit(f"cannot be read ({fault})") from fault
        position = restored.begun.position if restored else 0
        if repeats < 0 or (restored and position > len(restored.starts)):
            raise self._unfit(f"({now}) is not there")
        self._pass, self._position, self.repeats, self._queue = restored, position, repeats, queue
        self._places = {place.shard: place for place in places}

    def _text_name(self) -> str:
        data, size = self._config.data, f"{self._train.size} {_unit(self._train)}"
        return f"{size} in {data.shards} shards of sequences of {data.sequence_length} tokens, seed {self._config.seed}"

    def _unfit(self, fault: str) -> DataError:
        return DataError(
            f"the saved place in the text {fault}",
            "The checkpoint belongs to another run or corpus: start this island without it.",
        )

    def _now(self) -> _Point | None:
        if self._pass is None:
            return None
        begun = self._pass.begun
        return _Point(begun.shard, begun.pass_number, self._position, begun.repeat)

    def _parse(self, text: str) -> _Point:
        found = _BEGUN.fullmatch(text)
        if not found:
            raise DataError(f"{text[:80]!r} is no pass", "A pass is written SHARD:PASS:POSITION:REPEAT.")
        _number(found[1], self._config.data.shards)
        return _Point(found[1], int(found[2]), int(found[3]), int(found[4]), bool(found[5]))

    # -- passes ------------------------------------------------------------------------------------------------------

    def _take(self, most: int) -> NDArray[np.int64]:
        """The next of a pass's `starts`: int64 [N], at least one, at most `most`, all of one pass."""
        current = self._pass
        if current is None or self._position >= len(current.starts):
            current = self._begin_another()
        starts = current.starts[self._position : self._position + most]
        self._position += len(starts)
        self._note_place()
        return starts

    def _leave_own_pass(self) -> None:
        """What is read without a lease is read only until there is one: it moves no cursor."""
        queued = self._queue[0] if self._queue else None
        if queued and queued.at_once:
            self._begin(self._queue.popleft())
        elif self._pass and not self._pass.begun.is_leased and not queued and (point := self._leased()):
            self._begin(replace(point, at_once=True))

    def _begin_another(self) -> _Pass:
        """A pass with windows left: one that `begin` named, else a leased one, else one of the island's own."""
        for _ in range(LEASES_TRIED + len(self._queue)):
            point = self._queue.popleft() if self._queue else self._leased()
            if point is None:
                break
            begun = self._begin(point)
            if self._position < len(begun.starts):
                return begun
        return self._begin(self._own())

    def _leased(self) -> _Point | None:
        place = self._lease()
        return _Point(place.shard, *place.cursor) if place else None

    def _own(self) -> _Point:
        """What to read without a lease: the same pass once more, or to begin with one that is nobody's."""
        if self._pass:
            begun = self._pass.begun
            return _Point(begun.shard, begun.pass_number, 0, begun.repeat + 1)
        number, shard = divmod(self._fallback, self._config.data.shards)
        return _Point(str(shard), PRIVATE_PASSES + number % PRIVATE_PASSES, 0)

    def _begin(self, point: _Point) -> _Pass:
        """Nothing is left of it if the cursor is beyond its windows, as another config's may be."""
        self._pass = begun = self._pass_at(point)
        self._position = min(point.position, len(begun.starts))
        self.repeats += point.repeat > 0
        if point.is_leased:
            self._places.pop(point.shard, None)  # an older pass over it is over, or it could not be leased again
        self._note_place()
        if self.on_begin:
            self.on_begin(str(point))
        return begun

    def _pass_at(self, point: _Point) -> _Pass:
        data, seed = self._config.data, self._config.seed
        which = (seed, point.shard, point.pass_number, point.repeat)
        if self._train.ndim == 2:
            return _Pass(point, examples(len(self._train), data.shards, *which))
        return _Pass(point, windows(self._train.size, data.shards, data.sequence_length, *which))

    def _note_place(self) -> None:
        if self._pass and self._pass.begun.is_leased:
            self._places[self._pass.begun.shard] = self._pass.place(self._position)
