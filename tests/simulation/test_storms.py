"""Simulated runs under faults, one a seed. `FaultRates` has the faults, and `Invariants` what must hold.

ARCHIPELAGO_SEEDS is the number of seeds, and ARCHIPELAGO_FIRST_SEED the first one. `make soak` never ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.simulation import storm

FIRST = int(os.environ.get("ARCHIPELAGO_FIRST_SEED", "0"))
#: The quick tier plays this number of seeds, and the full tier FULL_SEEDS more.
QUICK_SEEDS = int(os.environ.get("ARCHIPELAGO_SEEDS", "20"))
SEEDS_OF_A_TEST = 60
FULL_SEEDS = 0 if "ARCHIPELAGO_SEEDS" in os.environ else 120
#: Seeds of runs that write compactions, so that their processes come to each failpoint.
FAILPOINT_SEEDS = (1, pytest.param(8, marks=pytest.mark.full), pytest.param(16, marks=pytest.mark.full))


@pytest.fixture(scope="module")
def workers() -> Iterator[ProcessPoolExecutor]:
    """Return a pool of processes that play storms."""
    with storm.pool() as workers:
        yield workers


def play(workers: ProcessPoolExecutor, first: int, count: int) -> None:
    parts = storm.spread(workers, first, count)
    failures = [failure for part in parts if (failure := part.result()) is not None]
    assert not failures, "\n\n".join(map(str, failures))


def test_storms(workers: ProcessPoolExecutor) -> None:
    """The invariants hold after every event, and the run makes progress after the storm."""
    play(workers, FIRST, QUICK_SEEDS)


@pytest.mark.full
@pytest.mark.parametrize("first", range(FIRST + QUICK_SEEDS, FIRST + QUICK_SEEDS + FULL_SEEDS, SEEDS_OF_A_TEST))
def test_more_storms(workers: ProcessPoolExecutor, first: int) -> None:
    play(workers, first, min(SEEDS_OF_A_TEST, FIRST + QUICK_SEEDS + FULL_SEEDS - first))


@pytest.mark.parametrize("seed", FAILPOINT_SEEDS)
def test_processes_die_at_each_failpoint(workers: ProcessPoolExecutor, seed: int) -> None:
    assert workers.submit(storm.die_at_each_failpoint, seed).result() == [], "no process has come to these failpoints"


def test_a_seed_plays_the_same_storm_again(workers: ProcessPoolExecutor) -> None:
    once, again = (workers.submit(storm.play, FIRST) for _ in range(2))
    assert once.result() == again.result()
