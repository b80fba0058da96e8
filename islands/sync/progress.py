"""Measures of an island's own training: speed, loss and totals."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from archipelago.islands.sync.connection.uplink import averaged

SMOOTHING = 0.9
#: The most losses that are kept. They are removed when a contribution is sent, and without rounds none is sent.
LOSSES_KEPT = 256


@dataclass
class Speed:
    """A moving average of the seconds that an inner step takes."""

    step_seconds: float = 0.0

    def stepped(self, steps: int, seconds: float) -> None:
        """Record that `steps` inner steps took `seconds`."""
        self.step_seconds = averaged(self.step_seconds, seconds / steps, SMOOTHING)


@dataclass
class Losses:
    """The losses of the inner steps since the last contribution.

    Attributes:
        mean: The mean loss that was taken last; NaN if it was not finite, or before the first one.
        diverged: The number of consecutive means that were not finite.
    """

    mean: float = math.nan
    diverged: int = 0
    _pending: deque[Any] = field(default_factory=lambda: deque(maxlen=LOSSES_KEPT))

    def add(self, losses_n: Any) -> None:
        """Add the losses of n steps: a number, or an array of any framework that numpy can read."""
        self._pending.append(losses_n)

    def take_mean(self) -> float:
        """Return the mean loss of the steps since the last call, or the last mean if there were none.

        Losses that a device still computes wait for the next call, so that the training thread need not.
        """
        ready = []
        while self._pending and _is_ready(self._pending[0]):  # a device computes them in order
            ready.append(self._pending.popleft())
        if ready:
            mean = float(np.mean([np.mean(np.asarray(losses_n)) for losses_n in ready]))
            self.mean = mean if math.isfinite(mean) else math.nan  # messages carry no infinite numbers
            self.diverged = 0 if math.isfinite(mean) else self.diverged + 1
        return self.mean


def _is_ready(losses: Any) -> bool:
    """Return whether a value can be read without waiting for a device."""
    asked = getattr(losses, "is_ready", None)
    return asked is None or bool(asked())


@dataclass
class Totals:
    """Inner steps and tokens of an island over all its incarnations."""

    steps: int = 0
    tokens: int = 0
