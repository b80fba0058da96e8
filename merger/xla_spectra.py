"""The spectra of `merger.spectra`, computed by XLA in products of int8 matrices.

All accelerators, and some processors with AMX or VNNI, multiply these many times faster than float64 numbers, and come
to the same bits: an integer of 14 bits is 128 times an int8 plus another int8.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from archipelago.merger.spectra import (
    BITS,
    EXPONENT_MIN,
    Array,
    Matrix,
    Power,
    Products,
    State,
    powered,
)

#: An int32 holds the sum of twice as many products of two int8.
_TERMS_MAX: Final = 1 << 16
#: Units for small integers take matrices whose sides are multiples of this number. Others are padded with zeros.
_TILE: Final = 16
#: On an H100 with JAX 0.11.2, Triton's kernels for products of int8 computed wrong sums in `Products.fine`. Those of
#: cuBLAS had numpy's bits (docs/results/accelerator.md).
COMPILED: Final = {"xla_gpu_enable_triton_gemm": False}


class Int8Products(Products):
    """Products of integers in int8, with sums in int32.

    Args:
        side: The rows of the matrix whose spectrum is changed. Below them it has zeros only, which change no exact sum.
    """

    def __init__(self, side: int) -> None:
        super().__init__(jnp)
        self._side = side

    def rows(self, side: int) -> Array:
        return np.int32(self._side)

    def integers(self, values: Array) -> Array:
        return jnp.rint(values).astype(jnp.int32)

    def two_to(self, exponent: Array) -> Array:
        return ((exponent + 127).astype(jnp.uint32) << 23).view(jnp.float32)

    def exponent(self, values: Array) -> Array:
        bits = jnp.abs(jnp.maximum(values.max(), -values.min())).view(jnp.int32)
        return jnp.maximum(((bits + (1 << (23 - BITS))) >> 23) - 126, EXPONENT_MIN)

    def repeated(self, step: Callable[[State, Array], State], state: State, coefficients: Array) -> State:
        end: State = jax.lax.scan(lambda state, row: (step(state, row), None), state, coefficients)[0]
        return end

    def product(self, left_AK: Array, right: Array, axis: int) -> Array:
        numbers = (((1,), (axis,)), ((), ()))
        dot = partial(jax.lax.dot_general, dimension_numbers=numbers, preferred_element_type=jnp.int32)
        total = jnp.zeros((), jnp.float64)
        for start in range(0, left_AK.shape[1], _TERMS_MAX):
            terms = slice(start, start + _TERMS_MAX)
            high, low = _bytes(left_AK[:, terms])
            other_high, other_low = _bytes(right[terms] if axis == 0 else right[:, terms])
            mixed = dot(jnp.concatenate([high, low], 1), jnp.concatenate([other_low, other_high], axis))
            for sums, unit in ((dot(high, other_high), 2.0**14), (mixed, 2.0**7), (dot(low, other_low), 1.0)):
                total = total + sums.astype(jnp.float64) * unit
        return total.astype(jnp.float32)


def _bytes(integers: Array) -> tuple[Array, Array]:
    return (integers >> 7).astype(jnp.int8), (integers & 127).astype(jnp.int8)


def on_device(device: jax.Device) -> Power:
    """Return a function that changes spectra on a device."""

    def power(matrix_RC: Matrix, exponent: float) -> Matrix:
        # XLA on a CPU multiplies what it has transposed itself in a third more time.
        if device.platform == "cpu" and matrix_RC.shape[0] > matrix_RC.shape[1]:
            return np.ascontiguousarray(power(np.ascontiguousarray(matrix_RC.T), exponent).T)
        with jax.enable_x64(True):  # of this thread
            return np.asarray(program(jax.device_put(matrix_RC, device), exponent))

    return power


@partial(jax.jit, static_argnames="exponent", compiler_options=COMPILED)
def program(matrix_RC: Array, exponent: float) -> Array:
    """Do what `with_power` does, where the matrix lies. JAX must be allowed to use 64 bits (`enable_x64`)."""
    wide_SC = matrix_RC if matrix_RC.shape[0] <= matrix_RC.shape[1] else matrix_RC.T
    side, length = wide_SC.shape
    products = Int8Products(side)
    # The exponent of the largest magnitude, without rounding.
    scale = 126 - (jnp.abs(wide_SC).max().view(jnp.int32) >> 23)
    wide_SC = wide_SC * products.two_to(scale >> 1) * products.two_to(scale - (scale >> 1))
    padded_SC = jnp.pad(wide_SC, [(0, -size % _TILE) for size in wide_SC.shape])
    out_SC = powered(padded_SC, exponent, products)[:side, :length]
    out_RC = out_SC if out_SC.shape == matrix_RC.shape else out_SC.T
    return jnp.where(out_RC == 0, jnp.float32(0.0), out_RC)  # no zero has a sign
