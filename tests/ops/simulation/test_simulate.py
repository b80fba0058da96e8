"""`archipelago simulate`: tables and their picture, one simulation, measured failures, and tapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from archipelago.broker.errors import ConfigError, DataError
from archipelago.ops.commands import run
from archipelago.ops.simulation.tape import read
from tests.failing import failing


def test_tables_are_set_beside_the_published_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "tables", "--days", "0.5", "--output", str(tmp_path / "out")]) == 0
    out, _ = capsys.readouterr()
    assert "M = 16" in out
    assert "not covered" in out
    assert (tmp_path / "out" / "simulation.png").read_bytes().startswith(b"\x89PNG")
    tables = (tmp_path / "out" / "simulation_tables.md").read_text(encoding="utf-8")
    assert "| M = 16 | 99 / " in tables
    assert tables.count("*") == 1 + 4, "what no formula covers"


def answer(capsys: pytest.CaptureFixture[str], *args: object) -> dict[str, Any]:
    """Return the output of a verb with --json."""
    assert run(["simulate", *map(str, args), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_json_has_all_cells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "tables", "--days", 1, "--output", tmp_path)
    assert len(found["table_1"]) == 30
    assert len(found["table_13"]) == 60
    for table in ("goodput", "uptime"):
        cells = [row[f"{table}_simulated"] - row[f"{table}_published"] for row in found["table_1"]]
        assert (sum(d * d for d in cells) / 30) ** 0.5 == pytest.approx(found[f"{table}_rms_points"])


def test_a_run_and_its_tape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tape.jsonl"
    found = answer(capsys, "run", "--chips", 2.4e6, "--islands", 4, "--days", 0.25, "--tape", path)
    tape = read(path)
    assert len(tape.islands) == 4
    assert tape.goodput() == pytest.approx(found["goodput"], abs=1e-5)
    assert 0.5 < found["goodput"] < found["uptime"] <= 1.0
    again = answer(capsys, "run", "--chips", 2.4e6, "--islands", 4, "--days", 0.25, "--seed", 1)
    assert again["goodput"] != found["goodput"], "another seed"


def test_measured_failures_are_played(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two islands of two slices over 1,000 s; one slice is away from 100 s to 400 s, and never again."""
    path = tmp_path / "outages.csv"
    path.write_text("slice,failed_seconds,returned_seconds\na,100,400\nb,1000,1000\n", encoding="utf-8")
    flags = ["--islands", 2, "--trace-slices", 4, "--pause-seconds", 0, "--step-seconds", 0.5, "--step-deviation", 0]
    found = answer(capsys, "run", "--trace", path, *flags)
    assert found["goodput"] == pytest.approx(1.0 - 300.0 / 4000.0, abs=1e-3)
    assert found["uptime"] == pytest.approx(1.0)
    assert found["outages"] == 2
    assert found["mean_return_seconds"] == pytest.approx(150.0)
    assert found["slice_hours_between"] == pytest.approx((4000 - 300) / 2 / 3600)
    alone = answer(capsys, "run", "--trace", path, "--islands", 2, *flags[4:])
    assert alone["goodput"] == pytest.approx(1.0 - 300.0 / 2000.0, abs=1e-3), "the two that it names"


def test_wrong_options_are_errors(tmp_path: Path) -> None:
    with failing(ConfigError, "config.slices"):
        run(["simulate", "run", "--islands", "8", "--slices", "4"])
    with failing(ConfigError, "config.days"):
        run(["simulate", "run", "--days", "-1"])
    with failing(DataError, "tape.unreadable"):
        run(["simulate", "run", "--trace", str(tmp_path / "nowhere.csv")])
    path = tmp_path / "outages.csv"
    path.write_text("slice,failed_seconds,returned_seconds\na,1,2\n", encoding="utf-8")
    with failing(ConfigError, "config.slices"):
        run(["simulate", "run", "--trace", str(path)])
    with failing(ConfigError, "config.seed"):
        run(["simulate", "run", "--seed", "-1"])
