"""The figures of a storm: goodput, stalls, the returns of killed islands, and what the baseline has, too. Pure.

The islands' *allocated* time is the window times their number. *Useful* inner steps are those that were merged.
*Possible* ones are those that fit into the allocated time at the run's step duration. Goodput is useful over possible.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from archipelago.ops.chaos.record import (
    RECOVERING,
    SERVING,
    STANDBY_USED,
    STOPPED,
    Check,
    LoggedTurn,
    ProcessEvent,
    Span,
    StormRecord,
    Timelines,
    checks,
    seconds_in,
    timelines,
    uptime,
)

STALL_SECONDS = 0.01


# -- goodput ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TimeShares:
    """The shares of the islands' allocated time. They sum to one, up to rounding.

    Attributes:
        useful: Inner steps that were merged.
        lost: Inner steps that were trained and never merged.
        idle: Training slower than the step duration allows: stalls, a loaded machine, a slow island.
        stopped: Stopped by SIGSTOP.
        recovering: Started and not yet training: imports, compilation, joining.
        dead: No process.
    """

    useful: float
    lost: float
    idle: float
    stopped: float
    recovering: float
    dead: float


def shares(storm: StormRecord, states: Timelines) -> TimeShares:
    """Return the shares of all islands together."""
    allocated = storm.seconds * len(storm.islands)
    step = storm.shortest_step_seconds

    def share(state: str) -> float:
        return sum(seconds_in(states[i], state, storm.begin, storm.end) for i in storm.islands) / allocated

    trained = sum(storm.steps_between(i, storm.begin, storm.end) for i in storm.islands) * step / allocated
    useful = merged_steps(storm) * step / allocated
    return TimeShares(
        useful, trained - useful, share(SERVING) - trained, share(STOPPED), share(RECOVERING),
        1.0 - sum(share(state) for state in (SERVING, STOPPED, RECOVERING)),
    )  # fmt: skip


def merged_steps(storm: StormRecord) -> float:
    """Return the inner steps of the window that were merged, as a mean over the fragments.

    Steps outside of the window are subtracted as if all of them had been merged, so the result is never too large.
    """
    merged = sum(member.steps for entry in storm.tape for member in entry.members) / storm.layout.count
    outside = sum(
        storm.steps_between(i, -math.inf, storm.begin) + storm.steps_between(i, storm.end, math.inf)
        for i in storm.islands
    )
    return merged - outside


# -- stalls -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stalls:
    """Times in which the devices of islands without a fault had no work.

    Attributes:
        turns: Number of turns of their loops in the window.
        over_10_ms: How many such times took longer than 10 ms.
        worst_seconds: The longest such time.
        net_over_10_ms: `over_10_ms` without the time that the training thread waited for a core of this machine.
        net_worst_seconds: `worst_seconds` without that time.
    """

    turns: int
    over_10_ms: int
    worst_seconds: float
    net_over_10_ms: int
    net_worst_seconds: float


def stalls(storm: StormRecord, states: Timelines) -> Stalls:
    """Return the stalls of all islands. Turns that overlap a SIGSTOP of the island do not count."""
    pairs = [pair for island in storm.islands for pair in _undisturbed(storm, island, states[island])]
    gross = [turn.idle for _, turn in pairs]
    # An idle time may begin in the turn before, so that turn's waits for a core count as well.
    net = [max(0.0, turn.idle - turn.waited - before.waited) for before, turn in pairs]
    return Stalls(
        len(pairs), sum(s > STALL_SECONDS for s in gross), max(gross, default=0.0),
        sum(s > STALL_SECONDS for s in net), max(net, default=0.0),
    )  # fmt: skip


def _undisturbed(storm: StormRecord, island: str, spans: Sequence[Span]) -> Iterator[tuple[LoggedTurn, LoggedTurn]]:
    """Yield each turn of the window after the previous turn of its incarnation; the first turn follows itself."""
    stops = [span for span in spans if span.state == STOPPED]
    newest: dict[str, LoggedTurn] = {}
    for turn in storm.turns.get(island, ()):
        before = newest.get(turn.who, turn)
        newest[turn.who] = turn
        slack = turn.idle + storm.step_seconds[island]
        disturbed = any(span.begin <= turn.at and span.end >= before.at - slack for span in stops)
        if storm.begin <= turn.at < storm.end and not disturbed:
            yield before, turn


# -- islands that were killed -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RejoinTimes:
    """The duration of each part of an island's return after a kill.

    A part is NaN if it did not happen before the end of the storm or the next kill.

    Attributes:
        island: Its name.
        at: When it was killed, in seconds after the begin of the window.
        away_seconds: Until it was started again.
        start_seconds: From there to its first inner step.
        merge_seconds: From there until a round with a contribution of the new incarnation closed.
        total_seconds: From the kill until then.
    """

    island: str
    at: float
    away_seconds: float
    start_seconds: float
    merge_seconds: float
    total_seconds: float


def rejoins(storm: StormRecord) -> list[RejoinTimes]:
    """Return the times of each island's return after each kill."""
    kills = [e for e in storm.events if e.what in ("kill", "died") and e.process in storm.islands]
    return [_rejoin(storm, kill) for kill in kills]


