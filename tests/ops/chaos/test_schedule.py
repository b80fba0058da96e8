"""Schedules of faults: properties of all of them, and a few examples."""

from __future__ import annotations

import itertools
import statistics

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from archipelago.broker.errors import ConfigError
from archipelago.ops.chaos.schedule import (
    KINDS,
    ON_LINKS,
    REDIS,
    VALUES,
    Fault,
    Kind,
    applies_to,
    from_text,
    in_order,
    periodic,
    poisson,
    to_text,
)
from tests.failing import failing

TARGETS = ("redis", "merger", "island-0", "island-1", "island-2")
SEEDS = st.integers(0, 1 << 32)
TIMES = st.floats(0, 1e5)
FAULTS = st.builds(
    Fault, at=TIMES, kind=st.sampled_from(sorted(KINDS)), target=st.sampled_from(TARGETS), seconds=TIMES,
    value=st.floats(0.001, 1e6),
).filter(lambda fault: applies_to(fault.kind, fault.target))  # fmt: skip
Rates = tuple[float, list[Kind], float]
RATES = st.tuples(
    st.floats(0.5, 50.0), st.lists(st.sampled_from(sorted(KINDS)), min_size=1, unique=True), st.floats(0.1, 10.0)
)


@given(st.lists(FAULTS))
def test_a_written_schedule_is_read_back(faults: list[Fault]) -> None:
    assert from_text(to_text(faults), TARGETS) == in_order(faults)


@example((2.421875, ["disk"], 0.1), 1.0, 0)  # a time that is rounded to the end
@given(RATES, st.floats(1.0, 200.0), SEEDS)
def test_a_seed_determines_the_faults_of_each_process(rates: Rates, seconds: float, seed: int) -> None:
    faults = poisson(TARGETS, seconds, seed, *rates)
    assert faults == poisson(TARGETS, seconds, seed, *rates)
    assert faults == in_order(faults)
    for target in TARGETS:
        mine = [fault for fault in faults if fault.target == target]
        assert mine == poisson([target], seconds, seed, *rates), "the faults of one process depend on another process"
        for before, after in itertools.pairwise(mine):
            assert before.until <= after.at, "a fault begins before the last one is over"
    for fault in faults:
        assert 0 <= fault.at < seconds
        assert fault.kind in rates[1]
        assert applies_to(fault.kind, fault.target)
        assert fault.value == VALUES.get(fault.kind, 0.0)


def test_redis_has_no_faults_of_links() -> None:
    assert {kind for kind in KINDS if applies_to(kind, REDIS)} == {"kill", "stop", "disk"}
    assert not poisson([REDIS], 1000.0, 0, 1.0, tuple(ON_LINKS))


def test_faults_have_the_requested_mean_distance_and_duration() -> None:
    """The mean of 4,000 exponential times is within 5 % of the expectation: three standard deviations."""
    seed = 3
    faults = poisson(["merger"], 48_000.0, seed, 10.0, return_seconds=2.0)
    uptimes = [after.at - before.until for before, after in itertools.pairwise(faults)]
    assert statistics.fmean(uptimes) == pytest.approx(10.0, rel=0.05), f"seed {seed}"
    assert statistics.fmean(fault.seconds for fault in faults) == pytest.approx(2.0, rel=0.05), f"seed {seed}"
    kills = sum(fault.kind == "kill" for fault in faults) / len(faults)
    assert kills == pytest.approx(0.5, abs=0.03), f"seed {seed}"


@given(st.floats(0.5, 20.0), st.integers(1, 30), SEEDS)
def test_one_kill_in_each_period(every: float, count: int, seed: int) -> None:
    faults = periodic(every, TARGETS[2:], 2.0, every * count, seed)
    assert len(faults) == count
    for n, fault in enumerate(faults):
        assert every * n < fault.at < every * (n + 1)
        assert (fault.kind, fault.seconds) == ("kill", 2.0)
        assert fault.target in TARGETS[2:]
    assert faults == periodic(every, TARGETS[2:], 2.0, every * count, seed)


def test_empty_lines_and_comments_are_skipped_and_values_have_defaults() -> None:
    text = (
        '\n# a note\n{"at": 3, "kind": "throttle", "target": "merger"}\n{"at": 1, "kind": "kill", "target": "redis"}\n'
    )
    assert from_text(text, TARGETS) == [Fault(1, "kill", "redis"), Fault(3, "throttle", "merger", 0.0, 1.0)]


def test_a_line_that_cannot_be_used_is_refused() -> None:
    for line in (
        "{",
        "{}",
        '{"at": 1, "kind": "flood", "target": "redis"}',
        '{"at": 1, "kind": "kill", "target": "island-7"}',
        '{"at": 1, "kind": "half-open", "target": "redis"}',
        '{"at": -1, "kind": "kill", "target": "redis"}',
        '{"at": 1e400, "kind": "kill", "target": "redis"}',
        '{"at": 1, "kind": "kill", "target": "redis", "more": 1}',
    ):
        with failing(ConfigError, "chaos.schedule"):
            from_text(line, TARGETS)
