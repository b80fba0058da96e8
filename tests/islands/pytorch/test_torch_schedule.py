"""Learning rates that follow an island's own steps instead of the clock of its run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest

from archipelago.islands.pytorch.schedule import ScheduleWatch

#: The clock after each step of an island that makes half of the run's steps, and of one whose merger has gone away.
SLOW = [step + 6 * (step // 6) for step in range(150)]
UNSERVED = [min(step, 30) for step in range(60)]
Rate = Callable[[int], float]


def cosine(step: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * step / 300))


def warm_up(step: int) -> float:
    return min(1.0, step / 200)


def staircase(step: int) -> float:
    return 0.5 ** (step // 10)


def warnings(clocks: Sequence[int], rates: Sequence[float], caplog: pytest.LogCaptureFixture) -> int:
    """Return how many warnings a script with these rates gets."""
    group = {"lr": 0.0}
    watch = ScheduleWatch(SimpleNamespace(param_groups=[group]))
    caplog.clear()
    for clock, rate in zip(clocks, rates, strict=True):
        group["lr"] = rate
        watch.look(clock, 1)
    return len(caplog.records)


@pytest.mark.parametrize("clocks", [SLOW, UNSERVED])
def test_a_rate_of_own_steps_is_noticed_once(clocks: Sequence[int], caplog: pytest.LogCaptureFixture) -> None:
    for rate_of in (cosine, warm_up):
        assert warnings(clocks, [rate_of(step) for step in range(len(clocks))], caplog) == 1
    assert caplog.records[0].code == "loop.schedule"  # type: ignore[attr-defined]


@pytest.mark.parametrize("clocks", [SLOW, UNSERVED, [2 * step for step in range(150)]])
def test_a_rate_of_the_clock_is_never_taken_for_one(clocks: Sequence[int], caplog: pytest.LogCaptureFixture) -> None:
    for rate_of in (cosine, warm_up, staircase, lambda step: 1e-3):
        for lag in (1, 2):  # the script reads the clock before a step, or one step earlier
            known = [0] * lag + list(clocks)
            assert not warnings(clocks, [rate_of(known[step]) for step in range(len(clocks))], caplog)
    plateaus = [0.1 ** (step // 20) for step in range(len(clocks))]
    assert not warnings(clocks, plateaus, caplog), "a rate that falls when the loss does not"
