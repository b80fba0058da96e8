"""The spectra of `merger.spectra`, computed by XLA in products of int8 matrices.

Processors with AMX or VNNI, and all accelerators, multiply these many times faster than float64 numbers, and come to
the same bits: an integer of 14 bits is 128 times an int8 plus another int8. A trial shows whether this machine is one
of them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Final, NamedTuple

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
    operations,
    powered,
    with_power,
)

log = logging.getLogger(__name__)
#: An int32 holds the sum of twice as many products of two int8.
_TERMS_MAX: Final = 1 << 16
#: Units for small integers take matrices whose sides are multiples of this number. Others are padded with zeros.
_TILE: Final = 16
#: The rows and columns of the matrix on which numpy and XLA are compared, and how often.
_TRIAL, _TRIALS = (256, 1024), 3
_ONE_TRIAL: Final = threading.Lock()
#: On an H100 with JAX 0.11.2, Triton's kernels for products of int8 computed wrong sums in `Products.fine`. Those of
#: cuBLAS had numpy's bits (docs/results/accelerator.md).
COMPILED: Final = {"xla_gpu_enable_triton_gemm": False}
_OTHER_BITS: Final = "%s computes other bits of spectra than numpy on this machine, so numpy computes them"


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


class Trial(NamedTuple):
    """How XLA and numpy change a trial matrix on this machine's processor.

    Attributes:
        power: XLA's way, or None where numpy is faster or has other bits.
        rate: The operations a second of one thread, by the better way.
    """

    power: Power | None
    rate: float


def trial() -> Trial:
    """Return how this machine's processor changes spectra. It is tried once."""
    with _ONE_TRIAL:  # threads need it at the same time
        return _tried()


@cache
def _tried() -> Trial:
    by_xla = on_device(jax.local_devices(backend="cpu")[0])
    is_same = has_same_bits(by_xla, "XLA")
    seconds, of_numpy = compared(by_xla, "XLA")
    is_better = is_same and seconds < of_numpy
    rate = operations(_TRIAL, 0.0) / (seconds if is_better else of_numpy)
    return Trial(by_xla if is_better else None, rate)


def by_default_device() -> Power | None:
    """Return the way of JAX's default device, for mergers in a process that trains there, or that of a processor."""
    with _ONE_TRIAL:
        power = _of_default_device()
    return power or trial().power


@cache
def _of_default_device() -> Power | None:
    device = jax.local_devices()[0]
    found = on_device(device)
    is_same = device.platform != "cpu" and has_same_bits(found, f"JAX on {device.device_kind}")
    return found if is_same else None


def has_same_bits(candidate: Power, name: str, shape: tuple[int, int] = _TRIAL) -> bool:
    """Return whether it has numpy's bits on a trial matrix, wide and tall. Other bits are logged."""
    wide_SC = _trial(shape)
    for exponent in (0.0, 0.5):
        expected_SC = with_power(wide_SC, exponent)
        for matrix_RC, expected_RC in ((wide_SC, expected_SC), (np.ascontiguousarray(wide_SC.T), expected_SC.T)):
            if not np.array_equal(candidate(matrix_RC, exponent).view(np.uint32), expected_RC.view(np.uint32)):
                log.warning(_OTHER_BITS, name)
                return False
    return True


def compared(candidate: Power, name: str, shape: tuple[int, int] = _TRIAL) -> tuple[float, float]:
    """Return the processor seconds that it takes for a trial matrix, and those of numpy. It has changed one before.

    XLA shares a matrix among its threads, and numpy has one for each matrix, so elapsed time would favour XLA.
    """
    ways = candidate, with_power
    theirs, own = (min(_seconds(partial(way, _trial(shape), 0.0)) for _ in range(_TRIALS)) for way in ways)
    log.info("spectra of a %d × %d matrix take %s %.0f ms, and numpy %.0f ms", *shape, name, 1e3 * theirs, 1e3 * own)
    return theirs, own


def _trial(shape: tuple[int, int]) -> Matrix:
    random = np.random.default_rng(0)
    return (random.uniform(-1.0, 1.0, shape) * np.exp2(random.integers(-8, 1, shape[1]))).astype(np.float32)


def _seconds(run: Callable[[], object]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began
