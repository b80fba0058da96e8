"""The time of named functions: their own, without that of named functions which they call, and of the whole process."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from archipelago.ops.bench import process
from archipelago.ops.bench.process import OF_ISLAND, OF_MERGER, WHOLE, Pieces, Spent

NAME = "archipelago_test_of_pieces"


class FakeTime:
    """Clocks that move only by `pass_`: a second of processor time is two on the wall."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def pass_(self, seconds: float) -> None:
        self.seconds += seconds

    def perf_counter(self) -> float:
        return 2 * self.seconds

    def thread_time(self) -> float:
        return self.seconds

    process_time = thread_time


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    clock, made = FakeTime(), types.ModuleType(NAME)
    monkeypatch.setattr(process, "time", clock)

    class Outer:
        def run(self) -> str:
            clock.pass_(1.0)
            made.inner(2.0)
            made.inner(3.0)
            return "done"

    made.__dict__.update(Outer=Outer, inner=clock.pass_)
    monkeypatch.setitem(sys.modules, NAME, made)
    return made


def test_a_piece_excludes_the_pieces_within_it(module: Any) -> None:
    counted = Pieces({f"{NAME}:Outer.run": "outer", f"{NAME}:inner": "inner"})
    assert module.Outer().run() == "done"
    module.inner(4.0)
    found = counted.spent()
    assert found["outer"] == Spent(1, 2.0, 1.0)
    assert found["inner"] == Spent(3, 18.0, 9.0)
    assert found[WHOLE] - Spent(0, 0.0, 0.0) == Spent(1, 20.0, 10.0)


def test_a_call_that_fails_counts(module: Any) -> None:
    def fails(seconds: float) -> None:
        raise ValueError("no")

    module.inner = fails
    counted = Pieces({f"{NAME}:inner": "inner"})
    with pytest.raises(ValueError, match="no"):
        module.inner(1.0)
    assert counted.spent()["inner"].calls == 1


def test_the_named_functions_exist() -> None:
    for place in (*OF_ISLAND, *OF_MERGER):
        module, _, path = place.partition(":")
        owner: Any = __import__(module, fromlist=["_"])
        for name in path.split("."):
            owner = getattr(owner, name)
        assert callable(owner)
