"""What has happened to a run: its rounds over time, in bounded memory, and its events. Pure.

A trail keeps every row until it is full. Then it joins neighbours, so that half as many rows each represent twice
as many additions. The page of a run of several weeks is therefore as small as that of an hour.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, NamedTuple, TypeVar

from archipelago.broker.manifest import Layout
from archipelago.broker.messages import UNCOPIED, UNSAVED, Note, Refusal, TapeEntry

#: The newest rounds, which say who participates.
RECENT_ROUNDS = 48
#: The most rows of a trail. If there are more, neighbouring rows are joined. A chart draws one for every pixel or two.
ROWS_KEPT = 720
#: The number of newest rounds whose times are drawn one by one, and whose staleness is counted.
DETAIL_ROUNDS = 96
MARKS_KEPT = 100
#: Islands whose own losses are kept, and rows of each.
ISLANDS_KEPT, ISLAND_ROWS = 64, 240


Row = TypeVar("Row")


class RoundRow(NamedTuple):
    """One round, or several neighbouring rounds. NaN marks values that were not measured.

    Attributes:
        round: The last of the rounds.
        tokens: Tokens merged so far, each counted once.
        loss: Mean loss in nats per token.
        known: The largest number of islands that were known.
        live: The smallest number of live islands.
        participating: The smallest number of live islands that recent rounds had merged.
        unix_seconds: When the last of the rounds closed, by the clock of the Redis.
        step: The global step after the last of the rounds.
    """

    round: float
    tokens: float
    loss: float
    known: float
    live: float
    participating: float
    unix_seconds: float = math.nan
    step: float = 0.0


class IslandRow(NamedTuple):
    """One island's loss in nats per token, in one of its merged contributions or in several neighbouring ones."""

    round: float
    tokens: float
    unix_seconds: float
    loss: float


class Mark(NamedTuple):
    """A round in which the merger or a setting changed."""

    round: int
    tokens: float
    unix_seconds: float
    text: str


def mean(values: Iterable[float]) -> float:
    """Return the mean of the values that are not NaN, or NaN if there are none."""
    known = [value for value in values if not math.isnan(value)]
    return statistics.fmean(known) if known else math.nan


#: How neighbouring rows are joined, by field: a drop in islands stays visible. The others keep
#: the value of the last row.
_JOINED: Final[Mapping[str, Callable[[list[float]], float]]] = {
    "loss": mean, "known": max, "live": min, "participating": min,
}  # fmt: skip


def joined(rows: Sequence[Any]) -> Any:
    """Join neighbouring rows of one kind into one."""
    last = rows[-1]
    names = [name for name in last._fields if name in _JOINED]
    return last._replace(**{name: _JOINED[name]([getattr(row, name) for row in rows]) for name in names})


def thinned(rows: Sequence[Row], most: int, join: Callable[[Sequence[Row]], Row] = joined) -> list[Row]:
    """Return at most `most` rows, each of which joins equally many neighbours."""
    span = max(1, math.ceil(len(rows) / most))
    return [join(rows[start : start + span]) for start in range(0, len(rows), span)]


def columns(rows: Sequence[Any], kind: Any) -> dict[str, list[Any]]:
    """Return rows of the named tuple `kind` as one list for each field."""
    return {name: [row[index] for row in rows] for index, name in enumerate(kind._fields)}


