"""Targets of faults, and the injector that carries out a schedule: it begins each fault when due, and undoes it."""

from __future__ import annotations

import heapq
import itertools
import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

import psutil

from archipelago.broker.errors import ArchipelagoError
from archipelago.ops.chaos.proxy import Proxy
from archipelago.ops.chaos.record import ProcessEvent
from archipelago.ops.chaos.schedule import Fault
from archipelago.ops.launch.embedded_redis import RedisServer
from archipelago.ops.launch.supervisor import Child, stop_all
from archipelago.ops.settings import say

TICK_SECONDS, CHECK_SECONDS = 0.01, 0.1
#: A process that ends without a fault is restarted after this time.
UNPLANNED_SECONDS = 1.0
#: How long the processes may take to end after the storm.
END_SECONDS = 5.0


@dataclass(eq=False)
class FaultTarget:
    """A process that faults are injected into.

    Attributes:
        name: The name by which schedules refer to it.
        process: An island, a merger or a worker of the baseline; or Redis, whose folder gives it the same data, port
            and password at each start.
        proxy: The proxy before Redis, if the link has faults.
        own_files: The files and folders that the process writes for the storm and not for the run.
        stopped: Whether SIGSTOP holds it.
    """

    name: str
    process: Child | RedisServer
    proxy: Proxy | None = None
    own_files: tuple[Path, ...] = ()
    started: int = 0
    stopped: bool = False
    dead: bool = True

    @property
    def pid(self) -> int:
        """The process ID of the newest process."""
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it still exists."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def hold(self, *, stops: bool) -> None:
        """Stop the process, or let it continue."""
        self.signal(signal.SIGSTOP if stops else signal.SIGCONT)
        self.stopped = stops


class FaultInjector:
    """An injector of scheduled faults. Call `poll` often, from the main thread.

    Attributes:
        events: Everything that happened to the processes, in order.
    """

    def __init__(self) -> None:
        self.events: list[ProcessEvent] = []
        self.targets: dict[str, FaultTarget] = {}
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._faults: deque[tuple[float, Fault]] = deque()
        self._count = itertools.count()

    def note(self, process: str, what: str, detail: str = "") -> None:
        """Record an event that happened just now."""
        self.events.append(ProcessEvent(time.monotonic(), process, what, detail))

    def start(self, target: FaultTarget) -> None:
        """Start a target for the first time, or restart it."""
        self.note(target.name, "start")
        target.process.start()
        target.dead, target.stopped, target.started = False, False, target.started + 1

    def carry_out(
        self, faults: Iterable[Fault], is_over: Callable[[float], bool], stopped: Callable[[], bool]
    ) -> tuple[float, float]:
        """Inject faults, whose times count from now, and report events. Return when that began and ended.

        `is_over`, from the begin to whether to end, is asked ten times a second. Raises ArchipelagoError if `stopped`.
        """
        begin, check_at = time.monotonic(), 0.0
        reported = len(self.events)
        self._faults = deque((begin + fault.at, fault) for fault in faults)
        while (now := time.monotonic()) < check_at or not is_over(begin):
            check_at = check_at if now < check_at else now + CHECK_SECONDS
            if stopped():
                raise ArchipelagoError(
                    "the storm was interrupted", "Only its folder is left.", code="chaos.interrupted"
                )
            self.poll()
            for event in self.events[reported:]:
                say(f"  {event.at - begin:6.1f} s  {event.process:<9} {event.what} {event.detail}".rstrip())
            reported = len(self.events)
            time.sleep(TICK_SECONDS)
        return begin, now

    def poll(self) -> None:
        """Inject and undo the faults that are due. Restart processes that ended without a fault."""
        while self._due and self._due[0][0] <= time.monotonic():
            heapq.heappop(self._due)[2]()
        while self._faults and self._faults[0][0] <= time.monotonic():
            fault = self._faults.popleft()[1]
            self._inject(self.targets[fault.target], fault)
        for target in self.targets.values():
            if target.started and not target.dead and not target.process.alive():
                target.dead = True
                self.note(target.name, "died")
                self._start_at(target, time.monotonic() + UNPLANNED_SECONDS)

    @property
    def is_busy(self) -> bool:
        """Return whether a fault is still scheduled or active."""
        return bool(self._faults or self._due) or any(target.dead or target.stopped for target in self.targets.values())

    def end_faults(self) -> None:
        """Drop the faults that are still scheduled, and undo the active ones now."""
        self._faults.clear()
        while self._due:
            heapq.heappop(self._due)[2]()

    def end(self) -> None:
        """End all processes but Redis. Continue stopped processes, so that they can end."""
        for target in self.targets.values():
            if target.started and target.process.alive():
                target.signal(signal.SIGCONT)
        stop_all([each.process for each in self.targets.values() if isinstance(each.process, Child)], END_SECONDS)

    def _call_at(self, at: float, action: Callable[[], None]) -> None:
        """Call `action` at a time, or earlier when the faults end."""
        heapq.heappush(self._due, (at, next(self._count), action))

    def _inject(self, target: FaultTarget, fault: Fault) -> None:
        """Begin a fault now, and undo it after its time. A dead process is spared."""
        of_process = fault.kind in ("stop", "disk")  # they end with the process
        if (fault.kind == "kill" or of_process) and (target.dead or (fault.kind == "stop" and target.stopped)):
            self.note(target.name, "spared", f"{fault.kind}: it is {'dead' if target.dead else 'stopped'}")
            return
        self.note(target.name, fault.kind, f"{fault.value:g}" if fault.value else "")
        end_at = time.monotonic() + fault.seconds  # a large process takes a while to die
        started, undo = target.started, _begin(target, fault)

        def end() -> None:
            if undo is not None and not (of_process and (target.dead or target.started != started)):
                undo()
                self.note(target.name, "continue" if fault.kind == "stop" else f"{fault.kind} over")

        if fault.kind == "kill":
            self._start_at(target, end_at)
        elif undo is not None:
            self._call_at(end_at, end)

    def _start_at(self, target: FaultTarget, at: float) -> None:
        """Start a dead target again at a time, unless another start comes before that."""
        started = target.started

        def start_again() -> None:
            if target.dead and target.started == started:
                self.start(target)

        self._call_at(at, start_again)


