"""`archipelago simulate`: the published tables and their picture, one simulation, measured failures, and tapes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from archipelago.broker.errors import ConfigError, DataError
from archipelago.ops.commands import run
from archipelago.ops.simulation.failures import YEAR_SECONDS
from archipelago.ops.simulation.published import ROWS
from archipelago.ops.simulation.tape import read
from tests.failing import failing


def answer(capsys: pytest.CaptureFixture[str], *args: object) -> dict[str, Any]:
    """Return the output of a verb with --json."""
    assert run(["simulate", *map(str, args), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_tables_are_set_beside_the_published_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "tables", "--days", "0.1", "--output", str(tmp_path / "out")]) == 0
    out, _ = capsys.readouterr()
    assert "M = 16" in out
    assert (tmp_path / "out" / "simulation.png").read_bytes().startswith(b"\x89PNG")
    tables = (tmp_path / "out" / "simulation_tables.md").read_text(encoding="utf-8")
    assert "| M = 16 | 99 / " in tables
    assert tables.count("*") == 1 + 4, "what no formula covers"


@pytest.mark.full
def test_the_defaults_reproduce_the_published_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The differences are within two points rms, and goodput follows the published fit.

    The fit is MTBF_m / (MTBF_m + 18.25 s) · (1 − 0.0325 · N / 1.2M), from 1.2M chips on, with MTBF_m = a year · M / N.
    """
    found = answer(capsys, "tables", "--days", 2, "--seed", 7, "--output", tmp_path)
    assert (len(found["table_1"]), len(found["table_13"])) == (30, 60)
    for table in ("goodput", "uptime"):
        cells = [row[f"{table}_simulated"] - row[f"{table}_published"] for row in found["table_1"]]
        rms = math.sqrt(sum(d * d for d in cells) / 30)
        assert rms == pytest.approx(found[f"{table}_rms_points"])
        assert rms < 2.0, f"{table}, seed 7"
    elastic, differences = {row.label: row for row in ROWS if row.elastic}, []
    for cell in found["table_1"]:
        if cell["row"] in elastic and cell["chips"] >= 1.2e6:
            between = YEAR_SECONDS * elastic[cell["row"]].islands / cell["chips"]
            fit = 100 * between / (between + 18.25) * (1 - 0.0325 * cell["chips"] / 1.2e6)
            differences.append(cell["goodput_simulated"] - fit)
    assert len(differences) == 10
    assert math.sqrt(sum(d * d for d in differences) / 10) < 2.5, "seed 7"


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
    one_slice = tmp_path / "outages.csv"
    one_slice.write_text("slice,failed_seconds,returned_seconds\na,1,2\n", encoding="utf-8")
    for flags, code in (
        (("--islands", "8", "--slices", "4"), "config.slices"),
        (("--days", "-1"), "config.days"),
        (("--trace", str(one_slice)), "config.slices"),
        (("--seed", "-1"), "config.seed"),
    ):
        with failing(ConfigError, code):
            run(["simulate", "run", *flags])
    with failing(DataError, "tape.unreadable"):
        run(["simulate", "run", "--trace", str(tmp_path / "nowhere.csv")])
