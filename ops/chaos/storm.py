"""A storm: run real processes on a real Redis under a schedule of faults, and record what can be observed.

The record contains the events of all processes on the machine's monotonic clock, each turn of each island's loop from
its turn log, and the time at which each round was first seen closed.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from archipelago.broker.errors import ArchipelagoError, BrokerError
from archipelago.broker.loss_unit import loss_unit
from archipelago.broker.messages import Refusal, TapeEntry
from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.broker.shards.transport import of_shard, opened
from archipelago.broker.transport import START, ReaderTransport
from archipelago.ops.chaos.injection import TICK_SECONDS
from archipelago.ops.chaos.processes import Plan, RunProcesses, await_ready, await_standbys, read_turn_log
from archipelago.ops.chaos.report.record import Identity, StormRecord
from archipelago.ops.chaos.script import own_step_seconds
from archipelago.ops.launch.final_loss import measure
from archipelago.ops.settings import say

OBSERVE_SECONDS = 0.1
RECENT = 32
EVERYTHING = 1 << 20


class Observer:
    """An observer that reads the run ten times a second, on a separate thread and connection. An outage leaves a gap.

    Attributes:
        closed_at: When each round was first seen closed.
        merged_tokens: Tokens merged so far, summed over the fragments.
    """

    def __init__(self, url: str, run: str) -> None:
        self._url, self._run = url, run
        self.closed_at: dict[int, float] = {}
        self.merged_tokens = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._observe_repeatedly, name="observer", daemon=True)

    def __enter__(self) -> Observer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _observe_repeatedly(self) -> None:
        transport: RedisTransport | None = None
        while not self._stopping.wait(OBSERVE_SECONDS):
            try:
                transport = transport or connect(self._url, self._run)
                self._observe(opened(transport)[1])
            except BrokerError:
                continue
        if transport is not None:
            transport.close()

    def _observe(self, transport: ReaderTransport) -> None:
        last = max(self.closed_at, default=0)
        entries = transport.reader.tape(RECENT)
        if entries and entries[0].round > last + 1:
            entries = transport.reader.tape(EVERYTHING)
        now = time.monotonic()
        for entry in entries:
            self.closed_at.setdefault(entry.round, now)
        self.merged_tokens = transport.reader.books().merged_tokens


def run_storm(plan: Plan, stopped: Callable[[], bool]) -> StormRecord:
    """Run a plan to its end.

    Args:
        plan: The storm.
        stopped: Whether a signal has asked this process to stop.

    Raises:
        ArchipelagoError: The run does not begin to train, or a signal interrupted it.
    """
    with ExitStack() as stack:
        processes = RunProcesses(plan, stack)
        observer = stack.enter_context(Observer(processes.url, processes.run))
        for worker in (*processes.mergers, *processes.islands):
            if not worker.started:
                processes.start(worker)
        await_ready(processes, (*processes.mergers, *processes.islands), processes.is_ready)
        await_standbys(processes)
        begin = time.monotonic()
        processes.schedule(plan.faults, begin)
        _await_end(plan, processes, observer, begin, stopped)
        end = time.monotonic()
        processes.end_faults()
        if not processes.drain():
            say("  some contributions were not merged in time")
        time.sleep(2 * OBSERVE_SECONDS)  # The observer must see the last rounds, too.
        held_out_loss = _held_out_loss(plan, processes.transport)
        return _record(plan, processes, observer, begin, end, held_out_loss)


def interrupted() -> ArchipelagoError:
    """Return the error of a storm that a signal ended."""
    return ArchipelagoError("the storm was interrupted", "Only its folder is left.", code="chaos.interrupted")


def _await_end(
    plan: Plan, processes: RunProcesses, observer: Observer, begin: float, stopped: Callable[[], bool]
) -> None:
    check_at = 0.0
    while True:
        if (now := time.monotonic()) >= check_at:
            if _is_over(plan, processes, observer, begin):
                return
            check_at = now + OBSERVE_SECONDS
        if stopped():
            raise interrupted()
        processes.poll()
        processes.report_events(begin)
        time.sleep(TICK_SECONDS)


def _is_over(plan: Plan, processes: RunProcesses, observer: Observer, begin: float) -> bool:
    if plan.merged_tokens:
        return observer.merged_tokens >= plan.merged_tokens * len(processes.manifest.fragments)
    left = begin + plan.seconds - time.monotonic()
    last_round_at = max(observer.closed_at.values(), default=0.0)
    return left <= 0 and (left <= -plan.settle_seconds or processes.is_well(last_round_at))


def _record(
    plan: Plan, processes: RunProcesses, observer: Observer, begin: float, end: float, held_out_loss: float
) -> StormRecord:
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
        closed_at=dict(observer.closed_at),
        tape=tape,
        books=transport.reader.books(),
        pending=transport.reader.pending(),
        refused=_refused(processes),
        held_out_loss=held_out_loss,
        unit=loss_unit(processes.manifest.corpus).name,
        standbys=plan.standbys,
        mergers=tuple(merger.name for merger in processes.mergers),
    )


def _tokens_per_step(tape: Sequence[TapeEntry]) -> float:
    """Return the mean tokens of an inner step of a user's script or task, by what was merged."""
    steps = sum(member.steps for entry in tape for member in entry.members)
    return sum(member.tokens for entry in tape for member in entry.members) / max(1, steps)


def _refused(processes: RunProcesses) -> frozenset[Identity]:
    return frozenset(
        (shard, event.island, event.incarnation, event.sequence)
        for shard in range(processes.manifest.shards)
        for _, event in of_shard(processes.home, processes.manifest, shard).reader.events(START, 0.0, EVERYTHING)
        if isinstance(event, Refusal) and not event.repeat
    )


def _held_out_loss(plan: Plan, transport: ReaderTransport) -> float:
    """Return the held-out loss of the final parameters; NaN for a script, or a task without `evaluate`."""
    from archipelago.islands.tasks.file import load_task

    if plan.script or (plan.task and load_task(plan.task).task.evaluate is None):
        return math.nan
    return loss_unit(transport.reader.manifest().corpus).from_evaluation(measure(transport, plan.task).bits_per_byte)
