"""`bench wire`, `bench merge`, and the output of measurements. Nothing here depends on the speed of the machine."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from archipelago.broker.errors import ConfigError
from archipelago.broker.redis.transport import connect
from archipelago.ops import plots
from archipelago.ops.bench import wire
from archipelago.ops.bench.merge import _BareNesterov, ratio_of
from archipelago.ops.bench.output import OutputOptions, finish, table, with_picture
from tests.failing import failing


def test_a_row_has_the_median_ratio_without_the_first_round() -> None:
    row = wire._row("ours", "theirs", 8_000_000, mine=[100.0, 2.0, 4.0, 8.0], theirs=[1.0, 1.0, 1.0, 6.0])
    assert (row["ratio"], row["ratio_from"], row["ratio_to"]) == (0.5, 0.25, 0.75)
    assert (row["MB_a_second"], row["theirs_MB_a_second"]) == (2, 8)


@pytest.mark.parametrize("width", [80, 160])
def test_a_table_cuts_no_name_and_no_number(width: int) -> None:
    """Eight columns leave less than two spaces between any two in 80 characters."""
    numbers = {"tokens": 4_566_016, "bits_per_byte": 2.148, "rounds": 381, "per_round": 2.9974}
    ratios = {"to_one": 1.0129, "to_parallel": 1.0025, "to_diloco": 0.9765}
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table([{"what": "data-parallel, 3× batch", **numbers, **ratios}], width))
    *heads, line = console.export_text().splitlines()
    assert " ".join(line.split()) == "data-parallel, 3× batch 4,566,016 2.1480 381 2.9974 1.0129 1.0025 0.9765"
    assert all("…" not in head for head in heads)


def test_both_sides_take_turns() -> None:
    order: list[str] = []
    ratio_of(lambda: order.append("floor"), lambda: order.append("ours"), rounds=2)
    assert order == ["floor", "ours"] * 3


@pytest.mark.full
def test_published_payloads_are_read_and_deleted(tmp_path: Path) -> None:
    size = 3 << 20
    with wire._server(tmp_path, append_only=False, size=size) as server:
        rows = [wire._against_relay(server.url, size, 1, 1), wire._fan_in(server.url, size, 1, 1)]
        look = connect(server.url, wire.RUN)
        books = look.reader.books()
        assert look.reader.backlog() == 0
        look.close()
    assert all(row["ratio"] > 0 for row in rows)
    assert books.published == books.refused == 2 * (1 + 2 * wire.PRODUCERS)
    assert books.bytes_up == books.published * size


def test_the_bare_arithmetic_is_a_nesterov_step() -> None:
    bare = _BareNesterov(np.zeros(3, np.float32), rate=0.5, momentum=0.5)
    ones_N = np.ones(3, np.float32)
    assert bare.step([ones_N, 3 * ones_N]).tolist() == [-1.5] * 3  # Mean 2, momentum 2: 0.5 · (2 + 0.5 · 2).
    assert bare.step([ones_N, 3 * ones_N]).tolist() == [-1.75] * 3  # Momentum 3, from the same parameters.


WIRE_ROW = {"server": "in memory", "what": "one producer", "against": "a relay", "ratio": 0.9, "goal": 0.8}


def test_a_result_is_written_as_json_and_ratios_are_drawn(tmp_path: Path) -> None:
    options = OutputOptions(output=tmp_path)
    rows = [WIRE_ROW, WIRE_ROW | {"goal": ""}]
    assert finish("wire", with_picture("wire", {"rows": rows}, options), options) == 0
    assert json.loads((tmp_path / "wire.json").read_text(encoding="utf-8"))["rows"] == rows
    assert (tmp_path / "wire.png").read_bytes().startswith(b"\x89PNG")


def test_a_result_without_matplotlib_has_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    options = OutputOptions(output=tmp_path)
    found = with_picture("wire", {"rows": [WIRE_ROW]}, options)
    assert finish("wire", found, options) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["wire.json"]
    with failing(ConfigError, "config.extra"):
        plots.pyplot()
