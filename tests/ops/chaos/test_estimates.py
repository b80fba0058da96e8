"""Estimates of other methods' goodput: examples, and a bound that always holds."""

from __future__ import annotations

import itertools
from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from archipelago.ops.chaos.lockstep.estimates import ELASTIC_PAUSE_SECONDS, estimate
from archipelago.ops.chaos.report.timelines import Span

STEP = 0.1
STATES = ("training", "stopped", "recovering", "dead")


def timeline(*states: tuple[float, str]) -> list[Span]:
    """Return spans from each (begin, state) to the next. The last pair is the end."""
    return [Span(begin, end, state) for (begin, state), (end, _) in itertools.pairwise(states)]


def test_without_failures_the_slowest_worker_sets_the_pace() -> None:
    undisturbed = {name: timeline((0, "training"), (80, "")) for name in "ab"}
    for seconds, goodput in ((STEP, 1.0), (2 * STEP, 0.5)):
        found = estimate(undisturbed, {"a": STEP, "b": seconds}, 0, 80, 40, 10)
        assert astuple(found) == pytest.approx((goodput, goodput, goodput))


def test_a_kill_loses_what_each_method_loses() -> None:
    """One of two workers is killed at 25 s and trains again at 35 s; H = 40 steps of 0.1 s; a checkpoint every 10 s."""
    killed = {
        "a": timeline((0, "training"), (60, "")),
        "b": timeline((0, "training"), (25, "dead"), (27, "recovering"), (35, "training"), (60, "")),
    }
    found = estimate(killed, dict.fromkeys("ab", STEP), 0, 60, 40, 10)
    assert found.data_parallel == pytest.approx((20 + 25) / 60), "the kill loses the 5 s since the checkpoint"
    alone, together = 10 - ELASTIC_PAUSE_SECONDS, 25 + 25 - ELASTIC_PAUSE_SECONDS
    assert found.data_parallel_elastic == pytest.approx((alone + 2 * together) / 120)
    # Rounds end at 4 … 24, then at 39, because the killed worker begins again at 35, then 43 … 59.
    assert found.diloco == pytest.approx(12 * 4 / 60)


def test_a_stop_loses_only_its_own_time() -> None:
    stopped = {
        "a": timeline((0, "training"), (60, "")),
        "b": timeline((0, "training"), (21, "stopped"), (31, "training"), (60, "")),
    }
    found = estimate(stopped, dict.fromkeys("ab", STEP), 0, 60, 40, 10)
    assert found.data_parallel == pytest.approx(50 / 60)
    assert found.diloco == pytest.approx(12 * 4 / 60), "the round that began at 20 ends at 34"


TIMELINES = st.lists(st.tuples(st.floats(0.5, 30.0), st.sampled_from(STATES)), min_size=1, max_size=8).map(
    lambda parts: timeline(*[(sum(d for d, _ in parts[:n]), state) for n, (_, state) in enumerate(parts)], (1e3, ""))
)


@given(st.lists(TIMELINES, min_size=1, max_size=4), st.integers(1, 50), st.floats(0.0, 20.0))
def test_no_estimate_exceeds_the_time_that_workers_were_up(
    spans: list[list[Span]], interval: int, checkpoint_seconds: float
) -> None:
    named = {str(n): timeline for n, timeline in enumerate(spans)}
    found = estimate(named, dict.fromkeys(named, STEP), 0.0, 60.0, interval, checkpoint_seconds)
    up = sum(
        max(0.0, min(span.end, 60.0) - span.begin)
        for timeline in spans
        for span in timeline
        if span.state == "training"
    ) / (60.0 * len(spans))
    for goodput in (found.data_parallel, found.data_parallel_elastic, found.diloco):
        assert -1e-9 <= goodput <= up + 1e-9
