"""The time that a merger works."""

from __future__ import annotations

import pytest

from archipelago.merger.busy_time import BusyTime
from archipelago.ops.experiments.virtual_time import VirtualClock


def test_waiting_and_the_time_between_turns_do_not_count() -> None:
    clock = VirtualClock()
    busy = BusyTime(clock)
    assert busy.take() == 0.0
    for _ in range(2):
        with busy.working():
            clock.now += 1.0
            with busy.waiting():
                clock.now += 100.0
            clock.now += 2.0
        clock.now += 100.0
    assert busy.take() == 6.0
    assert busy.take() == 0.0


def test_a_take_in_the_middle_divides_the_time() -> None:
    clock = VirtualClock()
    busy = BusyTime(clock)
    with busy.working():
        clock.now += 1.0
        assert busy.take() == 1.0
        clock.now += 2.0
    assert busy.take() == 2.0


def test_an_error_ends_the_work_and_a_clock_that_was_set_back_is_ignored() -> None:
    clock = VirtualClock()
    busy = BusyTime(clock)
    with pytest.raises(ValueError, match="lost"), busy.working(), busy.waiting():
        raise ValueError("lost")
    clock.now += 5.0
    assert busy.take() == 0.0
    with busy.working():
        clock.now -= 3.0
    assert busy.take() == 0.0
