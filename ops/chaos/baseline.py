"""Run the baseline of a storm: real processes that train the same model on the same text, data-parallel.

Each step needs the gradients of all workers, so a worker that is stopped or cut off stops all of them. When a
connection is lost, the group ends: all workers connect again, load the last checkpoint and go on from there.

The workers exchange float32 gradients through a hub in this process, over TCP, so that faults of links apply to them as
to the islands: they pass the same proxy. The baseline has it easier than the islands: its hub never fails, learns at
once that a worker has died or lost its connection, and forms the group again without a delay.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from archipelago.broker.machine import LOOPBACK
from archipelago.ops.chaos.figures import Figures, pauses
from archipelago.ops.chaos.injection import FaultInjector, FaultTarget
from archipelago.ops.chaos.processes import StormPlan, await_ready
from archipelago.ops.chaos.proxy import LoopServer, Proxy
from archipelago.ops.chaos.schedule import ON_LINKS, Fault
from archipelago.ops.launch.devices import memory_share
from archipelago.ops.launch.supervisor import Child, thread_environment

#: A time without a step is downtime if a connection was lost in it, or if it is longer than this, and than this many
#: median times between steps.
DOWN_SECONDS, DOWN_STEPS = 1.0, 2.0
#: A worker's connection to the hub.
Member = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class GroupProgress:
    """The progress of a process group.

    Attributes:
        step: How many steps are in the parameters.
        saved: How many steps are in the last checkpoint; 0 before the first.
        made: The time of each step, including those that were rolled back.
        lost: The time of each loss of a connection, after which the group begins again.
    """

    step: int = 0
    saved: int = 0
    made: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)


class Hub(LoopServer):
    """The exchange of a process group.

    A worker connects and sends its name. Once all are connected, each receives the step of the checkpoint to load.
    Then each sends the step of its last checkpoint and its gradient, and receives the mean of all gradients, again and
    again, until a connection is lost. Only the first worker saves checkpoints. Gradients are bytes, all else is lines.

    Args:
        names: The workers.
        progress: Records the steps.

    Attributes:
        port: The port of loopback on which it listens.
    """

    def __init__(self, names: Sequence[str], progress: GroupProgress) -> None:
        super().__init__("hub")
        self._names, self._progress = tuple(names), progress
        self._members: dict[str, Member] = {}
        self._idle = asyncio.Event()  # no exchange runs
        self._idle.set()
        self.port = 0

    async def _begin(self) -> None:
        self._server = await asyncio.start_server(self._serve, LOOPBACK, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _end(self) -> None:
        self._server.close()
        self._drop(self._members)
        await self._idle.wait()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # Closed transports free their sockets in the next turn of the loop.

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Accept a worker. The connection that completes the group also runs its exchange."""
        name = (await reader.readline()).decode(errors="replace").strip()
        if name not in self._names:
            writer.transport.abort()
            return
        while not self._idle.is_set():  # The worker is back before the end of its old connection has arrived.
            self._drop(self._members)
            await self._idle.wait()
        self._drop({each: one for each, one in self._members.items() if each == name or one[0].at_eof()})
        self._members[name] = reader, writer
        if len(self._members) == len(self._names):
            await self._exchange({each: self._members[each] for each in self._names})

    async def _exchange(self, members: Mapping[str, Member]) -> None:
        self._idle.clear()
        progress = self._progress
        try:
            await _send(members, b"%d\n" % progress.saved)
            while True:
                saved, gradients = zip(*await _all(_receive(reader) for reader, _ in members.values()), strict=True)
                mean_N = np.mean(gradients, axis=0, dtype=np.float32)
                progress.step, progress.saved = progress.step + 1, saved[0]
                progress.made.append(time.monotonic())
                await _send(members, mean_N.tobytes())
        except* (OSError, asyncio.IncompleteReadError):
            progress.step = progress.saved  # All return to the last checkpoint.
            progress.lost.append(time.monotonic())
        finally:
            self._drop(members)
            self._idle.set()

    def _drop(self, members: Mapping[str, Member]) -> None:
        for name, member in list(members.items()):
            member[1].transport.abort()
            if self._members.get(name) is member:
                del self._members[name]


