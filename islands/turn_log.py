"""What trials ask of islands: a log of the turns of their loops, and steps of a minimum duration.

A storm asks for both by environment variables, so a script need not know of it. Each turn writes one line of JSON to
the file that the environment names. Times are those of the machine's monotonic clock, which all its processes
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
#: The minimum duration of an inner step in seconds.
STEP_VARIABLE = "ARCHIPELAGO_STEP_SECONDS"


class MeasuredTurns:
    """The turns of one island. Only the thread that joined may use it.

    A minimum duration of steps is the clock of a simulated device, which is slower than the real one. Work between two
    steps, such as a sync, costs nothing as long as both together are shorter.
    """

    def __init__(
        self,
        step_seconds: float,
        log: Path | None = None,
        incarnation: str = "",
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Begin with the first step. The log gets one line for each `sync`. Raises OSError if it cannot be opened."""
        self._step_seconds, self._incarnation, self._clock, self._sleep = step_seconds, incarnation, clock, sleep
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) if log else None
        self._steps = 0
        self._due = clock()

    @classmethod
    def asked_for(cls, environment: Mapping[str, str], incarnation: str) -> MeasuredTurns | None:
        """Return what the environment asks for; None if that is nothing."""
        path, seconds = environment.get(VARIABLE), float(environment.get(STEP_VARIABLE, "0"))
        return cls(seconds, Path(path) if path else None, incarnation) if path or seconds else None

    def stepped(self, steps: int) -> None:
        """Log that the loop has made more steps, before any is sent. Wait first if they took too little time."""
        due = self._due + steps * self._step_seconds
        if (early := due - self._clock()) > 0:
            self._sleep(early)
        now = self._clock()
        self._due = max(due, now - steps * self._step_seconds)  # a late step is made up for by the next one at most
        self._steps += steps
        if self._log is not None:
            line = {"at": round(now, 6), "who": self._incarnation, "steps": self._steps}
            with contextlib.suppress(OSError):  # a full disk must not stop training
                os.write(self._log, (json.dumps(line) + "\n").encode())
