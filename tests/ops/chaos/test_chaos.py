"""`archipelago chaos`: one short storm on real processes, what the command refuses, and how it ends."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest

from archipelago.broker.errors import ConfigError
from archipelago.broker.messages import Books
from archipelago.ops.chaos import fake_clock
from archipelago.ops.chaos import main as chaos
from archipelago.ops.chaos.main import BROKEN, SCHEDULE, ChaosOptions, main
from archipelago.ops.chaos.report import Storm
from archipelago.ops.chaos.schedule import Fault, from_text
from archipelago.ops.chaos.storm import Plan, read_turn_log
from tests.integration.conftest import corpus, corpus_folder
from tests.integration.test_processes import SETTINGS, Processes, processes
from tests.ops.chaos.test_chaos_report import storm

__all__ = ["corpus", "corpus_folder", "processes"]

ROOT = Path(__file__).parents[3]
FAULTS = """
{"at": 0.5, "kind": "disk", "target": "merger", "seconds": 6, "value": 4096}
{"at": 1, "kind": "partition", "target": "island-1", "seconds": 1}
{"at": 2, "kind": "kill", "target": "island-0", "seconds": 0.5}
{"at": 2.5, "kind": "half-open", "target": "merger"}
{"at": 3, "kind": "kill", "target": "merger", "seconds": 0.5}
{"at": 4, "kind": "stop", "target": "redis", "seconds": 1}
{"at": 5.3, "kind": "disk", "target": "redis", "seconds": 0.6, "value": 1000}
{"at": 6, "kind": "throttle", "target": "island-1", "seconds": 1, "value": 5}
{"at": 7, "kind": "kill", "target": "redis", "seconds": 0.5}
{"at": 8, "kind": "reset", "target": "island-1", "seconds": 0.5}
{"at": 9, "kind": "delay", "target": "merger", "seconds": 0.5, "value": 0.05}
"""
JUMP = '{"at": 9.2, "kind": "clock", "target": "redis", "seconds": 1.5, "value": 3600}\n'
"""where there is libfaketime: leases and heartbeats run out, and then last for long"""
SAID = (
    "island-0  kill", "merger    kill", "redis     stop", "redis     continue", "redis     ready",
    "island-1  partition over", "merger    half-open", "merger    disk", "merger    delay over", "redis     disk over",
)  # fmt: skip


@pytest.mark.processes
def test_a_short_storm_in_which_everybody_meets_something(processes: Processes, tmp_path: Path) -> None:
    """Invariants, not figures: how far islands get here depends on what else the machine does."""
    schedule = tmp_path / "faults.jsonl"
    faults = FAULTS + (JUMP if fake_clock.library() else "")
    schedule.write_text(faults)
    found = processes.run(
        "chaos", "--islands=2", "--seconds=12", "--settle-seconds=120", "--step-seconds=0.03",
        f"--schedule={schedule}", "--no-undisturbed", "--checkpoint-every=2", *SETTINGS,
    )  # fmt: skip
    assert found["holds"], found["checks"]
    assert all(check["holds"] for check in found["checks"])
    folder = tmp_path / "runs" / "chaos"
    said = "".join(path.read_text() for path in tmp_path.glob("process-*.log"))
    for what in SAID:
        assert what in said, said
    assert found["seconds"] < 12 + 120, "in the end everybody is back"
    assert " died" not in said, said  # whoever was started while Redis was away has waited for it
    (kill,) = [back for back in found["returns"] if back["island"] == "island-0"]
    assert kill["away_seconds"] >= 0.5
    assert sum(found["shares"].values()) == pytest.approx(1.0)
    assert found["shares"]["dead"] > 0
    assert 0 < found["goodput"] <= found["goodput_of_live_time"] <= 1.0
    assert found["uptime"] == pytest.approx(1.0, abs=0.01), "the other island never stops"
    epochs = next(check for check in found["checks"] if "older merger" in check["name"])["found"]
    assert int(epochs.split()[0]) >= 2, "a second merger took over"
    assert found["tokens_trained"] == found["tokens_merged"] + found["tokens_lost"] > 0
    assert json.loads((folder / "report.json").read_text()).pop("command").startswith("archipelago chaos")
    assert (folder / "storm.png").read_bytes().startswith(b"\x89PNG")
    assert "every invariant held" in (folder / "storm.html").read_text()
    kept = from_text((folder / SCHEDULE).read_text(), ["redis", "merger", "island-0", "island-1"])
    assert Counter(fault.kind for fault in kept) == Counter(
        json.loads(line)["kind"] for line in faults.split("\n")[1:-1]
    )
    trained = [len(read_turn_log(folder / "storm" / "diaries" / f"island-{n}.jsonl")) for n in range(2)]
    assert min(trained) > 0


# -- without processes ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(("breaks", "status"), [(False, 0), (True, BROKEN)])
def test_a_broken_invariant_is_in_the_exit_status(
    breaks: bool, status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plans: list[Plan] = []

    def ride(plan: Plan, stopped: Callable[[], bool]) -> Storm:
        plans.append(plan)
        found = replace(storm(), standbys=plan.standbys)
        return replace(found, books=Books()) if breaks else found

    monkeypatch.setattr(chaos, "ride", ride)
    monkeypatch.setattr(chaos, "require_usable", lambda config: None)
    assert main(ChaosOptions(islands=2, slow=3.0, fault_seed=4, standbys=2)) == status
    first, control = plans
    assert (first.standbys, control.standbys) == (2, 0)
    assert "2 standbys waited beside the islands" in (tmp_path / "runs/chaos/storm.html").read_text()
    assert first.faults and not control.faults
    assert first.step_seconds == {"island-0": 0.05, "island-1": 0.05 * 3}
    assert control.merged_tokens == (0 if breaks else 1900)
    written = from_text((tmp_path / "runs/chaos" / SCHEDULE).read_text(), ["redis", "merger", "island-0", "island-1"])
    assert tuple(written) == first.faults


@pytest.mark.usefixtures("handlers")
def test_the_peers_bench_is_their_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plans: list[Plan] = []

    def ride(plan: Plan, stopped: Callable[[], bool]) -> Storm:
        plans.append(plan)
        return storm()

    monkeypatch.setattr(chaos, "ride", ride)
    monkeypatch.setattr(chaos, "require_usable", lambda config: None)
    assert main(ChaosOptions(what="peers", fault_seeds=(7, 8))) == 0
    assert [len(plan.faults) for plan in plans] == [0, 4, 4, 0]
    assert plans[1].faults != plans[2].faults
    for plan in plans:
        assert plan.config.sync.interval == 40
        assert plan.config.model.size == "small"
        assert sorted(plan.step_seconds.values())[:2] == [0.05, 0.05]
    assert max(plans[3].step_seconds.values()) == 0.1
    kill = Fault(7.5, "kill", plans[1].faults[0].target, 2.0)
    assert plans[1].faults[0] == kill
    rows = json.loads((tmp_path / "runs/chaos/peers.json").read_text())["rows"]
    assert [row["seed"] for row in rows] == [0, 7, 8, 0]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (ChaosOptions(islands=0), "--islands"),
        (ChaosOptions(seconds=0.0), "--seconds"),
        (ChaosOptions(standbys=-1), "--standbys"),
        (ChaosOptions(mean_seconds_between=-1.0), "--mean-seconds-between"),
        (ChaosOptions(step_seconds=float("nan")), "--step-seconds"),
        (ChaosOptions(slow=2.0, step_seconds=0.0), "--slow"),
        (ChaosOptions(spare=("island-9",)), "island-9"),
        (ChaosOptions(schedule=Path("none.jsonl")), "none.jsonl"),
        (ChaosOptions(spot=Path("none.json")), "none.json"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_starts(options: ChaosOptions, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        main(options)
    assert not (tmp_path / "runs").exists()


def test_only_a_storms_folder_is_made_anew(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "precious"
    folder.mkdir(parents=True)
    (folder / "report.json").write_text("{}")
    with pytest.raises(ConfigError, match="no storm's"):
        chaos._make_anew(folder)
    assert (folder / "report.json").exists()
    chaos._make_anew(tmp_path / "runs" / "new")
    (tmp_path / "runs" / "new" / "more").write_text("")
    chaos._make_anew(tmp_path / "runs" / "new")
    assert [path.name for path in (tmp_path / "runs" / "new").iterdir()] == [SCHEDULE]


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "turns.jsonl"
    assert read_turn_log(path) == []
    line = '{"at": 1, "who": "a", "steps": 1, "versions": 0, "between": 0, "idle": 0, "waited": 0}\n'
    path.write_text(line + line + line[:40])
    assert len(read_turn_log(path)) == 2


# -- a clock that jumps -----------------------------------------------------------------------------------------------

WALL_CLOCK = {"time.time", "time.time_ns", "time.localtime", "time.gmtime", "time.ctime", "time.strftime",
              "datetime.now", "datetime.utcnow", "datetime.today", "date.today"}  # fmt: skip


def _names(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            value = node.value
            owner = value.id if isinstance(value, ast.Name) else value.attr if isinstance(value, ast.Attribute) else ""
            yield f"{owner}.{node.attr}"
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


ONLY_SHOWN = {
    ("redis_checkup.py", "time.time"): "doctor compares it with the server's",
    ("scalars.py", "time.time"): "stamps of curves",
    ("link.py", "time.time"): "stamps of an island's notes",
    ("service.py", "time.time"): "stamps of the merger's notes and of the tape's rounds",
}
"""where the wall clock is read, and for whom; nobody decides by any of these"""


def test_a_jump_of_the_wall_clock_cannot_matter_to_who_does_not_read_it() -> None:
    """Storms have no fault for this: neither islands nor mergers ever decide by what time it is."""
    paths = [path for package in ("broker", "islands", "merger") for path in (ROOT / package).rglob("*.py")]
    assert {(path.name, name) for path in paths for name in _names(path) if name in WALL_CLOCK} == set(ONLY_SHOWN)


@pytest.mark.skipif(fake_clock.library() is None, reason="libfaketime is not installed")
def test_a_program_with_a_false_clock_goes_by_it(tmp_path: Path, until: Callable[..., None]) -> None:
    """The time of day jumps, also while it runs, and intervals stay right."""
    clock = fake_clock.FalseClock(tmp_path / "clock")
    code = "import time\nwhile input() is not None: print(time.time(), time.monotonic(), flush=True)"
    environment = {**os.environ, **clock.environment()}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdin is not None and program.stdout is not None

        def off(stdin: IO[str], stdout: IO[str]) -> tuple[float, float]:
            stdin.write("\n")
            stdin.flush()
            day, interval = map(float, stdout.readline().split())
            return day - time.time(), interval - time.monotonic()

        for seconds in (0.0, 3600.0, -60.0):
            clock.jump(seconds)
            until(lambda s=seconds: abs(off(program.stdin, program.stdout)[0] - s) < 5.0, f"a clock off by {seconds} s")
            assert abs(off(program.stdin, program.stdout)[1]) < 5.0
        program.kill()


def test_without_the_library_it_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fake_clock, "library", lambda: None)
    schedule = tmp_path / "faults.jsonl"
    schedule.write_text(JUMP)
    with pytest.raises(ConfigError, match="apt install libfaketime"):
        main(ChaosOptions(schedule=schedule))


def test_a_wall_clock_would_be_found(tmp_path: Path) -> None:
    source = tmp_path / "late.py"
    source.write_text("import time, datetime\nfrom time import time_ns\nclock = time.time\ndatetime.datetime.now()\n")
    assert WALL_CLOCK & set(_names(source)) == {"time.time", "time.time_ns", "datetime.now"}
