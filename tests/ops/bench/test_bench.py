"""The measurements: what they put together must be right, whatever this machine makes of it."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from archipelago.broker.redis.transport import connect
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.ops.bench import main, wire
from archipelago.ops.bench.bytes import weigh
from archipelago.ops.bench.merge import _BareNesterov, ratio_of
from tests.small import SMALL


def test_a_row_takes_the_median_of_the_ratios_and_leaves_the_first_round_out() -> None:
    row = wire._row("ours", "theirs", 8_000_000, mine=[100.0, 2.0, 4.0, 8.0], theirs=[1.0, 1.0, 1.0, 6.0])
    assert (row["ratio"], row["ratio_from"], row["ratio_to"]) == (0.5, 0.25, 0.75)
    assert (row["MB_a_second"], row["theirs_MB_a_second"]) == (2, 8)


@pytest.mark.parametrize("width", [80, 160])
def test_a_table_cuts_no_name_and_no_number(width: int) -> None:
    """Eight columns, of which 80 characters have room for less than two spaces between any two."""
    numbers = {"tokens": 4_566_016, "bits_per_byte": 2.148, "rounds": 381, "per_round": 2.9974}
    ratios = {"to_one": 1.0129, "to_parallel": 1.0025, "to_diloco": 0.9765}
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(main._table([{"what": "data-parallel, 3× batch", **numbers, **ratios}], width))
    *heads, line = console.export_text().splitlines()
    assert " ".join(line.split()) == "data-parallel, 3× batch 4,566,016 2.1480 381 2.9974 1.0129 1.0025 0.9765"
    assert all("…" not in head for head in heads)


def test_both_sides_take_turns() -> None:
    order: list[str] = []
    ratio_of(lambda: order.append("floor"), lambda: order.append("ours"), rounds=2)
    assert order == ["floor", "ours"] * 3


def test_what_producers_publish_is_read_ended_and_gone(tmp_path: Path) -> None:
    size = 3 << 20
    with wire._server(tmp_path, append_only=False, size=size) as server:
        rows = [wire._against_relay(server.url, size, 1, 1), wire._fan_in(server.url, size, 1, 1)]
        look = connect(server.url, wire.RUN)
        books = look.books()
        assert look.backlog() == 0
        look.close()
    assert all(row["ratio"] > 0 for row in rows)
    assert books.published == books.refused == 2 * (1 + 2 * wire.PRODUCERS)
    assert books.bytes_up == books.published * size


def test_the_bare_arithmetic_is_a_nesterov_step() -> None:
    bare = _BareNesterov(np.zeros(3, np.float32), rate=0.5, momentum=0.5)
    ones_N = np.ones(3, np.float32)
    assert bare.step([ones_N, 3 * ones_N]).tolist() == [-1.5] * 3  # mean 2, momentum 2: 0.5 · (2 + 0.5 · 2)
    assert bare.step([ones_N, 3 * ones_N]).tolist() == [-1.75] * 3  # momentum 3, from the same parameters


def test_bytes_a_parameter_by_codec(corpus: OpenCorpus) -> None:
    config = replace(SMALL, data=replace(SMALL.data, corpus=corpus.name))
    plain, four = weigh(config, 4, lambda _: None, pairs=[("float32", "float32"), ("int4", "int4")])["rows"]
    assert 0 < four["bytes_a_parameter"] < 8.5 / 4 < plain["bytes_a_parameter"] < 8.5


WIRE_ROW = {"server": "in memory", "what": "one producer", "against": "a relay", "ratio": 0.9, "goal": 0.8}


@pytest.mark.parametrize(
    ("what", "rows", "pictures"),
    [
        ("wire", [WIRE_ROW, WIRE_ROW | {"goal": ""}], ["wire.png"]),
        ("merge", [WIRE_ROW], ["merge.png"]),
        ("island", [{"what": "a step", "ratio": 1.1}, {"what": "peak memory", "ratio": ""}], []),
    ],
)
def test_what_was_measured_is_written_down_and_drawn_where_it_is_ratios(
    what: str, rows: list[dict[str, Any]], pictures: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"ops.bench_{what}.{what}", lambda *_, **__: {"rows": rows})
    assert main.main(main.BenchOptions(what, output=tmp_path)) == 0  # type: ignore[arg-type]
    assert json.loads((tmp_path / f"{what}.json").read_text())["rows"] == rows
    assert [path.name for path in tmp_path.glob("*.png")] == pictures
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
