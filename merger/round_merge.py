"""The merge of one round: check contributions as they arrive; at its close, weigh and add them, step, and round.

Each contribution is added once, in the order of arrival and with its final weight, which depends on all of them. Those
of one process, measured from one version, are summed first.

Everything here but `warm_up` is pure: state and contributions in, state and decisions out. The service calls it live,
and `merger.replay` calls it with recorded contributions.

Islands that are sent quantised differences all hold the same rounded parameters, because all add the same differences.
The merger keeps a copy of these (`published_N`). It measures each difference from that copy to the exact parameters,
so a difference includes the rounding that earlier ones left out, and rounding errors do not add up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median_low
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from archipelago.broker import control
from archipelago.broker.codecs import codec
from archipelago.broker.commits import Delivery
from archipelago.broker.config import MergeConfig, WireConfig
from archipelago.broker.errors import WireError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Contribution, RoundMember, TapeEntry
from archipelago.broker.wire import Body, encoded, is_digest, unpack_encoded
from archipelago.merger import claims, merge_rules, outer, weights
from archipelago.merger.claims import SeenWork
from archipelago.merger.outer import OuterOptimizer, Round, publish
from archipelago.merger.rounds import Close
from archipelago.merger.scores import Judgement, Score, Sent, judge, unjudged
from archipelago.merger.spectra import Spectra
from archipelago.merger.state import FragmentState, RunState
from archipelago.merger.weights import Group, Norms, RunningMean, groups

Vector = jax.Array | NDArray[np.float32]
#: `isotropic` merges a round as `rda` does if the lower median of the steps of its contributions is at least this share
#: of the run's steps. Contributions of one process count as one. Evening out a spectrum helps where the run has many
#: intervals, and harms where it has few (docs/log.md, 2026-11-30).
LONG_SHARE = 0.2


@dataclass(frozen=True)
class Addend:
    """A contribution that was downloaded and checked, and waits for its fragment's next round; or the sum of some.

    Attributes:
        entry: Its entry of the updates stream; of a sum, that of the last one.
        body: Its values as its codec encoded them.
        norms: The L2 norm of each tensor.
        norm: Its L2 norm.
    """

    entry: str
    contribution: Contribution
    body: Body = field(compare=False, repr=False)
    norms: NDArray[np.float32] = field(compare=False, repr=False)
    norm: float


@dataclass(frozen=True)
class MergedRound:
    """The result of a round.

    Attributes:
        state: The fragment after the round.
        norms: The norms that clipping compares with after the round.
        staleness: The running mean of staleness factors after the round.
        members: The contributions, with their weights, as the tape records them.
        gain: The factor on the merged outer gradient.
        scores: The islands' scores after the round.
        credit: The islands' credit after the round (`claims.seen`).
        difference: The body that takes islands to the new version; empty where full snapshots go down.
    """

    state: FragmentState
    norms: Norms
    staleness: RunningMean
    members: tuple[RoundMember, ...]
    gain: float
    scores: Mapping[str, Score]
    credit: Mapping[str, int]
    difference: bytes = b""

    def advance(self, state: RunState, of: Close | TapeEntry, step: int, contributions: Sequence[Contribution]) -> None:
        """Advance the run's state by this round, which leads to global step `step`, except what clocks measure."""
        state.staleness, state.norms[of.fragment] = self.staleness, self.norms
        state.after_round(of.round, step, contributions, self.scores, self.credit)


