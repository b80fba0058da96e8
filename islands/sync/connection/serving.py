"""A watch for a run that no merger serves: say so at once, and again while it lasts."""

from __future__ import annotations

import logging
from collections.abc import Callable

from archipelago.broker.transport import ReaderClient

#: How often the warning is repeated while no merger serves.
REMIND_SECONDS = 60.0

log = logging.getLogger(__name__)


class MergerWatch:
    """What one island knows about the merger of its run.

    Attributes:
        is_served: Whether a merger serves the run; None before the first look, and if that is not known.
    """

    def __init__(self, reader: ReaderClient, run: str, clock: Callable[[], float]) -> None:
        self._reader, self._run, self._clock = reader, run, clock
        self.is_served: bool | None = None
        self._warned_at: float | None = None
        self._has_no_right = False

    @property
    def in_words(self) -> str:
        """What to show while no merger serves; otherwise empty."""
        return "no merger serves the run" if self.is_served is False else ""

    def look(self, *, is_over: bool) -> None:
        """Look whether a merger serves the run. One that is over needs none. Raises BrokerError."""
        if self._has_no_right:
            return
        self.is_served = self._reader.is_served()
        self._has_no_right = self.is_served is None  # asking again would only fill the server's log of refusals
        if self.is_served is False and not is_over:
            self._warn()
        elif self._warned_at is not None:
            log.info("a merger serves the run %r again", self._run)
            self._warned_at = None

    def _warn(self) -> None:
        now = self._clock()
        if self._warned_at is not None and now - self._warned_at < REMIND_SECONDS:
            return
        self._warned_at = now
        log.warning(
            "no merger serves the run %r. This island trains on within its window, and the run does not advance. "
            "Start one: `archipelago merger --run %s`, with $ARCHIPELAGO_URL set or with a merger's join file.",
            self._run,
            self._run,
            extra={"code": "island.no-merger"},
        )
