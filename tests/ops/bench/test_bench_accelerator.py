"""`bench accelerator`: one command makes the whole table, on a processor too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from archipelago.broker.errors import ConfigError
from archipelago.ops.bench.accelerator import AcceleratorOptions, accelerator, main, rows
from tests.failing import failing


def test_the_table_has_each_model_and_the_quantiser() -> None:
    step = {"step_seconds_on": 0.102, "step_seconds_off": 0.1, "step_ratio": 1.02}
    found = {"what": "124m 16 × 512", "backend": "gpu", "tokens_a_second": 90.0, "tokens_a_second_plain": 100.0, **step}
    table = rows({"124m": found, "1b": found}, 124_000_000, {"quantise_seconds": 0.003, "copy_seconds": 0.001})
    assert [row["ratio"] for row in table] == pytest.approx([1.02, 0.9, 1.02, 0.9, 3.0])
    assert [row["goal"] for row in table] == [1.01, "", 1.01, "", ""]
    assert "124 M" in table[-1]["what"]
    assert len({tuple(row) for row in table}) == 1  # The rows are printed as one table.


def test_an_unknown_model_is_named_before_anything_is_measured() -> None:
    with failing(ConfigError, "model.unknown"):
        main(AcceleratorOptions(sizes=("124m", "huge")))


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_the_quick_form_measures_everything_on_a_processor(tmp_path: Path) -> None:
    found = accelerator(("tiny",), quick=True, folder=tmp_path, say=lambda line: None)
    assert len(found["rows"]) == 3
    assert all(row["ours"] > 0 and row["theirs"] > 0 and row["ratio"] > 0 for row in found["rows"])
    assert list((tmp_path / "profile-tiny").rglob("*.xplane.pb")), "the profile"
