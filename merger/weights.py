"""Weights: the share of each contribution in a round, the gain of the round, and the norm limit for clipping.

A contribution weighs `tokens · (tokens / steps) · s(staleness)`: Decoupled DiLoCo (arXiv 2604.21428), Algorithm 2,
times a staleness factor s. Within a round only the ratios matter (`shares`). Across rounds, s alone would slow a run
whose rounds are always somewhat stale, so the mean s of a round is divided by its running mean (`gain`).

An island cannot raise its weight by what it says of itself. Steps count up to the number that the closed rounds allow
(`seen_steps`), and tokens up to the median batch of the round's islands (`seen_batches`).

A contribution is clipped to a multiple of the usual norm, so that one outlier cannot derail the run. Norms are divided
by the length of the path behind them, which is learning rate times steps. The first contributions of a run cover a few
steps at the start of the warm-up, and their norms alone would be far too small a measure for later ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from archipelago.broker.config import MergeConfig, RunConfig, SyncConfig

#: Decay per round of the running mean of s, which remembers about twenty rounds.
RUNNING_DECAY = 0.95
#: A fresh round after many stale ones is enlarged by at most this factor.
GAIN_MAX = 2.0
#: How many norms are remembered for clipping.
WINDOW = 64
#: Nothing is clipped before this many norms are known.
ENOUGH = 8
#: Steps beyond this many sync intervals do not count as a longer path, whatever an island claims.
INTERVALS_MOST = 4
#: A path counts at least this share of the peak learning rate per step, because the rate may fall to 0 at the end.
RATE_LEAST = 1e-3
#: The weight of a contribution without tokens. One with a single token in a single step weighs 1.
_IDLE = 1e-9
#: A weight above its bound by less than this share is within it, because sums are rounded.
_ROUNDING = 1e-9

#: What decides one contribution's weight: tokens ≥ 0, inner steps ≥ 1, staleness ≥ 0 in versions.
Part = tuple[float, int, int]


def _none(staleness: int) -> float:
    return 1.0


def _polynomial(staleness: int) -> float:
    return float((1.0 + staleness) ** -0.5)


#: The staleness factor s in (0, 1] by name, from the staleness τ in versions. `none`: 1. `polynomial`: (1 + τ)^−½, from
#: FedAsync (arXiv 1903.03934). To add one, write a function here and add its name to `MergeConfig.staleness`.
STALENESS: dict[str, Callable[[int], float]] = {"none": _none, "polynomial": _polynomial}


@dataclass(frozen=True)
class RunningMean:
    """Exponential mean over the rounds of a round's mean s. It starts at 1, as if all earlier rounds were fresh."""

    value: float = 1.0

    def after(self, mean_staleness_factor: float) -> RunningMean:
        """Return the mean with one more round in it."""
        # In this form, unlike decay·a + (1 − decay)·b, a constant sample is an exact fixed point.
        return RunningMean(self.value + (1.0 - RUNNING_DECAY) * (mean_staleness_factor - self.value))


@dataclass(frozen=True)
class Weighed:
    """The weights of one round.

    Attributes:
        shares: The share of each part in [0, 1]; they sum to one.
        gain: The factor on the merged outer gradient, in (0, GAIN_MAX].
        running: The running mean for the next round.
    """

    shares: tuple[float, ...]
    gain: float
    running: RunningMean


def raw_weight(tokens: float, steps: int) -> float:
    """Return `tokens · (tokens / steps)`, the work done times its batch size (Algorithm 2). steps ≥ 1."""
    return tokens * (tokens / steps)


def _scaled(weights: Sequence[float]) -> list[float]:
    """Return the weights relative to the largest, so that no sum overflows; ones when all are zero."""
    if not all(math.isfinite(weight) and weight >= 0.0 for weight in weights):
        raise ValueError(f"weights must be finite and not negative: {list(weights)}")
    largest = max(weights, default=0.0)
    return [weight / largest if largest > 0.0 else 1.0 for weight in weights]


def shares(weights: Sequence[float]) -> list[float]:
    """Return each weight's part of their sum; equal parts when all are zero. A single weight gets exactly 1.0.

    The sum is rounded once (`fsum`), so the order of the weights changes no bit of any share.

    Raises:
        ValueError: A weight is negative or not finite.
    """
    scaled = _scaled(weights)
    total = math.fsum(scaled)
    return [weight / total for weight in scaled]


def capped(weights: Sequence[float], islands: Sequence[str], cap: float) -> list[float]:
    """Return the factor on each weight by which no island weighs more than `cap` times the mean of the others.

    The largest islands are lowered to one common level, so that all of them meet the bound exactly. A factor is exactly
    1.0 where nothing is lowered. The order of the weights changes no bit.

    Args:
        weights: The weights of the contributions, not negative.
        islands: The island of each contribution.
        cap: At least 1. An island's share is then at most cap / (M - 1 + cap) of M islands.
    """
    of_island: dict[str, list[float]] = {}
    for weight, island in zip(weights, islands, strict=True):
        of_island.setdefault(island, []).append(weight)
    totals = {island: math.fsum(own) for island, own in of_island.items()}
    ordered, others = sorted(totals.values(), reverse=True), len(totals) - 1
    if others < 1:
        return [1.0] * len(weights)
    level = math.inf
    for lowered, largest in enumerate(ordered):
        # If the first `lowered` islands weigh v each and the others R together, the bound v <= cap * mean of the others
        # of such an island is an equality for this v.
        level = cap * math.fsum(ordered[lowered:]) / (others + cap * (1 - lowered))
        if largest <= level * (1.0 + _ROUNDING):
            break
    return [level / totals[i] if totals[i] > level * (1.0 + _ROUNDING) else 1.0 for i in islands]


