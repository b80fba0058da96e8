"""Change the spectra of many matrices on several threads, and predict what that costs. Without JAX.

The number of threads changes no bit: each matrix is changed on its own, and the sums of its products are exact
(`merger.spectrum`). Numpy itself has one thread in our commands (`ops.cli`), because its threads wait busily: on a
machine that does other work, too, two of them are slower than one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from archipelago.broker.config import MergeConfig
from archipelago.broker.machine import usable_cores
from archipelago.broker.manifest import Tensor
from archipelago.merger.groups import groups
from archipelago.merger.spectrum import Matrix, Multiply, operations, with_power

#: How often `between` is called while matrices are changed. It must be far below a merger's lease.
BETWEEN_SECONDS: Final = 0.25
#: The matrix that a machine's rate is measured with. Smaller ones spend more of their time outside products.
_TRIAL: Final = (256, 1024)
_TRIALS: Final = 3

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
        self._between, self._clock = between, clock

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
                self._between()
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


def measured_rate(count: int = 0) -> float:
    """Measure how many operations a second this machine does with that many threads, in about 0.2 s."""
    count = count or default_threads()
    matrix_RC = np.random.default_rng(0).standard_normal(_TRIAL, np.float32)
    matrices, seconds = [(matrix_RC, 0.0)] * count, []
    for _ in range(1 + _TRIALS):  # the first one starts the threads of numpy
        spectra = Spectra(threads=count)
        spectra.change(with_power, matrices)
        seconds.append(spectra.seconds)
    return count * operations(_TRIAL, 0.0) / min(seconds)
