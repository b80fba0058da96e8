"""The minimum duration of a step in simulated time, and the log of an island's turns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipelago.islands.turn_log import Pacer, TurnLog
from tests.tiers import examples

STEP = 0.05
SHORT = st.floats(0.0, 0.02)


def played(pacer: Pacer, turns: list[tuple[float, float]]) -> list[float]:
    """Run turns (seconds between two steps, seconds of arithmetic), and return when each of them ended."""
    now, done_at = 0.0, 0.0
    ends: list[float] = []
    for between, arithmetic in turns:
        now += between
        pacer.dispatched(1, now)
        before_at, done_at = done_at, max(done_at, now) + arithmetic
        if ends:
            now = max(now, before_at)
            now += pacer.delay_seconds(now)
        ends.append(now)
    return ends


@settings(max_examples=examples(100))
@given(st.lists(st.tuples(SHORT, SHORT), min_size=3, max_size=50))
def test_a_gap_shorter_than_a_step_costs_nothing(turns: list[tuple[float, float]]) -> None:
    """A device that works concurrently with its host hides the arithmetic and the work between two steps."""
    ends = played(Pacer(STEP), turns)
    began = turns[0][0]
    for n, end in enumerate(ends[1:], 1):
        assert end == pytest.approx(began + n * STEP)


def test_a_long_gap_leaves_the_device_idle() -> None:
    pacer = Pacer(STEP)
    pacer.dispatched(1, 10.0)
    pacer.dispatched(1, 10.02)
    assert pacer.delay_seconds(10.02) == pytest.approx(0.03)
    pacer.dispatched(1, 10.4)
    assert pacer.delay_seconds(10.4) == 0.0
    pacer.dispatched(1, 10.41)
    assert pacer.delay_seconds(10.41) == pytest.approx(0.04)


# -- the turn log ---------------------------------------------------------------------------------------------------


def test_each_turn_is_a_line_and_incarnations_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "island.jsonl"
    for who in ("first", "second"):
        turn_log = TurnLog(path, who)
        turn_log.turned(1.5, 3)
        turn_log.turned(1.6, 4)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["who"] for line in lines] == ["first", "first", "second", "second"]
    assert lines[1] == {"at": 1.6, "who": "first", "steps": 4}
