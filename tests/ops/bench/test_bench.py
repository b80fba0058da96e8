"""The rules of `archipelago bench`: figures, tables, predictions and refusals. Nothing here measures the machine."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from archipelago.broker.config import DataConfig, ModelConfig, RunConfig, WireConfig
from archipelago.broker.errors import ConfigError
from archipelago.ops import plots
from archipelago.ops.bench import accelerator, hosts, island, join, largest, lora, start, wire
from archipelago.ops.bench.host_processes import Cost, HostTurn
from archipelago.ops.bench.merge import _BareNesterov, ratio_of
from archipelago.ops.bench.output import OutputOptions, finish, table, with_picture
from archipelago.ops.bench.start import Start
from archipelago.ops.bench.turns import Found, Turn
from tests.failing import failing

# -- refusals ---------------------------------------------------------------------------------------------------------


def test_impossible_options_are_refused_before_anything_is_measured() -> None:
    refused: list[tuple[str, Callable[[], object]]] = [
        ("model.unknown", lambda: accelerator.main(accelerator.AcceleratorOptions(sizes=("124m", "huge")))),
        ("bench.devices", lambda: hosts.main(hosts.HostsBenchOptions(devices=0))),
        ("bench.join", lambda: join.main(join.JoinOptions(parameters=0.0))),
    ]
    for code, main in refused:
        with failing(ConfigError, code):
            main()
    for parameters in (0.0, -1.0, float("nan"), float("inf")):
        with failing(ConfigError, "bench.parameters"):
            largest.largest(parameters, lambda line: None)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    present = importlib.util.find_spec

    def without_peft(name: str, *rest: Any) -> Any:
        return None if name == "peft" else present(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without_peft)
    with failing(ConfigError, "bench.lora") as caught:
        lora.main(lora.LoraOptions())
    assert "peft" in caught.value.what


# -- output -----------------------------------------------------------------------------------------------------------


def test_a_table_cuts_no_name_and_no_number() -> None:
    """Eight columns leave less than two spaces between any two in 80 characters."""
    numbers = {"tokens": 4_566_016, "bits_per_byte": 2.148, "rounds": 381, "per_round": 2.9974}
    ratios = {"to_one": 1.0129, "to_parallel": 1.0025, "to_diloco": 0.9765}
    for width in (80, 160):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(table([{"what": "data-parallel, 3× batch", **numbers, **ratios}], width))
        *heads, line = console.export_text().splitlines()
        assert " ".join(line.split()) == "data-parallel, 3× batch 4,566,016 2.1480 381 2.9974 1.0129 1.0025 0.9765"
        assert all("…" not in head for head in heads), width


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


# -- figures ----------------------------------------------------------------------------------------------------------


def test_the_first_round_of_the_wire_does_not_count_and_the_ratio_is_a_median() -> None:
    row = wire._row("ours", "theirs", 8_000_000, mine=[100.0, 2.0, 4.0, 8.0], theirs=[1.0, 1.0, 1.0, 6.0])
    assert (row["ratio"], row["ratio_from"], row["ratio_to"]) == (0.5, 0.25, 0.75)
    assert (row["MB_a_second"], row["theirs_MB_a_second"]) == (2, 8)


def test_merging_takes_turns_with_a_nesterov_step_in_bare_numpy() -> None:
    order: list[str] = []
    ratio_of(lambda: order.append("floor"), lambda: order.append("ours"), rounds=2)
    assert order == ["floor", "ours"] * 3
    bare = _BareNesterov(np.zeros(3, np.float32), rate=0.5, momentum=0.5)
    ones_N = np.ones(3, np.float32)
    assert bare.step([ones_N, 3 * ones_N]).tolist() == [-1.5] * 3  # Mean 2, momentum 2: 0.5 · (2 + 0.5 · 2).
    assert bare.step([ones_N, 3 * ones_N]).tolist() == [-1.75] * 3  # Momentum 3, from the same parameters.


def test_the_table_of_accelerators_has_each_model_and_the_quantiser() -> None:
    step = {"step_seconds_on": 0.102, "step_seconds_off": 0.1, "step_ratio": 1.02}
    found = {"what": "124m 16 × 512", "backend": "gpu", "tokens_a_second": 90.0, "tokens_a_second_plain": 100.0, **step}
    seconds = {"quantise_seconds": 0.003, "copy_seconds": 0.001}
    rows = accelerator.rows({"124m": found, "1b": found}, 124_000_000, seconds)
    assert [row["ratio"] for row in rows] == pytest.approx([1.02, 0.9, 1.02, 0.9, 3.0])
    assert [row["goal"] for row in rows] == [1.01, "", 1.01, "", ""]
    assert "124 M" in rows[-1]["what"]


def test_the_figures_of_hosts_are_medians_of_turns() -> None:
    two = [
        HostTurn(24, Cost(on, 0.3), Cost(0.2, 0.2), 6, Cost(untold, 0.1), 1e-5, longest, 100.0, 900.0)
        for on, untold, longest in ((0.25, 0.19, 1e-3), (0.3, 0.18, 5e-3), (0.9, 0.1, 2e-3))
    ]
    one = [HostTurn(24, Cost(0.125, 0.2), Cost(0.1, 0.15), 6)] * 3
    found = hosts.summary(two, one)
    assert found["two_steps_a_second_off"] == pytest.approx(5.0)
    assert found["two_steps_a_second_on"] == pytest.approx(1 / 0.3)
    assert found["boundary_seconds"] == pytest.approx(0.02)
    assert found["boundary_cpu_seconds"] == pytest.approx(0.1)
    assert found["two_seconds_a_sync"] == pytest.approx(0.1 * 24 / 6)
    assert found["one_cpu_seconds_a_sync"] == pytest.approx(0.05 * 24 / 6)
    assert (found["step_bytes"], found["sync_bytes"]) == (100.0, 900.0)
    assert (found["tell_seconds"], found["tell_seconds_longest"]) == (1e-5, 5e-3)


def test_the_figures_of_an_island_are_medians_of_pairs_and_differences_of_peaks() -> None:
    on = [Turn(1.1, 2.5, 900 << 20, 1000), Turn(1.2, 3.0, 700 << 20, 1000), Turn(1.5, 4.0, 800 << 20, 500)]
    off = [Turn(1.0, 2.0, 600 << 20), Turn(1.0, 2.0, 500 << 20), Turn(1.0, 2.0, 550 << 20)]
    turns = Found("gpu", 1, 10, 1000, 25 << 18, on, off, held_bytes=100 << 20, reference_bytes=0)
    found = island.summary(turns, alone_peak=400 << 20)
    assert (found["step_ratio"], found["step_ratio_from"], found["step_ratio_to"]) == (1.2, 1.1, 1.5)
    assert found["step_seconds_on"] == pytest.approx(0.12)
    assert found["cpu_seconds_a_synced_parameter"] == pytest.approx(1e-3)  # The median of 0.5, 1 and 4 ms.
    assert found["peak_bytes_beside"] == 500 << 20
    assert found["peak_bytes_beside_between_syncs"] == 200 << 20
    assert found["largest_fragment_bytes"] == 25 << 20
    step, memory = (row for row in island.rows(turns, 400 << 20, "a model") if row["goal"])
    assert (step["goal"], memory["goal"], memory["ratio"]) == (1.03, 8.0, 20.0)  # 100 of 25 MiB held, and 4


def test_the_figures_of_a_start_are_medians_and_its_ratios_are_of_pairs() -> None:
    cold = Start(wall=20.0, total=16.0, imports=1.0, joining=0.5, programs=14.0, state=0.0)
    warm = [
        Start(2.0, 1.5, 0.75, 0.125, 0.375, 0.125),
        Start(4.0, 3.0, 1.5, 0.25, 0.75, 0.25),
        Start(3.0, 2.0, 1.0, 0.5, 0.25, 0.125),
    ]
    found = start.summary(cold, warm, [0.5, 1.5, 0.5], [(0.5, 0.25), (0.75, 0.125), (0.25, 0.5)])
    assert (found["standby_wall_seconds"], found["standby_cpu_seconds"]) == (0.5, 0.25)
    assert (found["cpu_seconds"], found["wall_seconds"], found["cold_cpu_seconds"]) == (2.0, 3.0, 16.0)
    assert (found["ratio"], found["ratio_from"], found["ratio_to"]) == (3.0, 2.0, 4.0)
    assert [each.first_step for each in warm] == [0.125, 0.25, 0.125]
    total, *parts, _, told, _, _ = start.rows(found)
    assert told["seconds"] == 0.25
    assert (total["seconds"], total["jax_alone"], total["ratio"], total["goal"]) == (2.0, 0.5, 4.0, 1.2)
    assert [part["seconds"] for part in parts] == [1.0, 0.25, 0.375, 0.125, 0.125]


def test_models_and_codecs_of_an_island_and_a_start_have_defaults_and_settings_win() -> None:
    found = island.settled(RunConfig(), quick=False, backend="cpu")
    assert (found.model.size, found.wire.up, found.wire.down) == ("base", "int4", "int4")
    assert found.tokens_per_step < island.settled(RunConfig(), quick=False, backend="gpu").tokens_per_step
    assert island.settled(RunConfig(), quick=True, backend="cpu").model.size == "tiny"
    usual = start.settled(RunConfig(), quick=False)
    assert (usual.model.size, usual.tokens_per_step) == ("small", 16)
    assert start.settled(RunConfig(), quick=True).model.size == "tiny"
    data = DataConfig(corpus="mine", sequence_length=64)
    mine = replace(RunConfig(), model=ModelConfig("tiny-moe"), wire=WireConfig(up="int8"), data=data)
    for kept in (island.settled(mine, quick=False, backend="cpu"), start.settled(mine, quick=False)):
        assert (kept.model, kept.wire, kept.data) == (mine.model, mine.wire, mine.data)
