"""What an island does when, for who watches from outside: a line of JSON for each turn of its loop, in a file that
the environment names. Without that, nothing is written.

Times are the machine's monotonic clock, which all of its processes share. A line is with the system once it is
written: a kill takes at most the turn that it interrupts.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from archipelago.broker.errors import ConfigError

VARIABLE = "ARCHIPELAGO_TURN_LOG"
_SCHEDULED = Path("/proc/thread-self/schedstat")


class TurnLog:
    """One incarnation's. Belongs to the thread that makes it."""

    def __init__(self, path: Path, incarnation: str) -> None:
        """Raises OSError where the file cannot be written."""
        self.incarnation = incarnation
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._scheduled = os.open(_SCHEDULED, os.O_RDONLY) if _SCHEDULED.exists() else -1
        self._waited = self._waited_seconds()

    @classmethod
    def named_in(cls, environment: Mapping[str, str], incarnation: str) -> TurnLog | None:
        """Where the environment names a file. Raises ConfigError for one that cannot be written."""
        path = environment.get(VARIABLE)
        try:
            return cls(Path(path), incarnation) if path else None
        except OSError as error:
            raise ConfigError(
                f"{VARIABLE}: {path} cannot be written ({error.strerror})", "Name another file."
            ) from None

    def turned(self, at: float, steps: int, versions: int, between_seconds: float, idle_seconds: float) -> None:
        """One turn of the loop is done.

        `steps`: inner steps of this incarnation; `versions`: of all fragments together, which grow with each adoption;
        `between_seconds`: what the training thread did between two steps; `idle_seconds`: of the device before this
        step. How long the thread waited for a core in this turn is noted beside them, where the system says so.
        """
        waited, before = self._waited_seconds(), self._waited
        self._waited = waited
        line = {
            "at": round(at, 6), "who": self.incarnation, "steps": steps, "versions": versions,
            "between": round(between_seconds, 6), "idle": round(idle_seconds, 6), "waited": round(waited - before, 6),
        }  # fmt: skip
        with contextlib.suppress(OSError):  # a full disk is no reason to stop training
            os.write(self._file, (json.dumps(line) + "\n").encode())

    def _waited_seconds(self) -> float:
        """Seconds that this thread was ready to run and had no core; 0 where the system does not say."""
        if self._scheduled < 0:
            return 0.0
        fields = os.pread(self._scheduled, 128, 0).split()
        return int(fields[1]) * 1e-9
