"""Long work says that it goes on, and short work says nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from archipelago.broker.observe import progress as progress_module
from archipelago.broker.observe.progress import Activity, progress


def test_short_work_says_nothing() -> None:
    said: list[str] = []
    with progress("loading", say=said.append):
        pass
    assert said == []


def test_long_work_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, until: Callable[..., None]) -> None:
    monkeypatch.setattr(progress_module, "SILENT_SECONDS", 0.01)
    monkeypatch.setattr(progress_module, "EVERY_SECONDS", 0.01)
    said: list[str] = []
    with progress("replaying", 4, said.append) as activity:
        until(lambda: any("0 of 4" in line for line in said), "a first line")
        activity.done = 2
        until(lambda: any("2 of 4" in line and "left" in line for line in said), "a line with the rest")
    assert said[-1].startswith("replaying: ended")


def test_long_work_that_fails_says_so_and_raises(monkeypatch: pytest.MonkeyPatch, until: Callable[..., None]) -> None:
    monkeypatch.setattr(progress_module, "SILENT_SECONDS", 0.01)
    said: list[str] = []
    with pytest.raises(KeyError), progress("loading", say=said.append):
        until(lambda: said, "a line")
        raise KeyError
    assert len(said) >= 2


@pytest.mark.parametrize(("done", "left"), [(0, ""), (25, "about 30 s left"), (1, "about 16 min left"), (100, "")])
def test_the_time_left_is_estimated_from_what_is_done(done: int, left: str) -> None:
    line = Activity("x", 100, done).line(10.0)
    assert (left in line) if left else ("left" not in line)
