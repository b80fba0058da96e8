"""`archipelago chaos`: short storms on real processes, the options that it refuses, and its exit status."""

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
from typing import IO, Any

import pytest

from archipelago.broker.errors import ConfigError
from archipelago.broker.messages import Books
from archipelago.ops.chaos import fake_clock
from archipelago.ops.chaos import main as chaos
from archipelago.ops.chaos.main import BROKEN, SCHEDULE, ChaosOptions, main
from archipelago.ops.chaos.processes import Plan, read_turn_log
from archipelago.ops.chaos.report.record import StormRecord
from archipelago.ops.chaos.schedule import Fault, from_text
from tests.failing import failing
from tests.harness.processes import SETTINGS, Processes
from tests.integration.conftest import corpus, corpus_folder, processes
from tests.ops.chaos.test_storm_report import storm

__all__ = ["corpus", "corpus_folder", "processes"]

ROOT = Path(__file__).parents[3]
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
#: A jump of the clock of Redis, if libfaketime is installed. Leases and heartbeats expire, and later ones last long.
JUMP = '{"at": 12.2, "kind": "clock", "target": "redis", "seconds": 1.5, "value": 3600}\n'
EVENTS = {
    ("island-0", "kill"), ("merger", "kill"), ("redis", "stop"), ("redis", "continue"), ("redis", "ready"),
    ("island-1", "partition over"), ("merger", "half-open"), ("merger", "disk"), ("merger", "delay over"),
    ("redis", "disk over"),
}  # fmt: skip
#: One fault of each process, for the quick test.
KILLS = """
{"at": 0.5, "kind": "kill", "target": "merger", "seconds": 0.2}
{"at": 1.5, "kind": "kill", "target": "redis", "seconds": 0.2}
{"at": 2.5, "kind": "kill", "target": "island-0", "seconds": 0.2}
"""


def run_storm(processes: Processes, folder: Path, faults: str, *options: str) -> dict[str, Any]:
    """Run a storm with these faults and return its report."""
    schedule = folder / "faults.jsonl"
    schedule.write_text(faults)
    found = dict(processes.run(
        "chaos", "--settle-seconds=120", "--step-seconds=0.03", f"--schedule={schedule}", "--no-undisturbed",
        "--checkpoint-every=2", *options, *SETTINGS,
    ))  # fmt: skip
    assert found["holds"], found["checks"]
    assert all(check["holds"] for check in found["checks"])
    return found


def check_of(found: dict[str, Any], key: str) -> str:
    return str(next(check["found"] for check in found["checks"] if check["key"] == key))


def last_epoch(found: dict[str, Any]) -> int:
    """Return the epoch of the last merger. An earlier one may have been killed before it closed a round."""
    return int(check_of(found, "epochs").split()[-1])


@pytest.mark.processes
def test_a_run_survives_a_kill_of_each_of_its_processes(processes: Processes, tmp_path: Path) -> None:
    found = run_storm(processes, tmp_path, KILLS, "--islands=1", "--seconds=4")
    events = [(event["process"], event["what"]) for event in found["events"]]
    assert {("merger", "kill"), ("redis", "kill"), ("island-0", "kill")} <= set(events)
    assert "died" not in {what for _, what in events}, "a process ended without a fault"
    (rejoin,) = found["rejoins"]
    assert rejoin["island"] == "island-0"
    assert last_epoch(found) >= 2, "no second merger took over"
    parts = sum(found[f"tokens_{part}"] for part in ("merged", "refused", "pending", "lost"))
    assert found["tokens_trained"] == parts > 0
    assert found["tokens_lost"] >= 0


