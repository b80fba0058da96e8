"""Weights: the share of each contribution in a round, the gain of the round, the norm limit for clipping, and rules.

A contribution weighs `tokens · (tokens / steps) · s(staleness)`: Decoupled DiLoCo (arXiv 2604.21428), Algorithm 2,
times a staleness factor s. Within a round only the ratios matter (`shares`). Across rounds, s alone would slow a run
whose rounds are always somewhat stale, so the mean s of a round is divided by its running mean (`gain`).

An island cannot raise its weight by what it says of itself: its steps and tokens count as far as `claims.seen` goes.

A contribution is clipped to a multiple of the usual norm, so that one outlier cannot derail the run. Norms are divided
by the length of the path behind them, which is learning rate times steps. The first contributions of a run cover a few
steps at the start of the warm-up, and their norms alone would be far too small a measure for later ones.

A group is the rule by which a tensor of a fragment is merged, and in which blocks. No JAX.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np

from archipelago.broker.config import MergeConfig, RunConfig
from archipelago.broker.manifest import Tensor
from archipelago.merger.scores import Sent, short
from archipelago.merger.spectra import Matrix, memory, operations

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
#: Norm over path of the last merged contributions to a fragment after clipping, oldest first.
Norms = tuple[float, ...]
#: The weight of a contribution without tokens. One with a single token in a single step weighs 1.
_IDLE = 1e-9
#: A weight above its bound by less than this share is within it, because sums are rounded.
_ROUNDING = 1e-9


#: The staleness factor s in (0, 1] by name, from the staleness τ in versions. `none`: 1. `polynomial`: (1 + τ)^−½, from
#: FedAsync (arXiv 1903.03934). To add one, write it here and add its name to `MergeConfig.staleness`.
STALENESS: dict[str, Callable[[int], float]] = {
    "none": lambda staleness: 1.0,
    "polynomial": lambda staleness: float((1.0 + staleness) ** -0.5),
}


class RunningMean(NamedTuple):
    """Exponential mean over the rounds of a round's mean s. It starts at 1, as if all earlier rounds were fresh."""

    value: float = 1.0

    def after(self, mean_staleness_factor: float) -> RunningMean:
        """Return the mean with one more round in it."""
        # In this form, unlike decay·a + (1 − decay)·b, a constant sample is an exact fixed point.
        return RunningMean(self.value + (1.0 - RUNNING_DECAY) * (mean_staleness_factor - self.value))


def shares(weights: Sequence[float]) -> list[float]:
    """Return each weight's part of their sum. Not all are zero. A single weight gets exactly 1.0.

    The sum is rounded once (`fsum`), so the order of the weights changes no bit of any share. Raises ValueError for a
    weight that is negative or not finite.
    """
    if not all(math.isfinite(weight) and weight >= 0.0 for weight in weights):
        raise ValueError(f"weights must be finite and not negative: {list(weights)}")
    largest = max(weights)
    scaled = [weight / largest for weight in weights]  # no sum of them overflows
    total = math.fsum(scaled)
    return [weight / total for weight in scaled]


def capped(weights: Sequence[float], islands: Sequence[str], cap: float) -> list[float]:
    """Return the factor on each weight by which no island weighs more than `cap` times the mean of the others.

    The largest islands are lowered to one common level, so that all of them meet the bound exactly. A factor is exactly
    1.0 where nothing is lowered. An island without any weight counts as absent. The order of weights changes no bit.

    Args:
        cap: At least 1. An island's share is then at most cap / (M - 1 + cap) of M islands.
    """
    of_island: dict[str, list[float]] = {}
    for weight, island in zip(weights, islands, strict=True):
        of_island.setdefault(island, []).append(weight)
    totals = {island: math.fsum(own) for island, own in of_island.items()}
    ordered = sorted(filter(None, totals.values()), reverse=True)
    others = len(ordered) - 1
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


def final(sent: Sequence[Sent], factors: Sequence[float], config: MergeConfig) -> list[float]:
    """Return the weights of a round's contributions, with these factors of their islands and the share cap.

    The weight `tokens · (tokens / steps)` is the work done times its batch size (Algorithm 2). Without its factor, a
    weight is positive, even that of a contribution without tokens.
    """
    staleness = STALENESS[config.staleness]
    own = [
        factor * max(one.tokens * (one.tokens / one.steps), _IDLE) * staleness(one.staleness)
        for one, factor in zip(sent, factors, strict=True)
    ]
    lowered = capped(own, [one.island for one in sent], config.share_cap)
    return [weight * factor for weight, factor in zip(own, lowered, strict=True)]


def gain(
    of_round: Sequence[float], staleness: Sequence[int], config: MergeConfig, running: RunningMean
) -> tuple[float, RunningMean]:
    """Return the factor on the merged outer gradient, in (0, GAIN_MAX], and the running mean for the next round.

    It is the mean s over the running mean of earlier rounds. The mean s is weighted by the weights without s. When
    `config.normalise` is off, the gain is the mean s itself, so stale rounds take smaller steps.

    Args:
        of_round: The share of each contribution.
    """
    s = [STALENESS[config.staleness](each) for each in staleness]
    mean = math.fsum(of_round) / math.fsum(share / factor for share, factor in zip(of_round, s, strict=True))
    return min(mean / running.value, GAIN_MAX) if config.normalise else mean, running.after(mean)


# -- clipping ------------------------------------------------------------------------------------------------------


