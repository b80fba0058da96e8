"""All figures of a storm, for its report. Pure."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from archipelago.ops.chaos.lockstep.estimates import Estimates, estimate
from archipelago.ops.chaos.lockstep.results import MethodResult, longest_pause, sampled
from archipelago.ops.chaos.report.goodput import (
    Rejoin,
    Shares,
    Stalls,
    merged_steps,
    participation,
    possible_while_live,
    rejoins,
    shares,
    staleness,
    stalls,
)
from archipelago.ops.chaos.report.invariants import Check, checks
from archipelago.ops.chaos.report.record import STANDBY_USED, ProcessEvent, StormRecord
from archipelago.ops.chaos.report.timelines import timelines, uptime

#: The name of our own run among the methods.
ISLANDS = "islands"


@dataclass(frozen=True)
class Control:
    """Figures of the same run without faults, after as many merged tokens."""

    held_out_loss: float
    unit: str
    training_loss: float
    tokens_merged: int
    seconds: float
    goodput: float
    stalls: Stalls


@dataclass(frozen=True)
class Figures:
    """The figures of one storm.

    Attributes:
        seconds: Length of the window.
        islands: Number of islands.
        step_seconds: The run's step duration.
        ceiling: The highest possible goodput, which is below one if an island is slow.
        goodput: Merged inner steps over possible ones.
        goodput_of_live_time: Merged inner steps over those that fit into the time in which islands trained.
        uptime: Share of the window in which at least one island trained.
        shares: The shares of the allocated time.
        rounds: Rounds that closed in the window.
        faults: Number of faults by kind and target.
        events: Events of the processes, in seconds after the begin of the window.
        rejoins: The return of each killed island.
        stalls: Delays between the steps of islands without a fault.
        staleness: Merged contributions by staleness.
        checks: The invariants.
        holds: Whether all invariants hold.
        control: The same run without faults.
        estimates: Goodput that other methods would have had under the same failures; computed, not run.
        baselines: Results of other methods that ran under the same faults.
        tokens_trained: All tokens, by the turn logs: merged + refused + pending + lost.
        training_loss: Mean loss that the islands reported in the last tenth of the rounds.
        tokens_lost: Tokens that were trained and not sent, mostly by islands that were killed.
        participation: Islands of the run, live and participating, over time.
        standbys: Number of standby processes.
        standbys_used: Starts of islands for which a standby was ready.
    """

    seconds: float
    islands: int
    step_seconds: float
    ceiling: float
    goodput: float
    goodput_of_live_time: float
    uptime: float
    shares: Shares
    rounds: int
    rounds_per_minute: float
    contributions_per_round: float
    faults: dict[str, int]
    rejoins: list[Rejoin]
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
    control: Control | None = None
    estimates: Estimates | None = None
    baselines: list[MethodResult] = field(default_factory=list)
    participation: list[tuple[float, int, int, int]] = field(default_factory=list)
    standbys: int = 0
    standbys_used: int = 0
    events: list[ProcessEvent] = field(default_factory=list)


def figures(storm: StormRecord, control: Control | None = None, baselines: Sequence[MethodResult] = ()) -> Figures:
    """Compute all figures of a storm."""
    states, results = timelines(storm), checks(storm)
    step, returned = storm.shortest_step_seconds, rejoins(storm)
    totals = [r.total_seconds for r in returned if not math.isnan(r.total_seconds)]
    spent = shares(storm, states)
    trained = round(sum(storm.steps_between(i, -math.inf, math.inf) for i in storm.islands) * storm.tokens_per_step)
    settled = (storm.books.merged_tokens, storm.books.refused_tokens, storm.pending.tokens)
    merged, refused, pending = (tokens // storm.fragments for tokens in settled)
    live = possible_while_live(storm, states)
    step_seconds = {island: storm.step_seconds[island] or step for island in storm.islands}
    return Figures(
        seconds=storm.seconds,
        islands=len(storm.islands),
        step_seconds=step,
        ceiling=statistics.fmean(step / seconds for seconds in step_seconds.values()),
        goodput=spent.useful,
        goodput_of_live_time=merged_steps(storm) / live if live else math.nan,
        uptime=uptime(storm, states),
        shares=spent,
        rounds=storm.rounds_in_window,
        rounds_per_minute=storm.rounds_in_window / storm.seconds * 60,
        contributions_per_round=statistics.fmean(len(e.members) for e in storm.tape) if storm.tape else 0.0,
        faults=dict(sorted(Counter(f"{f.kind} {f.target}" for f in storm.faults).items())),
        rejoins=returned,
        rejoin_seconds_median=statistics.median(totals) if totals else math.nan,
        rejoin_seconds_worst=max(totals, default=math.nan),
        stalls=stalls(storm, states),
        staleness=staleness(storm),
        tokens_trained=trained,
        tokens_merged=merged,
        tokens_refused=refused,
        tokens_pending=pending,
        tokens_lost=trained - merged - refused - pending,
        bytes_up=storm.books.bytes_up,
        bytes_down=storm.books.bytes_down,
        held_out_loss=storm.held_out_loss,
        unit=storm.unit,
        training_loss=storm.training_loss,
        checks=results,
        holds=all(check.holds for check in results),
        control=control,
        estimates=estimate(states, step_seconds, storm.begin, storm.end, storm.interval, storm.checkpoint_seconds),
        baselines=list(baselines),
        participation=participation(storm),
        standbys=storm.standbys,
        standbys_used=sum(event.what == STANDBY_USED for event in storm.events),
        events=[replace(event, at=round(event.at - storm.begin, 3)) for event in storm.events],
    )


def as_method_result(storm: StormRecord, found: Figures) -> MethodResult:
    """Return the islands' own figures in the form of the baselines' results."""
    turns = [turn for island in storm.islands for turn in storm.turns.get(island, ())]
    returned = [r.away_seconds + r.start_seconds for r in found.rejoins if not math.isnan(r.start_seconds)]
    merged = sorted(
        ((storm.closed_at[e.round], e) for e in storm.tape if e.round in storm.closed_at), key=lambda pair: pair[0]
    )
    steps = itertools.accumulate(sum(m.steps for m in entry.members) / storm.fragments for _, entry in merged)
    useful = merged_steps(storm)
    return MethodResult(
        method=ISLANDS,
        seconds=found.seconds,
        goodput=found.goodput,
        steps_useful=useful,
        steps_made=sum(storm.steps_between(island, storm.begin, storm.end) for island in storm.islands),
        tokens=found.tokens_merged,
        bits_per_byte=found.held_out_loss,
        return_seconds_median=statistics.median(returned) if returned else math.nan,
        return_seconds_worst=max(returned, default=math.nan),
        pause_seconds_worst=longest_pause([turn.at for turn in turns], storm.begin, storm.end),
        curve=sampled(list(zip([at for at, _ in merged], steps, strict=True)), storm.begin, storm.end, useful),
    )


def as_control(storm: StormRecord) -> Control:
    """Return the figures of a run without faults, for comparison."""
    states = timelines(storm)
    return Control(
        storm.held_out_loss, storm.unit, storm.training_loss, storm.books.merged_tokens // storm.fragments,
        storm.seconds, shares(storm, states).useful, stalls(storm, states),
    )  # fmt: skip


def as_data(found: Figures) -> dict[str, Any]:
    """Return the figures as plain data, for report.json."""
    return asdict(found)
