"""Rounds as a state machine without clocks or sockets: contributions, the living, the time in; decisions out.

Rounds close in order, and the τ after the last closed one are *open*. The first contribution to an open round calls
it. It closes when every live island has answered, or when the grace window after its quorum has passed. Whatever
waits for its fragment is merged then: answers, what came too late for an earlier round, what leavers sent ahead.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from archipelago.broker.config import SyncConfig
from archipelago.broker.messages import Contribution
from archipelago.merger.round_timing import Pace, grace_seconds, slack, stride_seconds


@dataclass(frozen=True)
class Close:
    """The decision to merge what waits for a round's fragment; the times are for the tape."""

    round: int
    quorum_seconds: float
    grace_seconds: float
    open_seconds: float


@dataclass
class OpenRound:
    """What is known of a round that has not closed."""

    answered: set[str] = field(default_factory=set)
    first_at: float | None = None
    """when the first island that stays contributed: what calls the round. Leavers hurry nobody."""
    announced: bool = False
    quorum_at: float | None = None
    grace_seconds: float = 0.0
    is_merged: bool = False
    """What answers it went with an earlier round of its fragment: a broker forgot rounds, and islands were ahead."""

    def seconds_since_first(self, at: float | None) -> float:
        """Seconds from the first contribution to `at`, 0 where either never was."""
        return 0.0 if at is None or self.first_at is None else at - self.first_at


class Rounds:
    """The rounds of a run. `closed` is the last one that has closed, 0 before the first."""

    def __init__(
        self, config: SyncConfig, fragments: int, closed: int, pace: Pace, step_seconds: Mapping[str, float]
    ) -> None:
        self.config = config
        self.fragments = fragments
        self.window = min(config.window, fragments)  # two open rounds never share a fragment
        self.closed = closed
        self.pace = pace
        self.is_paused = False
        """no round closes; islands, bounded by the window, train on"""
        self._open: dict[int, OpenRound] = {}
        self._step_seconds = dict(step_seconds)

    def answer(self, contribution: Contribution, now: float) -> None:
        """Notes an admitted contribution. One for a closed round is late: it waits, and answers nothing."""
        self._step_seconds[contribution.island] = contribution.step_seconds
        if contribution.round <= self.closed:
            return
        found = self._open.setdefault(contribution.round, OpenRound())
        found.answered.add(contribution.island)
        if found.first_at is None and not contribution.farewell:
            found.first_at = now

    def forget(self, islands: Collection[str]) -> None:
        """What these islands answered counts for no quorum that is not reached yet."""
        for found in self._open.values():
            found.answered.difference_update(islands)

    def calls(self) -> list[int]:
        """Open rounds that have a contribution and are not announced yet; they are, once this was asked."""
        due = []
        for number in range(self.closed + 1, self.closed + 1 + self.window):
            found = self._open.get(number)
            if found is not None and found.first_at is not None and not found.announced:
                found.announced = True
                due.append(number)
        return due

    def close(self, now: float, live: AbstractSet[str], waiting: Collection[int]) -> Close | None:
        """The next round, if it is to close now. `waiting` holds the fragments that contributions wait for.

        When nobody lives, rounds close one after the other until nothing waits, empty ones among them; and so does one
        whose answers were merged before, which nobody answers again.
        """
        self._note_quorums(now, live)  # also in a pause: the pace knows of no pauses
        number = self.closed + 1
        found = self._open.get(number, OpenRound())
        is_due = found.is_merged or (number - 1) % self.fragments in waiting if live else bool(waiting)
        if self.is_paused or not is_due:
            return None
        grace_is_over = found.quorum_at is not None and now >= found.quorum_at + found.grace_seconds
        if not grace_is_over and not live <= found.answered:
            return None
        return Close(
            number,
            quorum_seconds=found.seconds_since_first(found.quorum_at),
            grace_seconds=found.grace_seconds,
            open_seconds=found.seconds_since_first(now),
        )

    def pace_after(self, close: Close) -> Pace:
        """The averages with this round's time to quorum: what its commit keeps for the next merger."""
        return self.pace.after_quorum(close.quorum_seconds, self.config.smoothing)

    def closed_round(self, close: Close, sync_seconds: float) -> None:
        """The round was merged and committed, which took `sync_seconds`."""
        self.closed = close.round
        self._open.pop(close.round, None)
        for number, found in self._open.items():  # its fragment's contributions are merged, all of them
            found.is_merged |= bool(found.answered) and (number - close.round) % self.fragments == 0
        self.pace = self.pace_after(close).after_sync(sync_seconds, self.config.smoothing)

    def deadline(self) -> float | None:
        """When the next round's grace window ends, if it has begun and anything follows from its end."""
        found = self._open.get(self.closed + 1)
        return (
            None
            if self.is_paused or found is None or found.quorum_at is None
            else found.quorum_at + found.grace_seconds
        )

    def _note_quorums(self, now: float, live: AbstractSet[str]) -> None:
        quorum = max(1, min(self.config.quorum, len(live)))
        for number in range(self.closed + 1, self.closed + 1 + self.window):
            found = self._open.get(number)
            if found is None or found.first_at is None or found.quorum_at is not None:
                continue
            if len(found.answered) >= quorum:
                found.quorum_at = now
                found.grace_seconds = self._grace_seconds(live)

    def _grace_seconds(self, live: AbstractSet[str]) -> float:
        stride = stride_seconds(self._step_seconds, live, self.config.interval, self.fragments)
        return grace_seconds(self.config.grace, slack(self.window, stride, self.pace))
