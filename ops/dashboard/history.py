"""What the dashboard keeps of a run to draw: rounds, held-out results and queues over time, in bounded memory.

A trail keeps every row until it is full, then half as many that stand for twice as many each. So a page of a run that
goes on for weeks is as light as one of an hour, and what is thinned is always thinned evenly. No clocks, no Redis.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from archipelago.broker.messages import Evaluation, TapeEntry
from archipelago.ops.watch.run_view import RECENT_ROUNDS

ROWS_KEPT = 4096
"""rows of a trail; two neighbours become one when there are more"""
POINTS_DRAWN = 360
"""of each line: about one for every two pixels that it gets"""
DETAIL_ROUNDS = 96
"""rounds that are drawn one by one"""
STALENESS_ROUNDS = 1024
"""rounds that the histogram of staleness looks back on"""
MARKS_KEPT = 100
SMOOTHING = 0.8

Row = TypeVar("Row")


class RoundRow(NamedTuple):
    """One round, or the neighbours that it stands for. NaN is what nobody measured."""

    round: float
    """the last one"""
    tokens: float
    """merged until then, each counted once"""
    loss: float
    """nats a token, mean"""
    size: float
    """islands that were heard of until then, the most"""
    live: float
    """the fewest"""
    participating: float
    """live islands that were merged in one of the rounds before, the fewest"""


class QueueRow(NamedTuple):
    """One reading of what waits and of what Redis holds; of neighbours, the most."""

    unix_seconds: float
    pending: float
    memory_bytes: float


class Detail(NamedTuple):
    """One round's times, in seconds."""

    round: int
    quorum_seconds: float
    """from the first contribution to the quorum"""
    waited_seconds: float
    """from the quorum to the close"""
    merge_seconds: float
    grace_seconds: float
    """what it was allowed to wait"""
    contributions: int
    live: int


def joined_rounds(rows: Sequence[RoundRow]) -> RoundRow:
    """The row that stands for these neighbours: a dip in who lives or takes part stays to be seen."""
    return RoundRow(
        rows[-1].round, rows[-1].tokens, mean([row.loss for row in rows]), max(row.size for row in rows),
        min(row.live for row in rows), min(row.participating for row in rows),
    )  # fmt: skip


def joined_queues(rows: Sequence[QueueRow]) -> QueueRow:
    """The row that stands for these neighbours: a peak stays to be seen."""
    return QueueRow(rows[-1].unix_seconds, max(row.pending for row in rows), max(row.memory_bytes for row in rows))


def joined_evaluations(rows: Sequence[Evaluation]) -> Evaluation:
    """The newest: each is a measurement of its own, and no mean was ever a model."""
    return rows[-1]


def thinned(rows: Sequence[Row], most: int, joined: Callable[[Sequence[Row]], Row]) -> list[Row]:
    """At most that many rows, each standing for as many neighbours; the newest is always the last one's."""
    span = max(1, math.ceil(len(rows) / most))
    return [joined(rows[start : start + span]) for start in range(0, len(rows), span)]


def mean(values: Iterable[float]) -> float:
    """Of those that were measured; NaN where none was."""
    known = [value for value in values if not math.isnan(value)]
    return statistics.fmean(known) if known else math.nan


def smoothed(values: Iterable[float], smoothing: float = SMOOTHING) -> list[float]:
    """An exponential moving average that begins without a bias; NaN leaves it where it is."""
    out, total, weight = [], 0.0, 0.0
    for value in values:
        if not math.isnan(value):
            total = smoothing * total + (1.0 - smoothing) * value
            weight = smoothing * weight + (1.0 - smoothing)
        out.append(total / weight if weight else math.nan)
    return out


class Trail(Generic[Row]):
    """Rows in order, at most `most` of them, evenly thinned: each stands for `span` that were added."""

    def __init__(self, joined: Callable[[Sequence[Row]], Row], most: int = ROWS_KEPT) -> None:
        self.joined, self.most, self.span = joined, most, 1
        self._rows: list[Row] = []
        self._open: list[Row] = []

    def add(self, row: Row) -> None:
        """The newest row."""
        self._open.append(row)
        if len(self._open) < self.span:
            return
        self._rows.append(self.joined(self._open))
        self._open = []
        if len(self._rows) >= self.most:
            self._rows = [self.joined(self._rows[n : n + 2]) for n in range(0, len(self._rows), 2)]
            self.span *= 2

    @property
    def rows(self) -> list[Row]:
        """All of them, with what has not yet become a whole one."""
        return [*self._rows, *([self.joined(self._open)] if self._open else [])]


