"""The step times of islands, which are kept in order as contributions arrive."""

from __future__ import annotations

import math
from statistics import median_low

from hypothesis import given, settings
from hypothesis import strategies as st

from archipelago.merger.claims import ACCOUNTS_MAX
from archipelago.merger.step_times import StepTimes, is_step_seconds
from tests.merger.test_rounds import answered, rounds
from tests.tiers import examples

NAMES = "abcde"
SECONDS = st.sampled_from([0.0, 0.5, 0.5, 1.0, 2.0, 1e-300, math.inf])
REPORTS = st.dictionaries(st.sampled_from(NAMES), SECONDS)


def require_equal(times: StepTimes, reported: dict[str, float]) -> None:
    assert dict(times.items()) == reported
    for island in (*NAMES, "stranger"):
        others = [s for name, s in reported.items() if name != island and is_step_seconds(s)]
        assert times.count_of_others(island) == len(others)
        assert times.median_of_others(island) == (median_low(others) if others else None)


@settings(max_examples=examples(400))
@given(REPORTS, st.lists(st.tuples(st.sampled_from(NAMES), SECONDS | st.none())))
def test_the_median_of_the_others_is_that_of_a_sorted_list(
    reported: dict[str, float], changes: list[tuple[str, float | None]]
) -> None:
    times = StepTimes(reported)
    require_equal(times, reported)
    for island, seconds in changes:
        if seconds is None:
            times.drop(island)
            reported.pop(island, None)
        else:
            times.put(island, seconds)
            reported[island] = seconds
        require_equal(times, reported)


@settings(max_examples=examples(200))
@given(st.frozensets(st.sampled_from(NAMES)), st.lists(st.tuples(st.sampled_from(NAMES), SECONDS), max_size=12))
def test_reports_of_live_islands_are_kept_as_they_arrive(
    live: frozenset[str], reports: list[tuple[str, float]]
) -> None:
    some, known = rounds(), dict[str, float]()
    for island, seconds in reports:
        some.answer(answered(island, step_seconds=seconds), 0.0)
        known[island] = seconds
        require_equal(some.reported(live), {name: s for name, s in known.items() if name in live} or known)


def test_islands_that_were_forgotten_count_no_more() -> None:
    some, live = rounds(), frozenset(f"i{n}" for n in range(ACCOUNTS_MAX + 1))
    for n in range(ACCOUNTS_MAX + 1):
        some.answer(answered(f"i{n}"), 0.0)
        some.reported(live)
    assert "i0" not in dict(some.reported(live).items())
    assert some.reported(live).count_of_others("stranger") == ACCOUNTS_MAX