def _begin(target: FaultTarget, fault: Fault) -> Callable[[], None] | None:
    """Begin a fault. Return the function that undoes it; None for a fault that has no end, and for a kill."""
    proxy = target.proxy
    match fault.kind:
        case "kill":
            target.signal(signal.SIGKILL)
            target.dead = True
            while target.process.alive():  # The next process needs its name and folder.
                time.sleep(0.001)
            return None
        case "stop":
            target.hold(stops=True)
            return lambda: target.hold(stops=False)
        case "disk":
            _limit_files(target, int(fault.value))
            return lambda: _limit_files(target, None)
    assert proxy is not None  # noqa: S101
    match fault.kind:
        case "throttle":
            proxy.set_rate(fault.value)
            return lambda: proxy.set_rate(math.inf)
        case "delay":
            proxy.delay_seconds = fault.value
            return lambda: setattr(proxy, "delay_seconds", 0.0)
        case "half-open":
            proxy.half_open()
            return None
        case "partition" | "reset":
            proxy.cut(reset=fault.kind == "reset")
            return proxy.heal
        case _:
            assert_never(fault.kind)


def _limit_files(target: FaultTarget, room: int | None) -> None:
    """Limit the size of a target's files, which stands in for a full disk: writes fail with EFBIG, not ENOSPC.

    `room` bytes fit into each file, beyond the largest of the target's own. None restores the limit that the process
    started with.
    """
    with suppress(psutil.NoSuchProcess):  # It may have ended just now.
        process = psutil.Process(target.pid)
        _, hard = process.rlimit(psutil.RLIMIT_FSIZE)
        own = [file for path in target.own_files for file in (path, *path.rglob("*")) if file.is_file()]
        limit = hard if room is None else room + max((file.stat().st_size for file in own), default=0)
        process.rlimit(psutil.RLIMIT_FSIZE, (limit, hard))
