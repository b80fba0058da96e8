"""Spectra in a process of their own: the same bits, also after the process has died or when it never worked."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable

import numpy as np
import pytest

from archipelago.merger import accelerator, xla_spectra
from archipelago.merger.accelerator import Accelerator
from archipelago.merger.spectra import Matrix, Power, Spectra, with_power

pytestmark = pytest.mark.usefixtures("optimised")

#: A shape that is worth a compiled program.
LARGE = (300, 1500)


def changed(faster: Callable[[], Power | None]) -> dict[tuple[float, float], bytes]:
    """Change matrices on several threads. Return the bytes of each by its first value and its exponent."""
    found = dict[tuple[float, float], bytes]()

    def work(matrix_RC: Matrix, exponent: float, power: Power) -> None:
        found[float(matrix_RC[0, 0]), exponent] = power(matrix_RC, exponent).tobytes()

    matrices = np.random.default_rng(0).standard_normal((2, *LARGE), np.float32)
    asked = list(zip(matrices, (0.0, 0.5), strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", f"{len(asked)}")
        Spectra(faster=faster).change(work, asked)
    assert len(found) == len(asked)
    return found


@pytest.mark.full
@pytest.mark.processes
def test_a_process_comes_to_the_same_bits_and_may_die(caplog: pytest.LogCaptureFixture) -> None:
    before, expected = set(multiprocessing.active_children()), changed(lambda: None)
    spectra = Accelerator("cpu", otherwise=lambda: None)
    assert changed(spectra) == expected
    assert not caplog.records
    (process,) = set(multiprocessing.active_children()) - before
    process.kill()
    process.join()
    assert changed(spectra) == changed(spectra) == expected
    assert len(caplog.records) == 1


@pytest.mark.full
@pytest.mark.processes
def test_a_machine_without_an_accelerator_says_so_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    spectra = Accelerator("none", otherwise=lambda: None)
    assert changed(spectra) == changed(lambda: None)
    assert len(caplog.records) == 1
    assert "on none failed" in caplog.text


class OnAThread(Accelerator):
    """An accelerator that answers on a thread of this process, so that a test can replace its device."""

    def _start(self) -> None:
        own, their = multiprocessing.Pipe()
        threading.Thread(target=accelerator._answer, args=(their,), daemon=True).start()
        self._lanes.put(accelerator._Lane(own, os.getpid()))
        self._process = multiprocessing.current_process()


def test_a_shape_that_the_accelerator_refuses_is_changed_here_and_others_there(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, small = (np.random.default_rng(0).standard_normal(shape, np.float32) for shape in ((300, 1500), (20, 30)))

    def power(matrix_RC: Matrix, exponent: float) -> Matrix:
        if matrix_RC.shape == large.shape:
            raise MemoryError("no room")
        return with_power(matrix_RC, exponent)

    monkeypatch.setattr(xla_spectra, "on_device", lambda device: power)
    here = list[tuple[int, ...]]()

    def this(matrix_RC: Matrix, exponent: float) -> Matrix:
        here.append(matrix_RC.shape)
        return with_power(matrix_RC, exponent)

    changing = OnAThread("cpu", otherwise=lambda: this)()
    assert changing is not None
    for matrix_RC in (large, small, large, small):
        np.testing.assert_array_equal(changing(matrix_RC, 0.0), with_power(matrix_RC, 0.0))
    assert here == [large.shape] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "cpu refuses matrices of 300 × 1500 (MemoryError: no room), so this processor changes them"
    ]
