"""Merge rules: combine the outer gradients of a round, tensor by tensor of a fragment's flat vector.

A rule is an accumulator. When a contribution arrives, one compiled program decodes it and takes its norms. When its
round closes, a second one decodes, clips and adds it. Names of shapes: N elements of a fragment, L elements of one
tensor. All arrays are float32, and subnormal numbers (below 1.2e-38) count as zero. Everything runs on the CPU, even on
a machine with an accelerator. A fragment compiles once per codec, whatever the number of its contributions.

To add a rule, write its three functions, register them in MERGE_RULES, and add the name to `MergeConfig`. Which rule
merges which tensor is decided in `merger.weights`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from archipelago.broker.codecs import codec as codec_of
from archipelago.broker.codecs import empty_vector
from archipelago.broker.wire import Body
from archipelago.merger.spectra import Power, Spectra
from archipelago.merger.weights import Group

#: The pytree of arrays that a rule keeps for one tensor.
Accumulator = Any

#: A mean of unit vectors shorter than this is rounding noise (some 8 float32 ulps) and has no direction.
CANCELLED = 1e-6
#: A contribution with a larger norm cannot come from training, and is refused.
NORM_MAX = 1e9
#: Squares are summed in this unit, so that norms from 1e-28 to NORM_MAX need one pass and no scaling by the largest.
_UNIT = np.float32(2.0**30)
#: The elements of a row, of which `_sums` adds one after another.
_LANES = 1024


class MergeRule(NamedTuple):
    """Three functions of an accumulator, which is linear in the weights.

    Attributes:
        init: `init(group)` returns an empty accumulator.
        add: `add(acc, delta_L, norm, weight)` adds an outer gradient, given its L2 norm and its weight (scalar arrays).
        finish: `finish(acc, inverse)` returns the merged delta_L, where `inverse` is one over the sum of the weights.
    """

    init: Callable[[Group], Accumulator]
    add: Callable[[Accumulator, jax.Array, jax.Array, jax.Array], Accumulator]
    finish: Callable[[Accumulator, jax.Array], jax.Array]


def _nothing(group: Group) -> jax.Array:
    # Minus zero is the neutral element of addition: −0 + x keeps the bits of x, while 0 + −0 is 0.
    return jnp.full(group.length, -0.0, jnp.float32)


def rounded(product_N: jax.Array, known: jax.Array) -> jax.Array:
    """Return a product that is rounded before anything is added to it, so that every processor computes the same bits.

    Left to itself, XLA adds a product in one instruction, without rounding, where the processor has that. Here the bits
    are combined with a zero that XLA does not know to be one: the sign of `known`, a scalar that is never negative.
    """
    bits_N = jax.lax.bitcast_convert_type(product_N, jnp.uint32) | _zero(known)
    return jax.lax.bitcast_convert_type(bits_N, jnp.float32)


def _zero(known: jax.Array) -> jax.Array:
    """Return the integer 0, which XLA does not know."""
    zero: jax.Array = jax.lax.bitcast_convert_type(known, jnp.uint32) >> jnp.uint32(31)
    return zero


def _average_add(sum_L: jax.Array, delta_L: jax.Array, norm: jax.Array, weight: jax.Array) -> jax.Array:
    return sum_L + rounded(weight * delta_L, weight)


def _average_finish(sum_L: jax.Array, inverse: jax.Array) -> jax.Array:
    return inverse * sum_L


class RdaAccumulator(NamedTuple):
    """The running sums Σ w‖Δ‖ (float32 scalar) and Σ w φ(Δ) (float32 [L]) of radial-directional averaging."""

    norm: jax.Array
    direction: jax.Array


@jax.jit
def _norm(x_L: jax.Array, known: jax.Array) -> jax.Array:
    """Return the L2 norm, which is zero from 1e-28 down. `known` is a number that is never negative."""
    return jnp.sqrt(_sums([_squares(x_L, known)])[0]) / _UNIT


def _sums(vectors: Sequence[jax.Array]) -> jax.Array:
    """Return the sum of each vector (float32 [V]), to the same bits on any machine.

    XLA leaves a plain sum to a library, whose order depends on the threads and the processor. So each vector becomes
    rows, which are added one after another, and then the two halves of a row until one element is left.
    """
    counts = [max(1, -(-vector.size // _LANES)) for vector in vectors]
    padded = [jnp.pad(each, (0, rows * _LANES - each.size)) for each, rows in zip(vectors, counts, strict=True)]
    rows_RW = jnp.concatenate(padded).reshape(-1, _LANES)

    def add(sums_VW: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        vector, row_W = row
        sum_W = jax.lax.dynamic_index_in_dim(sums_VW, vector, keepdims=False) + row_W
        return jax.lax.dynamic_update_index_in_dim(sums_VW, sum_W, vector, 0), None

    vector_of_row_R = jnp.asarray(np.repeat(np.arange(len(counts), dtype=np.int32), counts))
    sums_VW, _ = jax.lax.scan(add, jnp.zeros((len(counts), _LANES), jnp.float32), (vector_of_row_R, rows_RW))
    while (lanes := sums_VW.shape[1]) > 1:
        sums_VW = sums_VW[:, : lanes // 2] + sums_VW[:, lanes // 2 :]
    return sums_VW[:, 0]


def _squares(x_N: jax.Array, known: jax.Array) -> jax.Array:
    # The maximum serves the same purpose as `rounded`, with which XLA would not decode and sum in one pass.
    return jnp.maximum(jnp.square(_UNIT * x_N), jax.lax.bitcast_convert_type(_zero(known), jnp.float32))


def _unit(x_L: jax.Array, norm: jax.Array) -> jax.Array:
    """Return φ(x) = x/‖x‖, with φ(0) = 0."""
    return x_L * jnp.where(norm > 0, 1.0 / norm, 0.0)


def _rda_init(group: Group) -> RdaAccumulator:
    return RdaAccumulator(jnp.zeros((), jnp.float32), _nothing(group))


def _rda_add(acc: RdaAccumulator, delta_L: jax.Array, norm: jax.Array, weight: jax.Array) -> RdaAccumulator:
    length, direction = rounded(weight * norm, weight), rounded(weight * _unit(delta_L, norm), weight)
    return RdaAccumulator(acc.norm + length, acc.direction + direction)


def _rda_finish(acc: RdaAccumulator, inverse: jax.Array) -> jax.Array:
    length = _norm(acc.direction, inverse)
    return jnp.where(inverse * length > CANCELLED, inverse * acc.norm, 0.0) * _unit(acc.direction, length)


_RDA = MergeRule(_rda_init, _rda_add, _rda_finish)
#: The rules by name. `average`: Σ w Δ. `rda`: (Σ w‖Δ‖) · φ(Σ w φ(Δ)), which keeps the length of nearly orthogonal
#: gradients, where averaging shrinks them to about 1/√M. Both are from Decoupled DiLoCo (arXiv 2604.21428).
#: `isotropic`: the result of `rda` with a power of its singular values and the same norm (see `_isotropic`).
MERGE_RULES: dict[str, MergeRule] = {
    "average": MergeRule(_nothing, _average_add, _average_finish),
    "rda": _RDA,
    "isotropic": _RDA,
}


def _cpu() -> jax.Device:
    return jax.local_devices(backend="cpu")[0]


def begin(groups: tuple[Group, ...]) -> tuple[Accumulator, ...]:
    """Return empty accumulators, one for each group. Groups are in order and without gaps."""
    with jax.default_device(_cpu()):
        acc = _begin(groups)
    # They are committed to the CPU, so that whatever is computed with them is, too.
    placed: tuple[Accumulator, ...] = jax.device_put(acc, _cpu())
    return placed


@partial(jax.jit, static_argnames="groups")
def _begin(groups: tuple[Group, ...]) -> tuple[Accumulator, ...]:
    return tuple(MERGE_RULES[group.rule].init(group) for group in groups)


def norms(body: Body, groups: tuple[Group, ...]) -> tuple[NDArray[np.float32], float]:
    """Return the L2 norm of each tensor of a contribution, and that of all of it, which is NaN if a value is.

    The decoded values are not kept.
    """
    known = jax.device_put(np.float32(1.0), _cpu())  # so that these are computed where the sum is
    of_tensors, norm = _norms(body.parts, known, codec=body.codec, groups=groups)
    return np.asarray(of_tensors), float(norm)


@partial(jax.jit, static_argnames=("codec", "groups"))
def _norms(parts: Any, known: jax.Array, *, codec: str, groups: tuple[Group, ...]) -> tuple[jax.Array, jax.Array]:
    squares_N = _squares(codec_of(codec).restore(parts, _elements(groups), jnp), known)
    squares = [squares_N[group.start : group.end] for group in groups]
    of_tensors = jnp.sqrt(_sums(squares)) / _UNIT if groups else jnp.zeros(0, jnp.float32)
    return of_tensors, _norm(of_tensors, known)


def accumulate(
    acc: tuple[Accumulator, ...],
    body: Body,
    groups: tuple[Group, ...],
    norms: NDArray[np.float32],
    *,
    weight: float = 1.0,
    clip: float = 1.0,
) -> tuple[Accumulator, ...]:
    """Add a contribution to the accumulators, whose buffers are donated.

    Args:
        body: The contribution as its codec encoded it.
        norms: The norm of each tensor, by `norms`.
        clip: A factor on all of its values.
    """
    scalars = (np.float32(weight), np.float32(clip))
    added: tuple[Accumulator, ...] = _accumulate(acc, body.parts, norms, *scalars, codec=body.codec, groups=groups)
    return added


@partial(jax.jit, static_argnames=("codec", "groups"), donate_argnames="acc")
def _accumulate(
    acc: tuple[Accumulator, ...],
    parts: Any,
    norms: jax.Array,
    weight: jax.Array,
    clip: jax.Array,
    *,
    codec: str,
    groups: tuple[Group, ...],
) -> tuple[Accumulator, ...]:
    delta_N = codec_of(codec).restore(parts, _elements(groups), jnp)
    return tuple(
        MERGE_RULES[group.rule].add(part, clip * delta_N[group.start : group.end], clip * norms[i], weight)
        for i, (part, group) in enumerate(zip(acc, groups, strict=True))
    )


def _elements(groups: tuple[Group, ...]) -> int:
    return max((group.end for group in groups), default=0)


def finish(
    acc: tuple[Accumulator, ...],
    groups: tuple[Group, ...],
    *,
    total_weight: float = 1.0,
    gain: float = 1.0,
    spectra: Spectra | None = None,
    changes_spectra: bool = True,
) -> jax.Array:
    """Return the merged outer gradient (float32 [N]) times `gain`.

    Args:
        spectra: How matrices share threads.
        changes_spectra: Whether `isotropic` differs from `rda`.
    """
    merged_N: jax.Array = _finish(acc, np.float32(1.0 / total_weight), np.float32(gain), groups)
    changed = [group for group in groups if group.changes_spectrum and changes_spectra]
    if not changed:
        return merged_N
    flat_N = empty_vector(merged_N.size)
    flat_N[:] = merged_N
    matrices = [(matrix_RC, group.exponent) for group in changed for matrix_RC in group.matrices(flat_N)]
    (spectra or Spectra()).change(_isotropic, matrices)
    placed_N: jax.Array = jax.device_put(flat_N, _cpu())
    return placed_N


def _isotropic(matrix_RC: NDArray[np.float32], exponent: float, power: Power) -> None:
    """Replace a matrix U S Vᵀ by ‖S‖/‖Sᵖ‖ · U Sᵖ Vᵀ, in place. Its L2 norm stays.

    Over one interval, data-parallel training moves as unevenly as the islands' mean. In the long run it moves more
    evenly along the same directions (docs/results/learning.md). p = 0 is isotropic model merging (arXiv 2502.04959),
    and the map of Muon.
    """
    changed_RC = power(matrix_RC, exponent)
    both = (jax.device_put((each.ravel(), np.float32(1.0)), _cpu()) for each in (matrix_RC, changed_RC))
    norm, changed_norm = (np.float32(_norm(*each)) for each in both)
    np.multiply(changed_RC, norm / changed_norm if changed_norm > 0 else np.float32(0.0), out=matrix_RC)


@partial(jax.jit, static_argnames="groups")
def _finish(acc: tuple[Accumulator, ...], inverse: jax.Array, gain: jax.Array, groups: tuple[Group, ...]) -> jax.Array:
    parts = zip(acc, groups, strict=True)
    merged = [gain * MERGE_RULES[group.rule].finish(part, inverse) for part, group in parts]
    return jnp.concatenate(merged) if merged else jnp.zeros(0, jnp.float32)
