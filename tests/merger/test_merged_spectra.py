"""Spectra of many matrices: the same bits on any number of threads, a lease meanwhile, and what they cost."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from archipelago.broker.config import MergeConfig
from archipelago.broker.manifest import Tensor
from archipelago.broker.wire import encoded
from archipelago.merger import merge_rules, spectra
from archipelago.merger.groups import Group
from archipelago.merger.spectra import Spectra, cycle_operations, measured_rate
from archipelago.merger.spectrum import operations

ISOTROPIC = MergeConfig(embedding="isotropic", rest="isotropic", embedding_exponent=0.5, rest_exponent=0.0)
STACK = (Group(0, 7 * 20 * 15, "isotropic", (7, 20, 15)), Group(2100, 50 * 30, "isotropic", (50, 30), 0.5))


def test_the_number_of_threads_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spectra, "_LARGE", 2e4)  # Threads then share rows of these products, too.
    delta_N = np.random.default_rng(0).standard_normal(STACK[-1].end, np.float32)

    def merged(threads: int) -> bytes:
        acc = merge_rules.accumulate(merge_rules.begin(STACK), encoded(delta_N, "float32"), STACK).acc
        return np.asarray(merge_rules.finish(acc, STACK, spectra=Spectra(threads=threads))).tobytes()

    assert merged(1) == merged(2) == merged(5)


def test_matrices_are_changed_at_the_same_time_on_several_threads() -> None:
    both = threading.Barrier(2, timeout=30)
    Spectra(threads=2).change(lambda *_: both.wait(), [(np.zeros((2, 2), np.float32), 0.0)] * 2)


def test_an_error_of_one_matrix_is_raised() -> None:
    def fail(*_: object) -> None:
        raise ValueError("no spectrum")

    with pytest.raises(ValueError, match="no spectrum"):
        Spectra(threads=2).change(fail, [(np.zeros((2, 2), np.float32), 0.0)] * 4)


def test_the_caller_is_called_back_while_a_matrix_is_changed_and_can_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spectra, "BETWEEN_SECONDS", 0.001)
    on, called, changed = threading.Event(), list[str](), list[float]()

    def between() -> None:
        called.append(threading.current_thread().name)
        if len(called) == 3:
            on.set()
            raise RuntimeError("the lease is lost")

    def work(matrix_RC: object, exponent: float, multiply: object) -> None:
        assert on.wait(30)
        changed.append(exponent)

    with pytest.raises(RuntimeError, match="lease"):
        Spectra(between, threads=1).change(work, [(np.zeros((2, 2), np.float32), 0.0)] * 100)
    assert set(called) == {threading.current_thread().name}
    assert len(changed) < 100, "the rest is left out"


def test_the_time_of_spectra_is_that_of_the_clock() -> None:
    now = 5.0

    def work(*_: object) -> None:
        nonlocal now
        now += 2.0

    found = Spectra(clock=lambda: now, threads=1)
    found.change(work, [(np.zeros((2, 2), np.float32), 0.0)] * 3)
    found.change(work, [(np.zeros((2, 2), np.float32), 0.0)])
    assert found.seconds == 8.0


def test_the_environment_says_how_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", "0", "many"):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert 1 <= Spectra().threads <= (os.cpu_count() or 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert Spectra().threads == 5
    assert Spectra(threads=3).threads == 3


TENSORS = (
    Tensor("embedding", (300, 16), "embedding"),
    Tensor("norm", (16,)),
    Tensor("row", (1, 16)),
    Tensor("experts", (4, 16, 40)),
    Tensor("kernel", (2000, 1100)),
    Tensor("none", (0, 4)),
)


def test_a_cycle_costs_what_its_matrices_cost() -> None:
    """The last matrix is so large that its class is merged by `rda`."""
    small = operations((300, 16), 0.5) + 4 * operations((16, 40), 0.0)
    assert cycle_operations(TENSORS, MergeConfig(embedding="average", rest="rda")) == 0.0
    assert cycle_operations(TENSORS, ISOTROPIC) == small
    whole = MergeConfig(**{**vars(ISOTROPIC), "isotropic_side_max": 1100})
    assert cycle_operations(TENSORS, whole) == small + operations((2000, 1100), 0.0)


@pytest.mark.full
def test_the_rate_of_this_machine_is_that_of_a_processor() -> None:
    assert 1e7 < measured_rate(1) < 1e13
