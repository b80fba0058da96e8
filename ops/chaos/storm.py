"""A storm: run real processes on a real Redis under a schedule of faults, and record what can be observed.

The record contains the events of all processes on the machine's monotonic clock, each turn of each island's loop from
its turn log, and the time at which the merger closed each round.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress

from archipelago.broker.commits import START
from archipelago.broker.errors import BrokerError
from archipelago.broker.manifest import loss_unit
from archipelago.broker.messages import Refusal, TapeEntry
from archipelago.broker.shards.transport import of_shard
from archipelago.broker.transport import ReaderTransport
from archipelago.ops.chaos.processes import RunProcesses, StormPlan, monotonic, read_turn_log
from archipelago.ops.chaos.record import Identity, LoggedTurn, StormRecord, step_seconds
from archipelago.ops.launch.init import workload_of
from archipelago.ops.settings import say

EVERYTHING = 1 << 20
#: A measured step duration of a script that exceeds the minimum by less than this share is the minimum.
TIMER_SHARE = 0.05


def run_storm(plan: StormPlan, stopped: Callable[[], bool]) -> StormRecord:
    """Run a plan to its end. Raise ArchipelagoError if its run does not begin to train, or if `stopped`."""
    with ExitStack() as stack:
        processes = RunProcesses(plan, stack)
        processes.await_all()
        begin, end = processes.carry_out(plan.faults, lambda begin: _is_over(plan, processes, begin), stopped)
        processes.end_faults()
        if not processes.drain():
            say("  some contributions were not merged in time")
        return _record(plan, processes, begin, end)


def _is_over(plan: StormPlan, processes: RunProcesses, begin: float) -> bool:
    if plan.merged_tokens:
        with suppress(BrokerError):  # Redis may be too busy to answer; the next look asks again.
            merged = processes.transport.reader.counters().merged_tokens
            return merged >= plan.merged_tokens * len(processes.manifest.fragments)
        return False
    left = begin + plan.seconds - time.monotonic()
    return left <= 0 and (left <= -plan.settle_seconds or processes.is_well())


def _record(plan: StormPlan, processes: RunProcesses, begin: float, end: float) -> StormRecord:
    transport = processes.transport
    config, tape = processes.manifest.config, tuple(transport.reader.tape(EVERYTHING))
    turns = {island.name: read_turn_log(processes.turn_log(island.name)) for island in processes.islands}
    return StormRecord(
        begin=begin,
        end=end,
        islands=tuple(plan.step_seconds),
        step_seconds=own_step_seconds(plan.step_seconds, turns) if plan.is_own else dict(plan.step_seconds),
        tokens_per_step=_tokens_per_step(tape) if plan.is_own else config.tokens_per_step,
        layout=processes.manifest.shard_layout,
        faults=plan.faults,
        events=tuple(processes.events),
        turns=turns,
        closed_at={entry.round: monotonic(entry) for entry in tape},
        tape=tape,
        counters=transport.reader.counters(),
        pending=transport.reader.pending(),
        refused=_refused(processes),
        held_out_loss=_held_out_loss(plan, transport),
        unit=loss_unit(processes.manifest.corpus).name,
        standbys=plan.standbys,
    )


def own_step_seconds(asked: Mapping[str, float], turns: Mapping[str, Sequence[LoggedTurn]]) -> dict[str, float]:
    """Return the step duration of each island of a script: the minimum that was asked for, or what the script takes."""
    measured = [seconds for each in turns.values() for seconds in step_seconds(each)]
    usual, least = statistics.median(measured or [0.0]), min(asked.values())
    if usual <= least * (1 + TIMER_SHARE):
        return dict(asked)
    return {island: max(seconds, usual) for island, seconds in asked.items()}


def _tokens_per_step(tape: Sequence[TapeEntry]) -> float:
    """Return the mean tokens of an inner step of a user's script or task, by what was merged."""
    steps = sum(member.steps for entry in tape for member in entry.members)
    return sum(member.tokens for entry in tape for member in entry.members) / max(1, steps)


def _refused(processes: RunProcesses) -> frozenset[Identity]:
    return frozenset(
        (shard, event.island, event.incarnation, event.sequence)
        for shard in range(processes.manifest.shards)
        for _, event in of_shard(processes.primary, processes.manifest, shard).reader.events(START, 0.0, EVERYTHING)
        if isinstance(event, Refusal) and not event.repeat
    )


def _held_out_loss(plan: StormPlan, transport: ReaderTransport) -> float:
    """Return the held-out loss of the final parameters; NaN for a script, or a task without `evaluate`."""
    from archipelago.islands.evaluation import published
    from archipelago.islands.sync.evaluator import mean_of

    manifest = transport.reader.manifest()
    evaluate = None if plan.script else workload_of(manifest.config, plan.task).evaluation()
    if evaluate is None:
        return math.nan
    params, _, _ = published(transport, manifest)
    return loss_unit(manifest.corpus).from_evaluation(mean_of(evaluate(params)).bits)
