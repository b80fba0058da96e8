"""What trials ask of islands: a log of the turns of their loops, and steps of a minimum duration.

A storm asks scripts for both by environment variables, so a script need not know of it. Each turn writes one line of
JSON to the file that the environment names. Times are those of the machine's monotonic clock, which all its processes
share. A written line survives a kill of the process, so at most one turn is missing.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping
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


class MeasuredTurns:
    """The turns of one island. Only the thread that joined may use it.

    A minimum duration of steps is the clock of a simulated device, which is slower than the real one. Work between two
    steps, such as a sync, costs nothing as long as both together are shorter.
    """

    def __init__(
        self,
        turn_log: TurnLog | None,
        step_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Begin with the first step.

        Args:
            turn_log: Receives one line for each `sync`, if there is one.
            step_seconds: The minimum duration of an inner step.
            clock: Monotonic seconds.
            sleep: Waits for that many seconds.
        """
        self._turn_log, self._step_seconds, self._clock, self._sleep = turn_log, step_seconds, clock, sleep
        self._steps = 0
        self._due = clock()

    @classmethod
    def asked_for(
        cls, environment: Mapping[str, str], incarnation: str, step_seconds: float = 0.0
    ) -> MeasuredTurns | None:
        """Return what the environment asks for, or `--step-seconds-min`; None if neither does."""
        path, seconds = environment.get(VARIABLE), step_seconds or float(environment.get(STEP_VARIABLE, "0"))
        return cls(TurnLog(Path(path), incarnation) if path else None, seconds) if path or seconds else None

    def stepped(self, steps: int) -> None:
        """Log that the loop has made steps, before any of them is sent. Wait first if they took too little time.

        Args:
            steps: The steps since the last call.
        """
        due = self._due + steps * self._step_seconds
        if (early := due - self._clock()) > 0:
            self._sleep(early)
        now = self._clock()
        self._due = max(due, now - steps * self._step_seconds)  # a late step is made up for by the next one at most
        self._steps += steps
        if self._turn_log is not None:
            self._turn_log.turned(now, self._steps)
