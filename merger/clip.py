"""Clipping a contribution to a multiple of the usual norm, so that one outlier cannot throw the run off.

Norms are compared by the path that they were made on, learning rate times steps: the first contributions of a run go
over a few steps at the start of the warm-up, and are no measure of those that follow. (Compared as they are, a run of
eight islands was clipped to three times the first ones for a quarter of its length: docs/log.md.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

from archipelago.broker.config import RunConfig

WINDOW = 64
"""Norms that are remembered."""
ENOUGH = 8
"""Norms that must be known before anything is clipped."""
INTERVALS_MOST = 4
"""Steps over more intervals than these make no room for a larger norm, whoever says to have made them."""
RATE_LEAST = 1e-3
"""share of the learning rate's peak below which a path is not taken to be shorter: at the end it may be 0"""


def path(config: RunConfig, steps: int, global_step: int) -> float:
    """About how far Adam can have taken each element in `steps` up to the global step: by the rate in their middle."""
    inner, steps = config.inner, min(max(1, steps), INTERVALS_MOST * config.sync.interval)
    return steps * max(inner.rate_at(max(0.0, global_step - steps / 2)), RATE_LEAST * inner.peak)


@dataclass(frozen=True)
class NormWindow:
    """Norm over path of the last WINDOW contributions that were merged, oldest first, each as it was after clipping.

    As JSON it is the list of its norms, of which JSON keeps every bit.
    """

    norms: tuple[float, ...] = ()

    def with_norm(self, clipped_norm: float) -> NormWindow:
        """The window with one more norm, and the oldest one dropped when it is full.

        Pass the norm after clipping: an attacker who sends ever larger contributions then
        moves the median by no more than the multiple in half a window. Raises ValueError for a negative or
        non-finite norm.
        """
        return NormWindow((*self.norms, _checked(clipped_norm))[-WINDOW:])


def limit(window: NormWindow, multiple: float) -> float:
    """The largest norm over path that is not clipped, `multiple · median`; infinite where nothing is clipped.

    That is when `multiple` is 0, when fewer than ENOUGH norms are known, and when the median is 0: a fragment that has
    not moved so far must be able to start. (Covenant-72B clips to its running median by default.)
    """
    if multiple == 0.0 or len(window.norms) < ENOUGH:
        return math.inf
    usual = median(window.norms)
    return multiple * usual if usual > 0.0 else math.inf


def _checked(norm: float) -> float:
    if not (math.isfinite(norm) and norm >= 0.0):
        raise ValueError(f"a norm must be finite and not negative, not {norm}")
    return norm
