"""How much each contribution of a round counts, and how much the round as a whole does.

A contribution weighs `tokens · (tokens / steps) · s(staleness)`: Decoupled DiLoCo (arXiv 2604.21428), Algorithm 2,
times a staleness factor s. Within the round only the ratios matter (`shares`). Across rounds, a run whose rounds are
always somewhat stale would be slowed by s as such; so the round's mean s is divided by its running mean (`gain`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from archipelago.broker.config import MergeConfig

RUNNING_DECAY = 0.95
"""Decay, a round, of the running mean of s: a memory of about twenty rounds."""
_IDLE = 1e-9
"""what a contribution without tokens weighs against one of a single token"""
GAIN_MAX = 2.0
"""A fresh round after many stale ones is enlarged by at most this factor."""


def _none(staleness: int) -> float:
    return 1.0


def _polynomial(staleness: int) -> float:
    return float((1.0 + staleness) ** -0.5)


#: The staleness factor s in (0, 1] by name, from the staleness τ in versions. `none`: 1. `polynomial`: (1 + τ)^−½, from
#: FedAsync (arXiv 1903.03934). To add one, write a function here and add its name to `MergeConfig.staleness`.
STALENESS: dict[str, Callable[[int], float]] = {"none": _none, "polynomial": _polynomial}

Part = tuple[int, int, int]
"""What decides one contribution's weight: tokens ≥ 0, inner steps ≥ 1, staleness ≥ 0 in versions."""


@dataclass(frozen=True)
class RunningMean:
    """Exponential mean, over the rounds, of a round's mean s. It starts at 1, as if all rounds before were fresh."""

    value: float = 1.0

    def after(self, mean_staleness_factor: float) -> RunningMean:
        """The mean with one more round in it."""
        # In this form, unlike decay·a + (1 − decay)·b, a constant sample is an exact fixed point.
        return RunningMean(self.value + (1.0 - RUNNING_DECAY) * (mean_staleness_factor - self.value))


@dataclass(frozen=True)
class Weighed:
    """A round's decisions about weight, in the order of its parts."""

    shares: tuple[float, ...]
    """of each part, in [0, 1]; they sum to one"""
    gain: float
    """factor on the merged outer gradient, in (0, GAIN_MAX]"""
    running: RunningMean
    """for the next round"""


def raw_weight(tokens: int, steps: int) -> float:
    """`tokens · (tokens / steps)`: the work done, times its batch size (Decoupled DiLoCo, Algorithm 2). steps ≥ 1."""
    return tokens * (tokens / steps)


def _scaled(weights: Sequence[float]) -> list[float]:
    """The weights relative to the largest, so that no sum of them overflows; ones when all are zero."""
    if not all(math.isfinite(weight) and weight >= 0.0 for weight in weights):
        raise ValueError(f"weights must be finite and not negative: {list(weights)}")
    largest = max(weights, default=0.0)
    return [weight / largest if largest > 0.0 else 1.0 for weight in weights]


def shares(weights: Sequence[float]) -> list[float]:
    """Each weight's part of their sum; equal parts when all are zero. One weight has exactly 1.0.

    The sum is rounded once (`fsum`), so the order of the weights changes no bit of any share. Raises ValueError for a
    negative or non-finite weight.
    """
    scaled = _scaled(weights)
    total = math.fsum(scaled)
    return [weight / total for weight in scaled]


def gain(mean_staleness_factor: float, running: RunningMean) -> float:
    """How much a round counts against the rounds before it: its mean s over their running mean, at most GAIN_MAX."""
    return min(mean_staleness_factor / running.value, GAIN_MAX)


def effective(part: Part, config: MergeConfig) -> float:
    """A contribution's weight before its round is known: positive, so that a round of idle ones has a mean, too."""
    tokens, steps, staleness = part
    return max(raw_weight(tokens, steps), _IDLE) * STALENESS[config.staleness](staleness)


def weigh(parts: Sequence[Part], config: MergeConfig, running: RunningMean) -> Weighed:
    """Shares and gain of one round, from its parts (at least one).

    The gain is `gain(mean s, running)`, with the mean weighted by `raw_weight`; or mean s itself when
    `config.normalise` is off, so that stale rounds take smaller steps. Raises ValueError for a round without parts.
    """
    if not parts:
        raise ValueError("a round without contributions has no weights")
    s = STALENESS[config.staleness]
    raw = _scaled([raw_weight(tokens, steps) for tokens, steps, _ in parts])
    stale = [weight * s(staleness) for weight, (_, _, staleness) in zip(raw, parts, strict=True)]
    mean = math.fsum(stale) / math.fsum(raw)
    return Weighed(
        shares=tuple(shares(stale)),
        gain=gain(mean, running) if config.normalise else mean,
        running=running.after(mean),
    )
