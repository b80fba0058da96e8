"""All attacks on simulated runs. Each seed has another order, and other claims."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.hostile.simulated import play
from tests.simulation import storm

#: The quick tier plays the first seed.
SEEDS = (1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 5)))


@pytest.fixture(scope="module")
def workers() -> Iterator[ProcessPoolExecutor]:
    """Return a pool of processes that play simulated runs."""
    with storm.pool() as workers:
        yield workers


@pytest.mark.parametrize("seed", SEEDS)
def test_no_attack_harms_a_simulated_run(workers: ProcessPoolExecutor, seed: int) -> None:
    workers.submit(play, seed).result()
