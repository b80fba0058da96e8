"""How long a round may wait for more contributions after its quorum, so that no island idles for it.

Decoupled DiLoCo (arXiv 2604.21428), Eq. 3: slack = τ·T_step − (T_quorum + T_sync), grace ≤ γ·slack. T_step is the time
of one stride (H/P inner steps) of the fastest live island. All times are in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Pace:
    """Exponential moving averages of a round's times; None before the first sample, which sets the average."""

    quorum_seconds: float | None = None
    """T_quorum: from the first contribution of a round to its quorum"""
    sync_seconds: float | None = None
    """T_sync: from the close of a round to its snapshot being out"""

    def after_quorum(self, sample: float, smoothing: float) -> Pace:
        """With one more time to quorum; `smoothing` is the decay (`SyncConfig.smoothing`)."""
        return Pace(_smoothed(self.quorum_seconds, sample, smoothing), self.sync_seconds)

    def after_sync(self, sample: float, smoothing: float) -> Pace:
        """With one more time to sync; `smoothing` is the decay (`SyncConfig.smoothing`)."""
        return Pace(self.quorum_seconds, _smoothed(self.sync_seconds, sample, smoothing))


def _smoothed(mean: float | None, sample: float, smoothing: float) -> float:
    sample = max(0.0, sample)  # a clock that was set back must not lengthen the window
    return sample if mean is None else smoothing * mean + (1.0 - smoothing) * sample


def stride_seconds(
    step_seconds_by_island: Mapping[str, float], live: Collection[str], interval: int, fragments: int
) -> float:
    """T_step: the fastest live island's time for a stride of H/P = interval/fragments inner steps.

    Only positive finite reports count. While no live island has one, those of all known islands stand in; 0.0 when
    nothing is known, which leaves no slack to wait in.
    """
    known = {name: s for name, s in step_seconds_by_island.items() if s > 0.0 and math.isfinite(s)}
    alive = [s for name, s in known.items() if name in live]
    return min(alive or known.values(), default=0.0) * interval / fragments


def slack(window: int, stride_seconds: float, pace: Pace) -> float:
    """Eq. 3: τ·T_stride − (T_quorum + T_sync), negative when rounds are late. What was not measured yet counts as 0."""
    return window * stride_seconds - ((pace.quorum_seconds or 0.0) + (pace.sync_seconds or 0.0))


def grace_seconds(gamma: float, slack: float) -> float:
    """The longest that a round stays open after its quorum: γ · max(0, slack)."""
    return gamma * max(0.0, slack)
