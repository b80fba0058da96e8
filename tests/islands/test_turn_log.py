"""The minimum duration of a step in simulated time, and the log of an island's turns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipelago.broker.errors import ConfigError
from archipelago.islands.turn_log import STEP_VARIABLE, VARIABLE, MeasuredTurns, Pacer, TurnLog
from tests.failing import failing
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


@settings(max_examples=examples(100))
@given(st.lists(st.tuples(st.floats(0.0, 0.2), st.floats(0.0, 0.2)), min_size=2, max_size=30))
def test_no_step_is_shorter_than_its_minimum(turns: list[tuple[float, float]]) -> None:
    ends = played(Pacer(STEP), turns)
    for n, end in enumerate(ends):
        assert end >= turns[0][0] + n * STEP - 1e-9


def test_a_long_gap_leaves_the_device_idle() -> None:
    pacer = Pacer(STEP)
    pacer.dispatched(1, 10.0)
    assert pacer.idle_seconds == 0.0, "no step came before it"
    pacer.dispatched(1, 10.02)
    assert pacer.idle_seconds == 0.0
    assert pacer.delay_seconds(10.02) == pytest.approx(0.03)
    pacer.dispatched(1, 10.4)
    assert pacer.idle_seconds == pytest.approx(0.3)
    assert pacer.delay_seconds(10.4) == 0.0
    pacer.dispatched(1, 10.41)
    assert pacer.delay_seconds(10.41) == pytest.approx(0.04)


def test_arithmetic_longer_than_the_minimum_is_not_delayed_and_none_without_a_minimum() -> None:
    ends = played(Pacer(STEP), [(0.0, 0.2)] * 5)
    assert ends[-1] == pytest.approx(4 * 0.2)
    pacer = Pacer()
    for now in (1.0, 1.5, 1.5, 9.0):
        pacer.dispatched(4, now)
        assert pacer.delay_seconds(now) == 0.0


# -- the turn log ---------------------------------------------------------------------------------------------------


def test_each_turn_is_a_line_and_incarnations_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "island.jsonl"
    for who in ("first", "second"):
        turn_log = TurnLog.named_in({VARIABLE: str(path)}, who)
        assert turn_log is not None
        turn_log.turned(1.5, 3, 0.0)
        turn_log.turned(1.6, 4, 0.25)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["who"] for line in lines] == ["first", "first", "second", "second"]
    waited = [line.pop("waited") for line in lines]
    assert lines[1] == {"at": 1.6, "who": "first", "steps": 4, "idle": 0.25}
    assert min(waited) >= 0.0


def test_without_the_variable_there_is_no_log_and_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    assert TurnLog.named_in({}, "who") is None
    assert TurnLog.named_in({VARIABLE: ""}, "who") is None
    with failing(ConfigError, "turn-log"):
        TurnLog.named_in({VARIABLE: str(tmp_path / "nowhere" / "turns.jsonl")}, "x")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_does_not_stop_the_log() -> None:
    TurnLog(Path("/dev/full"), "who").turned(1.0, 1, 0.0)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_steps_last_as_long_as_the_storm_asks_and_are_logged_before_they_are_sent(tmp_path: Path) -> None:
    path, clock = tmp_path / "turns.jsonl", Clock()
    measured = MeasuredTurns(TurnLog(path, "a"), 0.05, clock, clock.sleep)
    measured.stepped(1)
    assert len(path.read_text().splitlines()) == 1
    clock.now += 0.01
    measured.synced()
    measured.stepped(2)
    clock.now += 0.2  # one long step
    measured.synced()
    measured.stepped(1)
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [turn["at"] for turn in found] == pytest.approx([100.05, 100.15, 100.35])
    assert [turn["steps"] for turn in found] == [1, 3, 4]
    assert [turn["idle"] for turn in found] == pytest.approx([0.0, 0.01, 0.2])


def test_only_a_storm_measures_a_script(tmp_path: Path) -> None:
    assert MeasuredTurns.asked_for({}, "a") is None
    environment = {VARIABLE: str(tmp_path / "turns.jsonl")}
    assert MeasuredTurns.asked_for(environment, "a") is not None
    for wrong in ("fast", "-1", "nan", "inf"):
        with failing(ConfigError, "turn-log"):
            MeasuredTurns.asked_for({**environment, STEP_VARIABLE: wrong}, "a")
