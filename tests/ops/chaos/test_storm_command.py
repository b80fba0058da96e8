"""`archipelago chaos`: storms on real processes, the plans of the command, its refusals and its exit status."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from archipelago.broker.errors import ArchipelagoError, ConfigError
from archipelago.broker.messages import Counters
from archipelago.broker.presence import Presence
from archipelago.ops.chaos import baseline
from archipelago.ops.chaos import main as chaos
from archipelago.ops.chaos.figures import Figures
from archipelago.ops.chaos.main import BROKEN, SCHEDULE, ChaosOptions, main
from archipelago.ops.chaos.processes import RunProcesses, StormPlan, parse_script, read_turn_log
from archipelago.ops.chaos.record import ProcessEvent, StormRecord
from archipelago.ops.chaos.schedule import from_text
from tests import samples
from tests.failing import failing
from tests.harness.processes import Processes
from tests.integration.conftest import corpus, corpus_folder, processes
from tests.ops.chaos.test_storm_report import BASELINE, storm

__all__ = ["corpus", "corpus_folder", "processes"]

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "docs" / "examples"
EVERYTHING = ("redis", "merger", "island-0", "island-1")
#: Redis lives for some seconds after its full disk, so that a machine that stands still does not skip the disk's end.
FAULTS = """
{"at": 0.5, "kind": "disk", "target": "merger", "seconds": 6, "value": 4096}
{"at": 1, "kind": "partition", "target": "island-1", "seconds": 1}
{"at": 2, "kind": "kill", "target": "island-0", "seconds": 0.5}
{"at": 2.5, "kind": "half-open", "target": "merger"}
{"at": 3, "kind": "kill", "target": "merger", "seconds": 0.5}
{"at": 4, "kind": "stop", "target": "redis", "seconds": 1}
{"at": 5.3, "kind": "disk", "target": "redis", "seconds": 0.6, "value": 1000}
{"at": 6, "kind": "throttle", "target": "island-1", "seconds": 1, "value": 5}
{"at": 10, "kind": "kill", "target": "redis", "seconds": 0.5}
{"at": 11, "kind": "reset", "target": "island-1", "seconds": 0.5}
{"at": 12, "kind": "delay", "target": "merger", "seconds": 0.5, "value": 0.05}
"""
EVENTS = {
    ("island-0", "kill"), ("merger", "kill"), ("redis", "stop"), ("redis", "continue"), ("redis", "ready"),
    ("island-1", "partition over"), ("merger", "half-open"), ("merger", "disk"), ("merger", "delay over"),
    ("redis", "disk over"),
}  # fmt: skip


#: Kills alone, of a script that needs no time to settle.
KILLS = """
{"at": 1, "kind": "kill", "target": "island-0", "seconds": 0.5}
{"at": 2, "kind": "kill", "target": "merger", "seconds": 0.2}
"""


def stormed(processes: Processes, faults: str, *flags: str) -> Mapping[str, Any]:
    """Run a storm over two islands and return its report. Assert invariants, and no speeds, which depend on load."""
    (processes.folder / "faults.jsonl").write_text(faults)
    found = processes.run(
        "chaos", "--islands=2", "--settle-seconds=120", "--checkpoint-every=2", *flags,
        "--schedule", str(processes.folder / "faults.jsonl"),
    )  # fmt: skip
    assert found["holds"] and all(check["holds"] for check in found["checks"]), found["checks"]
    assert "died" not in {event["what"] for event in found["events"]}, "a process ended without a fault"
    assert 0 < found["goodput"] <= 1.0
    return found


@pytest.mark.full
@pytest.mark.processes
def test_a_task_survives_every_kind_of_fault(processes: Processes, tmp_path: Path) -> None:
    task = str(EXAMPLES / "task_bytes.py")
    found = stormed(
        processes, FAULTS, "--task", task, "--standbys=1", "--no-undisturbed", "--seconds=15", "--step-seconds=0.1",
        "--sync.interval=12",
    )  # fmt: skip
    assert {(event["process"], event["what"]) for event in found["events"]} >= EVENTS
    assert found["seconds"] < 15 + 120, "the processes did not recover"
    (rejoin,) = [one for one in found["rejoins"] if one["island"] == "island-0"]
    assert rejoin["away_seconds"] >= 0.5
    assert sum(found["shares"].values()) == pytest.approx(1.0)
    assert found["shares"]["dead"] > 0
    assert found["goodput"] <= 1.0
    assert found["uptime"] == pytest.approx(1.0, abs=0.01), "island-1 stopped"
    (epochs,) = [check["found"] for check in found["checks"] if check["key"] == "epochs"]
    assert int(epochs.split()[-1]) >= 2, "no second merger took over"
    parts = sum(found[f"tokens_{part}"] for part in ("merged", "refused", "pending", "lost"))
    assert found["tokens_trained"] == parts > 0
    assert found["tokens_lost"] >= 0
    assert found["unit"] == "loss units"
    assert 1.0 < found["held_out_loss"] < 5.6, "the untrained model knows 256 bytes"
    folder = tmp_path / "runs" / "chaos"
    assert json.loads((folder / "report.json").read_text()).pop("command").startswith("archipelago chaos")
    assert len(from_text((folder / SCHEDULE).read_text(), EVERYTHING)) == len(FAULTS.split("\n")) - 2


@pytest.mark.full
@pytest.mark.processes
def test_a_script_of_the_guide_survives_kills(processes: Processes) -> None:
    found = stormed(processes, KILLS, "--script", str(EXAMPLES / "train_jax.py"), "--seconds=4", "--step-seconds=0.03")
    (rejoin,) = found["rejoins"]
    assert rejoin["start_seconds"] > 0
    assert found["held_out_loss"] is None
    assert 0 < found["training_loss"] < 1.4
    assert found["control"]["training_loss"] > 0


# -- without processes ------------------------------------------------------------------------------------------------


@dataclass
class Played:
    """The plans of a command whose storms and baseline are not run.

    Attributes:
        record: The record of every storm.
        storms: The plans of storms.
        baselines: The plans of baselines.
        failing: The error of the baseline, if it fails.
    """

    record: StormRecord = field(default_factory=storm)
    storms: list[StormPlan] = field(default_factory=list)
    baselines: list[StormPlan] = field(default_factory=list)
    failing: ArchipelagoError | None = None

    def run_storm(self, plan: StormPlan, stopped: Callable[[], bool]) -> StormRecord:
        self.storms.append(plan)
        return replace(self.record, standbys=plan.standbys)

    def run_baseline(self, plan: StormPlan, stopped: Callable[[], bool]) -> Figures:
        if self.failing:
            raise self.failing
        self.baselines.append(plan)
        return BASELINE


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    found = Played()
    monkeypatch.setattr(chaos, "run_storm", found.run_storm)
    monkeypatch.setattr(baseline, "run_baseline", found.run_baseline)
    monkeypatch.setattr(chaos, "trainable", lambda config, task: None)
    return found


def report(tmp_path: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((tmp_path / "runs/chaos/report.json").read_text())
    return found


def test_a_storm_is_followed_by_the_same_run_without_faults(played: Played, tmp_path: Path) -> None:
    assert main(ChaosOptions(islands=2, step_seconds=0.1, fault_seed=4, standbys=2)) == 0
    first, control = played.storms
    assert not played.baselines
    assert (first.standbys, control.standbys) == (2, 0)
    assert report(tmp_path)["standbys"] == 2
    assert first.faults and not control.faults
    assert (first.islands, first.step_seconds) == (("island-0", "island-1"), 0.1)
    assert control.merged_tokens == 1900
    assert tuple(from_text((tmp_path / "runs/chaos" / SCHEDULE).read_text(), EVERYTHING)) == first.faults


def test_a_broken_invariant_is_in_the_exit_status(played: Played) -> None:
    played.record = replace(storm(), counters=Counters())
    assert main(ChaosOptions(islands=2, undisturbed=False)) == BROKEN


def test_the_baseline_runs_under_the_faults_of_the_storm(
    played: Played, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ChaosOptions(islands=2, undisturbed=False, baseline=True)
    assert main(options) == 0
    (ours,), (plan,) = played.storms, played.baselines
    assert plan.folder != ours.folder
    assert plan.faults == ours.faults and plan.faults
    assert plan.step_seconds == played.record.step_seconds, "goodput is measured in steps of the islands"
    assert plan.config == ours.config
    assert "goodput 20.0%" in capsys.readouterr().err
    played.failing = ArchipelagoError("interrupted", code="chaos.interrupted")
    with failing(ArchipelagoError, "chaos.interrupted"):
        main(options)
    assert report(tmp_path)["goodput"] == pytest.approx(0.85), "the report of the storm is left"


def test_bad_options_are_refused_before_anything_starts(tmp_path: Path) -> None:
    Path("train.py").touch()
    for options, code in (
        (ChaosOptions(seconds=0.0), "config.value"),
        (ChaosOptions(mean_seconds_between=-1.0), "config.value"),
        (ChaosOptions(step_seconds=float("nan")), "config.value"),
        (ChaosOptions(baseline=True, step_seconds=0.0), "config.value"),
        (ChaosOptions(schedule=Path("none.jsonl")), "chaos.schedule"),
        (ChaosOptions(script="missing.py"), "config.value"),
        (ChaosOptions(script="'train.py"), "config.value"),
        (ChaosOptions(script=str(tmp_path)), "config.value"),
        (ChaosOptions(script=" "), "config.value"),
        (ChaosOptions(task="nothing.py"), "task.file"),
        (ChaosOptions(script="train.py", standbys=1), "config.value"),
        (ChaosOptions(script="train.py", baseline=True), "config.value"),
        (ChaosOptions(script="train.py", task="train.py"), "config.value"),
    ):
        with failing(ConfigError, code):
            main(options)
    assert not (tmp_path / "runs").exists()


def test_the_name_of_the_island_is_the_last_word_or_where_the_user_puts_it(tmp_path: Path) -> None:
    path = tmp_path / "my train.py"
    path.touch()
    last, named = parse_script(f"'{path}' --size 4"), parse_script(f"'{path}' --name={{island}} --size 4")
    assert last == (str(path), "--size", "4", "{island}")
    assert named == (str(path), "--name={island}", "--size", "4")
    assert parse_script("") == ()


def test_only_the_folder_of_a_storm_is_deleted(played: Played, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "chaos"
    folder.mkdir(parents=True)
    (folder / "report.json").write_text("{}")
    with failing(ConfigError, "chaos.foreign-folder"):
        main(ChaosOptions(undisturbed=False))
    assert (folder / "report.json").read_text() == "{}"
    for _ in range(2):
        assert main(ChaosOptions("new", islands=2, undisturbed=False)) == 0
        assert not (tmp_path / "runs" / "new" / "more").exists()
        (tmp_path / "runs" / "new" / "more").touch()


def test_a_storm_says_where_its_faults_come_from(
    played: Played, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "faults.jsonl"
    path.write_text('{"at": 1, "kind": "kill", "target": "island-0", "seconds": 0.5}')
    main(ChaosOptions(undisturbed=False, fault_seed=11))
    main(ChaosOptions(undisturbed=False, fault_seed=11, schedule=path))
    first, second = (line for line in capsys.readouterr().err.splitlines() if "faults in" in line)
    assert ", --fault-seed 11; " in first
    assert f"1 faults in 60 s, --schedule {path}; " in second


def test_the_folder_of_a_storm_that_still_runs_is_left_alone(
    played: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin_another(plan: StormPlan, stopped: Callable[[], bool]) -> StormRecord:
        plan.folder.mkdir()
        with failing(ConfigError, "chaos.running"):
            main(ChaosOptions(undisturbed=False))
        assert plan.folder.exists()
        return played.record

    monkeypatch.setattr(chaos, "run_storm", begin_another)
    assert main(ChaosOptions(undisturbed=False)) == 0


def test_a_storm_waits_until_each_island_has_made_a_turn_and_reaches_redis(tmp_path: Path) -> None:
    began, log = time.monotonic() - 9.0, tmp_path / "a.jsonl"
    entry = replace(samples.commit([]).tape, unix_seconds=time.time())
    processes = Mock(is_busy=False, events=[ProcessEvent(began, "a", "start")], turn_log=lambda name: log)
    processes.islands, reader = [SimpleNamespace(name="a")], processes.transport.reader
    reader.tape.return_value = [entry]
    for at, silent, is_well in ((None, 0, False), (began - 1, 0, False), (began + 1, 0, True), (began + 1, 99, False)):
        reader.presences.return_value = [Presence(samples.heartbeat("a"), silent)]
        if at is not None:
            log.write_text(json.dumps({"at": at, "who": "x", "steps": 1}) + "\n")
        assert RunProcesses.is_well(processes) is is_well


def test_a_script_that_ignores_the_names_of_its_islands_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "a.jsonl"
    log.write_text(json.dumps({"at": 1.0, "who": "x", "steps": 1}) + "\n")
    processes = Mock(turn_log=lambda name: log)
    processes.plan.islands = ["a"]
    for others in ([samples.heartbeat("b", incarnation="y")], [samples.heartbeat("a")]):
        processes.transport.reader.presences.return_value = [Presence(each, 0) for each in others]
        RunProcesses._require_names(processes)
    processes.transport.reader.presences.return_value = [Presence(samples.heartbeat("vm-1"), 0)]
    with failing(ConfigError, "chaos.name"):
        RunProcesses._require_names(processes)


def test_a_truncated_line_of_a_turn_log_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "turns.jsonl"
    assert read_turn_log(path) == []
    line = '{"at": 1, "who": "a", "steps": 1}\n'
    path.write_text(line + line + line[:20])
    assert len(read_turn_log(path)) == 2


# -- the time of day ---------------------------------------------------------------------------------------------------

WALL_CLOCK = re.compile(
    r"\b(time\.(time|time_ns|localtime|gmtime|ctime|strftime)|datetime\.(now|utcnow|today)|date\.today)\b"
    r"|\bfrom time import|\bfrom datetime import (?!timedelta$)"
)


def test_islands_and_mergers_do_not_decide_by_the_wall_clock() -> None:
    """So storms need no clocks that jump. Logs and curves in `broker/observe` only show times.

    The default of an argument `wall` only makes time stamps. The stamps that order one member's messages need the
    wall clock, and the reader puts a wrong clock right by that of the server.
    """
    needed = {"broker/redis/connection.py", "broker/redis/reader.py"}
    found = set()
    for path in (path for package in ("broker", "islands", "merger") for path in (ROOT / package).rglob("*.py")):
        lines = path.read_text(encoding="utf-8").splitlines()
        uses = [line for line in lines if WALL_CLOCK.search(line) and "wall: " not in line]
        if uses and path.parent.name != "observe":
            found.add(str(path.relative_to(ROOT)))
    assert found == needed
