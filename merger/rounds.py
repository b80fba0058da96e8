"""Rounds as a state machine without clocks or sockets: contributions and live islands in, decisions out.

Rounds close in order. The τ rounds after the last closed one are *open* (the window). The first contribution to an open
round calls it. A round closes when every live island has answered, or when the grace window after its quorum is over.
It merges everything that waits for its fragment: answers, contributions that came too late for an earlier round, and
contributions that departing islands sent ahead.

The grace window follows Decoupled DiLoCo (arXiv 2604.21428), Eq. 3: slack = τ·T_step − (T_quorum + T_sync), and
grace ≤ γ·slack. T_step is the time of one stride (H/P inner steps) of the fastest live island. Times are in seconds.
Islands report their step times, and `merger.claims` bounds what a minority says.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Contribution
from archipelago.merger.accounts import put_bounded
from archipelago.merger.claims import fastest_step_seconds
from archipelago.merger.state import RoundTiming, RunState

#: No round waits longer than this after its quorum, however long the steps are that islands report.
GRACE_SECONDS_MAX = 86400.0


@dataclass(frozen=True)
class Close:
    """The decision to close a round, with its times for the tape."""

    round: int
    quorum_seconds: float
    grace_seconds: float
    open_seconds: float


@dataclass
class OpenRound:
    """A round that has not closed.

    Attributes:
        answered: The islands that have contributed to it.
        first_at: When the round was called, which is when an island that stays first contributed to it.
        announced: Whether the round was announced to the islands.
        quorum_at: When the quorum was reached.
        grace_seconds: The grace window after the quorum.
        is_merged: Its contributions were merged by an earlier round of its fragment. This happens when a broker lost
            rounds and the islands were ahead.
    """

    answered: set[str] = field(default_factory=set)
    first_at: float | None = None
    announced: bool = False
    quorum_at: float | None = None
    grace_seconds: float = 0.0
    is_merged: bool = False

    def seconds_since_first(self, at: float | None) -> float:
        """Return the seconds from the first contribution to `at`, or 0 when one of them did not happen."""
        return 0.0 if at is None or self.first_at is None else at - self.first_at


class Rounds:
    """The open rounds of a run, whose progress it reads from the run's state.

    Args:
        manifest: The run or the shard, which has rounds of its own fragments only.
        state: The run as last committed. It owns the number of the last closed round.
    """

    def __init__(self, manifest: Manifest, state: RunState) -> None:
        self.manifest, self.config = manifest, manifest.config.sync
        #: No round closes while paused. Islands train on until the window stops them.
        self.is_paused = False
        #: The timing of the committed state, plus the time that its own commit took, which the next commit stores.
        self.timing = state.timing
        self._state = state
        self._window = manifest.window_after(state.closed)
        self._open: dict[int, OpenRound] = {}
        #: The last reported step time of each island, also from contributions that are not merged yet.
        self.step_seconds = {island: account.step_seconds for island, account in state.accounts.items()}

    @property
    def closed(self) -> int:
        """The last round that has closed, 0 before the first."""
        return self._state.closed

    def answer(self, contribution: Contribution, now: float) -> None:
        """Note an admitted contribution. One for a closed round is late: it waits for the next round."""
        put_bounded(self.step_seconds, contribution.island, contribution.step_seconds)
        if contribution.round <= self.closed:
            return
        found = self._open.setdefault(contribution.round, OpenRound())
        found.answered.add(contribution.island)
        if found.first_at is None and not contribution.farewell:
            found.first_at = now

    def forget(self, islands: Collection[str]) -> None:
        """Remove the answers of these islands from every quorum that is not reached yet."""
        for found in self._open.values():
            found.answered.difference_update(islands)

    def calls(self) -> list[int]:
        """Return the open rounds that have a contribution and were not announced, and mark them as announced."""
        due = []
        for number in self._window:
            found = self._open.get(number)
            if found is not None and found.first_at is not None and not found.announced:
                found.announced = True
                due.append(number)
        return due

    def close(self, now: float, live: AbstractSet[str], waiting: Collection[int]) -> Close | None:
        """Return the decision to close the next round, or None.

        Without live islands, rounds close one after the other until no contribution waits, and some of them are empty.
        A round whose contributions were merged by an earlier round closes empty too, because no island will answer it
        again.

        Args:
            now: The time.
            live: The live islands.
            waiting: The fragments that contributions wait for.
        """
        self._note_quorums(now, live)  # during a pause as well, because round timing does not know about pauses
        number = self._window[0]
        found = self._open.get(number, OpenRound())
        is_due = found.is_merged or self.manifest.fragment_of(number) in waiting if live else bool(waiting)
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

    def advance(self, state: RunState) -> None:
        """Continue from the state in which the next round has closed. Its commit may be under way."""
        self._state, self._window = state, self.manifest.window_after(state.closed)
        self._open.pop(state.closed, None)
        merged = self.manifest.fragment_of(state.closed)  # all contributions to it
        for number, found in self._open.items():
            found.is_merged |= bool(found.answered) and self.manifest.fragment_of(number) == merged

    def committed(self, sync_seconds: float) -> None:
        """Note that the last closed round was committed, `sync_seconds` after it was closed."""
        self.timing = self._state.timing.after_sync(sync_seconds, self.config.smoothing)

    def deadline(self) -> float | None:
        """Return when the next round's grace window ends, or None when no window has begun or rounds are paused."""
        found = self._open.get(self._window[0])
        if self.is_paused or found is None or found.quorum_at is None:
            return None
        return found.quorum_at + found.grace_seconds

    def _note_quorums(self, now: float, live: AbstractSet[str]) -> None:
        quorum = max(1, min(self.config.quorum, len(live)))
        for number in self._window:
            found = self._open.get(number)
            if found is None or found.first_at is None or found.quorum_at is not None:
                continue
            if len(found.answered) >= quorum:
                found.quorum_at = now
                found.grace_seconds = self._grace_seconds(live)

    def _grace_seconds(self, live: AbstractSet[str]) -> float:
        stride = fastest_step_seconds(self.step_seconds, live) * self.manifest.stride
        return grace_seconds(self.config.grace, slack(len(self._window), stride, self.timing))


def slack(window: int, stride_seconds: float, timing: RoundTiming) -> float:
    """Return Eq. 3, τ·T_step − (T_quorum + T_sync), which is negative when rounds are late. Unmeasured times are 0."""
    return window * stride_seconds - ((timing.quorum_seconds or 0.0) + (timing.sync_seconds or 0.0))


def grace_seconds(gamma: float, slack: float) -> float:
    """Return the longest that a round stays open after its quorum, γ · max(0, slack), up to GRACE_SECONDS_MAX."""
    return min(gamma * max(0.0, slack), GRACE_SECONDS_MAX)
