"""Leases and cursors of ranges of text, as pure functions.

A corpus, or the data of a task, is split into ranges. An island leases a range, and reads it from the range's cursor
on. Every contribution states how far its island has read (`ReadPosition`s). The commit that merges the
contribution also moves the cursor there. If an island dies, another one continues its range after the merged part. So
each completed pass over a range has merged each of its tokens once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from archipelago.broker.errors import WireError

#: The most positions in one contribution, and so the most ranges that an island can read at a time.
POSITIONS_MAX = 32
#: The most leases of an island: it leases one range ahead. The leases of one that has more do not count.
LEASES_MAX = POSITIONS_MAX + 1
#: The most ranges of a corpus, or of a task's data.
RANGES_MAX = 1 << 14
#: Cursors stay below this pass, so that every cursor can be written as a position.
PASSES_MAX = 10**12
# The pattern avoids \d, which matches the digits of all scripts, and leading zeros, so that a range has one name.
_POSITION = re.compile(r"(0|[1-9][0-9]{0,6}):([0-9]{1,12}):([0-9]{1,15}|end)")


@dataclass(frozen=True)
class ReadPosition:
    """A position in a pass over a range: where the next reader continues.

    The text form is `17:0:96`. The end of a pass is the beginning of the next one, `17:1:0`.

    Attributes:
        range: The range's number.
        pass_number: The number of the pass over the range, from 0.
        position: The number of sequences of this pass that were read.
    """

    range: str
    pass_number: int
    position: int

    @property
    def cursor(self) -> tuple[int, int]:
        """The pass, and the sequences of it that were read."""
        return self.pass_number, self.position

    def __str__(self) -> str:
        return f"{self.range}:{self.pass_number}:{self.position}"


def parse_positions(text: str) -> tuple[ReadPosition, ...]:
    """Parse the positions in a contribution's `data`. Raises WireError."""
    words = text.split()
    if len(words) > POSITIONS_MAX:
        raise WireError(f"{len(words)} positions in the data, {POSITIONS_MAX} at most")
    return tuple(map(parse_position, words))


def parse_position(word: str) -> ReadPosition:
    """Parse a position. Raises WireError."""
    found = _POSITION.fullmatch(word)
    if not found:
        raise WireError(f"{word[:40]!r} is not a position in the data")
    name, pass_number, position = found.groups()
    if position == "end":  # as version 0.3 wrote the end of a pass
        return ReadPosition(name, min(int(pass_number) + 1, PASSES_MAX - 1), 0)
    return ReadPosition(name, int(pass_number), int(position))


def advanced(cursors: Mapping[str, tuple[int, int]], positions: Iterable[ReadPosition]) -> dict[str, tuple[int, int]]:
    """Return the cursors that a merged contribution moves. They move only forwards."""
    moved: dict[str, tuple[int, int]] = {}
    for position in positions:
        if position.cursor[0] < PASSES_MAX and position.cursor > cursors.get(position.range, (0, 0)):
            moved[position.range] = max(position.cursor, moved.get(position.range, (0, 0)))
    return moved


def holder_in(lease: str, pass_number: int) -> str:
    """Return the holder (island/incarnation) in the text of a range's lease; empty if it is of another pass."""
    holder, _, of_pass = lease.rpartition(":")
    return holder if of_pass == str(pass_number) else ""


def choose(
    ranges: Sequence[str],
    cursors: Mapping[str, tuple[int, int]],
    holders: Mapping[str, str],
    me: str,
    gone: Callable[[str], bool],
    reading: Collection[str] = (),
) -> str | None:
    """Return the range that `me` should lease; None if there is none.

    A range is free if it has no holder, if its holder is gone, or if `me` holds it without reading it: then it never
    got the answer to its lease. It is free, too, if its holder has more than LEASES_MAX leases. Among the free ranges,
    those with the fewest passes come first, so that no text is read twice before all text is read once. Then come
    ranges that an earlier incarnation of this island held, and then the order of `ranges`. No pass begins before all
    ranges have reached the previous pass.

    Args:
        ranges: The ranges that `me` can read, in its order of preference.
        cursors: The cursor of each started range.
        holders: The holder (island/incarnation) of each leased range.
        me: The island and its incarnation, as island/incarnation.
        gone: Returns whether a holder has lost its leases.
        reading: The ranges that `me` reads already.
    """
    held, island = Counter(holders.values()), me.partition("/")[0]

    def pass_of(name: str) -> int:
        return cursors.get(name, (0, 0))[0]

    def is_free(name: str) -> bool:
        holder = holders.get(name, "")
        return holder in ("", me) or held[holder] > LEASES_MAX or gone(holder)

    def rank(name: str) -> tuple[int, bool]:
        return pass_of(name), holders.get(name, "").partition("/")[0] != island

    free = [name for name in ranges if name not in reading and is_free(name)]
    best = min(free, key=rank, default=None)
    return best if best is not None and pass_of(best) <= 1 + min(map(pass_of, ranges)) else None
