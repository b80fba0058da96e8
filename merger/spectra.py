"""Spectra: which tensors have one, how it is changed to the same bits on any machine, and what that costs. No JAX.

`groups` decides by which rule each tensor of a fragment is merged. `isotropic` changes the singular values of a matrix
to a power of them (`with_power`). Matrix products usually differ in their last bits between processors, because each
adds in another order. Here, factors are rounded to so few bits that float64 holds every partial sum exactly: then no
order and no fused multiplication changes a bit. All other operations act on single elements, which IEEE 754 defines. So
a merger that takes over on another machine, and a replay there, come to the same parameters.

The number of threads changes no bit either: each matrix is changed on its own. Numpy itself has one thread in our
commands (`ops.cli`), because its threads wait busily: on a machine that does other work, too, two of them are slower
than one.

Names of shapes: R rows, C columns, S the shorter side.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from archipelago.broker.config import MergeConfig
from archipelago.broker.machine import usable_cores
from archipelago.broker.manifest import Tensor
from archipelago.merger.executor import BETWEEN_SECONDS


@dataclass(frozen=True)
class Group:
    """One tensor in the fragment's vector.

    Attributes:
        start: Its first element.
        length: The number of its elements.
        rule: The name of its merge rule.
        shape: Its shape. Only matrices, and stacks of them along the leading axes, have a spectrum.
        exponent: The power of the singular values that `isotropic` leaves.
    """

    start: int
    length: int
    rule: str
    shape: tuple[int, ...] = ()
    exponent: float = 0.0

    @property
    def end(self) -> int:
        """One past the last element."""
        return self.start + self.length

    @property
    def changes_spectrum(self) -> bool:
        """Whether `isotropic` differs from `rda` for this tensor. Vectors, rows and columns have one singular value."""
        return self.rule == "isotropic" and len(self.shape) > 1 and min(self.shape[-2:]) > 1


def groups(layout: Sequence[tuple[Tensor, int]], config: MergeConfig) -> tuple[Group, ...]:
    """Return the tensors of one fragment in order, from its row of `Manifest.layout`. Empty tensors are left out."""
    return tuple(_group(tensor, offset, config) for tensor, offset in layout if tensor.size)


def _group(tensor: Tensor, offset: int, config: MergeConfig) -> Group:
    is_embedding = tensor.kind == "embedding"
    rule, exponent = (
        (config.embedding, config.embedding_exponent) if is_embedding else (config.rest, config.rest_exponent)
    )
    if rule != "isotropic":  # then the shape decides nothing, and equal groups share a program
        return Group(offset, tensor.size, rule)
    if len(tensor.shape) > 1 and min(tensor.shape[-2:]) > config.isotropic_side_max:
        return Group(offset, tensor.size, "rda")
    return Group(offset, tensor.size, rule, tensor.shape, exponent)


Matrix = NDArray[np.float64]
#: Returns a matrix product. It may share the rows of the first matrix among threads, which changes no bit.
Multiply = Callable[[Matrix, Matrix], Matrix]

#: Smaller singular values, as a share of the largest, are noise of the codec. They grow, but stay below the others.
FLOOR: Final = 1e-3
#: The first polynomial is steep at 1, so rounding must not carry a singular value beyond it.
_MARGIN: Final = 1.0 - 2.0**-8
#: Smaller numbers than 2 to the power of minus this become zeros, so that their scale is a float64.
_EXPONENT_MAX: Final = 900
#: The bits of a float64 significand, which bound the length of an exact sum.
_EXACT_BITS: Final = 53

#: Coefficients (a, b, c) of successive polynomials a·x + b·x³ + c·x⁵. Each has the smallest error max |1 − y| of all
#: such polynomials over the interval to which its predecessors take [FLOOR, 1], as in Polar Express (arXiv 2505.16932).
_STEPS: Final = (
    (8.47032880384807, -25.10807470666187, 18.62927559911801),
    (4.182834183293943, -3.108701109889243, 0.5806066813500494),
    (3.9618572789616, -2.954063746359379, 0.5629761179538965),
    (3.286586217027965, -2.464720134531286, 0.5073576938614552),
    (2.2737499944340436, -1.6446603679080731, 0.4161909274978867),
    (1.8887161973518254, -1.2651572253385928, 0.3765189255574865),
)


def with_power(matrix_RC: NDArray[np.float32], exponent: float, multiply: Multiply = np.matmul) -> Matrix:
    """Return U Sᵖ Vᵀ for a matrix U S Vᵀ, times some positive number. A matrix of zeros stays one.

    Singular values far below FLOOR · max S are damped, and zeros stay zeros but for rounding, so that a matrix of rank
    one keeps its direction. For p = 0, those from the floor on become equal to 0.001, and smaller ones stay below
    them. For p > 0, each s (as a share of a number from max S to a few times max S) becomes
    s · (s² + FLOOR²)^((p − 1)/2), to 0.001.

    Args:
        matrix_RC: The matrix. Its values are finite.
        exponent: p, one of 0, 1/4 and 1/2.
        multiply: Multiplies two large matrices.
    """
    wide_SC = np.asarray(matrix_RC if matrix_RC.shape[0] <= matrix_RC.shape[1] else matrix_RC.T, np.float64)
    largest = np.abs(wide_SC).max(initial=0.0)
    if not largest:
        return np.asarray(matrix_RC, np.float64)
    wide_SC = np.ascontiguousarray(np.ldexp(wide_SC, -int(np.frexp(largest)[1])))  # a power of two rounds nothing
    out_SC = _polar(wide_SC, multiply) if exponent == 0.0 else _root(wide_SC, exponent, multiply)
    return out_SC if out_SC.shape == matrix_RC.shape else np.ascontiguousarray(out_SC.T)


def operations(shape: tuple[int, ...], exponent: float) -> float:
    """Return the floating-point operations of the matrix products of `with_power` for a matrix, or a stack of them.

    X Xᵀ counts half (see `product`). For p = 0 there are 18 to 24 times the shorter side for each element.
    """
    *stack, rows, columns = shape
    side, length, steps = min(rows, columns), max(rows, columns), len(_STEPS)
    if exponent == 0.0:
        return float(math.prod(stack) * steps * (3 * side**2 * length + side**3))
    roots = 2 if exponent == 0.5 else 3  # with four fine products, of three products each, in every step
    fine = 2 * side**2 * length + (4 * steps * roots + roots - 2) * side**3
    return float(math.prod(stack) * (6 * fine + side**3))


def _polar(x_SC: Matrix, multiply: Multiply) -> Matrix:
    """Return U Vᵀ by Newton–Schulz iterations."""
    for number, (a, b, c) in enumerate(_STEPS):
        gram_SS = product(x_SC, x_SC.T)
        square_SS = product(gram_SS, gram_SS.T)
        if number == 0:
            most = math.sqrt(_norm_bound(square_SS)) / _MARGIN  # of the squares of the singular values
            x_SC, gram_SS, square_SS = x_SC / math.sqrt(most), gram_SS / most, square_SS / (most * most)
        x_SC = product(_polynomial(gram_SS, square_SS, a, b, c), x_SC, multiply)
    return x_SC


def _root(x_SC: Matrix, exponent: float, multiply: Multiply) -> Matrix:
    """Return U Sᵖ Vᵀ = (X Xᵀ)^(−(1 − p)/2) X for p = 1/2 or 1/4, times some positive number."""
    gram_SS = fine_product(x_SC, x_SC.T, multiply)
    gram_SS = gram_SS / math.sqrt(_norm_bound(product(gram_SS, gram_SS.T)))
    gram_SS[np.diag_indices(len(gram_SS))] += FLOOR**2
    root_SS, _ = _square_roots(gram_SS, multiply)  # its eigenvalues are the singular values
    half_SS, factor_SS = _square_roots(root_SS, multiply)
    if exponent == 0.25:
        factor_SS = fine_product(factor_SS, _square_roots(half_SS, multiply)[1], multiply)
    elif exponent != 0.5:
        raise ValueError(f"the exponent {exponent} is none of 0, 1/4 and 1/2")
    return fine_product(factor_SS, x_SC, multiply)


def _square_roots(a_SS: Matrix, multiply: Multiply) -> tuple[Matrix, Matrix]:
    """Return A^(1/2) and A^(−1/2), each times some positive number, by coupled Newton–Schulz iterations.

    A is symmetric, and its eigenvalues are from 0 to 1.001. The square roots of the eigenvalues take
    the same way to one as the singular values in `_polar`.
    """
    root_SS, inverse_SS = _MARGIN * a_SS, np.eye(len(a_SS))
    for a, b, c in _STEPS:
        error_SS = fine_product(inverse_SS, root_SS, multiply)
        step_SS = _polynomial(error_SS, fine_product(error_SS, error_SS, multiply), a, b, c)
        root_SS = fine_product(root_SS, step_SS, multiply)
        inverse_SS = fine_product(step_SS, inverse_SS, multiply)
    return root_SS, inverse_SS


def _polynomial(one_SS: Matrix, square_SS: Matrix, a: float, b: float, c: float) -> Matrix:
    out_SS = b * one_SS + c * square_SS
    out_SS[np.diag_indices(len(out_SS))] += a
    return out_SS


def product(left_AK: Matrix, right_KB: Matrix, multiply: Multiply = np.matmul) -> Matrix:
    """Return the product of two matrices whose elements are rounded to half the bits of an exact sum.

    The error is about 2⁻²¹ of the largest elements for K up to 2,048. The sum itself is exact.
    """
    bits = _bits(left_AK.shape[1])
    left, left_unit = _integers(left_AK, bits)
    if right_KB.base is left_AK and right_KB.shape == left_AK.shape[::-1]:  # X Xᵀ takes half the time
        return _times(left @ left.T, left_unit * left_unit)
    right, right_unit = _integers(right_KB, bits)
    return _times(multiply(left, right), left_unit * right_unit)


def fine_product(left_AK: Matrix, right_KB: Matrix, multiply: Multiply = np.matmul) -> Matrix:
    """Return the product of two matrices with twice the bits of `product`, as a sum of three exact products."""
    bits = _bits(left_AK.shape[1])
    left, left_unit = _integers(left_AK, bits)
    right, right_unit = _integers(right_KB, bits)
    right_rest, right_fine = _integers(right_KB - right * right_unit, bits)
    rest_AB = _times(multiply(left, right_rest), left_unit * right_fine)
    del right_rest  # memory of the size of the matrix
    left_rest, left_fine = _integers(left_AK - left * left_unit, bits)
    rest_AB += _times(multiply(left_rest, right), left_fine * right_unit)
    del left_rest
    rest_AB += _times(multiply(left, right), left_unit * right_unit)
    return rest_AB


def _bits(terms: int) -> int:
    """Return the most bits that factors may have so that a sum of `terms` products is exact."""
    return (_EXACT_BITS - max(1, (terms - 1).bit_length())) // 2


def _integers(values: Matrix, bits: int) -> tuple[Matrix, float]:
    """Return integers of at most that many bits and the power of two of which they are multiples."""
    largest = max(values.max(initial=0.0), -values.min(initial=0.0))
    exponent = max(-_EXPONENT_MAX, int(np.frexp(largest)[1]))
    scaled = values * math.ldexp(1.0, bits - exponent)  # rounds nothing, and is faster than np.ldexp
    return np.rint(scaled, out=scaled), math.ldexp(1.0, exponent - bits)


def _times(values: Matrix, factor: float) -> Matrix:
    """Multiply in place."""
    values *= factor
    return values


def _norm_bound(symmetric_SS: Matrix) -> float:
    """Return an upper bound of the largest eigenvalue: the largest sum of the magnitudes in a row, rounded up."""
    side = len(symmetric_SS)
    counts, unit = _integers(np.abs(symmetric_SS), _EXACT_BITS - side.bit_length() - 1)
    return float(counts.sum(axis=1).max() + side) * unit


#: Products with fewer operations are not worth the hand-over to other threads, which takes about 0.1 ms.
_LARGE: Final = 1e8

#: Changes a matrix, given its exponent and a way to multiply.
Work = Callable[[NDArray[np.float32], float, Multiply], object]


def default_threads() -> int:
    """Return how many threads change spectra by default: OMP_NUM_THREADS, or the cores that this process may use."""
    if (found := os.environ.get("OMP_NUM_THREADS", "")).isdecimal() and int(found):
        return int(found)
    return usable_cores()


class Spectra:
    """Shares matrices, and the products of large ones, among threads.

    Args:
        between: Called on the calling thread every BETWEEN_SECONDS, because large matrices may take longer than a
            merger's lease. What it raises ends the change.
        clock: Seconds of a monotonic clock.
        threads: The number of threads; 0 stands for `default_threads()`.

    Attributes:
        seconds: The time that all changes have taken.
        threads: The number of threads.
    """

    def __init__(
        self,
        between: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        threads: int = 0,
    ) -> None:
        self.seconds = 0.0
        self.threads = threads or default_threads()
        self.between, self._clock = between, clock

    def change(self, work: Work, matrices: Sequence[tuple[NDArray[np.float32], float]]) -> None:
        """Call `work` with each matrix and its exponent, the most expensive first."""
        began = self._clock()
        # Two pools, because a thread that waits for the rows of a product must not keep others from multiplying them.
        pool, rows = ThreadPoolExecutor(self.threads, "spectrum"), ThreadPoolExecutor(self.threads, "product")
        try:
            dearest = sorted(matrices, key=lambda each: -operations(each[0].shape, each[1]))
            running = {pool.submit(work, *each, partial(self._multiply, rows)) for each in dearest}
            while running:
                done, running = wait(running, BETWEEN_SECONDS, FIRST_COMPLETED)
                for future in done:
                    future.result()
                self.between()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            rows.shutdown(wait=False, cancel_futures=True)
            self.seconds += self._clock() - began

    def _multiply(self, rows: ThreadPoolExecutor, left_AK: Matrix, right_KB: Matrix) -> Matrix:
        """Return the product of two matrices. Threads take rows of a large one."""
        if self.threads == 1 or 2.0 * left_AK.size * right_KB.shape[1] < _LARGE:
            return left_AK @ right_KB
        parts = np.array_split(left_AK, self.threads)
        return np.concatenate(list(rows.map(lambda part_AK: part_AK @ right_KB, parts)))


def cycle_operations(tensors: Sequence[Tensor], config: MergeConfig) -> float:
    """Return the floating-point operations of all spectra of one cycle, in which each fragment is merged once."""
    return sum(
        operations(group.shape, group.exponent)
        for group in groups([(tensor, 0) for tensor in tensors], config)
        if group.changes_spectrum
    )
