"""Calls to servers that may hang are awaited for a moment only."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from archipelago.broker.errors import UnreachableError
from archipelago.broker.shards.reader import Bounded, BoundedReader
from tests.conftest import Until
from tests.failing import failing


def test_a_call_that_hangs_holds_up_nobody(until: Until) -> None:
    hangs, bounded = threading.Event(), Bounded(seconds=0.01)

    def late() -> int:
        hangs.wait()
        return 7

    with failing(UnreachableError):
        bounded(late, about="parts")
    for about in ("other parts", None):
        with failing(UnreachableError):  # at once
            bounded(lambda: 1, about)
    hangs.set()
    until(lambda: bounded._last is not None and bounded._last[1].done(), "the late answer")
    assert bounded(lambda: 8, about="parts") == 7, "what was asked already is answered"
    assert bounded(lambda: 8, about="parts") == 8
    assert bounded(lambda: 9) == 9
    with pytest.raises(ZeroDivisionError):
        bounded(lambda: 1 // 0)
    assert bounded(lambda: 9) == 9


def test_the_calls_of_a_reader_are_bounded() -> None:
    hangs = threading.Event()
    reader: Any = BoundedReader(cast(Any, SimpleNamespace(tape=lambda count: [count], backlog=hangs.wait)))
    assert reader.tape(3) == [3]
    reader._bounded._seconds = 0.01
    for _ in range(2):
        with failing(UnreachableError):
            reader.backlog()
    hangs.set()
