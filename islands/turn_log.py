"""What `archipelago chaos` measures of islands: a log of the turns of their loops, with steps of a minimum duration.

A storm asks scripts for it by environment variables, so a script need not know of it. Each turn writes one line of JSON
to the file that the environment names. Times are those of the machine's monotonic clock, which all its processes share.
A written line survives a kill of the process, so at most one turn is missing.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "ARCHIPELAGO_TURN_LOG"
#: The minimum duration of a script's inner step in seconds.
STEP_VARIABLE = "ARCHIPELAGO_STEP_SECONDS"
_SCHEDULER_STATISTICS = Path("/proc/thread-self/schedstat")


class TurnLog:
    """The turns of one incarnation. Only the thread that creates it may use it."""

    def __init__(self, path: Path, incarnation: str) -> None:
        """Open the file. Raises OSError if it cannot be written."""
        self.incarnation = incarnation
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        is_there = _SCHEDULER_STATISTICS.exists()
        self._statistics = os.open(_SCHEDULER_STATISTICS, os.O_RDONLY) if is_there else -1
        self._waited = self._waited_seconds()

    def turned(self, at: float, steps: int, idle_seconds: float) -> None:
        """Write one turn, with the time that the thread waited for a core in it, if the system reports it.

        Args:
            at: The monotonic time.
            steps: Inner steps of this incarnation so far.
            idle_seconds: Time that the device was idle before this step.
        """
        waited, before = self._waited_seconds(), self._waited
        self._waited = waited
        line = {
            "at": round(at, 6), "who": self.incarnation, "steps": steps, "idle": round(idle_seconds, 6),
            "waited": round(waited - before, 6),
        }  # fmt: skip
        with contextlib.suppress(OSError):  # a full disk must not stop training
            os.write(self._file, (json.dumps(line) + "\n").encode())

    def _waited_seconds(self) -> float:
        """Return the time that this thread was ready to run without a core; 0 if the system does not report it."""
        if self._statistics < 0:
            return 0.0
        fields = os.pread(self._statistics, 128, 0).split()
        return int(fields[1]) * 1e-9


@dataclass
class Pacer:
    """A minimum duration of our worker's steps: the clock of a simulated device, which is slower than the real one.

    It works through its steps in order, with one call in its queue. Work of the training thread between two steps
    therefore costs nothing as long as it is shorter than a step. Call `dispatched` and then `delay_seconds` once for
    each call of the steps.

    Attributes:
        step_seconds_min: The minimum duration of a step; 0 means no minimum.
        idle_seconds: How long the device had been idle before the last call.
    """

    step_seconds_min: float = 0.0
    idle_seconds: float = 0.0
    _steps: int = 0
    _before_at: float = -math.inf
    _done_at: float = -math.inf

    def dispatched(self, steps: int, now: float) -> None:
        """Record that `steps` steps were dispatched to the device."""
        first = math.isinf(self._done_at)
        self.idle_seconds = 0.0 if first else max(0.0, now - self._done_at)
        self._steps, self._before_at = steps, self._done_at
        self._done_at = max(self._done_at, now) + steps * self.step_seconds_min

    def delay_seconds(self, now: float) -> float:
        """Return the remaining simulated time of the call before the last one, whose arithmetic is done at `now`."""
        if now > self._before_at:  # the steps take longer than the minimum, so the next ones begin later
            self._done_at = max(self._done_at, now + self._steps * self.step_seconds_min)
        return max(0.0, self._before_at - now)


class MeasuredTurns:
    """The turns of one script. Only the thread that joined may use it."""

    def __init__(
        self,
        turn_log: TurnLog,
        step_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        pacer: Pacer | None = None,
    ) -> None:
        """Begin with the first step.

        Args:
            turn_log: Receives one line for each `sync`.
            step_seconds: The minimum duration of an inner step.
            clock: Monotonic seconds.
            sleep: Waits for that many seconds.
            pacer: Knows how long the device was idle, and sees to the duration of steps itself.
        """
        self._pacer = pacer
        self._turn_log, self._step_seconds, self._clock, self._sleep = turn_log, step_seconds, clock, sleep
        self._steps = 0
        self._sync_seconds = 0.0
        self._stepped_at = clock()

    @classmethod
    def asked_for(
        cls, environment: Mapping[str, str], incarnation: str, pacer: Pacer | None = None
    ) -> MeasuredTurns | None:
        """Return what the environment asks for, if anything. With a pacer, steps have no other minimum duration."""
        path = environment.get(VARIABLE)
        if not path:
            return None
        seconds = 0.0 if pacer else float(environment.get(STEP_VARIABLE, "0"))
        return cls(TurnLog(Path(path), incarnation), seconds, pacer=pacer)

    def stepped(self, steps: int) -> None:
        """Log that the script has made steps, before any of them is sent. Wait first if they took too little time.

        Args:
            steps: The steps since the last call.
        """
        early = self._stepped_at + steps * self._step_seconds - self._clock()
        if early > 0:
            self._sleep(early)
        self._stepped_at = self._clock()
        self._steps += steps
        # A device may have had work during the last `sync`, so its idle time is at most that of the call.
        idle = self._sync_seconds if self._pacer is None else self._pacer.idle_seconds
        self._turn_log.turned(self._stepped_at, self._steps, idle)

    def synced(self) -> None:
        """Note that `sync` returns now."""
        self._sync_seconds = self._clock() - self._stepped_at
