"""Merge rules: the outer gradients of a round become one, group by group of a fragment's flat vector.

A rule is an accumulator, so a contribution can be added when it arrives and forgotten after. Names of shapes:
N elements of a fragment; a group is R rows of L elements. All arrays are float32, and subnormal numbers (below
1.2e-38) count as zero. Everything runs on the CPU, also where there is an accelerator; a fragment compiles once,
whatever the number of its contributions.

To add a rule: write its three functions, register them in MERGE_RULES, and add the name to `MergeConfig`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from broker.config import MergeConfig
from broker.manifest import Tensor

Vector = jax.Array | NDArray[np.float32]
Accumulator = Any
"""whatever pytree of arrays a rule keeps of one group"""

CANCELLED = 1e-6
"""A mean of unit vectors shorter than this is rounding noise (some 8 float32 ulps), and has no direction."""


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
    """`init(group)`; `add(acc, delta_RxL, share)` with share a scalar array; `finish(acc)` gives the merged RxL."""

    init: Callable[[Group], Accumulator]
    add: Callable[[Accumulator, jax.Array, jax.Array], Accumulator]
    finish: Callable[[Accumulator], jax.Array]


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


def _average_add(sum_RxL: jax.Array, delta_RxL: jax.Array, share: jax.Array) -> jax.Array:
    return sum_RxL + share * delta_RxL


def _average_finish(sum_RxL: jax.Array) -> jax.Array:
    return sum_RxL


class RdaAccumulator(NamedTuple):
    """The running sums Σ w‖Δ‖ (float32, Rx1) and Σ w φ(Δ) (float32, RxL) of radial-directional averaging."""

    norm: jax.Array
    direction: jax.Array


def _polar(x_RxL: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Norm (Rx1) and unit vector φ(x) = x/‖x‖ of each row, φ(0) = 0. No square overflows or vanishes."""
    peak_Rx1 = jnp.max(jnp.abs(x_RxL), axis=1, keepdims=True)
    y_RxL = x_RxL / jnp.where(peak_Rx1 > 0, peak_Rx1, 1.0)
    length_Rx1 = jnp.sqrt(jnp.sum(jnp.square(y_RxL), axis=1, keepdims=True))  # 1 ≤ length ≤ √L, or 0
    return peak_Rx1 * length_Rx1, y_RxL / jnp.where(length_Rx1 > 0, length_Rx1, 1.0)


def _rda_init(group: Group) -> RdaAccumulator:
    return RdaAccumulator(jnp.zeros((group.rows, 1), jnp.float32), _nothing(group))


def _rda_add(acc: RdaAccumulator, delta_RxL: jax.Array, share: jax.Array) -> RdaAccumulator:
    norm_Rx1, unit_RxL = _polar(delta_RxL)
    return RdaAccumulator(acc.norm + share * norm_Rx1, acc.direction + share * unit_RxL)


def _rda_finish(acc: RdaAccumulator) -> jax.Array:
    length_Rx1, unit_RxL = _polar(acc.direction)
    return jnp.where(length_Rx1 > CANCELLED, acc.norm, 0.0) * unit_RxL


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


def add(
    acc: tuple[Accumulator, ...], delta_N: Vector, share: float, groups: tuple[Group, ...]
) -> tuple[Accumulator, ...]:
    """The accumulators with one more contribution. `acc` is used up; `delta_N` may change once the result is ready.

    `share` is rounded to float32. Raises ValueError unless `delta_N` is a float32 vector of as many elements as the
    groups cover.
    """
    elements = max((group.end for group in groups), default=0)
    if delta_N.shape != (elements,) or delta_N.dtype != np.float32:
        raise ValueError(f"{delta_N.dtype} of shape {delta_N.shape} where the groups have float32 ({elements},)")
    delta_N, share_ = jax.device_put((delta_N, np.float32(share)), _cpu())
    added: tuple[Accumulator, ...] = _add(acc, delta_N, share_, groups)
    return added


@partial(jax.jit, static_argnames="groups", donate_argnames="acc")
def _add(
    acc: tuple[Accumulator, ...], delta_N: jax.Array, share: jax.Array, groups: tuple[Group, ...]
) -> tuple[Accumulator, ...]:
    return tuple(
        MERGE_RULES[group.rule].add(part, delta_N[group.start : group.end].reshape(group.rows, group.length), share)
        for part, group in zip(acc, groups, strict=True)
    )


@partial(jax.jit, static_argnames="groups")
def finish(acc: tuple[Accumulator, ...], groups: tuple[Group, ...]) -> jax.Array:
    """The merged outer gradient: float32, N elements."""
    parts = zip(acc, groups, strict=True)
    return jnp.concatenate([MERGE_RULES[group.rule].finish(part).reshape(-1) for part, group in parts])


def merge(deltas: Sequence[Vector], shares: Sequence[float], groups: tuple[Group, ...]) -> jax.Array:
    """One outer gradient (float32, N elements, on the CPU) of several and their shares, which sum to one.

    Addition is not associative: the caller puts contributions in one canonical order, and the same order gives the
    same bits. A single contribution under `average` comes out bit for bit. Elements up to about 1e18 are safe.
    Raises ValueError when there is no contribution, or when shapes, dtypes or counts do not fit.
    """
    if not deltas or len(deltas) != len(shares):
        raise ValueError(f"{len(deltas)} contributions with {len(shares)} shares")
    acc = begin(groups)
    for delta_N, share in zip(deltas, shares, strict=True):
        acc = add(acc, delta_N, share, groups)
    merged_N: jax.Array = finish(acc, groups).block_until_ready()
    return merged_N