@pytest.mark.full
@pytest.mark.processes
def test_a_short_storm_with_every_kind_of_fault(processes: Processes, tmp_path: Path) -> None:
    """The test asserts invariants and no speeds, which depend on the load of the machine."""
    faults = FAULTS + (JUMP if fake_clock.library() else "")
    found = run_storm(processes, tmp_path, faults, "--islands=2", "--seconds=15")
    folder = tmp_path / "runs" / "chaos"
    events = [(event["process"], event["what"]) for event in found["events"]]
    assert set(events) >= EVENTS
    assert "died" not in {what for _, what in events}, "a process that started during an outage did not wait"
    assert found["seconds"] < 15 + 120, "the processes did not recover"
    (rejoin,) = [one for one in found["rejoins"] if one["island"] == "island-0"]
    assert rejoin["away_seconds"] >= 0.5
    assert sum(found["shares"].values()) == pytest.approx(1.0)
    assert found["shares"]["dead"] > 0
    assert 0 < found["goodput"] <= found["goodput_of_live_time"] <= 1.0
    assert found["uptime"] == pytest.approx(1.0, abs=0.01), "island-1 stopped"
    assert last_epoch(found) >= 2, "no second merger took over"
    parts = sum(found[f"tokens_{part}"] for part in ("merged", "refused", "pending", "lost"))
    assert found["tokens_trained"] == parts > 0
    assert found["tokens_lost"] >= 0
    assert json.loads((folder / "report.json").read_text()).pop("command").startswith("archipelago chaos")
    assert (folder / "storm.png").read_bytes().startswith(b"\x89PNG")
    assert "class=yes" in (folder / "storm.html").read_text()
    kept = from_text((folder / SCHEDULE).read_text(), ["redis", "merger", "island-0", "island-1"])
    assert Counter(fault.kind for fault in kept) == Counter(
        json.loads(line)["kind"] for line in faults.split("\n")[1:-1]
    )
    turns = [len(read_turn_log(folder / "storm" / "turns" / f"island-{n}.jsonl")) for n in range(2)]
    assert min(turns) > 0


