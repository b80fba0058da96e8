"""The grace window of the paper's Eq. 3."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from archipelago.merger.round_timing import Pace, grace_seconds, slack, stride_seconds

SECONDS = st.floats(0.0, 1e6)


def test_the_first_sample_sets_the_average_and_the_next_ones_move_it() -> None:
    pace = Pace().after_quorum(10.0, 0.8)
    assert pace == Pace(quorum_seconds=10.0, sync_seconds=None)
    assert pace.after_quorum(20.0, 0.8).quorum_seconds == pytest.approx(12.0)  # 0.8·10 + 0.2·20
    pace = pace.after_sync(1.0, 0.5).after_sync(3.0, 0.5)
    assert pace == Pace(quorum_seconds=10.0, sync_seconds=2.0)  # 0.5·1 + 0.5·3
    assert pace.after_quorum(4.0, 0.0).quorum_seconds == 4.0  # no smoothing: the last sample


def test_a_clock_set_back_counts_as_no_time() -> None:
    assert Pace().after_sync(-5.0, 0.8).sync_seconds == 0.0
    assert Pace(10.0, None).after_quorum(-5.0, 0.5).quorum_seconds == 5.0


def test_slack_and_grace_by_hand() -> None:
    pace = Pace(quorum_seconds=3.0, sync_seconds=1.5)
    assert slack(2, 4.0, pace) == 3.5  # 2·4 − (3 + 1.5)
    assert grace_seconds(0.9, slack(2, 4.0, pace)) == pytest.approx(3.15)
    assert slack(1, 4.0, pace) == -0.5
    assert grace_seconds(0.9, -0.5) == 0.0
    assert slack(2, 4.0, Pace()) == 8.0
    assert slack(2, 4.0, Pace(sync_seconds=1.0)) == 7.0


def test_stride_by_hand() -> None:
    step_seconds = {"fast": 0.5, "slow": 2.0, "gone": 0.1, "new": 0.0, "odd": math.nan, "stuck": math.inf}
    # H = 24 over P = 6: strides of 4 inner steps.
    assert stride_seconds(step_seconds, {"fast", "slow"}, 24, 6) == 2.0
    assert stride_seconds(step_seconds, ["slow"], 24, 6) == 8.0
    assert stride_seconds(step_seconds, [], 24, 6) == pytest.approx(0.4)  # nobody lives: all known
    assert stride_seconds(step_seconds, ["new", "odd", "stuck"], 24, 6) == pytest.approx(0.4)  # nothing known of them
    assert stride_seconds({"new": 0.0, "wrong": -1.0}, ["new"], 24, 6) == 0.0
    assert stride_seconds({}, ["fast"], 24, 6) == 0.0
    assert stride_seconds({"fast": 1.0}, ["fast"], 2, 6) == pytest.approx(1 / 3)  # a stride may be part of a step


@given(st.floats(0.0, 1.0), st.integers(1, 64), SECONDS, SECONDS, SECONDS, SECONDS)
def test_grace_is_never_negative_and_moves_the_right_way(
    gamma: float, window: int, stride: float, quorum: float, sync: float, more: float
) -> None:
    grace = grace_seconds(gamma, slack(window, stride, Pace(quorum, sync)))
    assert 0.0 <= grace <= gamma * (window * stride)
    assert grace_seconds(gamma, slack(window + 1, stride, Pace(quorum, sync))) >= grace
    assert grace_seconds(gamma, slack(window, stride, Pace(quorum + more, sync))) <= grace
    assert grace_seconds(gamma, slack(window, stride, Pace(quorum, sync + more))) <= grace


def test_grace_grows_with_the_window_and_shrinks_with_the_quorum() -> None:
    def grace(window: int, quorum: float) -> float:
        return grace_seconds(0.5, slack(window, 10.0, Pace(quorum, 0.0)))

    assert grace(2, 6.0) == 7.0 < grace(3, 6.0) == 12.0
    assert grace(2, 6.0) > grace(2, 8.0) == 6.0


@given(st.lists(SECONDS, min_size=1, max_size=20), st.floats(0.0, 0.99))
def test_an_average_stays_among_its_samples(samples: list[float], smoothing: float) -> None:
    pace = Pace()
    for sample in samples:
        pace = pace.after_quorum(sample, smoothing)
    assert pace.quorum_seconds is not None
    assert min(samples) * (1 - 1e-9) <= pace.quorum_seconds <= max(samples) * (1 + 1e-9)
