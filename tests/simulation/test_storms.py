"""Simulated runs under faults and attacks, one a seed. `FaultRates` has the faults, and `Invariants` what must hold.

ARCHIPELAGO_SEEDS is the number of seeds, and ARCHIPELAGO_FIRST_SEED the first one. `make soak` never ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.simulation import attacked, storm

FIRST = int(os.environ.get("ARCHIPELAGO_FIRST_SEED", "0"))
#: The quick tier plays this number of seeds, and the full tier FULL_SEEDS more.
QUICK_SEEDS = int(os.environ.get("ARCHIPELAGO_SEEDS", "10"))
FULL_SEEDS = 0 if "ARCHIPELAGO_SEEDS" in os.environ else 22
#: The seed of a run that writes compactions, so that its processes come to each failpoint.
FAILPOINT_SEED = 1
#: Each seed makes the attacks in another order, and with other claims.
ATTACK_SEEDS = (1, 2)


@pytest.fixture(scope="module")
def workers() -> Iterator[ProcessPoolExecutor]:
    """Return a pool of processes that play storms."""
    with storm.pool() as workers:
        yield workers


@pytest.mark.parametrize(
    ("first", "count"), [(FIRST, QUICK_SEEDS), pytest.param(FIRST + QUICK_SEEDS, FULL_SEEDS, marks=pytest.mark.full)]
)
def test_storms(workers: ProcessPoolExecutor, first: int, count: int) -> None:
    """The invariants hold after every event, and the run makes progress after the storm."""
    parts = storm.spread(workers, first, count)
    failures = [failure for part in parts if (failure := part.result()) is not None]
    assert not failures, "\n\n".join(map(str, failures))


@pytest.mark.full
def test_processes_die_at_each_failpoint(workers: ProcessPoolExecutor) -> None:
    missed = workers.submit(storm.die_at_each_failpoint, FAILPOINT_SEED).result()
    assert missed == [], "no process has come to these failpoints"


@pytest.mark.full
@pytest.mark.parametrize("seed", ATTACK_SEEDS)
def test_no_attack_harms_a_run(workers: ProcessPoolExecutor, seed: int) -> None:
    workers.submit(attacked.play, seed).result()


def test_a_seed_plays_the_same_storm_again(workers: ProcessPoolExecutor) -> None:
    once, again = (workers.submit(storm.play, FIRST) for _ in range(2))
    assert once.result() == again.result()
