"""Real training along a failure tape, in virtual time: islands stall, leave, return and lose slices as the tape says.

A tape (the paper's Appendix E.1) is a simulation of failures: what share of its slices each island has at each time.

One inner step of the tape is one second of the run's clock. A short stall keeps an island's state, and the events that
it missed arrive later. After AWAY_STEPS it counts as dead, and its successor gets parameters from the merger
and optimiser state from a peer. An island with fewer slices trains on fewer sequences a step and skips the sequences of
the lost slices.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from archipelago.islands.data.batches import Batches
from archipelago.islands.data.tokenizer import Tokens
from archipelago.islands.evaluation import published
from archipelago.islands.inner import InnerState
from archipelago.islands.tasks.ours import OurTask, our_task
from archipelago.islands.tasks.workload import Workload
from archipelago.islands.worker import Island
from archipelago.ops.experiments.baselines import Point, scoring
from archipelago.ops.experiments.virtual_time import VirtualRun, paces
from archipelago.ops.simulation.failures import Outcome

_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
_ENDLESS = 1 << 30
#: A real merger stops waiting for a silent island after about this time, in steps of a second.
AWAY_STEPS = 10.0


class Leg(NamedTuple):
    """A part of an island's tape: from `at` on, in seconds, the share `live` of its slices makes steps."""

    at: float
    live: float


@dataclass(frozen=True)
class FailureTape:
    """The legs of each island in the order of time. The first leg of each is at 0."""

    islands: tuple[tuple[Leg, ...], ...]
    step_seconds: float
    seconds: float

    def goodput_of(self, island: int, until: float | None = None) -> float:
        """Return the share of an island's time that went into steps, weighted by its live slices, up to `until`."""
        end = min(until or self.seconds, self.seconds)
        legs = self.islands[island]
        ends = [min(leg.at, end) for leg in legs[1:]] + [end]
        return sum(leg.live * max(0.0, stop - leg.at) for leg, stop in zip(legs, ends, strict=True)) / end

    def goodput(self, until: float | None = None) -> float:
        """Return the mean goodput of the islands."""
        return sum(self.goodput_of(island, until) for island in range(len(self.islands))) / len(self.islands)


def taped(outcome: Outcome, step_seconds: float) -> FailureTape:
    """Return the tape of a simulation."""
    islands = []
    for stretches, slices in zip(outcome.islands, outcome.slices, strict=True):
        legs: list[Leg] = []
        reached = 0.0
        for stretch in stretches:
            if stretch.begin > reached:
                legs.append(Leg(reached, 0.0))
            if not legs or legs[-1].live != stretch.live / slices:
                legs.append(Leg(stretch.begin, stretch.live / slices))
            reached = stretch.end
        if reached < outcome.seconds:
            legs.append(Leg(reached, 0.0))
        islands.append(tuple(legs))
    return FailureTape(tuple(islands), step_seconds, outcome.seconds)


class Stall(NamedTuple):
    """A time in which an island makes no steps, in steps of the run's clock."""

    begin: float
    end: float


_NO_STALL = Stall(0.0, 0.0)


class Course:
    """One island's steps and stalls over the time of the run, in steps. The tape starts again at its end."""

    def __init__(self, legs: Sequence[Leg], step_seconds: float, seconds: float) -> None:
        self._at = [leg.at / step_seconds for leg in legs]
        self._live = [leg.live for leg in legs]
        self._length = seconds / step_seconds

    def live(self, now: float) -> float:
        """Return the share of its slices that make steps."""
        return self._live[self._index(now)]

    def walk(self, now: float, steps: float) -> tuple[float, Stall]:
        """Return when `steps` steps from `now` on are made, and the longest stall in between."""
        turn, index = math.floor(now / self._length), self._index(now)
        longest, begin = _NO_STALL, None
        while True:
            last = index + 1 == len(self._at)
            end = (turn + 1) * self._length if last else turn * self._length + self._at[index + 1]
            if self._live[index]:
                if begin is not None and now - begin > longest.end - longest.begin:
                    longest = Stall(begin, now)
                if now + steps <= end:
                    return now + steps, longest
                steps, begin = steps - max(0.0, end - now), None
            elif begin is None:
                begin = now
            now, index, turn = max(now, end), 0 if last else index + 1, turn + last

    def _index(self, now: float) -> int:
        return max(0, bisect_right(self._at, now % self._length) - 1)


class LiveBatches(Batches):
    """The batches of an island of which some slices may be lost. The sequences of lost slices are skipped.

    Attributes:
        sequences: How many sequences of each batch are left.
    """

    sequences = 1 << 20

    def next(self, steps: int) -> Tokens:
        """Return the next batches, without the sequences of lost slices."""
        whole = super().next(steps)
        left = whole[:, : self.sequences]
        self.tokens = self.tokens * left.shape[1] // whole.shape[1]
        return left