@dataclass(frozen=True)
class RoundMerge:
    """The rules by which a run merges its rounds.

    Attributes:
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
        manifest = self.manifest
        cold = {(manifest.sizes[p], self.groups[p]): manifest.codecs(p) for p in manifest.own_fragments}
        for size, of_fragment in cold.keys() - self._warm:
            self._warm.add((size, of_fragment))
            zeros_N = np.zeros(size, np.float32)
            fragment = new_state(zeros_N, self.outer)
            acc = merge_rules.begin(of_fragment)
            for name in dict.fromkeys((*cold[size, of_fragment], "float32")):  # the last one for sums (`summed`)
                body = encoded(zeros_N, name)
                norms, _ = merge_rules.norms(body, of_fragment)
                acc = merge_rules.accumulate(acc, body, of_fragment, norms, weight=0.0)
            merged_N = merge_rules.finish(acc, of_fragment, spectra=self.spectra)
            params_N, _ = self.outer.step(fragment.params_N, fragment.outer, merged_N, Round())
            publish(manifest.config.wire, fragment.published_N, params_N)

    def opened(self, delivery: Delivery) -> Addend:
        """Return what a delivery holds.

        Raises WireError if its payload is not as announced, or if a value is NaN or too large (`wire.not-finite`).
        """
        contribution, payload = delivery.contribution, delivery.payload
        if contribution is None or delivery.fault:
            raise WireError(delivery.fault or "the entry cannot be read", code="unreadable")
        if not is_digest(contribution.digest, payload):
            raise WireError("the payload's digest is not the announced one", code="wire.payload")
        if len(payload) != contribution.bytes:  # the tape adds these numbers up
            raise WireError(f"the payload has {len(payload)} bytes, not {contribution.bytes}", code="wire.payload")
        p = contribution.fragment
        body = unpack_encoded(payload, self.manifest.sizes[p], contribution.codec)
        norms, norm = merge_rules.norms(body, self.groups[p])
        if not norm <= merge_rules.NORM_MAX:
            found = f"the norm is {norm:.1e}" if math.isfinite(norm) else "a value is NaN or infinite"
            raise WireError(f"{found}; norms up to {merge_rules.NORM_MAX:.0e} can be merged", code="wire.not-finite")
        return Addend(delivery.entry, contribution, body, norms, norm)

    def close(
        self, fragment: FragmentState, state: RunState, addends: Sequence[Addend], live: int, of: Close | TapeEntry
    ) -> MergedRound:
        """Return the merged round. Changes none of its arguments.

        Args:
            state: The run. With another length of it, which an operator can set, a path is of another length.
            addends: What waits for the fragment's next round, in the order of arrival.
        """
        config = control.steered(self.manifest.config, state.steered)
        version = of.version - 1  # what the contributions meet
        series = series_of(addends)
        whole = [summed(each, self.groups[of.fragment]) for each in series]
        headers = [addend.contribution for addend in whole]
        run_step = state.step + self.manifest.stride  # rounds follow each other by strides of the fastest
        return merge_round(
            fragment,
            state.staleness,
            whole,
            series,
            version=version,
            groups=self.groups[of.fragment],
            live=live,
            config=config.merge,
            wire=config.wire,
            outer=outer.build(config.outer),
            now=Round(progress=min(1.0, state.step / config.inner.steps), interval=float(config.sync.interval)),
            path=partial(weights.path, config, run_step=run_step),
            seen=claims.seen(
                headers, version, of.round, state.accounts, state.usual_batch, config.sync, self.manifest.own_rounds
            ),
            norms=state.norms.get(of.fragment, ()),
            scores=state.scores,
            spectra=self.spectra,
            changes_spectra=median_low([c.steps for c in headers] or [0]) < LONG_SHARE * config.inner.steps,
        )


# -- contributions that follow each other ------------------------------------------------------------------------------


def series_of(addends: Sequence[Addend]) -> list[list[Addend]]:
    """Return the contributions that add up to one together, in the order of the first of each.

    They are of one process and measured from one version, and each holds what the process did after the one before. So
    their sum is its progress, of which a mean would lose the larger part. They meet in a round if no round has closed
    in between: the island leaves, or no merger has served. Contributions whose sum could exceed NORM_MAX stay apart.
    """
    found: dict[tuple[str, str, int], list[Addend]] = {}
    for addend in addends:
        c = addend.contribution
        found.setdefault((c.island, c.incarnation, c.base), []).append(addend)
    out = list[list[Addend]]()
    for each in found.values():
        is_bounded = sum(addend.norm for addend in each) <= merge_rules.NORM_MAX
        out += [each] if is_bounded else [[addend] for addend in each]
    places = {addend.entry: place for place, addend in enumerate(addends)}
    return sorted(out, key=lambda each: places[each[0].entry])


def summed(series: Sequence[Addend], groups: tuple[Group, ...]) -> Addend:
    """Return the contributions that follow each other as one."""
    if len(series) == 1:
        return series[0]
    in_order = sorted(series, key=lambda addend: addend.contribution.sequence)
    size, last = max((group.end for group in groups), default=0), in_order[-1]
    sum_N = np.zeros(size, np.float32)
    for addend in in_order:
        sum_N += codec(addend.body.codec).restore(addend.body.parts, size, np)
    body, headers = encoded(sum_N, "float32"), [addend.contribution for addend in in_order]
    steps, tokens = sum(c.steps for c in headers), sum(c.tokens for c in headers)
    contribution = replace(last.contribution, steps=steps, tokens=tokens)
    return Addend(last.entry, contribution, body, *merge_rules.norms(body, groups))


def merge_round(
    fragment: FragmentState,
    staleness: RunningMean,
    addends: Sequence[Addend],
    series: Sequence[Sequence[Addend]],
    *,
    version: int,
    groups: tuple[Group, ...],
    live: int,
    config: MergeConfig,
    wire: WireConfig,
    outer: OuterOptimizer,
    now: Round,
    path: Callable[[int], float],
    seen: SeenWork,
    norms: Norms = (),
    scores: Mapping[str, Score] | None = None,
    spectra: Spectra | None = None,
    changes_spectra: bool = True,
) -> MergedRound:
    """Weigh, merge and take the outer step.

    A round in which nothing has any weight changes nothing: momentum must not move a run that no island trains.

    Args:
        staleness: The running mean of staleness factors before the round.
        addends: What is merged.
        series: For each of `addends`, the contributions that it sums (`series_of`).
        now: The progress of the run; participation is filled in here.
        path: Returns the length of the path that a norm is compared by, from the number of steps that weigh.
        changes_spectra: Whether `isotropic` differs from `rda` in this round.
    """
    known, sent = dict(scores or {}), _sent(addends, version, path, seen)
    spans = tuple((group.start, group.length) for group in groups)
    judged = judge(known, sent, spans, live) if config.scores else unjudged(known, len(sent))
    final, usual = weights.final(sent, judged.factors, config), weights.limit(norms, config.clip)
    limits = [min(usual, own) for own in judged.limits]
    clips = [most / one.norm if one.norm > most else 1.0 for one, most in zip(sent, limits, strict=True)]
    if not any(final):
        published_N, difference = publish(wire, fragment.published_N, fragment.published_N)
        kept = replace(fragment, published_N=published_N)
        members = _members(addends, series, version, final, clips, judged)
        return MergedRound(kept, norms, staleness, members, 0.0, judged.scores, seen.credit, difference)
    shares = weights.shares(final)
    gain, staleness = weights.gain(shares, [one.staleness for one in sent], config, staleness)
    acc, largest = merge_rules.begin(groups), max(final)
    relative = [
        weight / largest for weight in final
    ]  # no sum of them overflows, and a contribution alone keeps its bits
    for addend, one, weight, clip in zip(addends, sent, relative, clips, strict=True):
        if weight:
            acc = merge_rules.accumulate(acc, addend.body, groups, addend.norms, weight=weight, clip=clip)
            norms = weights.with_norm(norms, one.norm * clip)
    merged_N = merge_rules.finish(
        acc, groups, total_weight=sum(relative), gain=gain, spectra=spectra, changes_spectra=changes_spectra
    )
    now = _participation(now, sent, judged.factors, live)
    params_N, outer_state = outer_step(outer, fragment, merged_N, now)
    published_N, difference = publish(wire, fragment.published_N, params_N)
    state = FragmentState(params_N, outer_state, published_N)
    members = _members(addends, series, version, shares, clips, judged)
    return MergedRound(state, norms, staleness, members, gain, judged.scores, seen.credit, difference)


def _sent(addends: Sequence[Addend], version: int, path: Callable[[int], float], seen: SeenWork) -> list[Sent]:
    """Return what contributions are judged and weighed by."""
    both = zip(addends, seen.steps, seen.batches, strict=True)
    return [
        Sent(c.island, version - c.base, n, batch * n, addend.norm / path(n), c.digest, addend.body)
        for addend, n, batch in both
        for c in [addend.contribution]
    ]


def _participation(now: Round, sent: Sequence[Sent], judged: Sequence[float], live: int) -> Round:
    """Fill in how many islands take part in the round. An island counts by its factor, as if the rest were absent."""
    factors = {one.island: factor for one, factor in zip(sent, judged, strict=True)}
    absent = sum(1.0 - factor for factor in factors.values())
    present = len(factors) - absent
    islands = max(live, len(factors)) - absent
    return now._replace(participation=present / islands, islands=present)


def _members(
    addends: Sequence[Addend],
    series: Sequence[Sequence[Addend]],
    version: int,
    shares: Sequence[float],
    clips: Sequence[float],
    judged: Judgement,
) -> tuple[RoundMember, ...]:
    """Return the contributions as the tape records them. Those of one sum share its weight by their steps."""
    results = zip(addends, series, shares, clips, judged.values, judged.factors, strict=True)
    return tuple(
        RoundMember(
            island=c.island,
            incarnation=c.incarnation,
            sequence=c.sequence,
            base=c.base,
            staleness=version - c.base,
            weight=share if len(each) == 1 else share * c.steps / whole.contribution.steps,
            clip=clip,
            tokens=c.tokens,
            steps=c.steps,
            loss=c.loss,
            entry=addend.entry,
            data=c.data,
            score=score,
            factor=factor,
        )
        for whole, each, share, clip, score, factor in results
        for addend in each
        for c in [addend.contribution]
    )


def outer_step(
    outer: OuterOptimizer, fragment: FragmentState, merged_N: jax.Array, now: Round
) -> tuple[jax.Array, Any]:
    """Take the outer step. `archipelago bench sync` measures it under this name."""
    return outer.step(fragment.params_N, fragment.outer, merged_N, now)


def new_state(params_N: Vector, outer: OuterOptimizer) -> FragmentState:
    """Return the state of a fragment before its first round."""
    params = jax.device_put(params_N)  # `jnp.asarray` would compile a program for the transfer
    return FragmentState(params, outer.init(params), params)
