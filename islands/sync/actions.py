"""The actions of an island. With the tape and the payloads, they suffice to replay the island.

In memory an action is a dataclass. In the stream and in the record it is one word of text; `word` writes it and
`parse` reads it. A word that is repeated n times in a row is written once, followed by `*n`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from archipelago.broker.errors import WireError
from archipelago.broker.messages import Actions

#: The most actions of one incarnation that are expanded. A short text from outside can encode very many.
ACTIONS_MAX = 1 << 24
#: Every index of an action is smaller, so that it can be written with the digits that `parse` reads.
INDEX_END = 10**18
_REPEATED = re.compile(r"(\S+?)\*([0-9]{1,18})")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Join:
    """Begin from these versions of the fragments with fresh optimiser state. As text: `join:V0,V1,…`."""

    versions: tuple[int, ...]


@dataclass(frozen=True)
class TakeMoments:
    """Take over the inner optimiser state of an incarnation after `index` of its actions: `moments:NAME/INCARNATION@K`.

    Attributes:
        who: The island and its incarnation.
        index: The number of actions that it had done.
    """

    who: str
    index: int


@dataclass(frozen=True)
class RestoreWhole:
    """Take over the whole state of an earlier incarnation: `whole:NAME/INCARNATION@K`. Attributes as in TakeMoments."""

    who: str
    index: int


@dataclass(frozen=True)
class BeginPass:
    """Begin a pass over a shard: `d17:0:96:0`.

    Attributes:
        point: The pass as the data supply writes it; up to the first colon, this is the name of the shard.
    """

    point: str

    @property
    def shard(self) -> str:
        """The name of the shard."""
        return self.point.partition(":")[0]


@dataclass(frozen=True)
class ForgetShards:
    """Give up the leases of these shards: `f17,3`."""

    shards: tuple[str, ...]


@dataclass(frozen=True)
class Steps:
    """Make `count` inner steps in one scan: `n4`, or `h4` while the learning-rate schedule is held."""

    count: int
    is_held: bool = False


@dataclass(frozen=True)
class Adopt:
    """Adopt a version of a fragment: `a2:7`."""

    fragment: int
    version: int


@dataclass(frozen=True)
class Send:
    """Measure the contribution to a round: `s9`, or `s9:top3` with another codec than the run's."""

    round: int
    codec: str = ""


@dataclass(frozen=True)
class Length:
    """Train on with another length of the run, which an operator has set: `l3000`.

    Attributes:
        steps: The length in global inner steps.
    """

    steps: int


Action = Join | TakeMoments | RestoreWhole | BeginPass | ForgetShards | Steps | Adopt | Send | Length
_NUMBER = "([0-9]{1,18})"
_WORD = re.compile(
    rf"join:(?P<join>{_NUMBER}(,{_NUMBER})*)|(?P<taken>moments|whole):(?P<who>\S+)@(?P<index>{_NUMBER})|d(?P<point>\S+)"
    rf"|f(?P<shards>\S+)|(?P<clock>[nh])(?P<count>{_NUMBER})|a(?P<fragment>{_NUMBER}):(?P<version>{_NUMBER})"
    rf"|l(?P<length>{_NUMBER})|s(?P<round>{_NUMBER})(:(?P<codec>[a-z0-9]+))?"
)


def word(action: Action) -> str:
    """Return the action as one word of text."""
    match action:
        case Join(versions):
            return "join:" + ",".join(map(str, versions))
        case TakeMoments(who, index):
            return f"moments:{who}@{index}"
        case RestoreWhole(who, index):
            return f"whole:{who}@{index}"
        case BeginPass(point):
            return f"d{point}"
        case ForgetShards(shards):
            return "f" + ",".join(shards)
        case Steps(count, is_held):
            return f"{'h' if is_held else 'n'}{count}"
        case Adopt(fragment, version):
            return f"a{fragment}:{version}"
        case Length(steps):
            return f"l{steps}"
        case Send(number, codec):
            return f"s{number}:{codec}" if codec else f"s{number}"


@lru_cache(maxsize=4096)
def parse(text: str) -> Action:
    """Return the action that `word` wrote. Raises WireError for any other text."""
    found = _WORD.fullmatch(text)
    if found is None:
        raise WireError(f"{text[:60]!r} is not an action")
    if found["join"]:
        return Join(tuple(map(int, found["join"].split(","))))
    if found["taken"]:
        taken = TakeMoments if found["taken"] == "moments" else RestoreWhole
        return taken(found["who"], int(found["index"]))
    if found["point"]:
        return BeginPass(found["point"])
    if found["shards"]:
        return ForgetShards(tuple(found["shards"].split(",")))
    if found["count"]:
        return Steps(int(found["count"]), found["clock"] == "h")
    if found["fragment"]:
        return Adopt(int(found["fragment"]), int(found["version"]))
    if found["length"]:
        return Length(int(found["length"]))
    return Send(int(found["round"]), found["codec"] or "")


@dataclass
class ActionLog:
    """The actions of one incarnation, until they are sent.

    Attributes:
        island: The name of the island.
        incarnation: Its incarnation.
        enabled: Whether actions are kept at all, as in a recorded run.
        index: The number of actions that `take` has removed.
    """

    island: str
    incarnation: str
    enabled: bool
    index: int = 0

    def __post_init__(self) -> None:
        self._words: list[tuple[str, int]] = []

    @property
    def done(self) -> int:
        """The number of all actions so far."""
        return self.index + sum(count for _, count in self._words)

    def add(self, action: Action) -> None:
        """Append an action."""
        if not self.enabled:
            return
        text = word(action)
        if self._words and self._words[-1][0] == text:
            self._words[-1] = (text, self._words[-1][1] + 1)
        else:
            self._words.append((text, 1))

    def take(self) -> Actions | None:
        """Take out the actions since the last call; None if there were none."""
        actions = self.peek()
        self.index, self._words = self.done, []
        return actions

    def peek(self) -> Actions | None:
        """Return what `take` would, and keep it. Readers accept actions that arrive twice."""
        return Actions(self.island, self.incarnation, self.index, _text(self._words)) if self._words else None


def _text(words: Iterable[tuple[str, int]]) -> str:
    return " ".join(text if count == 1 else f"{text}*{count}" for text, count in words)


def _words(text: str) -> Iterator[tuple[str, int]]:
    for each in text.split():
        found = _REPEATED.fullmatch(each)
        yield (found[1], int(found[2])) if found else (each, 1)


def unfolded(parts: Sequence[Actions]) -> list[Action]:
    """Return the actions of one incarnation in order, up to the first one that is missing or cannot be read.

    Args:
        parts: What the incarnation sent, in any order. Parts may overlap.

    Raises:
        WireError: There are more than `ACTIONS_MAX` actions.
    """
    out: list[Action] = []
    for part in sorted(parts, key=lambda part: part.index):
        if part.index > len(out):
            break
        skip = len(out) - part.index
        for text, count in _words(part.text):
            known = min(skip, count)
            skip -= known
            if len(out) + count - known > ACTIONS_MAX:
                raise WireError(f"{part.island} sent more than {ACTIONS_MAX:,} actions", code="wire.too-many-actions")
            try:
                out += [parse(text)] * (count - known)
            except WireError as error:
                log.warning("actions of %s/%s: %s", part.island, part.incarnation, error.reason)
                return out
    return out
