"""The merge of one round: add contributions to a sum as they arrive, then weigh, step and round for the islands.

Everything here but `warm_up` is pure: state and contributions in, state and decisions out. The service calls it live,
and `merger.replay` calls it with recorded contributions.

Islands that are sent quantised differences all hold the same rounded parameters, because all add the same differences.
The merger keeps a copy of these (`published_N`). It measures each difference from that copy to the exact parameters,
so a difference includes the rounding that earlier ones left out, and rounding errors do not add up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from archipelago.broker import control
from archipelago.broker.commits import Delivery
from archipelago.broker.config import MergeConfig, WireConfig
from archipelago.broker.errors import WireError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Contribution, RoundMember
from archipelago.broker.wire import Body, digest, encoded, unpack_encoded
from archipelago.merger import merge_rules, outer, weights
from archipelago.merger.outer import OuterOptimizer, Round, publish
from archipelago.merger.round_sum import Addend, RoundSum
from archipelago.merger.scores import Score, unjudged
from archipelago.merger.spectra import Group, Spectra, groups
from archipelago.merger.state import FragmentState, RunState
from archipelago.merger.weights import NormWindow, RunningMean

Vector = jax.Array | NDArray[np.float32]


class Opened(NamedTuple):
    """A contribution that was downloaded: its entry, its header, and its values as their codec encoded them."""

    entry: str
    contribution: Contribution
    body: Body


@dataclass(frozen=True)
class MergedRound:
    """The result of a round.

    Attributes:
        state: The fragment after the round.
        staleness: The running mean of staleness factors after the round.
        members: The contributions, with their weights, as the tape records them.
        gain: The factor on the merged outer gradient.
        scores: The islands' scores after the round.
        difference: The body that takes islands to the new version; empty where full snapshots go down.
    """

    state: FragmentState
    staleness: RunningMean
    members: tuple[RoundMember, ...]
    gain: float
    scores: Mapping[str, Score]
    difference: bytes = b""


@dataclass(frozen=True)
class RoundMerge:
    """The rules by which a run merges its rounds.

    Attributes:
        manifest: The run.
        groups: The tensors of each fragment, with their merge rules.
        outer: The outer optimiser without an operator's changes.
        spectra: How the matrices share this machine's threads. It changes no bit.
    """

    manifest: Manifest
    groups: tuple[tuple[Group, ...], ...]
    outer: OuterOptimizer
    spectra: Spectra | None = field(default=None, compare=False, repr=False)
    _warm: set[tuple[int, tuple[Group, ...]]] = field(default_factory=set, compare=False, repr=False)

    @classmethod
    def of(cls, manifest: Manifest, spectra: Spectra | None = None) -> RoundMerge:
        """Return the rules in the manifest's config."""
        config = manifest.config
        of_fragments = tuple(groups(rows, config.merge) for rows in manifest.layout)
        return cls(manifest, of_fragments, outer.build(config.outer), spectra)

    def warm_up(self) -> None:
        """Compile the merge of every fragment once, so that the first rounds take no longer than later ones.

        Equal fragments share their programs, and a large model has many of them.
        """
        wire = self.manifest.config.wire
        cold = set(zip(self.manifest.sizes, self.groups, strict=True)) - self._warm
        self._warm.update(cold)
        for size, of_fragment in cold:
            zeros_N = np.zeros(size, np.float32)
            fragment = new_state(zeros_N, self.outer)
            acc = merge_rules.begin(of_fragment)
            for name in {wire.up, wire.thin} - {""}:
                acc = merge_rules.accumulate(acc, encoded(zeros_N, name), of_fragment, weight=0.0).acc
            merged_N = merge_rules.finish(acc, of_fragment, spectra=self.spectra)
            params_N, _ = self.outer.step(fragment.params_N, fragment.outer, merged_N, Round())
            publish(wire, fragment.published_N, params_N)

    def begin(
        self, p: int, fragment: FragmentState, version: int, settings: Mapping[str, float] | None = None
    ) -> RoundSum:
        """Return an empty sum for the next round of fragment `p`, whose version is still `version`.

        `settings` are those that an operator has changed. With another length of the run, a path is of another length.
        """
        config, fragments = control.steered(self.manifest.config, settings or {}), len(self.manifest.fragments)
        # Rounds follow each other by strides of the fastest island. These are the strides from the step before the
        # fragment's last round to the end of this one.
        strides = fragments + 1 if version else p + 1
        run_step = fragment.norms.step + strides * config.sync.interval / fragments
        return RoundSum(
            self.groups[p],
            config.merge,
            norms=fragment.norms,
            version=version,
            path=lambda steps: weights.path(config, steps, run_step),
            seen=partial(weights.seen_steps, config.sync, fragments),
            spectra=self.spectra,
        )

    def opened(self, delivery: Delivery) -> Opened:
        """Return what a delivery holds. Raises WireError when its payload is not as announced."""
        contribution, payload = delivery.contribution, delivery.payload
        if contribution is None or delivery.fault:
            raise WireError(delivery.fault or "the entry cannot be read", code="unreadable")
        if digest(payload) != contribution.digest:
            raise WireError("the payload's digest is not the announced one", code="wire.payload")
        if len(payload) != contribution.bytes:  # the tape adds these numbers up
            raise WireError(f"the payload has {len(payload)} bytes, not {contribution.bytes}", code="wire.payload")
        body = unpack_encoded(payload, self.manifest.sizes[contribution.fragment], contribution.codec)
        return Opened(delivery.entry, contribution, body)

    def close(
        self,
        fragment: FragmentState,
        state: RunState,
        round_sum: RoundSum,
        live: int,
    ) -> MergedRound:
        """Return the round that merges the sum while `live` islands are live. Changes none of its arguments."""
        config = self.manifest.config
        steered = control.steered(config, state.steered)
        optimizer = outer.build(steered.outer)
        now = Round(progress=min(1.0, state.step / steered.inner.steps), interval=float(config.sync.interval))
        return merge_round(
            fragment,
            state.staleness,
            round_sum,
            live=live,
            config=config.merge,
            wire=config.wire,
            outer=optimizer,
            now=now,
            scores=state.scores,
            step=state.step,
        )

    def advance(self, state: RunState, number: int, step: int, merged: MergedRound, round_sum: RoundSum) -> None:
        """Advance the run's state by a merged round that leads to global step `step`, except what clocks measure."""
        p = self.manifest.fragment_of(number)
        state.staleness, state.norms[p] = merged.staleness, merged.state.norms
        state.scores = dict(merged.scores)
        state.after_round(number, step, [addend.contribution for addend in round_sum.addends])


