"""Spectra in a process of their own: the same bits, also after the process has died or when it never worked."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable

import numpy as np
import pytest

from archipelago.merger.accelerator import Accelerator
from archipelago.merger.spectra import Matrix, Power, Spectra

pytestmark = pytest.mark.usefixtures("optimised")

#: A shape that is worth a compiled program.
LARGE = (300, 1500)


def changed(compiled: Callable[[], Power | None]) -> dict[tuple[float, float], bytes]:
    """Change matrices on several threads. Return the bytes of each by its first value and its exponent."""
    found = dict[tuple[float, float], bytes]()

    def work(matrix_RC: Matrix, exponent: float, power: Power) -> None:
        found[float(matrix_RC[0, 0]), exponent] = power(matrix_RC, exponent).tobytes()

    matrices = np.random.default_rng(0).standard_normal((2, *LARGE), np.float32)
    asked = list(zip(matrices, (0.0, 0.5), strict=True))
    Spectra(threads=len(asked), compiled=compiled).change(work, asked)
    assert len(found) == len(asked)
    return found


@pytest.mark.full
@pytest.mark.processes
def test_a_process_comes_to_the_same_bits_and_may_die(caplog: pytest.LogCaptureFixture) -> None:
    before, expected = set(multiprocessing.active_children()), changed(lambda: None)
    accelerator = Accelerator("cpu", otherwise=lambda: None)
    assert changed(accelerator) == expected
    assert not caplog.records
    (process,) = set(multiprocessing.active_children()) - before
    process.kill()
    process.join()
    assert changed(accelerator) == changed(accelerator) == expected
    assert len(caplog.records) == 1


@pytest.mark.full
@pytest.mark.processes
def test_a_machine_without_an_accelerator_says_so_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator("none", otherwise=lambda: None)
    assert changed(accelerator) == changed(lambda: None)
    assert len(caplog.records) == 1
    assert "on none failed" in caplog.text
