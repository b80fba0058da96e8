"""`archipelago simulate tables`: the published tables beside the simulated ones."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest

from archipelago.ops.commands import run
from archipelago.ops.simulation.failures import YEAR_SECONDS
from archipelago.ops.simulation.tables import ROWS


def answer(capsys: pytest.CaptureFixture[str], *args: object) -> dict[str, Any]:
    """Return the output of a verb with --json."""
    assert run(["simulate", *map(str, args), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_tables_are_set_beside_the_published_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "tables", "--days", "0.1"]) == 0
    out, _ = capsys.readouterr()
    assert re.search(r"M = 16 +99 / ", out)
    assert out.count("*") == 1 + 4, "what no formula covers"


@pytest.mark.full
def test_the_defaults_reproduce_the_published_tables(capsys: pytest.CaptureFixture[str]) -> None:
    """The differences are within two points rms, and goodput follows the published fit.

    The fit is MTBF_m / (MTBF_m + 18.25 s) · (1 − 0.0325 · N / 1.2M), from 1.2M chips on, with MTBF_m = a year · M / N.
    """
    found = answer(capsys, "tables", "--days", 2, "--seed", 7)
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
