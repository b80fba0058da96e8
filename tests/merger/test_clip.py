"""Clipping to a multiple of the running median norm."""

from __future__ import annotations

import json
import math
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from merger.clip import ENOUGH, WINDOW, NormWindow, factor

NORMS = st.floats(0.0, 1e30)
WINDOWS = st.lists(NORMS, max_size=WINDOW).map(lambda norms: NormWindow(tuple(norms)))


def test_factor_by_hand() -> None:
    window = NormWindow((8.0, 1.0, 7.0, 2.0, 6.0, 3.0, 5.0, 4.0))  # median 4.5
    assert factor(18.0, window, 2.0) == 0.5  # 2 · 4.5 / 18
    assert factor(9.0, window, 2.0) == 1.0  # just at the limit
    assert factor(1.0, window, 2.0) == 1.0


def test_what_is_never_clipped() -> None:
    window = NormWindow((1.0,) * ENOUGH)
    assert factor(100.0, window, 3.0) == 0.03
    assert factor(100.0, NormWindow((1.0,) * (ENOUGH - 1)), 3.0) == 1.0
    assert factor(100.0, window, 0.0) == 1.0
    assert factor(0.0, window, 3.0) == 1.0
    assert factor(100.0, NormWindow((0.0,) * ENOUGH), 3.0) == 1.0


def test_the_window_keeps_the_newest_norms_in_order() -> None:
    window = NormWindow()
    for norm in range(WINDOW + 6):
        window = window.with_norm(float(norm))
    assert window.norms == tuple(float(norm) for norm in range(6, WINDOW + 6))
    assert WINDOW == 64


def test_the_window_survives_json_bit_for_bit() -> None:
    window = NormWindow((0.1, 1 / 3, 1e-300, 7.0))
    assert NormWindow(tuple(json.loads(json.dumps(list(window.norms))))) == window


@pytest.mark.parametrize("norm", [math.nan, math.inf, -1.0])
def test_impossible_norms_are_an_error(norm: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        factor(norm, NormWindow(), 3.0)
    with pytest.raises(ValueError, match="finite"):
        NormWindow().with_norm(norm)


@given(NORMS, WINDOWS, st.floats(0.0, 100.0))
def test_clipping_never_enlarges_and_keeps_to_the_limit(norm: float, window: NormWindow, multiple: float) -> None:
    scale = factor(norm, window, multiple)
    assert 0.0 <= scale <= 1.0
    if multiple > 0.0 and len(window.norms) >= ENOUGH and median(window.norms) > 0.0:
        assert norm * scale <= multiple * median(window.norms) * (1 + 1e-12) + 1e-300


def _attacked(remember_clipped: bool, rounds: int) -> float:
    window = NormWindow((1.0,) * WINDOW)
    for _ in range(rounds):
        scale = factor(1e6, window, 3.0)
        window = window.with_norm(1e6 * scale if remember_clipped else 1e6)
    return median(window.norms)


def test_an_attack_drags_the_median_slowly() -> None:
    assert _attacked(remember_clipped=True, rounds=40) == pytest.approx(3.0)  # by the multiple in over half a window
    assert _attacked(remember_clipped=False, rounds=40) == 1e6  # what remembering raw norms would do
