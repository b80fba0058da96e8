"""Closing a round: weigh, clip, merge, step. Pure: state and contributions in, state and decisions out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from numpy.typing import NDArray

from archipelago.broker.config import MergeConfig
from archipelago.broker.errors import WireError
from archipelago.broker.messages import Contribution, Member
from archipelago.broker.wire import Body
from archipelago.merger import clip, merge_rules, weights
from archipelago.merger.clip import NormWindow
from archipelago.merger.merge_rules import Group
from archipelago.merger.outer import OuterOptimizer, Round
from archipelago.merger.state import FragmentState
from archipelago.merger.weights import RunningMean

Vector = jax.Array | NDArray[np.float32]


@dataclass(frozen=True)
class Waiting:
    """A contribution that is in its round's sum already: all that closing has yet to know of it.

    `norm` is its L2 norm before it was multiplied by `clip`, and `path` what norms are compared by.
    """

    entry: str
    contribution: Contribution
    norm: float
    clip: float
    path: float


class Gathering:
    """What waits for a fragment's next round: who, and one sum, whatever their number.

    Weights are relative to the largest so far, whose own is one: so no sum of them overflows, and a contribution that
    stays alone keeps its bits. The order of arrival is that of the sum; the tape has it.
    """

    def __init__(
        self,
        groups: tuple[Group, ...],
        config: MergeConfig,
        *,
        norms: NormWindow,
        version: int,
        path: Callable[[Contribution], float],
    ) -> None:
        """`version` is the fragment's before the round. `path` returns what a contribution's norm is compared by."""
        self.waiting: list[Waiting] = []
        self.total_weight = 0.0
        self.version = version
        self._groups, self._config = groups, config
        self._limit = clip.limit(norms, config.clip)
        self._path = path
        self._acc: tuple[merge_rules.Accumulator, ...] = ()  # made for the first one: many rounds never have any
        self._largest = 0.0

    def take(self, entry: str, contribution: Contribution, body: Body) -> None:
        """Decodes it into the sum. Raises WireError, with the sum as it was, where a value is none or too large."""
        c = contribution
        own = weights.effective((c.tokens, c.steps, self.version - c.base), self._config)
        largest = max(own, self._largest)
        weight, keep = own / largest, self._largest / largest
        acc = self._acc or merge_rules.begin(self._groups)
        path = self._path(c)
        taken = merge_rules.take(acc, body, self._groups, weight=weight, keep=keep, limit=self._limit * path)
        self._acc = taken.acc
        if not taken.is_sound:
            known = math.isfinite(taken.norm)
            what = f"a norm of {taken.norm:.1e}" if known else "NaN or infinity among the values, or a norm that"
            raise WireError(f"{what} is over the most that can be merged, {merge_rules.NORM_MAX:.0e}", code="wire.norm")
        self._largest, self.total_weight = largest, keep * self.total_weight + weight
        self.waiting.append(Waiting(entry, contribution, taken.norm, taken.clip, path))

    def warm_up(self, body: Body) -> None:
        """Compiles what adds a contribution of that codec; the sum is as it was."""
        acc = self._acc or merge_rules.begin(self._groups)
        self._acc = merge_rules.take(acc, body, self._groups, weight=0.0).acc

    def merged(self, gain: float) -> jax.Array:
        """The merged outer gradient (float32, N elements), times `gain`."""
        return merge_rules.finish(self._acc, self._groups, total_weight=self.total_weight or 1.0, gain=gain)


@dataclass(frozen=True)
class Closed:
    """What closing did."""

    state: FragmentState
    staleness: RunningMean
    members: tuple[Member, ...]
    gain: float
    difference: bytes = b""
    """body that leads the islands there from what they held, where differences go down"""


def close_fragment(
    state: FragmentState,
    staleness: RunningMean,
    gathered: Gathering,
    *,
    live: int,
    config: MergeConfig,
    outer: OuterOptimizer,
    now: Round,
) -> Closed:
    """Takes the outer step with what was gathered; `live` islands were there to answer. Who did, `now` is told here.

    With nothing gathered all stays as it is: momentum does not move a run that nobody trains.
    """
    waiting, version = gathered.waiting, gathered.version
    if not waiting:
        return Closed(state, staleness, (), 0.0)
    present = len({w.contribution.island for w in waiting})
    islands = max(live, present)
    parts = [(w.contribution.tokens, w.contribution.steps, version - w.contribution.base) for w in waiting]
    weighed = weights.weigh(parts, config, staleness)
    merged_N = gathered.merged(weighed.gain)
    now = now._replace(participation=present / islands, islands=float(present))
    params_N, outer_state = outer.step(state.params_N, state.outer, merged_N, now)
    norms = state.norms
    for w in waiting:
        norms = norms.with_norm(w.norm * w.clip / w.path)
    members = [_member(w, version, share) for w, share in zip(waiting, weighed.shares, strict=True)]
    return Closed(FragmentState(params_N, outer_state, norms, params_N), weighed.running, tuple(members), weighed.gain)


def _member(waiting: Waiting, version: int, share: float) -> Member:
    contribution = waiting.contribution
    return Member(
        island=contribution.island,
        incarnation=contribution.incarnation,
        sequence=contribution.sequence,
        base=contribution.base,
        staleness=version - contribution.base,
        weight=share,
        clip=waiting.clip,
        tokens=contribution.tokens,
        steps=contribution.steps,
        loss=contribution.loss,
        entry=waiting.entry,
    )


def mean_loss(members: Sequence[Member]) -> float:
    """Mean of the members' losses by tokens, NaN where none measured one."""
    known = [(m.loss, m.tokens) for m in members if not math.isnan(m.loss)]
    return statistics.fmean([v for v, _ in known], [n for _, n in known]) if known else math.nan


def new_state(params_N: Vector, outer: OuterOptimizer) -> FragmentState:
    """The state of a fragment before its first round."""
    params = jax.numpy.asarray(params_N)
    return FragmentState(params, outer.init(params), NormWindow(), params)