class Mark(NamedTuple):
    """A round from which on something is another."""

    round: int
    tokens: float
    text: str


class History:
    """The rounds of one run as they were seen, from entries of its tape."""

    def __init__(self, fragments: int) -> None:
        self.fragments = fragments
        self.newest: TapeEntry | None = None
        self._trail: Trail[RoundRow] = Trail(joined_rounds)
        self._known: set[str] = set()
        self._recent: deque[dict[str, int]] = deque(maxlen=RECENT_ROUNDS)
        self._details: deque[Detail] = deque(maxlen=DETAIL_ROUNDS)
        self._staleness: deque[tuple[int, ...]] = deque(maxlen=STALENESS_ROUNDS)
        self._marks: deque[Mark] = deque(maxlen=MARKS_KEPT)
        self._tokens = 0.0

    def begin(self, merged_tokens: int, tape: Sequence[TapeEntry]) -> None:
        """The first entries, at whose end that many tokens (summed over the fragments) were merged."""
        seen = sum(member.tokens for entry in tape for member in entry.members)
        self._tokens = max(0.0, (merged_tokens - seen) / self.fragments)
        self.extend(tape)

    def follows(self, tape: Sequence[TapeEntry]) -> bool:
        """Whether entries go on from what was seen: not where some are missing, nor where a run went back."""
        if self.newest is None or not tape:
            return self.newest is None and not tape
        mine = [entry for entry in tape if entry.round == self.newest.round]
        return bool(mine) and mine[-1].digest == self.newest.digest and tape[-1].round >= self.newest.round

    def extend(self, tape: Sequence[TapeEntry]) -> int:
        """Takes in the entries that are new, oldest first; how many there were."""
        last = self.newest.round if self.newest else -1
        new = [entry for entry in tape if entry.round > last]
        for entry in new:
            self._add(entry)
        return len(new)

    def _add(self, entry: TapeEntry) -> None:
        here = {member.island: member.staleness for member in entry.members}
        self._known |= here.keys()
        self._recent.append(here)
        taking_part = len(set().union(*self._recent))
        self._tokens += sum(member.tokens for member in entry.members) / self.fragments
        self._staleness.append(tuple(member.staleness for member in entry.members))
        self._details.append(
            Detail(
                entry.round, entry.quorum_seconds, max(0.0, entry.open_seconds - entry.quorum_seconds),
                entry.merge_seconds, entry.grace_seconds, len(entry.members), entry.live,
            )
        )  # fmt: skip
        size, live = max(entry.live, len(self._known)), float(entry.live)
        self._trail.add(RoundRow(entry.round, self._tokens, entry.loss, size, live, min(live, taking_part)))
        if self.newest and entry.epoch != self.newest.epoch:
            self._marks.append(Mark(entry.round, self._tokens, f"epoch {entry.epoch} begins"))
        if entry.steered:
            self._marks.append(Mark(entry.round, self._tokens, f"steered: {entry.steered}"))
        self.newest = entry

    def lines(self, points: int = POINTS_DRAWN) -> dict[str, list[float]]:
        """Columns over rounds, thinned."""
        rows = thinned(self._trail.rows, points, joined_rounds)
        return {**columns(rows, RoundRow), "smooth": smoothed([row.loss for row in rows])}

    def details(self) -> dict[str, list[Any]]:
        """Columns of the newest rounds, one by one."""
        return columns(list(self._details), Detail)

    def marks(self) -> dict[str, list[Any]]:
        """Columns of the rounds with which a merger took over, or a change of the operator took effect."""
        return columns(list(self._marks), Mark)

    def staleness(self) -> list[int]:
        """How many of the recent contributions were merged at staleness 0, 1, 2 …"""
        values = [value for members in self._staleness for value in members]
        counts = [0] * (max(values, default=-1) + 1)
        for value in values:
            counts[value] += 1
        return counts

    def parts(self, island: str) -> list[int]:
        """The island's part in the newest rounds, oldest first: its staleness where it was merged, else −1."""
        return [here.get(island, -1) for here in self._recent]


def columns(rows: Sequence[Any], kind: Any) -> dict[str, list[Any]]:
    """Rows of a NamedTuple, field by field."""
    return {name: [row[index] for row in rows] for index, name in enumerate(kind._fields)}
