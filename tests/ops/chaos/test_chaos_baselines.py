"""What others would have made of the same failures, by hand and in general."""

from __future__ import annotations

import itertools
from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from archipelago.ops.chaos.baselines import ELASTIC_PAUSE_SECONDS, Span, computed

STEP = 0.1
STATES = ("training", "stopped", "recovering", "dead")


def lane(*states: tuple[float, str]) -> list[Span]:
    """From each (begin, state) to the next; the last one is where it ends."""
    return [Span(begin, end, state) for (begin, state), (end, _) in itertools.pairwise(states)]


def test_without_failures_nothing_is_lost() -> None:
    calm = {"a": lane((0, "training"), (60, "")), "b": lane((0, "training"), (60, ""))}
    assert astuple(computed(calm, dict.fromkeys("ab", STEP), 0, 60, 40, 10)) == pytest.approx((1.0, 1.0, 1.0))


def test_the_slowest_sets_the_pace_of_everybody() -> None:
    calm = {"a": lane((0, "training"), (80, "")), "b": lane((0, "training"), (80, ""))}
    found = computed(calm, {"a": STEP, "b": 2 * STEP}, 0, 80, 40, 10)
    assert astuple(found) == pytest.approx((0.5, 0.5, 0.5))


def test_a_kill_by_hand() -> None:
    """One of two is killed at 25 and back at 35, in a minute; H = 40 steps of 0.1 s; checkpoints each 10 s."""
    killed = {
        "a": lane((0, "training"), (60, "")),
        "b": lane((0, "training"), (25, "dead"), (27, "recovering"), (35, "training"), (60, "")),
    }
    found = computed(killed, dict.fromkeys("ab", STEP), 0, 60, 40, 10)
    assert found.data_parallel == pytest.approx((20 + 25) / 60), "5 s since the checkpoint go with the kill"
    alone, together = 10 - ELASTIC_PAUSE_SECONDS, 25 + 25 - ELASTIC_PAUSE_SECONDS
    assert found.data_parallel_elastic == pytest.approx((alone + 2 * together) / 120)
    # Rounds end at 4 … 24, then at 39 (it begins again at 35), 43 … 59.
    assert found.diloco == pytest.approx(12 * 4 / 60)


def test_a_stop_takes_its_time_and_nothing_back() -> None:
    stopped = {
        "a": lane((0, "training"), (60, "")),
        "b": lane((0, "training"), (21, "stopped"), (31, "training"), (60, "")),
    }
    found = computed(stopped, dict.fromkeys("ab", STEP), 0, 60, 40, 10)
    assert found.data_parallel == pytest.approx(50 / 60)
    assert found.diloco == pytest.approx(12 * 4 / 60), "the round that began at 20 ends at 34"


LANES = st.lists(st.tuples(st.floats(0.5, 30.0), st.sampled_from(STATES)), min_size=1, max_size=8).map(
    lambda parts: lane(*[(sum(d for d, _ in parts[:n]), state) for n, (_, state) in enumerate(parts)], (1e3, ""))
)


@given(st.lists(LANES, min_size=1, max_size=4), st.integers(1, 50), st.floats(0.0, 20.0))
def test_nobody_does_more_than_who_was_up(lanes: list[list[Span]], interval: int, checkpoint_seconds: float) -> None:
    named = {str(n): spans for n, spans in enumerate(lanes)}
    found = computed(named, dict.fromkeys(named, STEP), 0.0, 60.0, interval, checkpoint_seconds)
    up = sum(
        max(0.0, min(span.end, 60.0) - span.begin) for spans in lanes for span in spans if span.state == "training"
    ) / (60.0 * len(lanes))
    for goodput in (found.data_parallel, found.data_parallel_elastic, found.diloco):
        assert -1e-9 <= goodput <= up + 1e-9
