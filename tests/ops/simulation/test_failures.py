"""The failure model against closed forms and small cases by hand, and the paper's tables."""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipelago.ops.commands import run
from archipelago.ops.simulation.failures import (
    UNIT_MEAN,
    YEAR_SECONDS,
    FailureModel,
    Outcome,
    SliceFailures,
    Stretch,
    delay,
    simulate,
    stretches,
)
from tests.tiers import examples

SEED = 7
DAY = 86400.0


def rng(seed: int = SEED) -> np.random.Generator:
    return np.random.default_rng(seed)


def one_slice(**changes: object) -> FailureModel:
    """Return a model of islands of one slice that fails every 1,000 s, with steps of negligible length."""
    settings = {"chips": 1, "islands": 1, "slices": 1, "years_between": 1000.0 / (365.25 * DAY), "step_seconds": 0.01,
                "pause_seconds": 50.0, "return_seconds": 150.0}  # fmt: skip
    return FailureModel(**{**settings, **changes})  # type: ignore[arg-type]


# -- closed forms -----------------------------------------------------------------------------------------------------


def test_uptime_of_one_island_is_mtbf_over_mtbf_plus_return() -> None:
    """MTBF / (MTBF + R), with R = 150 s away and 50 s to start again, whether or not the island is elastic."""
    for elastic in (True, False):
        outcome = simulate(one_slice(elastic=elastic), 1.2e7, rng())
        assert len(outcome.islands[0]) > 9000
        assert outcome.goodput == pytest.approx(1000.0 / 1200.0, abs=0.01), f"elastic {elastic}, seed {SEED}"
        assert outcome.uptime == pytest.approx(outcome.goodput)


def test_all_islands_are_down_together_by_chance() -> None:
    """Uptime of M islands is 1 − (1 − u)^M."""
    for islands in (2, 5):
        model = one_slice(islands=islands, slices=islands, chips=islands, return_seconds=950.0)
        outcome = simulate(model, 1.5e7, rng())
        assert outcome.goodput == pytest.approx(0.5, abs=0.01), f"{islands} islands, seed {SEED}"
        assert outcome.uptime == pytest.approx(1.0 - 0.5**islands, abs=0.01), f"{islands} islands, seed {SEED}"


def test_delays_are_exponentiated_weibull() -> None:
    """The mean is the requested one. It fixes the scale, and the scale fixes every quantile."""
    random = rng()
    drawn = np.sort([delay(60.0, random) for _ in range(20_000)])
    assert drawn.mean() == pytest.approx(60.0, rel=0.02), f"seed {SEED}"
    for share in (0.1, 0.5, 0.9):
        quantile = drawn[int(share * len(drawn))] / 60.0 * UNIT_MEAN
        assert (1.0 - math.exp(-(quantile**2))) ** 4 == pytest.approx(share, abs=0.015), f"seed {SEED}"


# -- small cases by hand ----------------------------------------------------------------------------------------------


class Outages(SliceFailures):
    """Failures at given times: (failed, returned) of each outage, in seconds."""

    def __init__(self, outages: list[tuple[float, float]]) -> None:
        self._outages = sorted(outages)

    def after(self, now: float, live: int) -> float:
        return max(now, self._outages[0][0]) if self._outages else math.inf

    def back(self, at: float) -> float:
        return max(at, self._outages.pop(0)[1])


def by_hand(slices: int, *outages: tuple[float, float], elastic: bool = True) -> Outcome:
    """Simulate one island for 30 steps of exactly one second, with pauses of two. Each outage stops one slice."""
    model = FailureModel(1, 1, slices, 1.0, 1.0, 0.0, 2.0, elastic=elastic)
    return Outcome(30.0, (list(stretches(model, slices, Outages([*outages]), 30.0, rng())),), (slices,))


