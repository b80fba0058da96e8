"""Shards of text and who reads them: leases and cursors, without Redis and without text.

A corpus is cut into shards. An island leases a shard, reads it from its cursor on, and every contribution says how far
its island had read (`Place`s). When the contribution is merged, the cursor goes there, in the same transaction. So a
shard whose island died goes on with another island from what was merged, and each completed pass over a shard has
merged each of its tokens once. Pure: texts and decisions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from archipelago.broker.errors import WireError

PLACES_MAX = 32
"""Places that one contribution may name: shards that its island holds at the same time."""
PASSES_MAX = 10**12
"""Cursors stay below this pass, so that wherever one may stand can be written as a place."""
# No \d, which takes the digits of all scripts, and no leading zero: a shard has one name.
_PLACE = re.compile(r"((?:[A-Za-z0-9][A-Za-z0-9._-]{0,63}/)?(?:0|[1-9][0-9]{0,6})):([0-9]{1,12}):([0-9]{1,15}|end)")


@dataclass(frozen=True)
class Place:
    """How far a pass over a shard has come. As text: `17:0:96`, at its end `17:0:end`, of another corpus `site/17:…`.

    `shard` is its number in the run's corpus, or `CORPUS/NUMBER` in a corpus that only some islands have.
    """

    shard: str
    pass_number: int
    position: int
    """sequences of the pass that were read"""
    ended: bool = False

    @property
    def cursor(self) -> tuple[int, int]:
        """Where the next reader begins: pass, and sequences of it that need not be read."""
        return (self.pass_number + 1, 0) if self.ended else (self.pass_number, self.position)

    def __str__(self) -> str:
        return f"{self.shard}:{self.pass_number}:{'end' if self.ended else self.position}"


def shard_name(corpus: str, number: int) -> str:
    """The name of a shard; `corpus` is empty for the run's own."""
    return f"{corpus}/{number}" if corpus else str(number)


def parse_places(text: str) -> tuple[Place, ...]:
    """The places in a contribution's `data`. Raises WireError."""
    words = text.split()
    if len(words) > PLACES_MAX:
        raise WireError(f"{len(words)} places in the data, {PLACES_MAX} at most")
    return tuple(_parse(word) for word in words)


def _parse(word: str) -> Place:
    found = _PLACE.fullmatch(word)
    if not found:
        raise WireError(f"{word[:40]!r} is no place in the data")
    shard, pass_number, position = found.groups()
    ended = position == "end"
    return Place(shard, int(pass_number), 0 if ended else int(position), ended)


def advanced(cursors: Mapping[str, tuple[int, int]], places: Iterable[Place]) -> dict[str, tuple[int, int]]:
    """The cursors that a merged contribution moves, forwards only; a pass that ended begins the next one."""
    moved: dict[str, tuple[int, int]] = {}
    for place in places:
        if place.cursor[0] < PASSES_MAX and place.cursor > cursors.get(place.shard, (0, 0)):
            moved[place.shard] = max(place.cursor, moved.get(place.shard, (0, 0)))
    return moved


def choose(
    shards: Sequence[str],
    cursors: Mapping[str, tuple[int, int]],
    holders: Mapping[str, str],
    me: str,
    gone: Callable[[str], bool],
) -> str | None:
    """The shard that `me` (island/incarnation) should lease, None when there is none.

    `shards` are those it may read, in the order that it likes them. Free is a shard without a holder, or whose holder
    is `gone`, or is `me`: who asks for what it holds was never told so. Of these come the ones with the fewest passes
    first, so that no text is read twice before another is read once; then one that an earlier incarnation of this very
    island held; then its own order. No pass begins before all shards have come to the one before it.
    """
    free = [name for name in shards if holders.get(name, "") in ("", me) or gone(holders[name])]
    if not free:
        return None
    mine = [name for name, holder in holders.items() if holder == me]
    slowest = min(cursors.get(name, (0, 0))[0] for name in [*shards, *mine])
    island = me.partition("/")[0]

    def rank(indexed: tuple[int, str]) -> tuple[int, bool, int]:
        index, name = indexed
        return cursors.get(name, (0, 0))[0], holders.get(name, "").partition("/")[0] != island, index

    _, best = min(enumerate(free), key=rank)
    return best if cursors.get(best, (0, 0))[0] <= slowest + 1 else None


def parse_cursor(text: str) -> tuple[int, int]:
    """The cursor that `cursor_text` wrote. Raises WireError."""
    found = re.fullmatch(r"([0-9]{1,13}):([0-9]{1,15})", text)
    if not found:
        raise WireError(f"{text[:40]!r} is no cursor")
    return int(found[1]), int(found[2])


def cursor_text(cursor: tuple[int, int]) -> str:
    """`PASS:POSITION`."""
    return f"{cursor[0]}:{cursor[1]}"
