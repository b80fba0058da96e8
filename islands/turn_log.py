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


class TurnLog:
    """The turns of one incarnation. Only the thread that creates it may use it."""

    def __init__(self, path: Path, incarnation: str) -> None:
        """Open the file. Raises OSError if it cannot be written."""
        self.incarnation = incarnation
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def turned(self, at: float, steps: int) -> None:
        """Write one turn.

        Args:
            at: The monotonic time.
            steps: Inner steps of this incarnation so far.
        """
        line = {"at": round(at, 6), "who": self.incarnation, "steps": steps}
        with contextlib.suppress(OSError):  # a full disk must not stop training
            os.write(self._file, (json.dumps(line) + "\n").encode())


@dataclass
class Pacer:
    """A minimum duration of our worker's steps: the clock of a simulated device, which is slower than the real one.

    It works through its steps in order, with one call in its queue. Work of the training thread between two steps
    therefore costs nothing as long as it is shorter than a step. Call `dispatched` and then `delay_seconds` once for
    each call of the steps.

    Attributes:
        step_seconds_min: The minimum duration of a step; 0 means no minimum.
    """

    step_seconds_min: float = 0.0
    _steps: int = 0
    _before_at: float = -math.inf
    _done_at: float = -math.inf

    def dispatched(self, steps: int, now: float) -> None:
        """Record that `steps` steps were dispatched to the device."""
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
    ) -> None:
        """Begin with the first step.

        Args:
            turn_log: Receives one line for each `sync`.
            step_seconds: The minimum duration of an inner step.
            clock: Monotonic seconds.
            sleep: Waits for that many seconds.
        """
        self._turn_log, self._step_seconds, self._clock, self._sleep = turn_log, step_seconds, clock, sleep
        self._steps = 0
        self._stepped_at = clock()

    @classmethod
    def asked_for(
        cls, environment: Mapping[str, str], incarnation: str, *, is_paced: bool = False
    ) -> MeasuredTurns | None:
        """Return what the environment asks for, if anything. The steps of a paced loop get no minimum duration here."""
        path = environment.get(VARIABLE)
        if not path:
            return None
        seconds = 0.0 if is_paced else float(environment.get(STEP_VARIABLE, "0"))
        return cls(TurnLog(Path(path), incarnation), seconds)

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
        self._turn_log.turned(self._stepped_at, self._steps)
