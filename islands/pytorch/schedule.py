"""Notices a learning rate that follows the island's own steps where the run's clock does not.

A rate that a script computes from `run.step` stands still when the clock does, and jumps when it jumps. One of a
schedule that counts its calls, such as those of `torch.optim.lr_scheduler`, goes on as before. A rate of optax cannot
be watched: it is computed within the compiled step.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

#: Warn after this many signs in a row.
SIGNS_MIN = 8
#: Two changes of the rate are alike if they differ by this share. One over a jump of the clock is twice as large.
ALIKE = 0.2

log = logging.getLogger(__name__)


class ScheduleWatch:
    """Watches the rate of the first group of parameters."""

    def __init__(self, optimizer: Any) -> None:
        self._group, self._rate, self._signs = optimizer.param_groups[0], 0.0, 0
        self._clocks = deque([0, 0], maxlen=2)
        #: How far the rate, the run's clock and the island's own steps went in each of the last calls.
        self._passed = deque([(0.0, 0, 0)] * 3, maxlen=3)

    def look(self, clock: int, own: int) -> None:
        """Look at the rate after a `sync` for `own` steps, when the run's clock is at `clock`. Warn once."""
        rate = self._group["lr"]
        if not isinstance(rate, float) or self._signs >= SIGNS_MIN:  # reading a tensor would wait for the device
            return
        self._passed.append((rate - self._rate, self._clocks[1] - self._clocks[0], own))  # set by the clock before
        self._rate = rate
        self._clocks.append(clock)
        (before, clock_before, own_before), (here, passed, steps), (after, clock_after, own_after) = self._passed
        if clock_before == passed == 0:
            self._count(before, here)
        elif passed >= 2 * steps and (clock_before, clock_after) == (own_before, own_after):
            self._count(before, here, after)
        if self._signs == SIGNS_MIN:
            log.warning(
                "the learning rate follows this island's own steps and not the clock of the run, which is at step %s. "
                "Its schedule ends too late, or rises again. Compute the rate from `run.step` before each step: "
                '`for group in optimizer.param_groups: group["lr"] = rate(run.step)`',
                f"{clock:,}", extra={"code": "loop.schedule"},
            )  # fmt: skip

    def _count(self, *changes: float) -> None:
        """Count a sign if the rate has changed alike while the clock has not."""
        is_alike = any(changes) and max(changes) - min(changes) <= ALIKE * max(map(abs, changes))
        self._signs = self._signs + 1 if is_alike else 0
