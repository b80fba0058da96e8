"""Runs under faults, one a seed: lost answers, crashes at any call, several mergers, a broker that forgets its tail."""

from __future__ import annotations

import os

import pytest

from tests.simulation.world import World

SEEDS = int(os.environ.get("ARCHIPELAGO_SEEDS", "200"))
FIRST = int(os.environ.get("ARCHIPELAGO_FIRST_SEED", "0"))
EVENTS = 150


@pytest.mark.parametrize("seed", range(FIRST, FIRST + SEEDS))
def test_storm(seed: int) -> None:
    """What must always hold, holds after every event; and when the storm is over, the run goes on."""
    world = World(seed)
    for _ in range(EVENTS):
        world.play()
        world.check()
    if not world.tails_lost:
        world.check_nothing_lost()
    world.calm(80)
    before = world.direct.tape(1)
    world.calm(160)
    world.check()
    after = world.direct.tape(1)
    assert after, "no round was ever closed"
    assert after[0].round > (before[0].round if before else 0) + 4, "the run stands still"
    assert world.direct.backlog() <= 4 * len(world.islands), "contributions pile up"
