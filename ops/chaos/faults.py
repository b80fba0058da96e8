"""Processes that a schedule of faults is done to: kills and stops, with their ends, when each is due.

What else can happen to a process is for who knows what it is: a link, a disk, a clock.
"""

from __future__ import annotations

import heapq
import itertools
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

from archipelago.ops.chaos.report import Happening
from archipelago.ops.chaos.schedule import Fault
from archipelago.ops.settings import say

TICK_SECONDS = 0.01
UNPLANNED_SECONDS = 1.0
"""A process that ends although nobody killed it is noted, and started again after so long."""


class Target:
    """A process that faults are done to. `started` counts how often it was."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.started = 0
        self.stopped = False
        self.dead = True

    @property
    def pid(self) -> int:
        """Of the process that is there now, or was last."""
        raise NotImplementedError

    def start(self) -> None:
        """Starts it, or starts it again."""
        raise NotImplementedError

    def alive(self) -> bool:
        """Whether its process is there."""
        raise NotImplementedError

    def signal(self, number: signal.Signals) -> None:
        """To the process itself."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)


class Trial:
    """Some targets, by name, and what happens to them. `tend` again and again, from the main thread."""

    def __init__(self) -> None:
        self.happenings: list[Happening] = []
        self.targets: dict[str, Target] = {}
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._faults: deque[tuple[float, Fault]] = deque()
        self._count = itertools.count()
        self._said = 0

    def note(self, process: str, what: str, detail: str = "") -> None:
        """Something happened just now."""
        self.happenings.append(Happening(time.monotonic(), process, what, detail))

    def say_news(self, begin: float) -> None:
        """What was noted since, a line each, with the time since `begin`."""
        for happening in self.happenings[self._said :]:
            say(f"  {happening.at - begin:6.1f} s  {happening.process:<9} {happening.what} {happening.detail}".rstrip())
        self._said = len(self.happenings)

    def start(self, target: Target) -> None:
        """Starts it, or starts it again."""
        self.note(target.name, "start")
        target.start()
        target.dead, target.stopped, target.started = False, False, target.started + 1

    def schedule(self, faults: Iterable[Fault], begin: float) -> None:
        """All of these, from then on; what was before is no news."""
        self._said = len(self.happenings)
        self._faults = deque((begin + fault.at, fault) for fault in faults)

    def tend(self) -> None:
        """Does what is due, and looks after processes that ended by themselves."""
        while self._due and self._due[0][0] <= time.monotonic():
            heapq.heappop(self._due)[2]()
        while self._faults and self._faults[0][0] <= time.monotonic():
            fault = self._faults.popleft()[1]
            self.befall(self.targets[fault.target], fault)
        for target in self.targets.values():
            if target.started and not target.dead and not target.alive():
                target.dead = True
                self.note(target.name, "died")
                self._start_later(target, UNPLANNED_SECONDS)

    @property
    def is_busy(self) -> bool:
        """Whether a fault is still to come, or to be over."""
        return bool(self._faults or self._due) or any(target.dead or target.stopped for target in self.targets.values())

    def befall(self, target: Target, fault: Fault) -> None:
        """Does it to the target, now."""
        match fault.kind:
            case "kill":
                self._kill(target, fault)
            case "stop":
                self._stop(target, fault)
            case _:
                raise NotImplementedError(fault.kind)

    def calm(self) -> None:
        """No more faults: whatever was to be over later is over now."""
        self._faults.clear()
        while self._due:
            heapq.heappop(self._due)[2]()

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        """Does that in so many seconds, or once the faults end."""
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._count), what))

    def _kill(self, target: Target, fault: Fault) -> None:
        if target.dead:
            self.note(target.name, "spared", "kill: it is dead")
            return
        self.note(target.name, "kill")
        target.signal(signal.SIGKILL)
        target.dead = True
        while target.alive():  # a moment: it is reaped here, so that its name and its folder are free
            time.sleep(0.001)
        self._start_later(target, fault.seconds)

    def _start_later(self, target: Target, seconds: float) -> None:
        started = target.started

        def again() -> None:
            if target.dead and target.started == started:
                self.start(target)

        self.later(seconds, again)

    def _stop(self, target: Target, fault: Fault) -> None:
        if target.dead or target.stopped:
            self.note(target.name, "spared", "stop: it is dead, or stopped")
            return
        self.note(target.name, "stop")
        target.signal(signal.SIGSTOP)
        target.stopped = True
        started = target.started
        self.later(fault.seconds, lambda: self._continue(target, started))

    def _continue(self, target: Target, started: int) -> None:
        if target.stopped and not target.dead and target.started == started:
            target.signal(signal.SIGCONT)
            target.stopped = False
            self.note(target.name, "continue")
