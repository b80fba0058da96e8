"""The history that the dashboard draws, in bounded memory: rounds and queues over time. Pure."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple

from archipelago.broker.control import STEPS
from archipelago.broker.messages import Evaluation, TapeEntry
from archipelago.broker.shards.layout import Layout
from archipelago.ops.dashboard.trails import Trail, columns, mean, smoothed, thinned
from archipelago.ops.watch.run_view import RECENT_ROUNDS
from archipelago.ops.watch.tape_position import TapePosition

#: Points of each line: about one for every two pixels.
POINTS_DRAWN = 360
#: The number of newest rounds that are drawn one by one.
DETAIL_ROUNDS = 96
#: The number of newest rounds in the histogram of staleness.
STALENESS_ROUNDS = 1024
MARKS_KEPT = 100
#: The run was paused or stopped if the time between two rounds is this many times as long as usual.
PAUSE_TIMES = 20.0
#: Islands whose own losses are kept, and rows and drawn points of each.
ISLANDS_KEPT, ISLAND_ROWS, ISLAND_POINTS = 64, 512, 120


class RoundRow(NamedTuple):
    """One round, or several neighbouring rounds. NaN marks values that were not measured.

    Attributes:
        round: The last of the rounds.
        tokens: Tokens merged so far, each counted once.
        loss: Mean loss in nats per token.
        known: The largest number of islands that were known.
        live: The smallest number of live islands.
        participating: The smallest number of live islands that recent rounds had merged.
        unix_seconds: When the last of the rounds closed, by the merger's clock.
        step: The global step of the last of the rounds.
    """

    round: float
    tokens: float
    loss: float
    known: float
    live: float
    participating: float
    unix_seconds: float = math.nan
    step: float = math.nan


class IslandRow(NamedTuple):
    """One island's loss in nats per token, in one of its merged contributions or in several neighbouring ones."""

    round: float
    tokens: float
    unix_seconds: float
    loss: float


class QueueRow(NamedTuple):
    """One reading of pending contributions and of Redis's memory; the maximum of several neighbours."""

    unix_seconds: float
    pending: float
    memory_bytes: float


class Detail(NamedTuple):
    """One round's times.

    Attributes:
        quorum_seconds: From the first contribution to the quorum.
        waited_seconds: From the quorum to the close.
        grace_seconds: The grace window that was allowed.
    """

    round: int
    quorum_seconds: float
    waited_seconds: float
    merge_seconds: float
    grace_seconds: float
    contributions: int
    live: int


def joined_rounds(rows: Sequence[RoundRow]) -> RoundRow:
    """Join neighbouring rows. A drop in live or participating islands stays visible."""
    return RoundRow(
        rows[-1].round, rows[-1].tokens, mean([row.loss for row in rows]), max(row.known for row in rows),
        min(row.live for row in rows), min(row.participating for row in rows), rows[-1].unix_seconds, rows[-1].step,
    )  # fmt: skip


def joined_losses(rows: Sequence[IslandRow]) -> IslandRow:
    """Join neighbouring rows."""
    return rows[-1]._replace(loss=mean([row.loss for row in rows]))


def joined_queues(rows: Sequence[QueueRow]) -> QueueRow:
    """Join neighbouring rows. A peak stays visible."""
    return QueueRow(rows[-1].unix_seconds, max(row.pending for row in rows), max(row.memory_bytes for row in rows))


def joined_evaluations(rows: Sequence[Evaluation]) -> Evaluation:
    """Return the newest row. Each is a measurement of one model, so a mean would belong to no model."""
    return rows[-1]


class Mark(NamedTuple):
    """A round in which the merger or a setting changed."""

    round: int
    tokens: float
    unix_seconds: float
    text: str


