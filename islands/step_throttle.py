"""A minimum duration of inner steps, which simulates a slower device. Trials of many islands on few cores use it.

The simulated device works through its steps in order, with one call in its queue. Work of the training thread between
two steps therefore costs nothing as long as it is shorter than a step. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class Pacer:
    """The clock of the simulated device. Call `dispatched` and then `delay_seconds` once for each call of the steps.

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