def path(config: RunConfig, steps: int, run_step: float) -> float:
    """Return about how far Adam can have moved each element in `steps` up to the run's own step.

    It is the number of steps times the learning rate in their middle. For users' own loops, it is the number of steps.
    """
    inner, steps = config.inner, min(max(1, steps), INTERVALS_MOST * config.sync.interval)
    if config.has_user_loops:  # the run does not know their learning rates
        return float(steps)
    return steps * max(inner.rate_at(max(0.0, run_step - steps / 2)), RATE_LEAST * inner.peak)


def with_norm(norms: Norms, clipped_norm: float) -> Norms:
    """Return the norms with one more, of which the newest WINDOW are remembered.

    Pass the norm after clipping. An attacker who sends ever larger contributions then moves the median by no more than
    the clipping multiple in half a window. Raises ValueError for a norm that is negative or not finite.
    """
    if not (math.isfinite(clipped_norm) and clipped_norm >= 0.0):
        raise ValueError(f"a norm must be finite and not negative, not {clipped_norm}")
    return (*norms, short(clipped_norm))[-WINDOW:]


def limit(norms: Norms, multiple: float) -> float:
    """Return the largest norm over path that is not clipped, `multiple · median`.

    It is infinite when `multiple` is 0, when fewer than ENOUGH norms are known, and when the median is 0, because a
    fragment that has not moved so far must be able to start.
    """
    if multiple == 0.0 or len(norms) < ENOUGH:
        return math.inf
    usual = median(norms)
    return multiple * usual if usual > 0.0 else math.inf


@dataclass(frozen=True)
class Group:
    """One tensor in the fragment's vector.

    Attributes:
        start: Its first element.
        length: The number of its elements.
        rule: The name of its merge rule.
        shape: Its shape. Only matrices, and stacks of them along the leading axes, have a spectrum.
        exponent: The power of the singular values that `isotropic` leaves, 0 or ½.
        blocks: Into how many blocks `isotropic` cuts the shorter side of each matrix. Each block is merged as a matrix
            of its own, and keeps its norm.
    """

    start: int
    length: int
    rule: str
    shape: tuple[int, ...] = ()
    exponent: float = 0.0
    blocks: int = 1

    @property
    def end(self) -> int:
        """One past the last element."""
        return self.start + self.length

    @property
    def changes_spectrum(self) -> bool:
        """Whether `isotropic` differs from `rda` for this tensor. Vectors, rows and columns have one singular value."""
        return self.rule == "isotropic" and len(self.shape) > 1 and min(self.shape[-2:]) > 1

    @property
    def operations(self) -> float:
        """The floating-point operations of changing the spectra of all blocks."""
        *stack, rows, columns = self.shape
        side, length = sorted((rows, columns))
        sides = [len(part) for part in np.array_split(range(side), self.blocks)]
        return math.prod(stack) * sum(operations((part, length), self.exponent) for part in sides)

    @property
    def largest_block(self) -> tuple[int, int]:
        """The shape of the largest block, shorter side first."""
        side, length = sorted(self.shape[-2:])
        return math.ceil(side / self.blocks), length

    def matrices(self, fragment_N: Matrix) -> list[Matrix]:
        """Return the blocks as views of a fragment's vector."""
        *_, rows, columns = self.shape
        stack = fragment_N[self.start : self.end].reshape(-1, rows, columns)
        return [part_RC for each_RC in stack for part_RC in np.array_split(each_RC, self.blocks, int(rows > columns))]


def groups(layout: Sequence[tuple[Tensor, int]], config: MergeConfig) -> tuple[Group, ...]:
    """Return the tensors of one fragment in order, from its row of `Manifest.layout`. Empty tensors are left out."""
    return tuple(_group(tensor, offset, config) for tensor, offset in layout if tensor.size)


def _group(tensor: Tensor, offset: int, config: MergeConfig) -> Group:
    is_embedding = tensor.kind == "embedding"
    rule, exponent = (
        (config.embedding, config.embedding_exponent) if is_embedding else (config.rest, config.rest_exponent)
    )
    if rule != "isotropic":  # then the shape decides nothing, and equal groups share a program
        return Group(offset, tensor.size, rule)
    blocks = math.ceil(min(tensor.shape[-2:], default=1) / config.isotropic_side_max)
    return Group(offset, tensor.size, rule, tensor.shape, exponent, blocks if len(tensor.shape) > 1 else 1)


def cycle_work(tensors: Sequence[Tensor], config: MergeConfig) -> tuple[float, int]:
    """Return the floating-point operations and the elements of all spectra of a cycle: each fragment is merged once."""
    changed = _changed(tensors, config)
    return sum(group.operations for group in changed), sum(group.length for group in changed)


def spectra_bytes(tensors: Sequence[Tensor], config: MergeConfig, largest: int, threads: int) -> int:
    """Return the memory that spectra take at their peak on the processor, besides the fragment that is merged.

    Each thread changes a block, and all blocks are of one fragment. `largest` is the size of the largest one.
    """
    shapes = [(group.largest_block, group.exponent) for group in _changed(tensors, config)]
    counts = (min(threads, max(1, largest // math.prod(shape))) for shape, _ in shapes)
    return max((count * memory(*each) for count, each in zip(counts, shapes, strict=True)), default=0)


def _changed(tensors: Sequence[Tensor], config: MergeConfig) -> list[Group]:
    return [group for group in groups([(tensor, 0) for tensor in tensors], config) if group.changes_spectrum]
