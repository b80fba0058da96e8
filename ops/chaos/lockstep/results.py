"""The result of a training method under the faults of a storm. Pure."""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from archipelago.ops.chaos.lockstep.coordinator import Ledger

#: Number of points of a curve.
POINTS = 600
Curve = list[tuple[float, float]]


@dataclass(frozen=True)
class MethodResult:
    """The result of one method in real processes. Steps are inner steps of one worker each.

    Attributes:
        method: Its name.
        seconds: Length of the window, which begins when all workers train.
        goodput: `steps_useful` over the steps that fit into the allocated time.
        steps_useful: Steps of the window that are in the final parameters.
        steps_made: Steps of the window, including those that were rolled back.
        tokens: Tokens in the final parameters.
        bits_per_byte: Held-out loss of the final parameters.
        return_seconds_median: Time from a kill to the next step of the killed worker; NaN without a return.
        return_seconds_worst: The longest such time.
        pause_seconds_worst: The longest time in which no worker ended a step.
        curve: (seconds, steps of the window that are in the parameters).
    """

    method: str
    seconds: float
    goodput: float
    steps_useful: float
    steps_made: int
    tokens: int
    bits_per_byte: float
    return_seconds_median: float
    return_seconds_worst: float
    pause_seconds_worst: float
    curve: Curve


def summarise(
    method: str,
    ledger: Ledger,
    kills: Iterable[tuple[float, str]],
    begin: float,
    end: float,
    step_seconds: Mapping[str, float],
    tokens_per_step: int,
    bits_per_byte: float,
) -> MethodResult:
    """Summarise a run from the coordinator's ledger. `kills` holds the time and the worker of each kill."""
    useful = sum(begin <= step.at < end for step in ledger.useful)
    made = [step for step in ledger.made if begin <= step.at < end]
    returns = _return_seconds(kills, [(step.at, step.worker) for step in made])
    return MethodResult(
        method=method,
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


def _return_seconds(kills: Iterable[tuple[float, str]], steps: Sequence[tuple[float, str]]) -> list[float]:
    """Return the time from each kill to the worker's next step, if that came before its next kill."""
    ordered = sorted(kills)
    out = []
    for at, worker in ordered:
        next_kill = min((later for later, other in ordered if other == worker and later > at), default=math.inf)
        out += [
            min((step - at for step, other in steps if other == worker and at < step < next_kill), default=math.nan)
        ]
    return [seconds for seconds in out if not math.isnan(seconds)]


def longest_pause(times: Iterable[float], begin: float, end: float) -> float:
    """Return the longest part of a window that has none of these times."""
    inside = sorted(at for at in times if begin < at < end)
    return max(after - before for before, after in itertools.pairwise([begin, *inside, end]))


def sampled(curve: Sequence[tuple[float, float]], begin: float, end: float, useful: float) -> Curve:
    """Sample a step curve at even times of a window, relative to its value at the begin.

    Args:
        curve: (time, steps in the parameters from then on).
        begin: Begin of the window.
        end: End of the window.
        useful: The value of the last point. It may exceed the curve, because some steps of the window reach the
            parameters after its end.
    """
    times = [at for at, _ in curve]

    def value(at: float) -> float:
        index = bisect.bisect_right(times, at)
        return curve[index - 1][1] if index else 0

    even = [begin + (end - begin) * n / POINTS for n in range(POINTS)]
    return [*((round(at - begin, 3), value(at) - value(begin)) for at in even), (round(end - begin, 3), useful)]
