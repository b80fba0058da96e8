"""What `archipelago chaos` measures of a user's training script: each `sync`, and steps of a minimum duration.

The storm asks for it by environment variables, so a script need not know of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from archipelago.broker.errors import ConfigError
from archipelago.islands.turn_log import TurnLog

#: The minimum duration of an inner step in seconds.
STEP_VARIABLE = "ARCHIPELAGO_STEP_SECONDS"


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
        self._sync_seconds = 0.0
        self._stepped_at = clock()

    @classmethod
    def asked_for(cls, environment: Mapping[str, str], incarnation: str) -> MeasuredTurns | None:
        """Return what the environment asks for, if anything. Raises ConfigError (`turn-log`) if that is impossible."""
        turn_log = TurnLog.named_in(environment, incarnation)
        if turn_log is None:
            return None
        given = environment.get(STEP_VARIABLE, "0")
        try:
            seconds = float(given)
        except ValueError:
            seconds = math.nan
        if not 0 <= seconds < math.inf:
            raise ConfigError(f"{STEP_VARIABLE} cannot be {given!r}", "Give seconds, or unset it.", code="turn-log")
        return cls(turn_log, seconds)

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
        self._turn_log.turned(self._stepped_at, self._steps, self._sync_seconds)

    def synced(self) -> None:
        """Note that `sync` returns now."""
        self._sync_seconds = self._clock() - self._stepped_at