def _rejoin(storm: StormRecord, kill: ProcessEvent) -> RejoinTimes:
    later = [e for e in storm.events if e.process == kill.process and e.at > kill.at]
    next_kill = min((e.at for e in later if e.what in ("kill", "died")), default=math.inf)
    started = min((e.at for e in later if e.what == "start"), default=math.nan)
    at, away = kill.at - storm.begin, started - kill.at
    turns = [turn for turn in storm.turns.get(kill.process, ()) if kill.at < turn.at < next_kill]
    if not turns:
        return RejoinTimes(kill.process, at, away, math.nan, math.nan, math.nan)
    first, incarnation = turns[0].at, turns[0].who
    merged = [
        storm.closed_at.get(entry.round, math.inf)
        for entry in storm.tape
        if any((m.island, m.incarnation) == (kill.process, incarnation) for m in entry.members)
    ]
    contributed = min(merged, default=math.nan)
    return RejoinTimes(kill.process, at, away, first - started, contributed - first, contributed - kill.at)


# -- beside the baseline ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MethodFigures:
    """The figures of one method in a storm. Steps are inner steps of one worker.

    Attributes:
        goodput: `steps_useful` over the steps that fit into the allocated time.
        uptime: The share of the window in which the method trained.
        steps_useful: Steps of the window that are in the parameters.
        steps_lost: Steps of the window that were made and are not in the parameters.
        pause_seconds_worst: The longest time in which no worker ended a step.
    """

    goodput: float
    uptime: float
    steps_useful: float
    steps_lost: float
    pause_seconds_worst: float


def pauses(times: Iterable[float], begin: float, end: float) -> list[tuple[float, float]]:
    """Return the parts into which these times cut a window."""
    inside = sorted(at for at in times if begin < at < end)
    return list(itertools.pairwise([begin, *inside, end]))


# -- all figures ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StormFigures(MethodFigures):
    """The figures of one storm.

    Attributes:
        step_seconds: The run's step duration.
        ceiling: The highest possible goodput, which is below one if an island is slow.
        goodput_of_live_time: Merged inner steps over those that fit into the time in which islands trained.
        rounds: Rounds that closed in the window.
        faults: Number of faults by kind and target.
        staleness: Merged contributions by staleness.
        tokens_trained: All tokens, by the turn logs: merged + refused + pending + lost.
        tokens_lost: Tokens that were trained and not sent, mostly by islands that were killed.
        training_loss: Mean loss that the islands reported in the last tenth of the rounds.
        holds: Whether all invariants hold.
        control: The same run without faults.
        baseline: Data-parallel training under the same faults; None if it did not run.
        standbys_used: Starts of islands for which a standby was ready.
        events: Events of the processes, in seconds after the begin of the window.
    """

    seconds: float
    islands: int
    step_seconds: float
    ceiling: float
    goodput_of_live_time: float
    shares: TimeShares
    rounds: int
    rounds_per_minute: float
    contributions_per_round: float
    faults: dict[str, int]
    rejoins: list[RejoinTimes]
    rejoin_seconds_median: float
    rejoin_seconds_worst: float
    stalls: Stalls
    staleness: dict[int, int]
    tokens_trained: int
    tokens_merged: int
    tokens_refused: int
    tokens_pending: int
    tokens_lost: int
    bytes_up: int
    bytes_down: int
    held_out_loss: float
    unit: str
    training_loss: float
    checks: list[Check]
    holds: bool
    control: StormFigures | None = None
    baseline: MethodFigures | None = None
    standbys: int = 0
    standbys_used: int = 0
    events: list[ProcessEvent] = field(default_factory=list)