def merge_round(
    fragment: FragmentState,
    staleness: RunningMean,
    round_sum: RoundSum,
    *,
    live: int,
    config: MergeConfig,
    wire: WireConfig,
    outer: OuterOptimizer,
    now: Round,
    scores: Mapping[str, Score] | None = None,
    step: int = 0,
) -> MergedRound:
    """Weigh, merge and take the outer step.

    A round in which nothing has any weight changes nothing: momentum must not move a run that no island trains.

    Args:
        fragment: The fragment before the round.
        staleness: The running mean of staleness factors before the round.
        round_sum: The contributions. They are added again if their final weights differ from those of the sum.
        live: The number of live islands.
        config: The merge rules.
        wire: The codecs, by which published parameters are rounded.
        outer: The outer optimiser.
        now: The progress of the run; participation is filled in here.
        scores: The islands' scores before the round.
        step: The run's step before the round.
    """
    version, known = round_sum.version, dict(scores or {})
    judged = round_sum.judged(known, live) if config.scores else unjudged(known, len(round_sum.addends))
    if not any(judged.factors):
        published_N, difference = publish(wire, fragment.published_N, fragment.published_N)
        members = tuple(
            _member(addend, version, 0.0, score, 0.0)
            for addend, score in zip(round_sum.addends, judged.values, strict=True)
        )
        kept = replace(fragment, norms=replace(fragment.norms, step=step), published_N=published_N)
        return MergedRound(kept, staleness, members, 0.0, judged.scores, difference)
    factors = _final_factors(round_sum, judged.factors, config.share_cap)
    round_sum.reweigh(factors, judged.limits)
    addends = round_sum.addends
    parts = [(a.batch * a.steps, a.steps, version - a.contribution.base) for a in addends]
    weighed = weights.weigh(parts, config, staleness, factors)
    now = _participation(now, addends, judged.factors, live)
    merged_N = round_sum.merged(weighed.gain)
    params_N, outer_state = outer_step(outer, fragment, merged_N, now)
    norms = replace(fragment.norms, step=step)
    for addend, factor in zip(addends, factors, strict=True):
        norms = norms.with_norm(addend.norm * addend.clip / addend.path) if factor else norms
    members = tuple(
        _member(addend, version, *rest)
        for addend, *rest in zip(addends, weighed.shares, judged.values, judged.factors, strict=True)
    )
    published_N, difference = publish(wire, fragment.published_N, params_N)
    state = FragmentState(params_N, outer_state, norms, published_N)
    return MergedRound(state, weighed.running, members, weighed.gain, judged.scores, difference)


