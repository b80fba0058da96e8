"""Clipping to a multiple of the running median norm."""

from __future__ import annotations

import json
import math
from statistics import median

import pytest

from archipelago.broker.config import InnerConfig, RunConfig, SyncConfig
from archipelago.merger.clip import ENOUGH, INTERVALS_MOST, WINDOW, NormWindow, limit, path


def test_the_limit_by_hand() -> None:
    assert limit(NormWindow((8.0, 1.0, 7.0, 2.0, 6.0, 3.0, 5.0, 4.0)), 2.0) == 9.0  # the median is 4.5


def test_what_is_never_clipped() -> None:
    window = NormWindow((1.0,) * ENOUGH)
    assert limit(window, 3.0) == 3.0
    assert limit(NormWindow((1.0,) * (ENOUGH - 1)), 3.0) == math.inf
    assert limit(window, 0.0) == math.inf
    assert limit(NormWindow((0.0,) * ENOUGH), 3.0) == math.inf


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
        NormWindow().with_norm(norm)


def _attacked(remember_clipped: bool, rounds: int) -> float:
    window = NormWindow((1.0,) * WINDOW)
    for _ in range(rounds):
        clipped = min(1e6, limit(window, 3.0))
        window = window.with_norm(clipped if remember_clipped else 1e6)
    return median(window.norms)


def test_an_attack_drags_the_median_slowly() -> None:
    assert _attacked(remember_clipped=True, rounds=40) == pytest.approx(3.0)  # by the multiple in over half a window
    assert _attacked(remember_clipped=False, rounds=40) == 1e6  # what remembering raw norms would do


# -- paths -------------------------------------------------------------------------------------------------------------

CONFIG = RunConfig(
    inner=InnerConfig(steps=1000, learning_rate=0.01, warmup_steps=100, final_share=0.0), sync=SyncConfig(interval=24)
)


def test_a_path_is_steps_times_the_learning_rate_in_their_middle() -> None:
    assert path(CONFIG, 24, 124) == pytest.approx(24 * CONFIG.inner.rate_at(112))
    assert path(CONFIG, 4, 4) == pytest.approx(4 * 0.01 * 3 / 101)
    assert path(CONFIG, 0, 0) > 0.0
    assert path(CONFIG, 24, 5000) == pytest.approx(24 * 1e-3 * 0.01), "where the rate is nothing"
    assert path(CONFIG, 1 << 40, 500) == path(CONFIG, INTERVALS_MOST * 24, 500), "whoever says so"


def test_the_first_rounds_of_a_warm_up_do_not_hold_up_the_next_ones() -> None:
    """Eight islands with a norm of what they can have moved: a round after 4 steps, then each 24."""
    window = NormWindow()
    for global_step in range(4, 400, 24):
        steps = min(global_step, 24)
        norm = sum(CONFIG.inner.rate_at(global_step - back) for back in range(1, steps + 1))
        assert norm <= limit(window, 1.5) * path(CONFIG, steps, global_step)
        for _ in range(8):
            window = window.with_norm(norm / path(CONFIG, steps, global_step))


def test_the_limit_is_as_much_lower_in_the_warm_up_as_paths_are_shorter() -> None:
    assert path(CONFIG, 4, 4) < 0.1 * path(CONFIG, 24, 124)
