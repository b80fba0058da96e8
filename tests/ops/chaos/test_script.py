"""`archipelago chaos --script`: a user's own training script under faults."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from archipelago.broker.errors import ConfigError
from archipelago.islands.turn_log import STEP_VARIABLE, VARIABLE, MeasuredTurns, TurnLog
from archipelago.ops.chaos.main import ChaosOptions, main
from archipelago.ops.chaos.processes import read_turn_log
from archipelago.ops.chaos.report.figures import figures
from archipelago.ops.chaos.report.page import headlines
from archipelago.ops.chaos.report.record import Turn
from archipelago.ops.chaos.script import own_step_seconds, parsed
from tests.failing import failing
from tests.harness.processes import Processes
from tests.integration.conftest import processes
from tests.ops.chaos.test_storm_report import storm

__all__ = ["processes"]

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"


def test_the_name_of_the_island_is_the_last_word_or_where_the_user_puts_it(tmp_path: Path) -> None:
    path = tmp_path / "my train.py"
    path.touch()
    last, named = parsed(f"'{path}' --size 4"), parsed(f"'{path}' --name={{island}} --size 4")
    assert last is not None
    assert named is not None
    assert last.argv("oslo") == [str(path), "--size", "4", "oslo"]
    assert named.argv("oslo") == [str(path), "--name=oslo", "--size", "4"]
    assert last.environment()["PYTHONPATH"].startswith(str(tmp_path)), "it imports the modules beside it"
    assert parsed("") is None


def test_what_a_script_or_task_cannot_have_is_refused(tmp_path: Path) -> None:
    Path("train.py").touch()
    for options, code in (
        (ChaosOptions(script="missing.py"), "chaos.script"),
        (ChaosOptions(script="'train.py"), "chaos.script"),
        (ChaosOptions(script=str(tmp_path)), "chaos.script"),
        (ChaosOptions(script=" "), "chaos.script"),
        (ChaosOptions(task="train.py", baseline=True), "chaos.conflict"),
        (ChaosOptions(task="nothing.py"), "task.file"),
        (ChaosOptions(script="train.py", standbys=1), "chaos.conflict"),
        (ChaosOptions(script="train.py", baseline=True), "chaos.conflict"),
        (ChaosOptions(script="train.py", task="train.py"), "chaos.conflict"),
    ):
        with failing(ConfigError, code):
            main(options)
    assert not (tmp_path / "runs").exists()


def turns(*at: float) -> Sequence[Turn]:
    return [Turn(seconds, "a", number, 0.0, 0.0) for number, seconds in enumerate(at, 1)]


def test_a_slow_script_has_its_own_step_duration() -> None:
    asked = {"a": 0.05, "b": 0.1}
    assert own_step_seconds(asked, {"a": turns(0.0, 0.051, 0.102)}) == asked
    assert own_step_seconds(asked, {"a": turns(0.0, 0.3, 0.6)}) == pytest.approx({"a": 0.3, "b": 0.3})
    assert own_step_seconds(asked, {}) == asked


def test_without_a_held_out_loss_the_training_loss_is_shown() -> None:
    record = replace(storm(), held_out_loss=math.nan)
    found = figures(record, figures(record))
    assert found.training_loss == pytest.approx(2.0)
    rows = dict(headlines(found))
    assert not any("bits per byte" in text for row in rows.items() for text in row)
    assert sum("2.0000" in text for text in rows.values()) == 2


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
    assert [turn.steps for turn in read_turn_log(path)] == [1]
    clock.now += 0.01
    measured.synced()
    measured.stepped(2)
    clock.now += 0.2  # one long step
    measured.synced()
    measured.stepped(1)
    found = read_turn_log(path)
    assert [turn.at for turn in found] == pytest.approx([100.05, 100.15, 100.35])
    assert [turn.steps for turn in found] == [1, 3, 4]
    assert [turn.idle for turn in found] == pytest.approx([0.0, 0.01, 0.2])


def test_only_a_storm_measures_a_script(tmp_path: Path) -> None:
    assert MeasuredTurns.asked_for({}, "a") is None
    environment = {VARIABLE: str(tmp_path / "turns.jsonl")}
    assert MeasuredTurns.asked_for(environment, "a") is not None
    for wrong in ("fast", "-1", "nan", "inf"):
        with failing(ConfigError, "turn-log"):
            MeasuredTurns.asked_for({**environment, STEP_VARIABLE: wrong}, "a")


KILLS = """
{"at": 1, "kind": "kill", "target": "island-0", "seconds": 0.5}
{"at": 2, "kind": "kill", "target": "merger", "seconds": 0.2}
{"at": 3, "kind": "partition", "target": "island-1", "seconds": 1}
"""


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize(
    "flags",
    [
        ("--script", str(EXAMPLES / "train_jax.py"), "--undisturbed"),
        ("--task", str(EXAMPLES / "task_bytes.py"), "--standbys=1", "--no-undisturbed", "--sync.interval=12"),
    ],
    ids=["script", "task"],
)
def test_a_script_or_task_of_the_guide_survives_a_storm(
    flags: tuple[str, ...], processes: Processes, tmp_path: Path
) -> None:
    (tmp_path / "faults.jsonl").write_text(KILLS)
    found = processes.run(
        "chaos", *flags, "--islands=2", "--seconds=5", "--settle-seconds=120", "--checkpoint-every=2",
        "--step-seconds=0.03", "--schedule", str(tmp_path / "faults.jsonl"),
    )  # fmt: skip
    assert found["holds"] and all(check["holds"] for check in found["checks"]), found["checks"]
    events = [(event["process"], event["what"]) for event in found["events"]]
    assert {("island-0", "kill"), ("merger", "kill"), ("island-1", "partition over")} <= set(events)
    assert "died" not in {what for _, what in events}, "a process ended without a fault"
    assert 0 < found["goodput"] <= 1.0
    assert found["tokens_merged"] > 0
    if "--task" in flags:
        assert found["unit"] == "loss units"
        assert 1.0 < found["held_out_loss"] < 5.6, "the untrained model knows 256 bytes"
        return
    (rejoin,) = found["rejoins"]
    assert rejoin["start_seconds"] > 0
    assert found["held_out_loss"] is None
    assert 0 < found["training_loss"] < 1.4
    assert found["control"]["training_loss"] > 0
