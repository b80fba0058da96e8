"""Gives inner steps a minimum duration, as if a slower device made them: for trials of many islands on few cores. Pure.

The device that is stood in for works through its steps one after the other, with one stretch of them waiting: so what
the training thread does between two steps costs it nothing as long as that takes less than a step, as on any device
that works beside its host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class Pacer:
    """When such a device is done with what it was given. Call `dispatched` and then `nap_seconds`, once a stretch."""

    step_seconds_min: float = 0.0
    """0 leaves steps as fast as they are"""
    idle_seconds: float = 0.0
    """how long the device had stood idle when it was given the last stretch"""
    _steps: int = 0
    _before_at: float = -math.inf
    _done_at: float = -math.inf

    def dispatched(self, steps: int, now: float) -> None:
        """The device is given so many steps."""
        first = math.isinf(self._done_at)
        self.idle_seconds = 0.0 if first else max(0.0, now - self._done_at)
        self._steps, self._before_at = steps, self._done_at
        self._done_at = max(self._done_at, now) + steps * self.step_seconds_min

    def nap_seconds(self, now: float) -> float:
        """How long until the stretch before the last one is done; its arithmetic is done by `now`."""
        if now > self._before_at:  # the steps themselves take longer than the minimum: what follows begins later
            self._done_at = max(self._done_at, now + self._steps * self.step_seconds_min)
        return max(0.0, self._before_at - now)
