"""A discrete-event model of islands whose slices fail and return, in virtual time: goodput and uptime. Pure.

After Decoupled DiLoCo (arXiv 2604.21428, Section 4 and Appendix E). Chips fail while they step, as a Poisson process.
A failed chip stops its slice. The slice returns after an exponentiated Weibull delay. Each change of an elastic
island's size costs a pause. Islands never wait for each other. We decide what the paper leaves open:

- A step in which a slice fails counts, and the island notices the failure when the step ends. Several failures within
  a step cost one pause, and so do several returns. Chips fail only in steps, not in pauses.
- An elastic island pauses once to continue without the failed slices, and once more to take the returned ones back.
- An island that is not elastic stalls until all of its slices are back, and then pauses once.
- Slices are dealt to the islands evenly. Their number does not depend on the number of chips.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

YEAR_SECONDS = 365.25 * 86400.0
#: The mean of `delay` for λ = 1: the integral of 1 − (1 − exp(−x²))⁴ over x > 0, term by term.
UNIT_MEAN = math.gamma(1.5) * (4.0 - 6.0 / math.sqrt(2.0) + 4.0 / math.sqrt(3.0) - 1.0 / 2.0)


@dataclass(frozen=True)
class FailureModel:
    """The parameters of the paper, and the sizes they apply to. Its defaults reproduce the paper's Table 1."""

    chips: float = 1.2e6
    """chips of all islands together"""
    islands: int = 8
    """number of islands, M"""
    slices: int = 128
    """slices of all islands together; a failed chip stops its slice"""
    years_between: float = 1.0
    """mean time between two interruptions of one chip"""
    step_seconds: float = 6.0
    """duration of an inner step"""
    step_deviation: float = 0.1
    """standard deviation of an inner step's duration, as a share of the mean"""
    pause_seconds: float = 12.0
    """time that an elastic island loses with each change of its size, and any other with a restart"""
    return_seconds: float = 72.0
    """mean time until a slice is back"""
    elastic: bool = True
    """whether an island continues with the remaining slices"""


class Stretch(NamedTuple):
    """A time, in seconds, in which an island makes steps with the same `live` slices."""

    begin: float
    end: float
    live: int


def delay(mean_seconds: float, rng: np.random.Generator) -> float:
    """Draw a delay in seconds from an exponentiated Weibull distribution of that mean, which gives λ.

    P(delay ≤ x) = (1 − exp(−(x/λ)^k))^α with k = 2 and α = 4.
    """
    u = rng.random() ** 0.25
    # log1p keeps the upper tail, where 1 − u would be rounded to 0.
    return float(mean_seconds / UNIT_MEAN * math.sqrt(-math.log1p(-min(u, 1.0 - 1e-16))))


class SliceFailures:
    """The failures of one island, a Poisson process in the time that its slices step; they return after delays."""

    def __init__(self, model: FailureModel, rng: np.random.Generator) -> None:
        failures_a_second = model.chips / model.slices / (model.years_between * YEAR_SECONDS)  # of one slice that steps
        self._mean_seconds = 1.0 / failures_a_second
        self._return_seconds, self._rng = model.return_seconds, rng

    def after(self, now: float, live: int) -> float:
        """Return when the next slice fails if `live` slices step from `now` on, in seconds; infinity for never.

        The process has no memory, so this may be called again whenever `live` changes.
        """
        return now + float(self._rng.exponential(self._mean_seconds / live)) if live else math.inf

    def back(self, at: float) -> float:
        """Return when the slice that failed at `at`, as `after` had predicted, is back, in seconds."""
        return at + delay(self._return_seconds, self._rng)


def _end_of_step(model: FailureModel, rng: np.random.Generator, now: float, until: float) -> float:
    """Return the end of the first step that ends after `until`, for steps made from `now` on."""
    count = 1.0 + (until - now) / model.step_seconds
    z = float(rng.standard_normal()) if model.step_deviation else 0.0
    mean = model.step_seconds * (1.0 + model.step_deviation * max(-3.0, min(3.0, z)) / math.sqrt(count))
    return now + mean * (1 + int((until - now) / mean))


def stretches(
    model: FailureModel, slices: int, failures: SliceFailures, seconds: float, rng: np.random.Generator
) -> Iterator[Stretch]:
    """Yield the stretches of one island in virtual `seconds`. Between two stretches it pauses or stalls."""
    now, live = 0.0, slices
    down: list[float] = []  # A heap of the times at which slices return.
    while now < seconds:
        failed = 0
        if live:
            at = failures.after(now, live)
            change = min(at, down[0] if down else math.inf, seconds)  # Slices that return in a pause wait for a step.
            end = _end_of_step(model, rng, now, max(now, change))
            yield Stretch(now, min(end, seconds), live)
            while at < end and failed < live:
                heapq.heappush(down, failures.back(at))
                failed += 1
                at = failures.after(at, live - failed)
            now, live = end, live - failed
            now += model.pause_seconds if failed and live and model.elastic else 0.0
        if down and (not live or not model.elastic):
            now = max(now, down[0] if model.elastic else max(down))
        returned = 0
        while down and down[0] <= now:
            heapq.heappop(down)
            returned += 1
        live += returned
        now += model.pause_seconds if returned else 0.0


@dataclass(frozen=True)
class Outcome:
    """A finished simulation: its length in seconds, and the stretches and the slices of each island."""

    seconds: float
    islands: tuple[list[Stretch], ...]
    slices: tuple[int, ...]

    @property
    def goodput(self) -> float:
        """The share of the islands' time that went into steps, weighted by their live slices."""
        worked = sum((s.end - s.begin) * s.live for island in self.islands for s in island)
        return worked / (self.seconds * sum(self.slices))

    @property
    def uptime(self) -> float:
        """The share of the time in which at least one island makes steps."""
        return covered(((s.begin, s.end) for island in self.islands for s in island), 0.0, self.seconds) / self.seconds


def covered(spans: Iterable[tuple[float, float]], begin: float, end: float) -> float:
    """Return the seconds of a window that at least one of these spans covers."""
    seconds, reached = 0.0, begin
    for first, last in sorted(spans):
        seconds += max(0.0, min(last, end) - max(first, reached))
        reached = max(reached, last)
    return seconds


def simulate(model: FailureModel, seconds: float, rng: np.random.Generator) -> Outcome:
    """Simulate all islands for virtual `seconds`, with all random draws from `rng`."""
    sizes = tuple(len(range(island, model.slices, model.islands)) for island in range(model.islands))
    islands = tuple(list(stretches(model, size, SliceFailures(model, rng), seconds, rng)) for size in sizes)
    return Outcome(seconds, islands, sizes)