async def _receive(reader: asyncio.StreamReader) -> tuple[int, Any]:
    """Return the step of a worker's last checkpoint, and its gradient: float32 [N]."""
    saved, count = map(int, (await reader.readuntil()).split())
    return saved, np.frombuffer(await reader.readexactly(count), np.float32)


async def _send(members: Mapping[str, Member], message: bytes) -> None:
    for _, writer in members.values():
        writer.write(message)
    await _all(writer.drain() for _, writer in members.values())


async def _all(calls: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Await all calls at once. Raise an ExceptionGroup as soon as one fails."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(call) for call in calls]
    return [task.result() for task in tasks]


def worker_faults(faults: Iterable[Fault], names: Sequence[str]) -> tuple[Fault, ...]:
    """Return the faults of a storm that also apply to the workers. A connection that is half open is only reset."""
    kept = (fault for fault in faults if fault.target in names and fault.kind in {"kill", "stop", *ON_LINKS})
    return tuple(
        dataclasses.replace(fault, kind="reset", seconds=0.0) if fault.kind == "half-open" else fault for fault in kept
    )


def start_group(plan: StormPlan, faults: Sequence[Fault], hub: Hub, stack: ExitStack) -> FaultInjector:
    """Start the workers of a process group. Return the injector of their faults."""
    group, names = FaultInjector(), tuple(plan.step_seconds)
    plan.folder.mkdir(parents=True)
    settings = {
        "config": plan.config.to_json(), "task": plan.task, "step_seconds": dict(plan.step_seconds),
        "checkpoint_seconds": plan.checkpoint_seconds,
    }  # fmt: skip
    (plan.folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    linked = {fault.target for fault in faults if fault.kind in ON_LINKS}
    stack.callback(group.end)
    environment = {**thread_environment(len(names)), **memory_share(len(names))}
    for name in names:
        proxy = stack.enter_context(Proxy(hub.port)) if name in linked else None
        port = str(proxy.port if proxy else hub.port)
        argv = ["-m", "archipelago.ops.chaos.baseline_worker", str(plan.folder), name, port]
        child = Child(name, argv, environment, plan.folder / "logs" / f"{name}.log")
        group.targets[name] = FaultTarget(name, child, proxy)
        group.start(group.targets[name])
    return group


def run_baseline(plan: StormPlan, stopped: Callable[[], bool]) -> Figures:
    """Train data-parallel under the faults of a storm, and return the figures.

    Args:
        plan: The plan of the storm.
        stopped: Whether a signal has asked this process to stop.

    Raises:
        ArchipelagoError: The workers do not begin to train, or a signal interrupted them.
    """
    faults, progress = worker_faults(plan.faults, tuple(plan.step_seconds)), GroupProgress()
    with ExitStack() as stack:
        hub = stack.enter_context(Hub(tuple(plan.step_seconds), progress))
        group = start_group(plan, faults, hub, stack)
        await_ready(group, dict.fromkeys(plan.step_seconds, lambda: progress.made))
        first = progress.step
        begin, end = group.carry_out(faults, lambda begin: time.monotonic() >= begin + plan.seconds, stopped)
        useful = progress.step - first
    return summarise(progress, useful, begin, end, plan.step_seconds)


def summarise(
    progress: GroupProgress, useful: int, begin: float, end: float, step_seconds: Mapping[str, float]
) -> Figures:
    """Return the figures of a process group.

    Args:
        progress: All steps of the group.
        useful: By how many steps the parameters are further at the end of the window than at its begin.
        begin, end: The window.
        step_seconds: The minimum duration of a step, by worker.
    """
    made, workers = sum(begin <= at < end for at in progress.made), len(step_seconds)
    between = pauses(progress.made, begin, end)
    seconds = [after - before for before, after in between]
    limit = max(DOWN_SECONDS, DOWN_STEPS * statistics.median(seconds)) if made else 0.0
    up = [b - a for a, b in between if b - a <= limit and not any(a <= at < b for at in progress.lost)]
    return {
        "goodput": useful * min(step_seconds.values()) / (end - begin),
        "uptime": sum(up) / (end - begin),
        "steps_useful": useful * workers,
        "steps_lost": (made - useful) * workers,
        "pause_seconds_worst": max(seconds),
    }
