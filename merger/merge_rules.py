"""Merge rules: the outer gradients of a round become one, group by group of a fragment's flat vector.

A rule is an accumulator: a contribution is decoded, checked, clipped and added when it arrives, in one compiled
program, and forgotten after. Names of shapes: N elements of a fragment; a group is R rows of L elements. All arrays are
float32, and subnormal numbers (below 1.2e-38) count as zero. Everything runs on the CPU, also where there is an
accelerator; a fragment compiles once a codec, whatever the number of its contributions.

To add a rule: write its three functions, register them in MERGE_RULES, and add the name to `MergeConfig`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from archipelago.broker.codecs import codec as codec_of
from archipelago.broker.config import MergeConfig
from archipelago.broker.manifest import Tensor
from archipelago.broker.wire import Body

Accumulator = Any
"""whatever pytree of arrays a rule keeps of one group"""

CANCELLED = 1e-6
"""A mean of unit vectors shorter than this is rounding noise (some 8 float32 ulps), and has no direction."""
NORM_MAX = 1e9
"""A contribution of a larger norm is none of training's, and is not taken."""
_UNIT = np.float32(2.0**30)
"""squares are summed in this unit: norms from 1e-28 to NORM_MAX come out in one pass, without a look for the largest"""


@dataclass(frozen=True)
class Group:
    """`rows` neighbouring vectors of `length` elements, from element `start` on. The rule sees them as one matrix."""

    start: int
    rows: int
    length: int
    rule: str

    @property
    def end(self) -> int:
        """One past the last element."""
        return self.start + self.rows * self.length


class MergeRule(NamedTuple):
    """`init(group)`; `add(acc, delta_RxL, norm_Rx1, weight)`, with the rows' norms and weight a scalar array; and
    `finish(acc, inverse)`, where `inverse` is one over the sum of the weights, gives the merged RxL.

    An accumulator is linear in the weights: all of it is multiplied when their unit changes.
    """

    init: Callable[[Group], Accumulator]
    add: Callable[[Accumulator, jax.Array, jax.Array, jax.Array], Accumulator]
    finish: Callable[[Accumulator, jax.Array], jax.Array]


