"""Goodput: the share of the islands' time that became merged inner steps, and the shares of the rest. Pure.

The islands' *allocated* time is the window times their number. *Useful* inner steps are those that were merged.
*Possible* ones are those that fit into the allocated time at the run's step duration.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from archipelago.ops.chaos.report.record import ProcessEvent, StormRecord, Turn, has_member
from archipelago.ops.chaos.report.timelines import RECOVERING, SERVING, STOPPED, Span, Timelines, seconds_in

STALL_SECONDS = 0.01


@dataclass(frozen=True)
class Shares:
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


def shares(storm: StormRecord, states: Timelines) -> Shares:
    """Return the shares of all islands together."""
    allocated = storm.seconds * len(storm.islands)
    step = storm.shortest_step_seconds

    def share(state: str) -> float:
        return sum(seconds_in(states[i], state, storm.begin, storm.end) for i in storm.islands) / allocated

    trained = sum(storm.steps_between(i, storm.begin, storm.end) for i in storm.islands) * step / allocated
    useful = merged_steps(storm) * step / allocated
    return Shares(
        useful, trained - useful, share(SERVING) - trained, share(STOPPED), share(RECOVERING),
        1.0 - sum(share(state) for state in (SERVING, STOPPED, RECOVERING)),
    )  # fmt: skip


def merged_steps(storm: StormRecord) -> float:
    """Return the inner steps of the window that were merged, as a mean over the fragments.

    Steps outside of the window are subtracted as if all of them had been merged, so the result is never too large.
    """
    merged = sum(member.steps for entry in storm.tape for member in entry.members) / storm.fragments
    outside = sum(
        storm.steps_between(i, -math.inf, storm.begin) + storm.steps_between(i, storm.end, math.inf)
        for i in storm.islands
    )
    return merged - outside


def possible_while_live(storm: StormRecord, states: Timelines) -> float:
    """Return how many inner steps fit into the time in which islands trained, each at its own step duration."""
    fallback = storm.shortest_step_seconds
    return sum(
        seconds_in(states[i], SERVING, storm.begin, storm.end) / (storm.step_seconds[i] or fallback)
        for i in storm.islands
    )


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


def _undisturbed(storm: StormRecord, island: str, spans: Sequence[Span]) -> Iterator[tuple[Turn, Turn]]:
    """Yield each turn of the window after the previous turn of its incarnation; the first turn follows itself."""
    stops = [span for span in spans if span.state == STOPPED]
    newest: dict[str, Turn] = {}
    for turn in storm.turns.get(island, ()):
        before = newest.get(turn.who, turn)
        newest[turn.who] = turn
        slack = turn.idle + storm.step_seconds[island]
        disturbed = any(span.begin <= turn.at and span.end >= before.at - slack for span in stops)
        if storm.begin <= turn.at < storm.end and not disturbed:
            yield before, turn


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


# -- islands that were killed -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rejoin:
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


def rejoins(storm: StormRecord) -> list[Rejoin]:
    """Return a Rejoin for each kill of an island."""
    kills = [e for e in storm.events if e.what in ("kill", "died") and e.process in storm.islands]
    return [_rejoin(storm, kill) for kill in kills]


def _rejoin(storm: StormRecord, kill: ProcessEvent) -> Rejoin:
    later = [e for e in storm.events if e.process == kill.process and e.at > kill.at]
    next_kill = min((e.at for e in later if e.what in ("kill", "died")), default=math.inf)
    started = min((e.at for e in later if e.what == "start"), default=math.nan)
    at, away = kill.at - storm.begin, started - kill.at
    turns = [turn for turn in storm.turns.get(kill.process, ()) if kill.at < turn.at < next_kill]
    if not turns:
        return Rejoin(kill.process, at, away, math.nan, math.nan, math.nan)
    first, incarnation = turns[0].at, turns[0].who
    merged = [storm.closed_at.get(e.round, math.inf) for e in storm.tape if has_member(e, kill.process, incarnation)]
    contributed = min(merged, default=math.nan)
    return Rejoin(kill.process, at, away, first - started, contributed - first, contributed - kill.at)


def staleness(storm: StormRecord) -> dict[int, int]:
    """Return the number of merged contributions at each staleness."""
    return dict(sorted(Counter(member.staleness for entry in storm.tape for member in entry.members).items()))