def seen_steps(config: SyncConfig, fragments: int, steps: int, staleness: int) -> int:
    """Return how many of a contribution's steps weigh: an interval for each version since its base, and the window.

    The fastest island's stride is the clock of the rounds, so no island that answers them has done more. What islands
    did while no merger served counts as one interval for each of them.
    """
    strides = fragments * (staleness + 1) + min(config.window, fragments)
    return min(steps, math.ceil(strides * config.interval / fragments))


def seen_batches(batches: Sequence[float], islands: Sequence[str]) -> list[float]:
    """Return how many tokens of a step weigh: at most the upper median of the batches of the round's islands.

    A minority of islands cannot raise that median. With two islands it is the larger batch, because nobody can tell
    which of the two is right.

    Args:
        batches: The tokens of a step of each contribution.
        islands: The island of each contribution.
    """
    largest: dict[str, float] = {}
    for batch, island in zip(batches, islands, strict=True):
        largest[island] = max(batch, largest.get(island, 0.0))
    usual = sorted(largest.values(), reverse=True)[(len(largest) - 1) // 2] if largest else 0.0
    return [min(batch, usual) for batch in batches]


def gain(mean_staleness_factor: float, running: RunningMean) -> float:
    """Return the factor on a round: its mean s over the running mean of earlier rounds, at most GAIN_MAX."""
    return min(mean_staleness_factor / running.value, GAIN_MAX)


def effective(part: Part, config: MergeConfig) -> float:
    """Return a contribution's weight before its round is known. It is positive even for one without tokens."""
    tokens, steps, staleness = part
    return max(raw_weight(tokens, steps), _IDLE) * STALENESS[config.staleness](staleness)


def weigh(
    parts: Sequence[Part], config: MergeConfig, running: RunningMean, factors: Sequence[float] | None = None
) -> Weighed:
    """Return the shares and the gain of one round.

    Args:
        parts: The contributions.
        config: The merge rules.
        running: The running mean of earlier rounds.
        factors: A factor in [0, 1] on the weight of each part, not all 0; default 1.

    The gain is `gain(mean s, running)`, where the mean is weighted by `raw_weight`. When `config.normalise` is off, the
    gain is the mean s itself, so stale rounds take smaller steps.

    Raises:
        ValueError: There are no parts.
    """
    if not parts:
        raise ValueError("a round without contributions has no weights")
    s = STALENESS[config.staleness]
    kept = factors or [1.0] * len(parts)
    raw = _scaled([raw_weight(tokens, steps) * factor for (tokens, steps, _), factor in zip(parts, kept, strict=True)])
    stale = [weight * s(staleness) for weight, (_, _, staleness) in zip(raw, parts, strict=True)]
    mean = math.fsum(stale) / math.fsum(raw)
    return Weighed(
        shares=tuple(shares(stale)),
        gain=gain(mean, running) if config.normalise else mean,
        running=running.after(mean),
    )


# -- clipping ------------------------------------------------------------------------------------------------------


def path(config: RunConfig, steps: int, run_step: float) -> float:
    """Return about how far Adam can have moved each element in `steps` up to the run's own step.

    It is the number of steps times the learning rate in their middle. For users' own loops, it is the number of steps.
    """
    inner, steps = config.inner, min(max(1, steps), INTERVALS_MOST * config.sync.interval)
    if config.has_own_loops:  # the run does not know their learning rates
        return float(steps)
    return steps * max(inner.rate_at(max(0.0, run_step - steps / 2)), RATE_LEAST * inner.peak)


@dataclass(frozen=True)
class NormWindow:
    """Norm over path of the last WINDOW merged contributions after clipping, oldest first.

    Attributes:
        norms: The norms.
        step: The run's step before the round that added the newest ones.
    """

    norms: tuple[float, ...] = ()
    step: int = 0

    def with_norm(self, clipped_norm: float) -> NormWindow:
        """Return the window with one more norm, without the oldest one when it is full.

        Pass the norm after clipping. An attacker who sends ever larger contributions then moves the median by no more
        than the clipping multiple in half a window.

        Raises:
            ValueError: The norm is negative or not finite.
        """
        if not (math.isfinite(clipped_norm) and clipped_norm >= 0.0):
            raise ValueError(f"a norm must be finite and not negative, not {clipped_norm}")
        return NormWindow((*self.norms, clipped_norm)[-WINDOW:], self.step)


def limit(window: NormWindow, multiple: float) -> float:
    """Return the largest norm over path that is not clipped, `multiple · median`.

    It is infinite when `multiple` is 0, when fewer than ENOUGH norms are known, and when the median is 0, because a
    fragment that has not moved so far must be able to start.
    """
    if multiple == 0.0 or len(window.norms) < ENOUGH:
        return math.inf
    usual = median(window.norms)
    return multiple * usual if usual > 0.0 else math.inf
