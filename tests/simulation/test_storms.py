"""Simulated runs under faults, one a seed. `FaultRates` has the faults, and `Invariants` what must hold.

ARCHIPELAGO_SEEDS is the number of seeds, and ARCHIPELAGO_FIRST_SEED the first one. `make soak` never ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.simulation import storm
from tests.tiers import is_full

SEEDS = int(os.environ.get("ARCHIPELAGO_SEEDS", "2000" if is_full() else "100"))
FIRST = int(os.environ.get("ARCHIPELAGO_FIRST_SEED", "0"))
SEEDS_OF_A_TEST = 200


@pytest.fixture(scope="module")
def workers() -> Iterator[ProcessPoolExecutor]:
    """Return a pool of processes that play storms."""
    with storm.pool() as workers:
        yield workers


@pytest.mark.parametrize("first", range(FIRST, FIRST + SEEDS, SEEDS_OF_A_TEST))
def test_storms(workers: ProcessPoolExecutor, first: int) -> None:
    """The invariants hold after every event, and the run makes progress after the storm."""
    parts = storm.spread(workers, first, min(SEEDS_OF_A_TEST, FIRST + SEEDS - first))
    failures = [failure for part in parts if (failure := part.result()) is not None]
    assert not failures, "\n\n".join(map(str, failures))


def test_a_seed_plays_the_same_storm_again(workers: ProcessPoolExecutor) -> None:
    once, again = (workers.submit(storm.play, FIRST) for _ in range(2))
    assert once.result() == again.result()
