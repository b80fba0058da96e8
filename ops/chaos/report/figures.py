"""All figures of a storm, for its report. Pure."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import dataclass, field, replace

from archipelago.ops.chaos.report.goodput import (
    MethodFigures,
    Rejoin,
    Shares,
    Stalls,
    merged_steps,
    pauses,
    possible_while_live,
    rejoins,
    shares,
    staleness,
    stalls,
)
from archipelago.ops.chaos.report.invariants import Check, checks
from archipelago.ops.chaos.report.record import STANDBY_USED, ProcessEvent, StormRecord
from archipelago.ops.chaos.report.timelines import timelines, uptime


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
        baseline: Data-parallel training under the same faults; None if it did not run.
        tokens_trained: All tokens, by the turn logs: merged + refused + pending + lost.
        training_loss: Mean loss that the islands reported in the last tenth of the rounds.
        tokens_lost: Tokens that were trained and not sent, mostly by islands that were killed.
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
    control: Figures | None = None
    baseline: MethodFigures | None = None
    standbys: int = 0
    standbys_used: int = 0
    events: list[ProcessEvent] = field(default_factory=list)


def figures(storm: StormRecord, control: Figures | None = None, baseline: MethodFigures | None = None) -> Figures:
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
        baseline=baseline,
        standbys=storm.standbys,
        standbys_used=sum(event.what == STANDBY_USED for event in storm.events),
        events=[replace(event, at=round(event.at - storm.begin, 3)) for event in storm.events],
    )


def as_method(storm: StormRecord, found: Figures) -> MethodFigures:
    """Return the figures of the islands that the baseline has, too."""
    useful = merged_steps(storm)
    turns = [turn.at for island in storm.islands for turn in storm.turns.get(island, ())]
    return MethodFigures(
        goodput=found.goodput,
        uptime=found.uptime,
        steps_useful=useful,
        steps_lost=sum(storm.steps_between(island, storm.begin, storm.end) for island in storm.islands) - useful,
        pause_seconds_worst=max(after - before for before, after in pauses(turns, storm.begin, storm.end)),
    )
