"""Weights and scores by hand and their bounds. An island gains nothing by large claims or by several names."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from statistics import median_high
from typing import get_args, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipelago.broker.codecs import CODECS, Vector, body_of, codec
from archipelago.broker.config import OWN_MODEL, InnerConfig, MergeConfig, ModelConfig, RunConfig, SyncConfig
from archipelago.broker.wire import digest, encoded
from archipelago.merger.scores import (
    JUDGES_LEAST,
    JUDGES_MOST,
    SAMPLE,
    Judgement,
    Score,
    Sent,
    direction,
    drawn,
    expected,
    judge,
)
from archipelago.merger.weights import (
    ENOUGH,
    GAIN_MAX,
    INTERVALS_MOST,
    STALENESS,
    WINDOW,
    Norms,
    RunningMean,
    capped,
    final,
    gain,
    limit,
    path,
    shares,
    with_norm,
)
from tests.tiers import examples

CONFIG = MergeConfig(staleness="polynomial", normalise=True)
NOTHING = encoded(np.zeros(0, np.float32), "float32")


def test_staleness_factors_by_hand() -> None:
    factors = {"none": {0: 1.0, 99: 1.0}, "polynomial": {0: 1.0, 3: 0.5, 8: 1 / 3}}  # (1 + staleness)^−½
    for name, by_hand in factors.items():
        for staleness, wanted in by_hand.items():
            assert STALENESS[name](staleness) == pytest.approx(wanted, rel=1e-15), (name, staleness)
    assert set(get_args(get_type_hints(MergeConfig)["staleness"])) == set(STALENESS) == set(factors)


def test_shares_by_hand() -> None:
    assert shares([1.0, 3.0]) == [0.25, 0.75]
    assert shares([1e308, 1e308]) == [0.5, 0.5]  # their sum overflows float64
    assert shares([5e-324, 5e-324, 0.0]) == [0.5, 0.5, 0.0]
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
    assert capped([0.0, 10.0, 1.0], ["a", "b", "c"], 2.0) == [1.0, 0.2, 1.0], "an island without weight is absent"


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
    sent_ = [Sent("a", 0, 1, 10.0, 1.0, "", NOTHING), Sent("b", 3, 4, 20.0, 1.0, "", NOTHING)]
    assert final(sent_, [1.0, 1.0], CONFIG) == [100.0, 50.0]
    assert final(sent_, [0.5, 0.0], CONFIG) == [50.0, 0.0]
    assert final(sent_, [1.0, 1.0], replace(CONFIG, share_cap=1.0)) == [50.0, 50.0]
    assert shares([100.0, 50.0]) == pytest.approx([2 / 3, 1 / 3], rel=1e-15)
    found, running = gain([2 / 3, 1 / 3], [0, 3], CONFIG, RunningMean(0.8))
    # The mean of s by raw weight is (100·1 + 100·½) / 200 = 0.75, against a running mean of 0.8.
    assert found == pytest.approx(0.75 / 0.8, rel=1e-15)
    assert running.value == pytest.approx(0.95 * 0.8 + 0.05 * 0.75, rel=1e-14)
    # Raw weights 300 and 100, s = 1 and ½: (300 + 50) / 400 = 0.875; unweighted it would be 0.75.
    assert gain(shares([300.0, 50.0]), [0, 3], CONFIG, RunningMean())[0] == pytest.approx(0.875, rel=1e-15)


def test_gains_are_relative_to_the_running_mean_and_clamped() -> None:
    off = replace(CONFIG, normalise=False)
    assert gain([1.0], [3], off, RunningMean(0.5))[0] == 0.5
    assert gain([1.0], [3], CONFIG, RunningMean(0.5))[0] == 1.0
    assert gain([1.0], [0], CONFIG, RunningMean(0.1))[0] == GAIN_MAX == 2.0
    running = RunningMean()
    for _ in range(20):
        running = running.after(0.5)
    assert running.value == pytest.approx(0.5 + 0.5 * 0.95**20, rel=1e-12)
    assert RunningMean(0.3).after(0.3).value == 0.3


# -- clipping to a multiple of the running median norm ----------------------------------------------------------------


def test_the_limit_is_a_multiple_of_the_median_of_enough_norms() -> None:
    assert limit((8.0, 1.0, 7.0, 2.0, 6.0, 3.0, 5.0, 4.0), 2.0) == 9.0  # the median is 4.5
    window = (1.0,) * ENOUGH
    assert limit(window, 3.0) == 3.0
    assert limit((1.0,) * (ENOUGH - 1), 3.0) == math.inf
    assert limit(window, 0.0) == math.inf
    assert limit((0.0,) * ENOUGH, 3.0) == math.inf


def test_the_window_keeps_the_newest_norms_in_order() -> None:
    window: Norms = ()
    for norm in range(WINDOW + 6):
        window = with_norm(window, float(norm))
    assert window == tuple(float(norm) for norm in range(6, WINDOW + 6))
    for wrong in (math.nan, math.inf, -1.0):
        with pytest.raises(ValueError):
            with_norm((), wrong)


def test_an_attack_moves_the_median_slowly() -> None:
    window: Norms = (1.0,) * WINDOW
    for _ in range(40):
        window = with_norm(window, min(1e6, limit(window, 3.0)))  # clipped norms are remembered
    assert statistics.median(window) == pytest.approx(3.0), "at most by the multiple in half a window"


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


def test_the_path_of_a_users_user_loop_is_its_steps() -> None:
    own = replace(CLIPPED, model=ModelConfig(size=OWN_MODEL))
    assert path(own, 24, 10) == path(own, 24, 5000) == 24.0
    assert path(own, 0, 0) == 1.0
    assert path(own, 1 << 40, 500) == INTERVALS_MOST * 24


# -- scores: honest islands keep their weight exactly, others lose it --------------------------------------------------


SPANS = ((0, 2048), (2048, 64), (2112, 6080))
SIZE = 8192
HONEST = tuple("abcdefgh")

Forge = Callable[[Vector, np.random.Generator], Vector]
FLIP: Forge = lambda delta_N, random: -delta_N  # noqa: E731
NOISE: Forge = lambda delta_N, random: random.standard_normal(SIZE, np.float32)  # noqa: E731
SAME_NOISE: Forge = lambda delta_N, random: np.random.default_rng(12345).standard_normal(SIZE, np.float32)  # noqa: E731
TRIPLE: Forge = lambda delta_N, random: 3 * delta_N  # noqa: E731


def sent(name: str, values_N: Vector, *, tokens: int = 100, staleness: int = 0) -> Sent:
    norm = float(np.linalg.norm(values_N))
    return Sent(name, staleness, 4, tokens, norm, digest(values_N.tobytes()), encoded(values_N, "float32"))


def contributions(
    number: int, forged: Mapping[str, Forge], islands: tuple[str, ...] = HONEST, agreement: float = 0.3, **changes: int
) -> list[Sent]:
    """Return one contribution of each island to a round. Two honest ones have this cosine."""
    random = np.random.default_rng(number)
    common_N = random.standard_normal(SIZE, np.float32)
    out = []
    for name in islands:
        own_N = random.standard_normal(SIZE, np.float32)
        delta_N = math.sqrt(agreement) * common_N + math.sqrt(1 - agreement) * own_N
        delta_N = forged[name](delta_N, random) if name in forged else delta_N
        out.append(sent(name, delta_N.astype(np.float32), **changes))
    return out


def after(rounds: int, forged: Mapping[str, Forge], known: Mapping[str, Score] | None = None) -> Judgement:
    """Judge `rounds` rounds, and return the last judgement."""
    judged = Judgement((), (), (), known or {})
    for number in range(rounds):
        judged = judge(judged.scores, contributions(number, forged), SPANS, len(HONEST))
    return judged


def test_honest_islands_keep_their_weight_exactly() -> None:
    for agreement in (0.05, 0.3, 0.9):
        scores: Mapping[str, Score] = {}
        for number in range(20):
            judged = judge(scores, contributions(number, {}, agreement=agreement), SPANS, 8)
            assert judged.factors == (1.0,) * 8, (agreement, number)
            assert judged.limits == (math.inf,) * 8
            scores = judged.scores
        assert all(score.value == pytest.approx(1.0, abs=0.2) for score in scores.values())


def test_hostile_islands_lose_their_weight_in_the_first_round() -> None:
    for forge in (FLIP, NOISE, SAME_NOISE):
        for hostile in ("a", "ab"):
            wanted = tuple(0.0 if name in hostile else 1.0 for name in HONEST)
            assert after(1, dict.fromkeys(hostile, forge)).factors == wanted
            judged = after(6, dict.fromkeys(hostile, forge))
            assert judged.factors == wanted
            assert [judged.scores[name].lowered for name in HONEST] == [6 if name in hostile else 0 for name in HONEST]


def test_an_island_that_behaves_gets_its_weight_back() -> None:
    bad = after(10, {"a": FLIP}).scores
    assert bad["a"].factor == 0.0
    good = after(20, {}, bad)
    assert good.factors == (1.0,) * 8
    assert good.scores["a"].lowered == 0
    judged = judge(good.scores, contributions(99, {"a": FLIP}), SPANS, 8)
    assert judged.factors == (0.0, *(1.0,) * 7), "one contribution that points away is left out of its round"
    assert judged.scores["a"].factor == 1.0, "its past still counts"


def test_three_islands_can_judge_and_two_cannot() -> None:
    for count in (2, 3):
        names = HONEST[:count]
        judged = judge({}, contributions(0, {"a": FLIP}, names), SPANS, count)
        assert judged.factors == ((1.0, 1.0) if count < JUDGES_LEAST else (0.0, 1.0, 1.0))


def test_norms_that_stay_large_are_clipped_to_the_usual_one() -> None:
    judged = after(10, {"a": TRIPLE})
    assert judged.factors == (1.0,) * 8
    assert judged.limits[1:] == (math.inf,) * 7
    usual = median_high([one.norm for one in contributions(9, {"a": TRIPLE})])
    assert judged.limits[0] == pytest.approx(usual)


def test_a_slow_island_is_expected_to_agree_less() -> None:
    assert expected(25, 100) == 0.5
    assert expected(300, 100) == 1.0
    scores: Mapping[str, Score] = {}
    for number in range(20):
        random = np.random.default_rng(number)
        common_N = random.standard_normal(SIZE, np.float32)
        # A sixteenth of the steps: the common part is 16 times smaller and the noise 4 times.
        parts = [(name, 1.0, 1600) for name in HONEST[1:]] + [("a", 0.25, 100)]
        round_ = [
            sent(name, (0.6 * share * common_N + random.standard_normal(SIZE)).astype(np.float32), tokens=tokens)
            for name, share, tokens in parts
        ]
        judged = judge(scores, round_, SPANS, 8)
        scores = judged.scores
        assert judged.factors == (1.0,) * 8


def test_unrelated_stale_contributions_cost_nothing_and_do_not_judge() -> None:
    stale = contributions(0, {}, ("w", "x", "y", "z"), staleness=2)
    fresh = contributions(1, {}, ("a", "b", "c"))
    judged = judge({}, [*stale, *fresh], SPANS, 7)
    assert judged.factors == (1.0,) * 7
    assert [judged.scores[name].usual > 0.0 for name in "awxyz"] == [True, False, False, False, False]


def test_an_old_base_hides_no_attack() -> None:
    liar = [replace(one, staleness=3) for one in contributions(0, {"h": FLIP})[-1:]]
    judged = judge({}, [*contributions(0, {})[:-1], *liar], SPANS, 8)
    assert judged.factors == (*(1.0,) * 7, 0.0)
    assert judged.scores["h"].lowered == 1
    round_, scores = contributions(0, {"h": TRIPLE}), dict[str, Score]()
    for _ in range(5):
        judged = judge(scores, [*round_[:-1], replace(round_[-1], staleness=3)], SPANS, 8)
        scores = dict(judged.scores)
    assert judged.limits[:-1] == (math.inf,) * 7
    assert judged.limits[-1] < 0.5 * round_[-1].norm


def test_a_large_fragment_is_sampled_where_nobody_can_know() -> None:
    spans = ((0, 8 * SAMPLE), (8 * SAMPLE, 32))
    random = np.random.default_rng(0)
    one_N, other_N = (random.standard_normal(8 * SAMPLE + 32, np.float32) for _ in range(2))
    near_N = one_N + other_N
    first = [direction(encoded(x_N, "int4"), spans, b"first") for x_N in (one_N, near_N, other_N)]
    assert first[0].size < 2 * SAMPLE
    assert float(first[0] @ first[1]) == pytest.approx(math.sqrt(0.5), abs=0.03)
    assert float(first[0] @ first[2]) == pytest.approx(0.0, abs=0.03)
    assert not np.array_equal(first[0], direction(encoded(one_N, "int4"), spans, b"second"))


def test_a_sample_has_the_elements_of_the_decoded_contribution() -> None:
    spans = ((0, 100), (100, 2 * SAMPLE), (2 * SAMPLE + 100, 77))
    values_N = np.random.default_rng(1).standard_normal(2 * SAMPLE + 177, np.float32)
    for name in CODECS:
        body = encoded(values_N, name)
        decoded_N = codec(name).decode(body_of(body.parts), values_N.size)
        of_body, of_decoded = (direction(each, spans, b"seed") for each in (body, encoded(decoded_N, "float32")))
        assert of_body.size < values_N.size
        assert np.array_equal(of_body, of_decoded)
        for part in (slice(100), slice(-77, None)):  # the small tensors as a whole, apart from their norms
            sampled, found = of_body[part], decoded_N[part]
            assert sampled * np.linalg.norm(found) == pytest.approx(found * np.linalg.norm(sampled))


# -- many islands ----------------------------------------------------------------------------------------------------


def test_judges_are_drawn_anew_and_by_nothing_that_an_island_can_choose() -> None:
    names = [f"i{n:03}" for n in range(256)]
    seats = [drawn(names, bytes([n])) for n in range(64)]
    assert all(len(set(seat)) == JUDGES_MOST for seat in seats)
    assert len(set(map(tuple, seats))) == len(seats)
    assert {name for seat in seats for name in seat} == set(names)
    assert drawn(names[::-1], b"x") == drawn(names, b"x")
    assert drawn(names[:JUDGES_MOST], b"x") == names[:JUDGES_MOST]
