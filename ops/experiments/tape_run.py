"""Real training along a failure tape, in virtual time: islands stall, leave, return and lose slices as the tape says.

One inner step of the tape is one second of the run's clock. A short stall keeps an island's state, and the events that
it missed arrive later. After AWAY_STEPS it counts as dead, and its successor gets parameters from the merger
and optimiser state from a peer. An island with fewer slices trains on fewer sequences a step and skips the sequences of
the lost slices.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from archipelago.broker.config import RunConfig
from archipelago.broker.errors import DataError
from archipelago.islands.creation import fitted
from archipelago.islands.data.batches import Batches
from archipelago.islands.data.corpus import open_corpus
from archipelago.islands.data.tokenizer import Tokens
from archipelago.islands.evaluation import published
from archipelago.islands.inner import InnerState
from archipelago.islands.tasks.ours import OurTask, our_task, our_work
from archipelago.islands.tasks.workload import Workload
from archipelago.islands.worker import Island
from archipelago.ops.experiments.baselines import Point, scoring
from archipelago.ops.experiments.virtual_time import VirtualRun, paces
from archipelago.ops.simulation.tape import FailureTape, Leg

_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
_ENDLESS = 1 << 30
#: A real merger stops waiting for a silent island after about this time, in steps of a second.
AWAY_STEPS = 10.0


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
        if not any(self._live):
            raise DataError(
                "an island of the tape never makes a step",
                "Leave it out, or simulate a shorter return.",
                code="tape.never-steps",
            )

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


Say = Callable[[str], None]


def quality(config: RunConfig, tapes: Mapping[str, FailureTape], say: Say) -> list[dict[str, Any]]:
    """Train along each tape on as many tokens as along the first one.

    A tape with less goodput takes longer. On each tape the learning rate schedule ends with the tokens.

    Returns:
        A row for each tape, with held-out bits per byte and their ratio to the first row's.
    """
    corpus = open_corpus(config.data.corpus)
    config = fitted(config, corpus)
    rows: list[dict[str, Any]] = []
    for name, tape in tapes.items():
        whole = config.inner.steps * config.tokens_per_step * len(tape.islands)
        run, goodput, _, last = follow(our_work(config, corpus), tape, rows[0]["tokens"] if rows else whole)
        steps = run.manifest.config.inner.steps
        row = {"tape": name, "islands": len(tape.islands), "goodput": goodput, "steps": steps, "deaths": run.deaths}
        row["schedule_done"] = min(1.0, run.merger.state.step / steps)
        rows.append({**row, "tokens": run.tokens, "bits_per_byte": last.bits_per_byte})
        say(f"{name}: {last.bits_per_byte:.4f} bits per byte after {run.tokens:,} tokens; {run.deaths} deaths")
    for row in rows:
        row["to_first"] = row["bits_per_byte"] / rows[0]["bits_per_byte"]
    return rows


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


def calm(islands: int, step_seconds: float) -> FailureTape:
    """Return a tape on which nothing fails."""
    return FailureTape(((Leg(0.0, 1.0),),) * islands, step_seconds, 1e6 * step_seconds)
