"""Hostile moves that nobody listed, in simulated runs. The moves of findings are kept as examples."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.hostile.moves import Move, hostile_moves
from tests.hostile.simulated import KINDS, play
from tests.simulation import storm
from tests.tiers import examples

#: The quick tier plays a tenth of this number of runs, and the full tier plays it PARTS times more.
EXAMPLES, PARTS = 500, 4


@pytest.fixture(scope="module")
def workers() -> Iterator[ProcessPoolExecutor]:
    """Return a pool of processes that play simulated runs."""
    with storm.pool() as workers:
        yield workers


@example(0, [Move("contribution", (("global_step", 1 << 62),))])
@example(1, [Move("contribution", (("tokens", 1 << 53), ("steps", 1 << 40), ("global_step", 1 << 40)), "noise", 40)])
@example(2, [Move("contribution", (("data", "0:99999999:end"),))])
@example(0, [Move("contribution", (("data", "0:2:end"),), "noise", 3)])
@example(3, [Move("contribution", (("step_seconds", 1e-300),)), Move("heartbeat", (("step_seconds", 1e-300),))])
@example(4, [Move("contribution", (("island", "ada"), ("incarnation", "i2"), ("digest", "0" * 32)), "zeros", 40)])
@example(5, [Move("leases"), Move("contribution", (("data", "0:0:end 1:0:end 2:0:end 3:0:end"),))])
@example(1, [Move("leases"), Move("heartbeat", (("state", "dead"),))])
@settings(
    max_examples=examples(EXAMPLES), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.integers(0, 1000), hostile_moves(KINDS))
def test_no_move_harms_a_simulated_run(workers: ProcessPoolExecutor, seed: int, moves: list[Move]) -> None:
    workers.submit(play, seed, moves).result()


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
@settings(
    max_examples=examples(EXAMPLES), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.integers(0, 1 << 31), hostile_moves(KINDS))
def test_no_move_harms_more_runs(workers: ProcessPoolExecutor, part: int, seed: int, moves: list[Move]) -> None:
    workers.submit(play, seed, moves).result()
