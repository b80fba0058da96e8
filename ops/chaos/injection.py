"""Targets of faults, and the injector that kills, stops and restarts them and disturbs their links when that is due.

Subclasses add the faults of disks and clocks.
"""

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
from pathlib import Path

from archipelago.broker.errors import ArchipelagoError, ConfigError
from archipelago.broker.files import write_atomically
from archipelago.ops.chaos.proxy import Proxy
from archipelago.ops.chaos.report.record import ProcessEvent
from archipelago.ops.chaos.schedule import Fault
from archipelago.ops.launch.supervisor import Child
from archipelago.ops.settings import say

TICK_SECONDS, CHECK_SECONDS = 0.01, 0.1
#: A process that ends without a fault is restarted after this time.
UNPLANNED_SECONDS = 1.0
LIBRARY = "libfaketimeMT.so.1"
FOLDERS = ("/usr/lib/*/faketime", "/usr/lib/faketime", "/usr/local/lib/faketime", "/opt/homebrew/lib/faketime")
#: How often the program reads the file. The library counts in whole seconds.
REFRESH_SECONDS = 1


class FaultTarget:
    """A process that faults are injected into.

    Attributes:
        name: The name by which schedules refer to it.
        started: How many times it was started.
        stopped: Whether SIGSTOP holds it.
        dead: Whether it has no running process.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.started = 0
        self.stopped = False
        self.dead = True

    @property
    def pid(self) -> int:
        """The process ID of the newest process."""
        raise NotImplementedError

    def start(self) -> None:
        """Start a process."""
        raise NotImplementedError

    def alive(self) -> bool:
        """Return whether its process runs. Reap a process that has ended."""
        raise NotImplementedError

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it still exists."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)


class Worker(FaultTarget):
    """An island or the merger, with a proxy before Redis if its link has faults."""

    def __init__(self, child: Child, proxy: Proxy | None) -> None:
        super().__init__(child.name)
        self.child, self.proxy = child, proxy

    @property
    def pid(self) -> int:
        """The process ID of the newest process."""
        assert self.child.process is not None  # noqa: S101
        return self.child.process.pid

    def start(self) -> None:
        """Start a process. Call this from the main thread."""
        self.child.start()

    def alive(self) -> bool:
        """Return whether its process runs."""
        return self.child.process is not None and self.child.process.poll() is None


class FaultInjector:
    """An injector of scheduled faults. Call `poll` often, from the main thread.

    Attributes:
        events: Everything that happened to the processes, in order.
        targets: The targets by name.
    """

    def __init__(self) -> None:
        self.events: list[ProcessEvent] = []
        self.targets: dict[str, FaultTarget] = {}
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._faults: deque[tuple[float, Fault]] = deque()
        self._count = itertools.count()
        self._reported = 0

    def note(self, process: str, what: str, detail: str = "") -> None:
        """Record an event that happened just now."""
        self.events.append(ProcessEvent(time.monotonic(), process, what, detail))

    def _report_events(self, begin: float) -> None:
        """Print each new event on a line, with its time since `begin`."""
        for event in self.events[self._reported :]:
            say(f"  {event.at - begin:6.1f} s  {event.process:<9} {event.what} {event.detail}".rstrip())
        self._reported = len(self.events)

    def start(self, target: FaultTarget) -> None:
        """Start a target for the first time, or restart it."""
        self.note(target.name, "start")
        target.start()
        target.dead, target.stopped, target.started = False, False, target.started + 1

    def carry_out(
        self, faults: Iterable[Fault], is_over: Callable[[float], bool], stopped: Callable[[], bool]
    ) -> tuple[float, float]:
        """Inject faults, whose times count from now, and report events. Return when that began and ended.

        Args:
            faults: The schedule, ordered by time.
            is_over: From the begin to whether to end. It is asked ten times a second.
            stopped: Whether a signal has asked this process to stop.

        Raises:
            ArchipelagoError: A signal has (`chaos.interrupted`).
        """
        begin, check_at = time.monotonic(), 0.0
        self._reported = len(self.events)
        self._faults = deque((begin + fault.at, fault) for fault in faults)
        while (now := time.monotonic()) < check_at or not is_over(begin):
            check_at = check_at if now < check_at else now + CHECK_SECONDS
            if stopped():
                raise ArchipelagoError(
                    "the storm was interrupted", "Only its folder is left.", code="chaos.interrupted"
                )
            self.poll()
            self._report_events(begin)
            time.sleep(TICK_SECONDS)
        return begin, now

    def poll(self) -> None:
        """Inject and undo the faults that are due. Restart processes that ended without a fault."""
        while self._due and self._due[0][0] <= time.monotonic():
            heapq.heappop(self._due)[2]()
        while self._faults and self._faults[0][0] <= time.monotonic():
            fault = self._faults.popleft()[1]
            self.inject(self.targets[fault.target], fault)
        for target in self.targets.values():
            if target.started and not target.dead and not target.alive():
                target.dead = True
                self.note(target.name, "died")
                self._start_later(target, UNPLANNED_SECONDS)

    @property
    def is_busy(self) -> bool:
        """Return whether a fault is still scheduled or active."""
        return bool(self._faults or self._due) or any(target.dead or target.stopped for target in self.targets.values())

    def inject(self, target: FaultTarget, fault: Fault) -> None:
        """Inject a fault now. Subclasses handle the other kinds."""
        match fault.kind:
            case "kill":
                self._kill(target, fault)
            case "stop":
                self._stop(target, fault)
            case _:
                assert isinstance(target, Worker)  # noqa: S101
                self._disturb_link(target, fault)

    def end_faults(self) -> None:
        """Drop the faults that are still scheduled, and undo the active ones now."""
        self._faults.clear()
        while self._due:
            heapq.heappop(self._due)[2]()

    def call_later(self, seconds: float, action: Callable[[], None]) -> None:
        """Call `action` after `seconds`, or earlier when the faults end."""
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._count), action))

    def _kill(self, target: FaultTarget, fault: Fault) -> None:
        if target.dead:
            self.note(target.name, "spared", "kill: it is dead")
            return
        self.note(target.name, "kill")
        target.signal(signal.SIGKILL)
        target.dead = True
        while target.alive():  # The next process needs its name and folder, so we wait until it is reaped.
            time.sleep(0.001)
        self._start_later(target, fault.seconds)

    def _start_later(self, target: FaultTarget, seconds: float) -> None:
        started = target.started

        def start_again() -> None:
            if target.dead and target.started == started:
                self.start(target)

        self.call_later(seconds, start_again)

    def _stop(self, target: FaultTarget, fault: Fault) -> None:
        if target.dead or target.stopped:
            self.note(target.name, "spared", "stop: it is dead or stopped")
            return
        self.note(target.name, "stop")
        target.signal(signal.SIGSTOP)
        target.stopped = True
        started = target.started
        self.call_later(fault.seconds, lambda: self._continue(target, started))

    def _continue(self, target: FaultTarget, started: int) -> None:
        if target.stopped and not target.dead and target.started == started:
            target.signal(signal.SIGCONT)
            target.stopped = False
            self.note(target.name, "continue")

    def _disturb_link(self, worker: Worker, fault: Fault) -> None:
        assert worker.proxy is not None  # noqa: S101
        self.note(worker.name, fault.kind, f"{fault.value:g}" if fault.value else "")
        undo = _disturb(worker.proxy, fault)
        if undo is None:
            return

        def end() -> None:
            undo()
            self.note(worker.name, f"{fault.kind} over")

        self.call_later(fault.seconds, end)

    def end(self) -> None:
        """End all workers. Continue stopped processes, so that they can end."""
        for target in self.targets.values():
            if target.started and target.alive():
                target.signal(signal.SIGCONT)
        for target in self.targets.values():
            if isinstance(target, Worker):
                target.child.stop(5.0)


def _disturb(proxy: Proxy, fault: Fault) -> Callable[[], None] | None:
    """Disturb a link. Return the function that undoes it; None for a fault that has no end."""
    match fault.kind:
        case "partition":
            proxy.cut()
            return proxy.heal
        case "reset":
            proxy.cut(reset=True)
            return proxy.heal
        case "throttle":
            proxy.set_rates(fault.value, fault.value)
            return lambda: proxy.set_rates(math.inf, math.inf)
        case "delay":
            proxy.delay_seconds = fault.value
            return lambda: setattr(proxy, "delay_seconds", 0.0)
        case _:
            proxy.half_open()
            return None


def library() -> Path | None:
    """Return the path of libfaketime, or None if it is not installed."""
    return next((path for folder in FOLDERS for path in Path("/").glob(f"{folder[1:]}/{LIBRARY}")), None)


def require_library() -> Path:
    """Return the path of libfaketime. Raise ConfigError if it is not installed."""
    if (found := library()) is None:
        raise ConfigError(
            "the fault `clock` needs libfaketime, which is not installed here",
            "Install it (Debian: `apt install libfaketime`), or leave `clock` out of --kinds.",
            code="chaos.no-libfaketime",
        )
    return found


class FakeClock:
    """The time of day of one program, which libfaketime shifts. Its monotonic clock, and so its intervals, stay right.

    Args:
        file: The file that holds the offset. It is created with an offset of zero.

    Raises:
        ConfigError: libfaketime is not installed.
    """

    def __init__(self, file: Path) -> None:
        self._library, self._file = require_library(), file.absolute()
        self.jump(0.0)

    def environment(self) -> dict[str, str]:
        """Return the environment variables that the program must be started with."""
        return {
            "LD_PRELOAD": str(self._library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_CACHE_DURATION": str(REFRESH_SECONDS),
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def jump(self, seconds: float) -> None:
        """Set the program's clock ahead of the machine's by `seconds`, within REFRESH_SECONDS."""
        write_atomically(self._file, f"{seconds:+.3f}\n")
