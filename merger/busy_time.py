"""The time that a merger works, in contrast to the time that it waits for contributions. Pure: clocks are arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class BusyTime:
    """Adds up the time inside `working`, without that inside `waiting`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds = 0.0
        self._since: float | None = None

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count the time of this block."""
        self._since = self._clock()
        try:
            yield
        finally:
            self._add(None)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Leave out the time of this block, which is inside `working`."""
        self._add(None)
        try:
            yield
        finally:
            self._since = self._clock()

    def take(self) -> float:
        """Return the seconds since the last call, and begin again."""
        self._add(self._clock())
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _add(self, since: float | None) -> None:
        if self._since is not None:
            self._seconds += max(0.0, self._clock() - self._since)
            self._since = since