def groups(layout: Sequence[tuple[Tensor, int]], config: MergeConfig) -> tuple[Group, ...]:
    """The groups of one fragment, in order, from its row of `Manifest.layout`. Empty tensors have none.

    A group is what RDA takes one norm of. Granularity `tensor`: a whole tensor. Granularity `row`: each slice along
    the first axis of a tensor of two or more axes, else the whole tensor.
    """
    out = []
    for tensor, offset in layout:
        if tensor.size:
            rows = tensor.shape[0] if config.granularity == "row" and len(tensor.shape) > 1 else 1
            rule = config.embedding if tensor.kind == "embedding" else config.rest
            out.append(Group(offset, rows, tensor.size // rows, rule))
    return tuple(out)


def _nothing(group: Group) -> jax.Array:
    # Minus zero is the neutral element of addition: −0 + x has the bits of x, and 0 + −0 has not.
    return jnp.full((group.rows, group.length), -0.0, jnp.float32)


def _average_add(sum_RxL: jax.Array, delta_RxL: jax.Array, norm_Rx1: jax.Array, weight: jax.Array) -> jax.Array:
    return sum_RxL + weight * delta_RxL


def _average_finish(sum_RxL: jax.Array, inverse: jax.Array) -> jax.Array:
    return inverse * sum_RxL


class RdaAccumulator(NamedTuple):
    """The running sums Σ w‖Δ‖ (float32, Rx1) and Σ w φ(Δ) (float32, RxL) of radial-directional averaging."""

    norm: jax.Array
    direction: jax.Array


def _norms(x_RxL: jax.Array) -> jax.Array:
    """L2 norm of each row, Rx1; zero from 1e-28 down."""
    return jnp.sqrt(jnp.sum(jnp.square(_UNIT * x_RxL), axis=1, keepdims=True)) / _UNIT


def _unit(x_RxL: jax.Array, norm_Rx1: jax.Array) -> jax.Array:
    """φ(x) = x/‖x‖ of each row, φ(0) = 0."""
    return x_RxL * jnp.where(norm_Rx1 > 0, 1.0 / norm_Rx1, 0.0)


def _rda_init(group: Group) -> RdaAccumulator:
    return RdaAccumulator(jnp.zeros((group.rows, 1), jnp.float32), _nothing(group))


def _rda_add(acc: RdaAccumulator, delta_RxL: jax.Array, norm_Rx1: jax.Array, weight: jax.Array) -> RdaAccumulator:
    return RdaAccumulator(acc.norm + weight * norm_Rx1, acc.direction + weight * _unit(delta_RxL, norm_Rx1))


def _rda_finish(acc: RdaAccumulator, inverse: jax.Array) -> jax.Array:
    length_Rx1 = _norms(acc.direction)
    return jnp.where(inverse * length_Rx1 > CANCELLED, inverse * acc.norm, 0.0) * _unit(acc.direction, length_Rx1)


MERGE_RULES: dict[str, MergeRule] = {
    "average": MergeRule(_nothing, _average_add, _average_finish),
    "rda": MergeRule(_rda_init, _rda_add, _rda_finish),
}
"""By name. `average`: Σ w Δ. `rda`: (Σ w‖Δ‖) · φ(Σ w φ(Δ)), which keeps the length where nearly orthogonal Δ would
average to about 1/√M of it. Both are in Decoupled DiLoCo (arXiv 2604.21428)."""


def _cpu() -> jax.Device:
    return jax.local_devices(backend="cpu")[0]


def begin(groups: tuple[Group, ...]) -> tuple[Accumulator, ...]:
    """The accumulators of a round that has no contribution yet, one a group. Groups are in order and without gaps."""
    with jax.default_device(_cpu()):
        acc = tuple(MERGE_RULES[group.rule].init(group) for group in groups)
    placed: tuple[Accumulator, ...] = jax.device_put(acc, _cpu())  # for good, like what is added
    return placed


class Taken(NamedTuple):
    """The accumulators with one more contribution, its norm, and the factor that it was clipped with.

    They are as they were where the norm is over NORM_MAX, or not a number because a value is none.
    """

    acc: tuple[Accumulator, ...]
    norm: float
    clip: float

    @property
    def is_sound(self) -> bool:
        """Whether it was added."""
        return self.norm <= NORM_MAX


def take(
    acc: tuple[Accumulator, ...],
    body: Body,
    groups: tuple[Group, ...],
    *,
    weight: float = 1.0,
    keep: float = 1.0,
    limit: float = math.inf,
) -> Taken:
    """Adds a contribution, as its codec has encoded it, with that weight; `acc` is used up.

    What was added before is multiplied by `keep`. A norm over `limit` is clipped to it. Scalars are rounded to float32.
    """
    scalars = (np.float32(weight), np.float32(keep), np.float32(limit))
    placed = jax.device_put((body.parts, *scalars), _cpu())
    taken, norm, clip = _take(acc, *placed, codec=body.codec, groups=groups)
    return Taken(taken, float(norm), float(clip))


@partial(jax.jit, static_argnames=("codec", "groups"), donate_argnames="acc")
def _take(
    acc: tuple[Accumulator, ...],
    parts: Any,
    weight: jax.Array,
    keep: jax.Array,
    limit: jax.Array,
    *,
    codec: str,
    groups: tuple[Group, ...],
) -> tuple[tuple[Accumulator, ...], jax.Array, jax.Array]:
    delta_N = codec_of(codec).restore(parts, _elements(groups), jnp)
    deltas = [delta_N[group.start : group.end].reshape(group.rows, group.length) for group in groups]
    norms = [_norms(delta_RxL) for delta_RxL in deltas]
    norm = _norms(jnp.concatenate(norms).reshape(1, -1))[0, 0] if norms else jnp.float32(0)
    clip = jnp.where(norm > limit, limit / norm, 1.0)
    taken = tuple(
        MERGE_RULES[group.rule].add(jax.tree.map(lambda x: keep * x, part), clip * delta_RxL, clip * norm_Rx1, weight)
        for part, group, delta_RxL, norm_Rx1 in zip(acc, groups, deltas, norms, strict=True)
    )
    sound = norm <= NORM_MAX
    return jax.tree.map(lambda new, old: jnp.where(sound, new, old), taken, acc), norm, clip


def _elements(groups: tuple[Group, ...]) -> int:
    return max((group.end for group in groups), default=0)


def finish(
    acc: tuple[Accumulator, ...], groups: tuple[Group, ...], *, total_weight: float = 1.0, gain: float = 1.0
) -> jax.Array:
    """The merged outer gradient (float32, N elements), times `gain`."""
    inverse, gain_ = np.float32(1.0 / total_weight), np.float32(gain)
    merged_N: jax.Array = _finish(acc, *jax.device_put((inverse, gain_), _cpu()), groups)
    return merged_N


@partial(jax.jit, static_argnames="groups")
def _finish(acc: tuple[Accumulator, ...], inverse: jax.Array, gain: jax.Array, groups: tuple[Group, ...]) -> jax.Array:
    parts = zip(acc, groups, strict=True)
    merged = [gain * MERGE_RULES[group.rule].finish(part, inverse).reshape(-1) for part, group in parts]
    return jnp.concatenate(merged) if merged else jnp.zeros(0, jnp.float32)
