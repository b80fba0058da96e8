"""Spectra: how the one of a matrix is changed to the same bits on any machine, and what that costs. No JAX.

`isotropic` changes the singular values of a matrix to a power of them (`with_power`). Matrix products usually differ in
their last bits between processors, because each adds in another order. Here the factors are integers of 14 bits times a
power of two, whose product is exact, and rounded once to float32. Sums of products with a polynomial's coefficients are
rounded once as well, so no fused multiplication changes a bit. All other operations act on single elements; none is a
division, which compilers for GPUs approximate, and scales are powers of two. So a merger that takes over on another
machine, and a replay there, come to the same parameters, whether numpy or XLA (`merger.xla_spectra`) has multiplied.

The number of threads changes no bit either: each matrix is changed on its own, and each thread has whole rows of a
large product. The libraries that multiply have one thread (numpy by `ops.cli`), because their own threads wait busily:
on a machine that does other work, too, two of them are slower than one.

Names of shapes: R rows, C columns, S the shorter side.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, reduce
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from archipelago.broker.machine import usable_cores

Matrix = NDArray[np.float32]
#: An array of numpy or of JAX.
Array = Any
#: What an iteration changes.
State = TypeVar("State")
#: Returns what `with_power` does, to the same bits.
Power = Callable[[Matrix, float], Matrix]

#: Smaller singular values, as a share of the largest, are noise of the codec. They grow, but stay below the others.
FLOOR: Final = 1e-2
#: The bits of the integers that are multiplied.
BITS: Final = 14
#: The smallest exponent of a factor, so that the scale of no product leaves the range of float32.
EXPONENT_MIN: Final = -48

# Coefficients (a, b, c) of successive polynomials a·x + b·x^(1+q) + c·x^(1+2q), with significands of 9 bits. Each has
# the smallest error max |1 − y| of all such polynomials over the interval to which its predecessors take the one from
# the floor to one, as in Polar Express (arXiv 2505.16932). It takes 0.98 · x for x, because it is steep at the
# interval's end, and rounding must not carry a value far beyond it.

#: q = 2, from FLOOR. In row n, the first polynomial takes x · 2^(−n/4) for x.
_FIRST: Final = (
    (7.9375, -22.25, 15.78125),
    (6.671875, -13.21875, 6.625),
    (5.609375, -7.859375, 2.7890625),
    (4.71875, -4.671875, 1.171875),
)
_NEXT: Final = (
    (3.5625, -2.5625, 0.4853515625),
    (2.609375, -1.859375, 0.4091796875),
    (1.91796875, -1.2578125, 0.3466796875),
    (1.8359375, -1.17578125, 0.3388671875),
)
#: q = 4, from the square root of FLOOR.
_ROOT: Final = (
    (3.7734375, -9.8125, 7.1875),
    (1.7734375, -0.53125, 0.053955078125),
    (1.47265625, -0.537109375, 0.10107421875),
    (1.37890625, -0.509765625, 0.12939453125),
)


class Factor(NamedTuple):
    """A matrix of integers of at most 14 bits times a power of two: `integers` · 2^(`exponent` − 14)."""

    integers: Array
    exponent: Array


#: Two factors whose sum has at least 24 bits.
Halves = tuple[Factor, Factor]


class Products:
    """Exact products of factors, rounded once to float32. Here a float64 holds each of their partial sums.

    Whatever computes the sums, and in whatever order, the bits are these. `merger.xla_spectra` and
    `merger.torch_spectra` have other ways.

    Attributes:
        xp: numpy or `jax.numpy`.
    """

    def __init__(self, xp: Any = np) -> None:
        self.xp = xp

    def integers(self, values: Array) -> Array:
        """Return the nearest integers of float32 values, in the type that is multiplied."""
        return self.xp.rint(values).astype(np.float64)

    def product(self, left_AK: Array, right: Array, axis: int) -> Array:
        """Multiply two matrices of integers. This axis of the right one has length K."""
        if axis == 1 and right is left_AK:  # Numpy takes half the time for X Xᵀ, on one thread.
            gram_AA: Matrix = (left_AK @ left_AK.T).astype(np.float32)
            return gram_AA
        right_KB = right if axis == 0 else right.T
        return in_rows(lambda rows: (left_AK[rows] @ right_KB).astype(np.float32), left_AK, right_KB.shape[1])

    def two_to(self, exponent: Array) -> Array:
        """Return two to an integer from −126 to 127 in float32."""
        return np.float32(2.0**exponent)

    def exponent(self, values: Array) -> Array:
        """Return the exponent of the smallest power of two above all magnitudes when these are rounded to 14 bits."""
        significand, exponent = math.frexp(max(values.max(), -values.min()))
        return max(exponent + (significand >= 1.0 - 2.0 ** (-BITS - 1)), EXPONENT_MIN)

    def rounded(self, values: Array) -> Factor:
        """Round a float32 matrix to integers of 14 bits times a power of two."""
        exponent = self.exponent(values)
        return Factor(self.integers(values * self.two_to(BITS - exponent)), exponent)

    def value(self, factor: Factor) -> Array:
        """Return a factor in float32, which holds it exactly."""
        return factor.integers.astype(np.float32) * self.two_to(factor.exponent - BITS)

    def halves(self, values: Array) -> Halves:
        """Return two factors whose sum is a float32 matrix, to 2⁻²⁸ of its largest element."""
        high = self.rounded(values)
        return high, self.rounded(values - self.value(high))

    def times(self, left: Factor, right: Factor, axis: int = 0) -> Array:
        """Return the product of two factors in float32."""
        unit = self.two_to(left.exponent + right.exponent - 2 * BITS)
        return self.product(left.integers, right.integers, axis) * unit

    def gram(self, x: Factor) -> Array:
        """Return X Xᵀ in float32."""
        return self.times(x, x, axis=1)

    def fine(self, left: Halves, right: Halves) -> Array:
        """Return the product of two matrices of 24 bits. The product of the low halves is left out."""
        (high, low), (other_high, other_low) = left, right
        return (self.times(high, other_low) + self.times(low, other_high)) + self.times(high, other_high)

    def rows(self, side: int) -> Array:
        """Return how many rows of a square matrix are not padding, in int32."""
        return np.int32(side)

    def unit(self, side: int) -> Array:
        """Return the unit matrix in float32, with zeros where there is padding."""
        return self.xp.diag((self.xp.arange(side, dtype=np.int32) < self.rows(side)).astype(np.float32))

    def polynomial(self, coefficients: Iterable[Array], ones: Sequence[Factor], squares: Sequence[Factor]) -> Array:
        """Return a + b · G + c · G², where G and its square are sums of factors.

        The products are exact in float32, so that a fused addition changes nothing.
        """
        a, b, c = coefficients
        out_SS = a * self.unit(len(ones[0].integers))
        for one, square in zip(ones, squares, strict=True):
            out_SS = out_SS + (b * self.value(one) + c * self.value(square))
        return out_SS

    def repeated(self, step: Callable[[State, Array], State], state: State, coefficients: Array) -> State:
        """Return the state after a step with each row of coefficients."""
        return reduce(step, coefficients, state)

    def norm_exponent(self, symmetric: Factor) -> Array:
        """Return the exponent of a power of two above all eigenvalues. It bounds the sum of magnitudes in each row."""
        sums_S = self.xp.abs(symmetric.integers).astype(np.int32).sum(axis=1, dtype=np.int32)
        rounding = self.rows(len(sums_S))
        return self.exponent((sums_S + rounding).astype(np.float32)) + symmetric.exponent - BITS


def with_power(matrix_RC: Matrix, exponent: float, products: Products | None = None) -> Matrix:
    """Return U Sᵖ Vᵀ for a matrix U S Vᵀ, times some positive number. A matrix of zeros stays one.

    Singular values far below FLOOR · max S are damped, and zeros stay zeros but for rounding, so that a matrix of rank
    one keeps its direction. For p = 0, those from the floor on become equal to 0.002, and smaller ones stay below
    them. For p = ½, each s (as a share of a number from max S to a few times max S) becomes
    s · (s² + FLOOR²)^(−1/4), to 0.005.

    Args:
        matrix_RC: The matrix. Its values are finite.
        exponent: p, 0 or ½.
        products: How this processor multiplies. It decides no bit.
    """
    wide_SC = matrix_RC if matrix_RC.shape[0] <= matrix_RC.shape[1] else matrix_RC.T
    largest = max(matrix_RC.max(initial=0.0), -matrix_RC.min(initial=0.0))
    if largest == 0.0:
        return np.zeros_like(matrix_RC)
    scale = -math.frexp(largest)[1]
    # Two powers of two, which round nothing: one alone can be too large for float32. `ldexp` takes ten times as long.
    wide_SC = np.multiply(wide_SC, np.float32(2.0 ** (scale // 2)), order="C")
    wide_SC *= np.float32(2.0 ** (scale - scale // 2))
    out_SC = powered(wide_SC, exponent, products or Products())
    out_RC = out_SC if out_SC.shape == matrix_RC.shape else out_SC.T
    changed_RC: Matrix = np.add(out_RC, np.float32(0.0), order="C")  # no zero has a sign
    return changed_RC


def operations(shape: tuple[int, int], exponent: float) -> float:
    """Return the floating-point operations of numpy's matrix products for a matrix.

    X Xᵀ counts half (see `Products.product`). For p = 0 there are 15 to 20 times the shorter side for each element.
    """
    side, length = sorted(shape)
    once = 3.0 * side**2 * length + side**3
    return 5.0 * once if exponent == 0.0 else once + 96.0 * side**3


def memory(shape: tuple[int, int], exponent: float) -> int:
    """Return the bytes that numpy takes at its peak to change a matrix, besides the matrix (measured). XLA takes fewer.

    The second factor is that of square matrices, of which p = ½ has many.
    """
    side, length = sorted(shape)
    of_element, of_square = (52, 48) if exponent == 0.0 else (24, 180)
    return of_element * side * length + of_square * side**2


def powered(x_SC: Array, exponent: float, products: Products) -> Array:
    """Return U Sᵖ Vᵀ, times some positive number, by these products.

    The matrix is not taller than wide, and the magnitude of its largest element is from ½ to 1.
    """
    if exponent not in {0.0, 0.5}:
        raise ValueError(f"the exponent {exponent} is neither 0 nor 0.5")
    x = products.rounded(x_SC)
    gram_SS = products.gram(x)
    gram = products.rounded(gram_SS)
    square = products.rounded(products.gram(gram))
    bound = products.norm_exponent(square)  # of the fourth powers of the singular values
    if exponent:
        gram_SS = gram_SS * products.two_to(-((bound + 1) >> 1))
        return products.times(_inverse_fourth_root(gram_SS, products), x)
    quarter = bound >> 2
    x, gram, square = (
        Factor(each.integers, each.exponent - power * quarter) for each, power in ((x, 1), (gram, 2), (square, 4))
    )
    first = products.xp.asarray(_FIRST, dtype=np.float32)[bound & 3]

    def step(x_SC: Array, coefficients: Array) -> Array:
        x = products.rounded(x_SC)
        gram = products.rounded(products.gram(x))
        square = products.rounded(products.gram(gram))
        return products.times(products.rounded(products.polynomial(coefficients, [gram], [square])), x)

    x_SC = products.times(products.rounded(products.polynomial(first, [gram], [square])), x)
    return products.repeated(step, x_SC, np.array(_NEXT, np.float32))


def _inverse_fourth_root(gram_SS: Array, products: Products) -> Factor:
    """Return (G + FLOOR²)^(−1/4), times some positive number, for a matrix whose eigenvalues are from 0 to 1.

    It is the product R of polynomials that take what is left of the matrix, G R⁴, to the unit matrix. Eigenvalues near
    FLOOR² need 24 bits.
    """
    coefficients = np.array(_ROOT, np.float32)

    def step_of(coefficients: Array, left: Halves) -> Halves:
        square = products.halves(products.fine(left, left))
        return products.halves(products.polynomial(coefficients, left, square))

    def next_step(state: tuple[Halves, Halves, Halves], coefficients: Array) -> tuple[Halves, Halves, Halves]:
        root, step, left = state
        twice = products.halves(products.fine(step, step))
        left = products.halves(products.fine(products.halves(products.fine(twice, left)), twice))
        step = step_of(coefficients, left)
        return products.halves(products.fine(step, root)), step, left

    left = products.halves(gram_SS + np.float32(FLOOR**2) * products.unit(len(gram_SS)))
    step = step_of(coefficients[0], left)
    (root, _), _, _ = products.repeated(next_step, (step, step, left), coefficients[1:])
    return root


#: Products with fewer operations are not worth the hand-over to other threads, which takes about 0.1 ms.
_LARGE: Final = 1e8
#: Spectra with fewer operations are not worth the seconds that it takes to find or compile something faster than numpy.
_COMPILED: Final = 1e9

#: Changes a matrix, given its exponent and a way to change its spectrum.
Work = Callable[[Matrix, float, Power], object]


def default_threads() -> int:
    """Return how many threads change spectra by default: OMP_NUM_THREADS, or the cores that this process may use."""
    if (found := os.environ.get("OMP_NUM_THREADS", "")).isdecimal() and int(found):
        return int(found)
    return usable_cores()


def in_rows(rows_of: Callable[[slice], Matrix], left_AK: Array, columns: int) -> Matrix:
    """Return all rows of a product of `left_AK` from what returns some of them. Threads share those of a large one."""
    rows = len(left_AK)
    if 2.0 * left_AK.size * columns < _LARGE or (threads := default_threads()) == 1:
        return rows_of(slice(0, rows))
    ends = [rows * part // threads for part in range(threads + 1)]
    return np.concatenate(list(_row_threads(threads).map(rows_of, map(slice, ends, ends[1:]))))


@cache
def _row_threads(threads: int) -> ThreadPoolExecutor:
    """A pool of its own, because a thread that waits for the rows of a product must not keep others from them."""
    return ThreadPoolExecutor(threads, "product")


def by_fastest() -> Power | None:
    """Return the fastest way to change spectra on this processor, or None for numpy."""
    from archipelago.merger.spectra_trial import trial

    return trial().power


class Spectra:
    """Shares matrices among threads (`default_threads`).

    Args:
        clock: Seconds of a monotonic clock.
        faster: Returns what changes large matrices, to the same bits, if there is something faster than numpy.

    Attributes:
        seconds: The time that all changes have taken.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        faster: Callable[[], Power | None] = by_fastest,
    ) -> None:
        self.seconds = 0.0
        self._clock, self._faster = clock, faster
        self._threads = default_threads()

    def change(self, work: Work, matrices: Sequence[tuple[Matrix, float]]) -> None:
        """Call `work` with each matrix and its exponent, the most expensive first."""
        began = self._clock()
        pool = ThreadPoolExecutor(self._threads, "spectrum")
        try:
            dearest = sorted(matrices, key=lambda each: -operations(each[0].shape, each[1]))
            for future in [pool.submit(work, *each, self._power) for each in dearest]:
                future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            self.seconds += self._clock() - began

    def _power(self, matrix_RC: Matrix, exponent: float) -> Matrix:
        """Change a spectrum by the fastest way. A matrix of zeros lets a merger that starts find and compile it."""
        if operations(matrix_RC.shape, exponent) >= _COMPILED and (faster := self._faster()):
            return faster(matrix_RC, exponent)
        return with_power(matrix_RC, exponent)
