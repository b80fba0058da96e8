"""What other ways to train make of the same failures: as they ran (`ops.chaos_lockstep`), or computed. Pure.

Computed ones come from a storm's lanes, and are given what they need for nothing: synchronising takes no time, and a
Redis or a merger that fails is none of theirs. An island is up while it was training in the storm; so its restarts take
as long as they took there.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from archipelago.ops.chaos.rendezvous import Ledger

ELASTIC_PAUSE_SECONDS = 4.8
"""What each change of size costs elastic data-parallel training: the worst stall of a survivor seen with torchft."""
UP, DEAD = "training", "dead"


@dataclass(frozen=True)
class Span:
    """A process is in one state for a while: training (for the others: serving), stopped, recovering or dead."""

    begin: float
    end: float
    state: str


@dataclass(frozen=True)
class Baselines:
    """Goodput of each: useful island time over allocated."""

    data_parallel: float
    """without elasticity: a step needs everybody, and a kill takes back what no checkpoint holds"""
    data_parallel_elastic: float
    """goes on with whoever is up; each change costs a pause"""
    diloco: float
    """synchronous: a round needs H steps of everybody, and who is killed begins its own again"""


Lanes = Mapping[str, Sequence[Span]]


def computed(
    lanes: Lanes, step_seconds: Mapping[str, float], begin: float, end: float, interval: int, checkpoint_seconds: float
) -> Baselines:
    """Of the islands in `step_seconds`, in a window. `interval`: H; a checkpoint comes after so many useful seconds."""
    shortest, longest = min(step_seconds.values()), max(step_seconds.values())
    spans = {island: lanes[island] for island in step_seconds}
    allocated = (end - begin) * len(spans)
    return Baselines(
        _data_parallel(spans, begin, end, checkpoint_seconds) * len(spans) * shortest / longest / allocated,
        _elastic(spans, step_seconds, begin, end) / allocated,
        _diloco(spans, step_seconds, begin, end, interval) * len(spans) * interval * shortest / allocated,
    )  # fmt: skip


def _data_parallel(lanes: Lanes, begin: float, end: float, checkpoint_seconds: float) -> float:
    """Seconds of steps with everybody that were not taken back."""
    kills = {span.begin for spans in lanes.values() for span in spans if span.state == DEAD}
    useful = since = 0.0
    for first, last in _pieces(lanes, begin, end):
        if first in kills:
            useful, since = useful - since, 0.0
        if len(_up(lanes, first)) == len(lanes):
            useful += last - first
            since = math.fmod(since + last - first, checkpoint_seconds) if checkpoint_seconds else since + last - first
    return useful


def _elastic(lanes: Lanes, step_seconds: Mapping[str, float], begin: float, end: float) -> float:
    """Useful island seconds: those who are up make steps at the pace of the slowest of them."""
    useful, before, goes_on_at = 0.0, _up(lanes, begin), begin
    shortest = min(step_seconds.values())
    for first, last in _pieces(lanes, begin, end):
        up = _up(lanes, first)
        if up != before:
            before, goes_on_at = up, first + ELASTIC_PAUSE_SECONDS
        if up:
            pace = shortest / max(step_seconds[island] for island in up)
            useful += max(0.0, last - max(first, goes_on_at)) * len(up) * pace
    return useful


def _diloco(lanes: Lanes, step_seconds: Mapping[str, float], begin: float, end: float, interval: int) -> int:
    """Rounds that closed."""
    rounds, now = 0, begin
    while (now := max(_done(lanes[i], now, interval * seconds) for i, seconds in step_seconds.items())) <= end:
        rounds += 1
    return rounds


def _done(spans: Sequence[Span], since: float, seconds: float) -> float:
    """When an island that begins at `since` has trained for so long without being killed in between; else infinity."""
    missing = seconds
    for span in spans:
        if span.end <= since:
            continue
        if span.state == DEAD:
            missing = seconds
        elif span.state == UP:
            begin = max(since, span.begin)
            if span.end - begin >= missing - 1e-9:
                return begin + missing
            missing -= span.end - begin
    return math.inf


def _pieces(lanes: Lanes, begin: float, end: float) -> list[tuple[float, float]]:
    """The window, cut wherever a state changes."""
    edges = {edge for spans in lanes.values() for span in spans for edge in (span.begin, span.end)}
    return list(itertools.pairwise(sorted({begin, end} | {edge for edge in edges if begin < edge < end})))


def _up(lanes: Lanes, at: float) -> frozenset[str]:
    return frozenset(i for i, spans in lanes.items() if any(s.begin <= at < s.end and s.state == UP for s in spans))


# -- as they ran ------------------------------------------------------------------------------------------------------

POINTS = 600
"""of a curve"""
Curve = list[tuple[float, float]]


@dataclass(frozen=True)
class Ran:
    """How a way to train came through the faults, in real processes. Steps are inner steps, of one worker each."""

    way: str
    seconds: float
    """of the window: from when all train"""
    goodput: float
    """steps of the window that are in the parameters at its end, over those that allocated time has room for"""
    steps_useful: float
    steps_made: int
    """in the window, also those that were taken back"""
    tokens: int
    """in the parameters at the end"""
    bits_per_byte: float
    """of the parameters at the end, on held-out text"""
    return_seconds_median: float
    """from a kill to the next step of who was killed; NaN where there is none"""
    return_seconds_worst: float
    pause_seconds_worst: float
    """the longest time in which nobody ended a step"""
    curve: Curve
    """(seconds, steps of the window in the parameters)"""


def ran(
    way: str,
    ledger: Ledger,
    kills: Iterable[tuple[float, str]],
    begin: float,
    end: float,
    step_seconds: Mapping[str, float],
    tokens_per_step: int,
    bits_per_byte: float,
) -> Ran:
    """From what a group noted. `kills`: when, and whom."""
    useful = sum(begin <= step.at < end for step in ledger.useful)
    made = [step for step in ledger.made if begin <= step.at < end]
    returns = _returns(kills, [(step.at, step.worker) for step in made])
    return Ran(
        way=way,
        seconds=end - begin,
        goodput=useful * min(step_seconds.values()) / ((end - begin) * len(step_seconds)),
        steps_useful=useful,
        steps_made=len(made),
        tokens=len(ledger.useful) * tokens_per_step,
        bits_per_byte=bits_per_byte,
        return_seconds_median=statistics.median(returns) if returns else math.nan,
        return_seconds_worst=max(returns, default=math.nan),
        pause_seconds_worst=longest_pause([step.at for step in made], begin, end),
        curve=sampled(ledger.curve, begin, end, useful),
    )


def _returns(kills: Iterable[tuple[float, str]], steps: Sequence[tuple[float, str]]) -> list[float]:
    """From each kill to the next step of who was killed; not of those that did not return, or were killed before."""
    ordered = sorted(kills)
    out = []
    for at, who in ordered:
        again = min((later for later, whom in ordered if whom == who and later > at), default=math.inf)
        out += [min((step - at for step, whose in steps if whose == who and at < step < again), default=math.nan)]
    return [seconds for seconds in out if not math.isnan(seconds)]


def longest_pause(times: Iterable[float], begin: float, end: float) -> float:
    """The longest time of a window without any of these in it."""
    inside = sorted(at for at in times if begin < at < end)
    return max(after - before for before, after in itertools.pairwise([begin, *inside, end]))


def sampled(curve: Sequence[tuple[float, float]], begin: float, end: float, useful: float) -> Curve:
    """A curve of steps (when, how many from then on) at even times of a window, over what it had at its begin.

    The last point is `useful`, what is left of the window: some of it is brought in after its end.
    """
    times = [at for at, _ in curve]

    def value(at: float) -> float:
        index = bisect.bisect_right(times, at)
        return curve[index - 1][1] if index else 0

    even = [begin + (end - begin) * n / POINTS for n in range(POINTS)]
    return [*((round(at - begin, 3), value(at) - value(begin)) for at in even), (round(end - begin, 3), useful)]