def figures(
    storm: StormRecord, control: StormFigures | None = None, baseline: MethodFigures | None = None
) -> StormFigures:
    """Compute all figures of a storm."""
    states, results = timelines(storm), checks(storm)
    spent, returned, step = shares(storm, states), rejoins(storm), storm.shortest_step_seconds
    totals = [r.total_seconds for r in returned if not math.isnan(r.total_seconds)]
    trained = round(sum(storm.steps_between(i, -math.inf, math.inf) for i in storm.islands) * storm.tokens_per_step)
    settled = (storm.books.merged_tokens, storm.books.refused_tokens, storm.pending.tokens)
    merged, refused, pending = (tokens // storm.layout.count for tokens in settled)
    own_step = {island: storm.step_seconds[island] or step for island in storm.islands}
    live = sum(seconds_in(states[i], SERVING, storm.begin, storm.end) / own_step[i] for i in storm.islands)
    losses = [entry.loss for entry in storm.tape[-max(1, len(storm.tape) // 10) :] if math.isfinite(entry.loss)]
    members = [member for entry in storm.tape for member in entry.members]
    useful, turned = merged_steps(storm), [turn.at for island in storm.islands for turn in storm.turns.get(island, ())]
    return StormFigures(
        seconds=storm.seconds,
        islands=len(storm.islands),
        step_seconds=step,
        ceiling=statistics.fmean(step / seconds for seconds in own_step.values()),
        goodput=spent.useful,
        goodput_of_live_time=useful / live if live else math.nan,
        uptime=uptime(storm, states),
        steps_useful=useful,
        steps_lost=sum(storm.steps_between(i, storm.begin, storm.end) for i in storm.islands) - useful,
        pause_seconds_worst=max(after - before for before, after in pauses(turned, storm.begin, storm.end)),
        shares=spent,
        rounds=storm.rounds_in_window,
        rounds_per_minute=storm.rounds_in_window / storm.seconds * 60,
        contributions_per_round=len(members) / max(1, len(storm.tape)),
        faults=dict(sorted(Counter(f"{f.kind} {f.target}" for f in storm.faults).items())),
        rejoins=returned,
        rejoin_seconds_median=statistics.median(totals) if totals else math.nan,
        rejoin_seconds_worst=max(totals, default=math.nan),
        stalls=stalls(storm, states),
        staleness=dict(sorted(Counter(member.staleness for member in members).items())),
        tokens_trained=trained,
        tokens_merged=merged,
        tokens_refused=refused,
        tokens_pending=pending,
        tokens_lost=trained - merged - refused - pending,
        bytes_up=storm.books.bytes_up,
        bytes_down=storm.books.bytes_down,
        held_out_loss=storm.held_out_loss,
        unit=storm.unit,
        training_loss=statistics.fmean(losses) if losses else math.nan,
        checks=results,
        holds=all(check.holds for check in results),
        control=control,
        baseline=baseline,
        standbys=storm.standbys,
        standbys_used=sum(event.what == STANDBY_USED for event in storm.events),
        events=[replace(event, at=round(event.at - storm.begin, 3)) for event in storm.events],
    )
