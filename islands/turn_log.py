"""A log of the turns of an island's loop, for measurements by other programs.

Each turn writes one line of JSON to the file that the environment names. Times are those of the machine's monotonic
clock, which all its processes share. A written line survives a kill of the process, so at most one turn is missing.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from archipelago.broker.errors import ConfigError

VARIABLE = "ARCHIPELAGO_TURN_LOG"
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

    @classmethod
    def named_in(cls, environment: Mapping[str, str], incarnation: str) -> TurnLog | None:
        """Open the file that the environment names, if any. Raises ConfigError if it cannot be written."""
        path = environment.get(VARIABLE)
        try:
            return cls(Path(path), incarnation) if path else None
        except OSError as error:
            raise ConfigError(
                f"Cannot write {path}, which {VARIABLE} names ({error.strerror})", "Name another file.", code="turn-log"
            ) from None

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
