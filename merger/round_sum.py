"""The sum of the contributions to one round: they are added as they arrive, and again if their weights change."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax

from archipelago.broker.config import MergeConfig
from archipelago.broker.errors import WireError
from archipelago.broker.messages import Contribution
from archipelago.broker.wire import Body
from archipelago.merger import merge_rules, weights
from archipelago.merger.scores import Judgement, Score, Sent, judge
from archipelago.merger.spectra import Group, Spectra
from archipelago.merger.weights import NormWindow


@dataclass(frozen=True)
class Addend:
    """A contribution that is in a round's sum.

    Attributes:
        entry: Its entry of the updates stream.
        contribution: Its header.
        norm: Its L2 norm before clipping.
        clip: The factor that it was multiplied by.
        path: The length of the path that its norm is compared by (`weights.path`).
        steps: Its steps that weigh (`weights.seen_steps`).
        weight: Its weight, before the round is known.
        body: Its values as its codec encoded them. They are kept until the round closes, because the final weights
            depend on all contributions.
    """

    entry: str
    contribution: Contribution
    norm: float
    clip: float
    path: float
    steps: int
    weight: float = field(compare=False)
    body: Body = field(compare=False, repr=False)

    @property
    def batch(self) -> float:
        """The tokens of a step, as its island says."""
        return self.contribution.tokens / self.contribution.steps


class RoundSum:
    """The weighted sum of the contributions that wait for a fragment's next round, and the list of them.

    Weights are relative to the largest one so far, which counts as one. No sum of them can overflow, and a contribution
    that stays alone keeps its bits. The tape keeps the order of arrival, which is the order of the sum.

    Args:
        groups: The tensors of the fragment.
        config: The merge rules.
        norms: The norms that clipping compares with.
        version: The fragment's version before the round.
        path: Returns the length of the path that a norm is compared by, from the contribution's number of steps.
        seen: Returns how many steps of a contribution weigh, from their number and its staleness.
        spectra: How the matrices share this machine's threads. It changes no bit.
    """

    def __init__(
        self,
        groups: tuple[Group, ...],
        config: MergeConfig,
        *,
        norms: NormWindow,
        version: int,
        path: Callable[[int], float],
        seen: Callable[[int, int], int] = lambda steps, staleness: steps,
        spectra: Spectra | None = None,
    ) -> None:
        self.addends: list[Addend] = []
        self.total_weight = 0.0
        self.version = version
        self._groups, self._config = groups, config
        self._limit = weights.limit(norms, config.clip)
        self._path, self._seen, self._spectra = path, seen, spectra
        self._acc: tuple[merge_rules.Accumulator, ...] = ()  # allocated late: many rounds of a fragment stay empty
        self._largest = 0.0

    def add(self, entry: str, contribution: Contribution, body: Body) -> None:
        """Decode a contribution into the sum. Raises WireError, and adds nothing, if a value is NaN or too large."""
        c = contribution
        staleness = self.version - c.base
        steps = self._seen(c.steps, staleness)
        own = weights.effective((c.tokens * steps / c.steps, steps, staleness), self._config)
        largest = max(own, self._largest)
        weight, keep = own / largest, self._largest / largest
        acc = self._acc or merge_rules.begin(self._groups)
        path = self._path(c.steps)
        taken = merge_rules.accumulate(acc, body, self._groups, weight=weight, keep=keep, limit=self._limit * path)
        self._acc = taken.acc
        if not taken.is_sound:
            found = f"the norm is {taken.norm:.1e}" if math.isfinite(taken.norm) else "a value is NaN or infinite"
            raise WireError(f"{found}; norms up to {merge_rules.NORM_MAX:.0e} can be merged", code="wire.not-finite")
        self._largest, self.total_weight = largest, keep * self.total_weight + weight
        self.addends.append(Addend(entry, contribution, taken.norm, taken.clip, path, steps, own, body))

    def merged(self, gain: float) -> jax.Array:
        """Return the merged outer gradient (float32 [N]), times `gain`. See `merge_rules.finish`."""
        total = self.total_weight or 1.0
        return merge_rules.finish(self._acc, self._groups, total_weight=total, gain=gain, spectra=self._spectra)

    def batches(self) -> list[float]:
        """Return how many tokens of a step of each contribution weigh."""
        islands = [a.contribution.island for a in self.addends]
        return weights.seen_batches([a.batch for a in self.addends], islands)

    def judged(self, known: Mapping[str, Score], live: int) -> Judgement:
        """Compare the contributions with each other. `known` are the scores before the round."""
        sent = [
            Sent(
                island=a.contribution.island,
                staleness=self.version - a.contribution.base,
                tokens=round(batch * a.steps),
                norm=a.norm / a.path,
                loss=a.contribution.loss,
                digest=a.contribution.digest,
                body=a.body,
            )
            for a, batch in zip(self.addends, self.batches(), strict=True)
        ]
        spans = tuple((group.start, group.length) for group in self._groups)
        return judge(known, sent, spans, live)

    def reweigh(self, factors: Sequence[float], limits: Sequence[float]) -> None:
        """Add all contributions again, with a factor on the weight of each and another limit to its norm over path.

        Nothing is added again, and the sum keeps its bits, where all factors are 1 and no norm is over its limit.
        """
        clipped = [a.norm * a.clip > limit * a.path for a, limit in zip(self.addends, limits, strict=True)]
        if all(factor == 1.0 for factor in factors) and not any(clipped):
            return
        final = [a.weight * factor for a, factor in zip(self.addends, factors, strict=True)]
        largest = max(final)
        self._acc, self.total_weight = merge_rules.begin(self._groups), 0.0
        for i, addend in enumerate(self.addends):
            weight, limit = final[i] / largest, min(self._limit, limits[i]) * addend.path
            if weight > 0.0:
                taken = merge_rules.accumulate(self._acc, addend.body, self._groups, weight=weight, limit=limit)
                self._acc, self.total_weight = taken.acc, self.total_weight + weight
                self.addends[i] = replace(addend, clip=taken.clip)