class Trail(Generic[Row]):
    """Rows in order, at most `most` of them, evenly thinned: each represents `span` added rows."""

    def __init__(self, most: int = ROWS_KEPT, join: Callable[[Sequence[Row]], Row] = joined) -> None:
        self.join, self.most, self.span = join, most, 1
        self._rows: list[Row] = []
        self._open: list[Row] = []

    def add(self, row: Row) -> None:
        self._open.append(row)
        if len(self._open) < self.span:
            return
        self._rows.append(self.join(self._open))
        self._open = []
        if len(self._rows) >= self.most:
            self._rows = thinned(self._rows, self.most // 2, self.join)
            self.span *= 2

    @property
    def rows(self) -> list[Row]:
        """All rows. The last one may represent fewer additions."""
        return [*self._rows, *([self.join(self._open)] if self._open else [])]


class History:
    """The rounds of one run, from the entries of its tape.

    Args:
        layout: The fragments of each shard. Rounds of different shards close in any order; on the axis of rounds, each
            is where the run was when it closed.
        away: The shards that the entries and the merged tokens leave out. Means are over the other fragments.
    """

    def __init__(self, layout: Layout, away: Collection[int] = ()) -> None:
        self._layout, self._fragments = layout, layout.count_without(away)
        self._newest: dict[int, TapeEntry] = {}  # of each shard
        self._trail: Trail[RoundRow] = Trail()
        self._known: set[str] = set()
        self._recent: deque[set[str]] = deque(maxlen=RECENT_ROUNDS)
        self._details: deque[TapeEntry] = deque(maxlen=DETAIL_ROUNDS)
        self._marks: deque[Mark] = deque(maxlen=MARKS_KEPT)
        self._losses: dict[str, Trail[IslandRow]] = {}
        self._tokens = 0.0
        self._round = 0

    def begin(self, merged_tokens: int, tape: Sequence[TapeEntry]) -> None:
        """Add the first entries, oldest first. The tokens are those merged until the last one, over those fragments."""
        seen = sum(member.tokens for entry in tape for member in entry.members)
        self._tokens = max(0.0, (merged_tokens - seen) / self._fragments)
        self.extend(tape)

    def follows(self, tape: Sequence[TapeEntry]) -> bool:
        """Return whether the entries connect to those that were added: none is missing, and no shard has gone back.

        A shard that has closed no round for long may have none among the newest rounds of the run.
        """
        if not self._newest or not tape:
            return not self._newest and not tape
        last = {self._layout.shard_of(entry.round): entry.round for entry in tape}
        digests = {entry.round: entry.digest for entry in tape}
        mine = [(seen, last[shard]) for shard, seen in self._newest.items() if shard in last]
        return bool(mine) and all(
            digests.get(seen.round) == seen.digest and seen.round <= newest for seen, newest in mine
        )

    def extend(self, tape: Sequence[TapeEntry]) -> int:
        """Add the entries that are new, and return their number. The oldest comes first."""
        new = [entry for entry in tape if (seen := self._newest_like(entry)) is None or entry.round > seen.round]
        for entry in new:
            self._add(entry)
        return len(new)

    def _newest_like(self, entry: TapeEntry) -> TapeEntry | None:
        """Return the newest round of the shard of `entry` that was added; None if there is none."""
        return self._newest.get(self._layout.shard_of(entry.round))

    def _add(self, entry: TapeEntry) -> None:
        here = {member.island for member in entry.members}
        self._known |= here
        self._recent.append(here)
        self._tokens += sum(member.tokens for member in entry.members) / self._fragments
        self._details.append(replace(entry, before=""))  # That field may be long.
        known, live = max(entry.live, len(self._known)), float(entry.live)
        closed = entry.unix_seconds or math.nan
        self._round = max(self._round, entry.round)
        self._mark(entry, closed)
        participating = min(live, len(set().union(*self._recent)))
        row = RoundRow(self._round, self._tokens, entry.loss, known, live, participating, closed, entry.step)
        self._trail.add(row)
        for member in entry.members:
            trail = self._losses.pop(member.island, None) or Trail(ISLAND_ROWS)
            self._losses[member.island] = trail  # The island that was merged longest ago stays first.
            trail.add(IslandRow(self._round, self._tokens, closed, member.loss))
            if len(self._losses) > ISLANDS_KEPT:
                del self._losses[next(iter(self._losses))]
        self._newest[self._layout.shard_of(entry.round)] = entry

    def _mark(self, entry: TapeEntry, closed: float) -> None:
        """Note a takeover, or a change of settings, in the round."""
        before = self._newest_like(entry)
        if before and entry.epoch != before.epoch:
            where = f" in shard {self._layout.shard_of(entry.round)}" if self._layout.shards > 1 else ""
            self._marks.append(Mark(self._round, self._tokens, closed, f"epoch {entry.epoch} begins{where}"))
        if entry.steered:
            self._marks.append(Mark(self._round, self._tokens, closed, f"steered: {entry.steered}"))

    def losses(self) -> dict[str, dict[str, list[float]]]:
        """Return columns of each island's own loss in nats per token, by the island's name."""
        return {name: columns(trail.rows, IslandRow) for name, trail in sorted(self._losses.items())}

    def lines(self) -> dict[str, list[float]]:
        """Return columns over rounds."""
        return columns(self._trail.rows, RoundRow)

    def details(self) -> dict[str, list[Any]]:
        """Return columns of the newest rounds: waits for the quorum and after it, merge and grace."""
        rounds = self._details
        return {
            "round": [entry.round for entry in rounds],
            "quorum_seconds": [entry.quorum_seconds for entry in rounds],
            "waited_seconds": [max(0.0, entry.open_seconds - entry.quorum_seconds) for entry in rounds],
            "merge_seconds": [entry.merge_seconds for entry in rounds],
            "grace_seconds": [entry.grace_seconds for entry in rounds],
        }

    def marks(self) -> dict[str, list[Any]]:
        """Return columns of the rounds in which a merger took over or a change by an operator took effect."""
        return columns(list(self._marks), Mark)

    def staleness(self) -> list[int]:
        """Return how many contributions to the newest rounds were merged at staleness 0, 1, 2 …"""
        counts = Counter(member.staleness for entry in self._details for member in entry.members)
        return [counts[value] for value in range(max(counts, default=-1) + 1)]


# -- events -----------------------------------------------------------------------------------------------------------

#: Pairs of words in the reason of a refusal, and what to do. The first that matches counts.
_REFUSALS = (
    ("over the cap", "Its link or its steps are too slow for the run: give it a faster link, or choose a larger "
                     "sync.interval in a new run. A single late contribution is harmless."),
    ("may have gone back", "The run went back: its Redis came back older, or a checkpoint was restored. The "
                           "island follows by itself within seconds."),
    ("too many", "The merger is slower than the islands. It catches up, or needs a faster machine."),
    ("repeat", "Nothing has to be done."),
    ("expelled", "The operator or the run's rule has expelled it. To admit it: `archipelago steer island.NAME=`, "
                 "or, if it was revoked, `archipelago invite NAME`."),
    ("finite", "Its arithmetic broke. Start it again; if that repeats, lower the learning rate in a new run."),
    ("digest", "Its bytes were changed on the way. Check its network, its machine and its version of the program."),
    ("sign", "It has no invitation to this run, or a wrong one. Create a join file with `archipelago invite`."),
    ("in the name of", "Somebody sends in another's name. Give each island credentials of its own (`invite`)."),
    ("impossible", "Its clock or its counters are wrong, or it cheats. Start it again, or expel it."),
    ("codec", "It has another version of the program. Install the run's version there."),
)  # fmt: skip

#: By kind of event. About others, nothing has to be done.
_REMEDIES = {
    "replaced": "Give each island its own --name. The newer process goes on.",
    "diverged": "Start it again: it takes the run's parameters. If all islands diverge, begin a new run with a lower "
                "--inner.learning-rate.",
    "stalled": "If it hangs, start it again; its log may say why. Else it comes back with its next sync.",
    "drained": "To let it join again: `archipelago steer island.NAME=`, and start it.",
    "expelled": "To let it join again: `archipelago steer island.NAME=`, or, if it was revoked, "
                "`archipelago invite NAME`, and start it.",
    "lowered": "Check the island's corpus, its software and its device. Its weight returns when it agrees again.",
    "idle": "Look at these islands' logs: they live and send nothing. Restart or expel them.",
    "paused": "Resume merging with `archipelago steer merging=`.",
    UNSAVED: "Do what it says; the merger tries again by itself.",
    UNCOPIED: "Do what it says; a merger tries again by itself, and once more when it is started.",
    "repaired": "Find out who else writes to this Redis, and give each program credentials of its own.",
}  # fmt: skip


@dataclass(frozen=True)
class Event:
    """A note, or refusals that repeat each other, as one line of a run's history.

    Attributes:
        remedy: What to do about it; empty if nothing has to be done.
        times: How many refusals of that island for that reason came in a row. The other fields are those of the newest.
    """

    unix_seconds: float
    who: str
    kind: str
    text: str
    remedy: str = ""
    times: int = 1


def events_of(notes: Sequence[Note], refusals: Sequence[tuple[float, Refusal]]) -> list[Event]:
    """Return notes and refusals as one list, oldest first."""
    found = [Event(note.unix_seconds, note.who, note.kind, note.text, _REMEDIES.get(note.kind, "")) for note in notes]
    for at, each in refusals:
        text = f"round {each.round:,}: {each.reason}"
        found.append(Event(at, each.island, "refused", text, refusal_remedy(each.reason)))
    out: list[Event] = []
    for event in sorted(found, key=lambda event: event.unix_seconds):
        if out and event.kind == "refused" and _without_round(event) == _without_round(out[-1]):
            event = replace(event, times=out.pop().times + 1)
        out.append(event)
    return out


def _without_round(event: Event) -> tuple[str, str, str]:
    return event.who, event.kind, event.text.partition(": ")[2]


def refusal_remedy(reason: str) -> str:
    """Return what to do about a refusal, by its reason."""
    low = reason.lower()
    return next((remedy for words, remedy in _REFUSALS if words in low), "Look at the island's log and its version.")