class TapeRun(VirtualRun):
    """A run whose islands follow a tape from its beginning.

    Args:
        work: What the run trains.
        tape: When its islands stall, leave, return and lose slices.
        slow: How many times longer the steps of the last `slowed` islands take, also without failures.
        slowed: How many islands are slow.

    Attributes:
        tokens: Tokens that all islands have trained on.
        deaths: How often an island stalled for so long that it counted as dead.
    """

    def __init__(self, work: Workload, tape: FailureTape, slow: float = 1.0, slowed: int = 0) -> None:
        self._courses = {
            f"island-{number}": Course(legs, tape.step_seconds, tape.seconds)
            for number, legs in enumerate(tape.islands)
        }
        self._paces = dict(zip(self._courses, paces(len(self._courses), slow, slowed), strict=True))
        self.tokens = self.deaths = 0
        self._counted: dict[Island, int] = {}
        self._stalled: dict[str, float] = {}  # The time at which each island will be back.
        self._away: dict[str, float] = {}
        self._ended = False  # Once an island has made the last step, no island returns.
        assert isinstance(work.named, OurTask)  # noqa: S101 - only their batches have sequences to skip
        live = our_task(work.config, work.named.corpus, reader=LiveBatches)
        super().__init__(dataclasses.replace(work, named=live), list(self._paces.values()))

    def finish(self, tokens: float = math.inf) -> None:
        """Follow the tape to the run's end or to `tokens`, and merge the last contributions."""
        while self.islands or (self._away and not self._ended):
            self._leave_and_return()
            if self.islands:
                before = set(self.islands)
                for island in self.islands.values():
                    self._fit(island)
                self.play_one()
                self._ended |= self.islands.keys() != before
            else:
                self.clock.now = max(self.clock.now, min(self._away.values()))
            self._count()
            if self.tokens >= tokens:
                self._ended = True
                for name in list(self.islands):
                    self.remove_island(name, farewell=True)
        self.merger.turn(0.0)

    def _leave_and_return(self) -> None:
        """Remove the islands that will stall for too long, and add those that are back."""
        for name, back in self._stalled.items():
            self.remove_island(name, farewell=False)
            self._away[name] = back
            self.deaths += 1
        self._stalled.clear()
        for name in [name for name, back in self._away.items() if back <= self.clock.now and not self._ended]:
            del self._away[name]
            island = self.add_island(name, self._paces[name], "peer" if self.islands else "fresh")
            self._counted[island] = island.totals.tokens  # Its tokens from before it left are counted already.

    def _fit(self, island: Island) -> None:
        """Set the size of an island's next batch to its share of live slices, rounded up or down in turn."""
        whole = self.manifest.config.data.batch_size
        phase = island.totals.steps * _GOLDEN % 1.0
        live = self._courses[island.name].live(self.clock.now) or 1.0
        assert isinstance(island.batches, LiveBatches)  # noqa: S101 - the reader of its task
        island.batches.sequences = min(whole, max(1, math.floor(live * whole + phase))) if live < 1.0 else whole

    def _schedule(self, island: Island, at: float) -> None:
        """Schedule an island's next step boundary, delayed by its stalls."""
        now = self.clock.now
        boundary, stall = self._courses[island.name].walk(now, at - now)
        if stall.end - stall.begin > AWAY_STEPS:
            self._stalled[island.name] = stall.end
        super()._schedule(island, boundary)

    def _count(self) -> None:
        for island in self.islands.values():
            self.tokens += island.totals.tokens - self._counted.get(island, 0)
            self._counted[island] = island.totals.tokens


def follow(
    work: Workload, tape: FailureTape, tokens: float, slow: float = 1.0, slowed: int = 0
) -> tuple[TapeRun, float, Point, Point]:
    """Run along the tape until the islands have trained on `tokens`, with a schedule that ends there.

    The steps of the last `slowed` islands take `slow` times longer.

    Returns:
        The run, its goodput, and the held-out loss before and after it.
    """
    point = scoring(work)
    longer = dataclasses.replace(work.config.inner, steps=rehearsed(work, tape, tokens, slow, slowed))
    run = TapeRun(work.changed(inner=longer), tape, slow, slowed)
    first = point(0, published(run.transport, run.manifest)[0])
    run.finish(tokens)
    goodput = tape.goodput(run.clock.now * tape.step_seconds)
    return run, goodput, first, point(run.tokens, published(run.transport, run.manifest)[0])


def rehearsed(work: Workload, tape: FailureTape, tokens: float, slow: float = 1.0, slowed: int = 0) -> int:
    """Return the global step at which the islands of a tape will have trained on `tokens`.

    This plays the whole run with steps that train nothing, because the timing does not depend on what islands learn. It
    also shows how the global step lags while the fastest island stalls.
    """

    def idle(state: InnerState, tokens_nxBxT1: jax.Array, step: jax.Array) -> tuple[InnerState, jax.Array]:
        return state, jax.device_put(np.zeros(len(tokens_nxBxT1), np.float32))

    endless = work.changed(inner=dataclasses.replace(work.config.inner, steps=_ENDLESS))
    run = TapeRun(dataclasses.replace(endless, steps=idle), tape, slow, slowed)
    run.finish(tokens)
    return run.merger.state.step
