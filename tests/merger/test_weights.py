"""Shares, staleness and gain: results worked out by hand, and properties that hold for all numbers."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from random import Random
from typing import get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipelago.broker.config import OWN_MODEL, InnerConfig, MergeConfig, ModelConfig, RunConfig, SyncConfig
from archipelago.merger.weights import (
    ENOUGH,
    GAIN_MAX,
    INTERVALS_MOST,
    STALENESS,
    WINDOW,
    NormWindow,
    Part,
    RunningMean,
    capped,
    gain,
    limit,
    path,
    raw_weight,
    shares,
    weigh,
)
from tests.tiers import examples

CONFIG = MergeConfig(staleness="polynomial", normalise=True)
PARTS = st.lists(
    st.tuples(st.integers(1, 1 << 53), st.integers(1, 1 << 20), st.integers(0, 1000)), min_size=1, max_size=20
)


def test_raw_weights_and_staleness_factors_by_hand() -> None:
    assert raw_weight(tokens=600, steps=3) == 600 * 200  # 600 / 3 = 200 tokens a step
    assert raw_weight(tokens=10, steps=4) == 25.0  # 10 · 2.5
    factors = {"none": {0: 1.0, 99: 1.0}, "polynomial": {0: 1.0, 3: 0.5, 8: 1 / 3}}  # (1 + staleness)^−½
    for name, by_hand in factors.items():
        for staleness, expected in by_hand.items():
            assert STALENESS[name](staleness) == pytest.approx(expected, rel=1e-15), (name, staleness)
    assert set(get_args(get_type_hints(MergeConfig)["staleness"])) == set(STALENESS) == set(factors)


def test_shares_by_hand() -> None:
    assert shares([1.0, 3.0]) == [0.25, 0.75]
    assert shares([0.0, 0.0, 0.0, 0.0]) == [0.25] * 4
    assert shares([1e308, 1e308]) == [0.5, 0.5]  # their sum overflows float64
    assert shares([5e-324, 5e-324, 0.0]) == [0.5, 0.5, 0.0]
    assert shares([]) == []
    for wrong in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError):
            shares([1.0, wrong])


def test_the_share_cap_by_hand() -> None:
    # Twice the mean of the others: of four islands, 10 against 1 + 1 + 1 becomes 2 against 3.
    assert capped([10.0, 1.0, 1.0, 1.0], ["a", "b", "c", "d"], 2.0) == [0.2, 1.0, 1.0, 1.0]
    # Both contributions of an island count together.
    assert capped([6.0, 4.0, 1.0, 1.0, 1.0], ["a", "a", "b", "c", "d"], 2.0) == [0.2, 0.2, 1.0, 1.0, 1.0]
    # Two large islands go to one level v with v = 2 * (v + 1 + 1 + 1) / 4, so v = 3.
    lowered = capped([100.0, 50.0, 1.0, 1.0, 1.0], ["a", "b", "c", "d", "e"], 2.0)
    assert lowered == pytest.approx([0.03, 0.06, 1.0, 1.0, 1.0], rel=1e-15)
    assert capped([2.0, 1.0], ["a", "b"], 2.0) == [1.0, 1.0], "exactly at the bound"
    assert capped([1e30], ["a"], 2.0) == [1.0], "an island alone has no others"
    assert capped([7.0, 1.0, 1.0], ["a", "b", "c"], 7.0) == [1.0, 1.0, 1.0], "a larger cap allows more"


@settings(max_examples=examples(200))
@given(
    st.lists(st.tuples(st.sampled_from("abcdefg"), st.floats(1e-9, 1e30)), min_size=1, max_size=14),
    st.sampled_from([1.0, 1.5, 2.0, 16.0]),
    st.randoms(use_true_random=False),
)
def test_no_island_weighs_more_than_the_cap(parts: list[tuple[str, float]], cap: float, random: Random) -> None:
    names, weights = [name for name, _ in parts], [weight for _, weight in parts]
    factors = capped(weights, names, cap)
    assert all(0.0 < factor <= 1.0 for factor in factors)
    total = math.fsum(weight * factor for weight, factor in zip(weights, factors, strict=True))
    for name in set(names):
        own = math.fsum(w * f for w, f, n in zip(weights, factors, names, strict=True) if n == name)
        bound = cap / (len(set(names)) - 1 + cap)
        assert own / total <= bound * (1 + 1e-6) or len(set(names)) == 1
        if any(f < 1.0 for f, n in zip(factors, names, strict=True) if n == name):
            assert own / total == pytest.approx(bound, rel=1e-6), "nobody is lowered further than needed"
    order = list(range(len(parts)))
    random.shuffle(order)
    assert capped([weights[i] for i in order], [names[i] for i in order], cap) == [factors[i] for i in order]


def test_weigh_by_hand() -> None:
    # Raw weights 10 · 10/1 = 100 and 20 · 20/4 = 100. Staleness 0 and 3: s = 1 and ½, so 100 and 50 of 150.
    weighed = weigh([(10, 1, 0), (20, 4, 3)], CONFIG, RunningMean(0.8))
    assert weighed.shares == pytest.approx((2 / 3, 1 / 3), rel=1e-15)
    # The mean of s by raw weight is (100·1 + 100·½) / 200 = 0.75, against a running mean of 0.8.
    assert weighed.gain == pytest.approx(0.75 / 0.8, rel=1e-15)
    assert weighed.running.value == pytest.approx(0.95 * 0.8 + 0.05 * 0.75, rel=1e-14)
    # Raw weights 300 and 100, s = 1 and ½: (300 + 50) / 400 = 0.875; unweighted it would be 0.75.
    assert weigh([(300, 300, 0), (100, 100, 3)], CONFIG, RunningMean()).gain == pytest.approx(0.875, rel=1e-15)
    with pytest.raises(ValueError):
        weigh([], CONFIG, RunningMean())


def test_gains_are_relative_to_the_running_mean_and_clamped() -> None:
    off = replace(CONFIG, normalise=False)
    assert weigh([(10, 1, 3)], off, RunningMean(0.5)).gain == 0.5
    assert weigh([(10, 1, 3)], CONFIG, RunningMean(0.5)).gain == 1.0
    assert gain(1.0, RunningMean(0.1)) == GAIN_MAX == 2.0
    assert gain(0.3, RunningMean(0.2)) == pytest.approx(1.5)
    running = RunningMean()
    for _ in range(20):
        running = running.after(0.5)
    assert running.value == pytest.approx(0.5 + 0.5 * 0.95**20, rel=1e-12)
    assert RunningMean(0.3).after(0.3).value == 0.3


@given(PARTS, st.integers(0, 1000), st.floats(1e-3, 1.0), st.randoms(use_true_random=False))
def test_weighing_is_bounded_and_ignores_the_order(
    parts: list[Part], more: int, running: float, random: Random
) -> None:
    order = list(range(len(parts)))
    random.shuffle(order)
    straight = weigh(parts, CONFIG, RunningMean(running))
    permuted = weigh([parts[i] for i in order], CONFIG, RunningMean(running))
    assert permuted.shares == tuple(straight.shares[i] for i in order)
    assert (permuted.gain, permuted.running) == (straight.gain, straight.running)
    assert 0.0 < straight.gain <= GAIN_MAX
    tokens, steps, staleness = parts[0]
    after = weigh([(tokens, steps, staleness + more), *parts[1:]], CONFIG, RunningMean()).shares
    assert after[0] <= straight.shares[0] * (1 + 1e-12), "a staler part never gets a larger share"
    assert abs(math.fsum(after) - 1.0) <= 1e-12
    fresh = weigh([(tokens, steps, 0) for tokens, steps, _ in parts], CONFIG, RunningMean())
    assert (fresh.gain, fresh.running) == (1.0, RunningMean(1.0))


# -- clipping to a multiple of the running median norm ----------------------------------------------------------------


def test_the_limit_is_a_multiple_of_the_median_of_enough_norms() -> None:
    assert limit(NormWindow((8.0, 1.0, 7.0, 2.0, 6.0, 3.0, 5.0, 4.0)), 2.0) == 9.0  # the median is 4.5
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
    assert NormWindow(tuple(json.loads(json.dumps(list(window.norms))))) == window
    for wrong in (math.nan, math.inf, -1.0):
        with pytest.raises(ValueError):
            NormWindow().with_norm(wrong)


def test_an_attack_moves_the_median_slowly() -> None:
    window = NormWindow((1.0,) * WINDOW)
    for _ in range(40):
        window = window.with_norm(min(1e6, limit(window, 3.0)))  # clipped norms are remembered
    assert statistics.median(window.norms) == pytest.approx(3.0), "at most by the multiple in half a window"


# -- paths -------------------------------------------------------------------------------------------------------------

CLIPPED = RunConfig(
    inner=InnerConfig(steps=1000, learning_rate=0.01, warmup_steps=100, final_share=0.0), sync=SyncConfig(interval=24)
)


def test_a_path_is_steps_times_the_learning_rate_in_their_middle() -> None:
    assert path(CLIPPED, 24, 124) == pytest.approx(24 * CLIPPED.inner.rate_at(112))
    assert path(CLIPPED, 4, 4) == pytest.approx(4 * 0.01 * 3 / 101)
    assert path(CLIPPED, 0, 0) > 0.0
    assert path(CLIPPED, 24, 5000) == pytest.approx(24 * 1e-3 * 0.01), "where the learning rate is 0"
    assert path(CLIPPED, 1 << 40, 500) == path(CLIPPED, INTERVALS_MOST * 24, 500), "whatever the island claims"


def test_the_path_of_a_users_own_loop_is_its_steps() -> None:
    own = replace(CLIPPED, model=ModelConfig(size=OWN_MODEL))
    assert path(own, 24, 10) == path(own, 24, 5000) == 24.0
    assert path(own, 0, 0) == 1.0
    assert path(own, 1 << 40, 500) == INTERVALS_MOST * 24