class History:
    """The rounds of one run, from the entries of its tape.

    Args:
        layout: The fragments of each shard. Rounds of different shards close in any order; on the axis of rounds, each
            is where the run was when it closed.
    """

    def __init__(self, layout: Layout) -> None:
        self.fragments, self._layout = layout.count, layout
        self._position = TapePosition(layout)
        self.newest: TapeEntry | None = None
        self._trail: Trail[RoundRow] = Trail(joined_rounds)
        self._known: set[str] = set()
        self._recent: deque[dict[str, int]] = deque(maxlen=RECENT_ROUNDS)
        self._details: deque[Detail] = deque(maxlen=DETAIL_ROUNDS)
        self._staleness: deque[tuple[int, ...]] = deque(maxlen=STALENESS_ROUNDS)
        self._marks: deque[Mark] = deque(maxlen=MARKS_KEPT)
        self._lengths: deque[tuple[int, float]] = deque(maxlen=MARKS_KEPT)
        self._losses: dict[str, Trail[IslandRow]] = {}
        self._tokens = 0.0
        self._round = self._step = 0

    def begin(self, merged_tokens: int, tape: Sequence[TapeEntry]) -> None:
        """Add the first entries.

        Args:
            merged_tokens: Tokens merged until the last entry, summed over the fragments.
            tape: The entries, oldest first.
        """
        seen = sum(member.tokens for entry in tape for member in entry.members)
        self._tokens = max(0.0, (merged_tokens - seen) / self.fragments)
        self.extend(tape)

    def follows(self, tape: Sequence[TapeEntry]) -> bool:
        """Return whether the entries connect to those that were added: none is missing, and the run did not go back."""
        return self._position.connects_to(tape)

    def extend(self, tape: Sequence[TapeEntry]) -> int:
        """Add the entries that are new, and return their number. The oldest comes first."""
        new = self._position.new(tape)
        for entry in new:
            self._add(entry)
        return len(new)

    def _add(self, entry: TapeEntry) -> None:
        here = {member.island: member.staleness for member in entry.members}
        self._known |= here.keys()
        self._recent.append(here)
        participating = len(set().union(*self._recent))
        self._tokens += sum(member.tokens for member in entry.members) / self.fragments
        self._staleness.append(tuple(member.staleness for member in entry.members))
        self._details.append(
            Detail(
                entry.round, entry.quorum_seconds, max(0.0, entry.open_seconds - entry.quorum_seconds),
                entry.merge_seconds, entry.grace_seconds, len(entry.members), entry.live,
            )
        )  # fmt: skip
        known, live = max(entry.live, len(self._known)), float(entry.live)
        closed = entry.unix_seconds or math.nan
        self._round, self._step = max(self._round, entry.round), max(self._step, entry.step)
        self._trail.add(
            RoundRow(self._round, self._tokens, entry.loss, known, live, min(live, participating), closed, self._step)
        )
        before = self._position.newest_like(entry)
        if before and entry.epoch != before.epoch:
            where = f" in shard {self._layout.shard_of(entry.round)}" if self._layout.shards > 1 else ""
            self._marks.append(Mark(self._round, self._tokens, closed, f"epoch {entry.epoch} begins{where}"))
        if entry.steered:
            self._marks.append(Mark(self._round, self._tokens, closed, f"steered: {entry.steered}"))
            changes = dict(change.partition("=")[::2] for change in entry.steered.split())
            with suppress(KeyError, ValueError):
                self._lengths.append((self._round, float(changes[STEPS])))
        for member in entry.members:
            self._add_loss(member.island, IslandRow(self._round, self._tokens, closed, member.loss))
        self.newest = entry
        self._position.add(entry)

    def _add_loss(self, island: str, row: IslandRow) -> None:
        trail = self._losses.pop(island, None) or Trail(joined_losses, ISLAND_ROWS)
        self._losses[island] = trail  # The island that was merged longest ago stays first.
        if len(self._losses) > ISLANDS_KEPT:
            del self._losses[next(iter(self._losses))]
        trail.add(row)

    def losses(self, points: int = ISLAND_POINTS) -> dict[str, dict[str, list[float]]]:
        """Return columns of each island's own loss in nats per token, by the island's name."""
        return {
            name: columns(thinned(trail.rows, points, joined_losses), IslandRow)
            for name, trail in sorted(self._losses.items())
        }

    def tokens_at(self, rounds: Iterable[float]) -> list[float]:
        """Return the tokens that were merged at each of these rounds, between two known rounds in proportion."""
        rows = [RoundRow(0, 0.0, math.nan, 0, 0, 0), *self._trail.rows]
        numbers = [row.round for row in rows]
        out = []
        for number in rounds:
            n = min(len(rows) - 1, bisect_left(numbers, number))
            low, high = rows[max(0, n - 1)], rows[n]
            share = (number - low.round) / (high.round - low.round) if high.round > low.round else 1.0
            out.append(low.tokens + min(1.0, max(0.0, share)) * (high.tokens - low.tokens))
        return out

    def lengths_at(self, rounds: Iterable[float], own: float, now: float) -> list[float]:
        """Return the length of the run, in steps, that was in force at each of these rounds.

        Args:
            rounds: The rounds.
            own: The length in the run's config.
            now: The present length. It counts for all rounds if no change of it is known.
        """
        begins = [number for number, _ in self._lengths]
        lengths = [own if begins else now, *(length for _, length in self._lengths)]
        return [lengths[bisect_right(begins, number)] for number in rounds]

    def steps_per_second(self) -> float:
        """Return the global steps per second over the recent rounds, since the last pause; NaN if it is not known."""
        rows = [row for row in self._trail.rows[-RECENT_ROUNDS:] if not math.isnan(row.unix_seconds)]
        gaps = [after.unix_seconds - before.unix_seconds for before, after in pairwise(rows)]
        usual = statistics.median(gaps) if gaps else 0.0
        begin = max((n + 1 for n, gap in enumerate(gaps) if gap > PAUSE_TIMES * usual > 0.0), default=0)
        seconds = rows[-1].unix_seconds - rows[begin].unix_seconds if rows else 0.0
        return (rows[-1].step - rows[begin].step) / seconds if seconds > 0.0 else math.nan

    def lines(self, points: int = POINTS_DRAWN) -> dict[str, list[float]]:
        """Return columns over rounds, thinned to at most `points`."""
        rows = thinned(self._trail.rows, points, joined_rounds)
        return {**columns(rows, RoundRow), "smooth": smoothed([row.loss for row in rows])}

    def details(self) -> dict[str, list[Any]]:
        """Return columns of the newest rounds, one row for each."""
        return columns(list(self._details), Detail)

    def marks(self) -> dict[str, list[Any]]:
        """Return columns of the rounds in which a merger took over or a change by an operator took effect."""
        return columns(list(self._marks), Mark)

    def staleness(self) -> list[int]:
        """Return how many of the recent contributions were merged at staleness 0, 1, 2 …"""
        values = [value for members in self._staleness for value in members]
        counts = [0] * (max(values, default=-1) + 1)
        for value in values:
            counts[value] += 1
        return counts

    def parts(self, island: str) -> list[int]:
        """Return the staleness at which the newest rounds merged the island, oldest first; −1 where they did not."""
        return [here.get(island, -1) for here in self._recent]