def test_an_elastic_island_pauses_to_shrink_and_to_grow() -> None:
    outcome = by_hand(2, (10.5, 14.2))
    assert outcome.islands == ([Stretch(0, 11, 2), Stretch(13, 15, 1), Stretch(17, 30, 2)],)
    assert outcome.goodput == pytest.approx((11 + 1 + 13) / 30)
    assert outcome.uptime == pytest.approx((11 + 2 + 13) / 30)
    several = by_hand(3, (10.2, 99.0), (10.9, 99.0))
    assert several.islands == ([Stretch(0, 11, 3), Stretch(13, 30, 1)],), "failures in one step cost one pause"


def test_an_island_stalls_without_slices_or_if_it_is_not_elastic() -> None:
    inelastic = by_hand(2, (10.5, 14.0), (10.8, 16.5), elastic=False)
    assert inelastic.islands == ([Stretch(0, 11, 2), Stretch(18.5, 30, 2)],), "until all slices are back"
    assert by_hand(1, (10.5, 14.2)).islands == ([Stretch(0, 11, 1), Stretch(16.2, 30, 1)],)
    assert by_hand(1, (0.5, 99.0)).uptime == pytest.approx(1 / 30)


def test_uptime_counts_overlaps_once() -> None:
    outcome = Outcome(10.0, ([Stretch(0, 2, 1), Stretch(5, 6, 1)], [Stretch(1, 4, 1)], []), (1, 1, 1))
    assert outcome.uptime == pytest.approx(0.5)
    assert outcome.goodput == pytest.approx(0.2)


@given(
    chips=st.floats(1.0, 1e8),
    islands=st.integers(1, 6),
    more=st.integers(0, 20),
    pause=st.floats(0.0, 100.0),
    back=st.floats(0.0, 1000.0),
    elastic=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=examples(60))
def test_stretches_follow_one_another(
    chips: float, islands: int, more: int, pause: float, back: float, elastic: bool, seed: int
) -> None:
    model = FailureModel(chips, islands, islands + more, pause_seconds=pause, return_seconds=back, elastic=elastic)
    outcome = simulate(model, 5000.0, rng(seed))
    for island, slices in zip(outcome.islands, outcome.slices, strict=True):
        assert all(s.begin < s.end <= 5000.0 and 0 < s.live <= slices for s in island)
        assert all(a.end <= b.begin for a, b in pairwise(island))
    assert sum(outcome.slices) == model.slices
    assert 0.0 <= outcome.goodput <= outcome.uptime + 1e-9 <= 1.0 + 1e-8
    assert outcome == simulate(model, 5000.0, rng(seed)), "the same seed gives the same outcome"


# -- the verb tables --------------------------------------------------------------------------------------------------


def test_tables_are_set_beside_the_published_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "tables", "--days", "0.1"]) == 0
    out, _ = capsys.readouterr()
    assert re.search(r"M = 16 +99 / ", out)


@pytest.mark.full
def test_the_defaults_reproduce_the_published_tables(capsys: pytest.CaptureFixture[str]) -> None:
    """The differences are within two points rms, and goodput follows the published fit.

    The fit is MTBF_m / (MTBF_m + 18.25 s) · (1 − 0.0325 · N / 1.2M), from 1.2M chips on, with MTBF_m = a year · M / N.
    """
    assert run(["simulate", "tables", "--days", "2", "--seed", "7", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (len(found["goodput"]), len(found["uptime"])) == (30, 30)
    assert max(found["goodput_rms"], found["uptime_rms"]) < 2.0, "points, seed 7"
    differences = []
    for cell in found["goodput"]:
        if cell["column"] in ("1.2M", "2.4M") and "not" not in cell["row"]:
            islands, chips = int(cell["row"].removeprefix("M = ").split(",")[0]), 1e6 * float(cell["column"][:-1])
            between = YEAR_SECONDS * islands / chips
            differences.append(cell["ours"] - 100 * between / (between + 18.25) * (1 - 0.0325 * chips / 1.2e6))
    assert len(differences) == 10
    assert math.sqrt(sum(d * d for d in differences) / 10) < 2.5, "seed 7"
