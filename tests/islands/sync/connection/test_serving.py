"""The watch for a run that no merger serves."""

from __future__ import annotations

from typing import Any, cast

import pytest

from archipelago.islands.sync.connection.serving import REMIND_SECONDS, MergerWatch
from archipelago.ops.experiments.virtual_time import VirtualClock


class Unserved:
    """A run without a merger."""

    def is_served(self) -> bool:
        return False


def test_a_missing_merger_is_said_now_and_then_until_the_run_is_over(caplog: pytest.LogCaptureFixture) -> None:
    clock = VirtualClock()
    watch = MergerWatch(cast(Any, Unserved()), "run", clock)
    watch.look(is_over=True)
    assert not caplog.records
    for _ in range(2):
        watch.look(is_over=False)
        watch.look(is_over=False)
        clock.now += REMIND_SECONDS
    assert len(caplog.records) == 2
    assert watch.is_served is False