def _final_factors(round_sum: RoundSum, judged: Sequence[float], cap: float) -> list[float]:
    """Return the factor on each contribution's weight: its island's, that of its batch, then the cap among the rest."""
    # The weight has the square of the batch: tokens · (tokens / steps).
    both = zip(round_sum.batches(), round_sum.addends, strict=True)
    seen = [(batch / a.batch) ** 2 if batch < a.batch else 1.0 for batch, a in both]
    own = [a * b for a, b in zip(judged, seen, strict=True)]
    some = [(i, addend) for i, addend in enumerate(round_sum.addends) if own[i] > 0.0]
    lowered = weights.capped([a.weight * own[i] for i, a in some], [a.contribution.island for _, a in some], cap)
    factors = [0.0] * len(judged)
    for (i, _), factor in zip(some, lowered, strict=True):
        factors[i] = own[i] * factor
    return factors


def _participation(now: Round, addends: Sequence[Addend], judged: Sequence[float], live: int) -> Round:
    """Fill in how many islands take part in the round. An island counts by its factor, as if the rest were absent."""
    factors = {a.contribution.island: factor for a, factor in zip(addends, judged, strict=True)}
    absent = sum(1.0 - factor for factor in factors.values())
    present = len(factors) - absent
    islands = max(live, len(factors)) - absent
    return now._replace(participation=present / islands, islands=present)


def _member(addend: Addend, version: int, share: float, score: float, factor: float) -> RoundMember:
    contribution = addend.contribution
    return RoundMember(
        island=contribution.island,
        incarnation=contribution.incarnation,
        sequence=contribution.sequence,
        base=contribution.base,
        staleness=version - contribution.base,
        weight=share,
        clip=addend.clip,
        tokens=contribution.tokens,
        steps=contribution.steps,
        loss=contribution.loss,
        entry=addend.entry,
        data=contribution.data,
        score=score,
        factor=factor,
    )


def outer_step(
    outer: OuterOptimizer, fragment: FragmentState, merged_N: jax.Array, now: Round
) -> tuple[jax.Array, Any]:
    """Take the outer step. `archipelago bench sync` measures it under this name."""
    return outer.step(fragment.params_N, fragment.outer, merged_N, now)


def new_state(params_N: Vector, outer: OuterOptimizer) -> FragmentState:
    """Return the state of a fragment before its first round."""
    params = jax.numpy.asarray(params_N)
    return FragmentState(params, outer.init(params), NormWindow(), params)