# -- without processes ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(("breaks", "status"), [(False, 0), (True, BROKEN)])
def test_a_broken_invariant_is_in_the_exit_status(
    breaks: bool, status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plans: list[Plan] = []

    def run(plan: Plan, stopped: Callable[[], bool]) -> StormRecord:
        plans.append(plan)
        found = replace(storm(), standbys=plan.standbys)
        return replace(found, books=Books()) if breaks else found

    monkeypatch.setattr(chaos, "run_storm", run)
    monkeypatch.setattr(chaos, "require_usable", lambda config: None)
    assert main(ChaosOptions(islands=2, slow=3.0, fault_seed=4, standbys=2)) == status
    first, control = plans
    assert (first.standbys, control.standbys) == (2, 0)
    assert json.loads((tmp_path / "runs/chaos/report.json").read_text())["standbys"] == 2
    assert first.faults and not control.faults
    assert first.step_seconds == {"island-0": 0.05, "island-1": 0.05 * 3}
    assert control.merged_tokens == (0 if breaks else 1900)
    written = from_text((tmp_path / "runs/chaos" / SCHEDULE).read_text(), ["redis", "merger", "island-0", "island-1"])
    assert tuple(written) == first.faults


@pytest.mark.usefixtures("handlers")
def test_the_peers_benchmark_has_its_own_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plans: list[Plan] = []

    def run(plan: Plan, stopped: Callable[[], bool]) -> StormRecord:
        plans.append(plan)
        return storm()

    monkeypatch.setattr(chaos, "run_storm", run)
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
    ("options", "code"),
    [
        (ChaosOptions(islands=0), "chaos.bad-number"),
        (ChaosOptions(seconds=0.0), "chaos.bad-number"),
        (ChaosOptions(mean_seconds_between=-1.0), "chaos.bad-number"),
        (ChaosOptions(step_seconds=float("nan")), "chaos.bad-number"),
        (ChaosOptions(slow=2.0, step_seconds=0.0), "chaos.no-step-seconds"),
        (ChaosOptions(spare=("island-9",)), "chaos.unknown-process"),
        (ChaosOptions(schedule=Path("none.jsonl")), "chaos.unreadable-file"),
        (ChaosOptions(spot=Path("none.json")), "chaos.unreadable-file"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(options: ChaosOptions, code: str, tmp_path: Path) -> None:
    with failing(ConfigError, code):
        main(options)
    assert not (tmp_path / "runs").exists()


def test_a_negative_number_of_standbys_is_refused() -> None:
    with pytest.raises(ConfigError):
        main(ChaosOptions(standbys=-1))


def test_only_the_folder_of_a_storm_is_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "precious"
    folder.mkdir(parents=True)
    (folder / "report.json").write_text("{}")
    with failing(ConfigError, "chaos.foreign-folder"):
        chaos._prepare_folder(folder)
    assert (folder / "report.json").exists()
    chaos._prepare_folder(tmp_path / "runs" / "new")
    (tmp_path / "runs" / "new" / "more").write_text("")
    chaos._prepare_folder(tmp_path / "runs" / "new")
    assert {path.name for path in (tmp_path / "runs" / "new").iterdir()} == {".gitignore", SCHEDULE}


def test_a_truncated_line_of_a_turn_log_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "turns.jsonl"
    assert read_turn_log(path) == []
    line = '{"at": 1, "who": "a", "steps": 1, "versions": 0, "between": 0, "idle": 0, "waited": 0}\n'
    path.write_text(line + line + line[:40])
    assert len(read_turn_log(path)) == 2


# -- a clock that jumps -----------------------------------------------------------------------------------------------

WALL_CLOCK = {"time.time", "time.time_ns", "time.localtime", "time.gmtime", "time.ctime", "time.strftime",
              "datetime.now", "datetime.utcnow", "datetime.today", "date.today"}  # fmt: skip


def wall_clock_uses(source: str) -> set[str]:
    """Return the uses of the wall clock, except as the default of an argument `wall`, which only makes time stamps."""
    tree = ast.parse(source)
    stamps = set()
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        arguments, defaults = function.args, function.args.defaults
        positional = [*arguments.posonlyargs, *arguments.args]
        with_default = [
            *zip(positional[len(positional) - len(defaults) :], defaults, strict=True),
            *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
        ]
        stamps |= {id(default) for name, default in with_default if name.arg == "wall"}
    return {name for node in ast.walk(tree) if id(node) not in stamps for name in _names(node)} & WALL_CLOCK


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Attribute):
        value = node.value
        owner = value.id if isinstance(value, ast.Name) else value.attr if isinstance(value, ast.Attribute) else ""
        yield f"{owner}.{node.attr}"
    elif isinstance(node, ast.ImportFrom):
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_islands_and_mergers_do_not_decide_by_the_wall_clock() -> None:
    """So storms need no clock faults of islands and mergers. Logs and curves in `broker/observe` only show times.

    Expiry dates of join files and the stamps that order one member's messages need the wall clock.
    """
    needed = {"broker/process.py", "broker/redis/connection.py"}
    paths = [path for package in ("broker", "islands", "merger") for path in (ROOT / package).rglob("*.py")]
    found = {path.relative_to(ROOT): wall_clock_uses(path.read_text(encoding="utf-8")) for path in paths}
    assert {str(path) for path, names in found.items() if names and path.parent.name != "observe"} == needed


@pytest.mark.skipif(fake_clock.library() is None, reason="libfaketime is not installed")
def test_a_program_follows_its_fake_clock(tmp_path: Path, until: Callable[..., None]) -> None:
    """The time of day jumps while the program runs, and intervals stay right."""
    clock = fake_clock.FakeClock(tmp_path / "clock")
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


def test_a_clock_fault_needs_libfaketime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fake_clock, "library", lambda: None)
    schedule = tmp_path / "faults.jsonl"
    schedule.write_text(JUMP)
    with failing(ConfigError, "chaos.no-libfaketime"):
        main(ChaosOptions(schedule=schedule))


def test_a_use_of_the_wall_clock_is_found() -> None:
    used = "import time, datetime\nfrom time import time_ns\nclock = time.time\ndatetime.datetime.now()\n"
    assert wall_clock_uses(used) == {"time.time", "time.time_ns", "datetime.now"}
    assert wall_clock_uses("def f(a, wall=time.time, *, other=time.time): pass") == {"time.time"}
    assert wall_clock_uses("def f(a, wall=time.time): pass") == set()
