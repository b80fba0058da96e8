"""The minimum duration of a step, and the log of an island's turns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from archipelago.islands.turn_log import STEP_VARIABLE, VARIABLE, MeasuredTurns

STEP = 0.05


class FakeTime:
    """A clock that only sleeping and the test move."""

    now = 10.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_work_between_two_steps_is_a_part_of_their_minimum_duration() -> None:
    clock = FakeTime()
    turns = MeasuredTurns(STEP, clock=clock, sleep=clock.sleep)
    ends = []
    for work, steps in ((0.02, 1), (0.04, 1), (0.03, 2), (0.06, 1), (0.01, 1), (0.2, 1), (0.01, 1), (0.01, 1)):
        clock.now += work
        turns.stepped(steps)
        ends.append(clock.now)
    assert ends == pytest.approx([10.05, 10.1, 10.2, 10.26, 10.3, 10.5, 10.51, 10.55])


def test_trials_ask_by_the_environment_or_a_flag(tmp_path: Path) -> None:
    assert MeasuredTurns.asked_for({}, "x") is None
    assert MeasuredTurns.asked_for({STEP_VARIABLE: str(STEP)}, "x")
    assert MeasuredTurns.asked_for({VARIABLE: str(tmp_path / "log")}, "x")


# -- the turn log ---------------------------------------------------------------------------------------------------


def test_each_turn_is_a_line_and_incarnations_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "island.jsonl"
    for who in ("first", "second"):
        clock = FakeTime()
        turns = MeasuredTurns(0.0, path, who, clock)
        turns.stepped(3)
        clock.now += 0.1
        turns.stepped(1)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["who"] for line in lines] == ["first", "first", "second", "second"]
    assert lines[1] == {"at": 10.1, "who": "first", "steps": 4}
