"""The rules of `archipelago bench`: figures, tables, predictions and torchft. Nothing here measures the machine."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import jax
import pytest
from rich.console import Console

from archipelago.broker.config import ModelConfig, RunConfig, WireConfig
from archipelago.broker.errors import BrokerError, ConfigError
from archipelago.ops.bench import accelerator, largest, provenance, wire
from archipelago.ops.bench import sync as bench_sync
from archipelago.ops.bench.accelerator_processes import IslandTurns, TimedTurn, TorchTurns
from archipelago.ops.bench.harness import Spent
from archipelago.ops.bench.output import OutputOptions, finish, table, taking_turns
from archipelago.ops.bench.profile import DeviceTimes
from archipelago.ops.bench.sync import Synced, SyncOptions, torchft
from archipelago.ops.launch.devices import Accelerators
from tests.failing import failing

# -- refusals ---------------------------------------------------------------------------------------------------------


def test_impossible_options_are_refused_before_anything_is_measured() -> None:
    for parameters in (0.0, -1.0, float("nan"), float("inf")):
        with failing(ConfigError, "config.value"):
            largest.largest(parameters)


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


def test_a_result_is_written_as_json(tmp_path: Path) -> None:
    options = OutputOptions(output=tmp_path)
    rows = [WIRE_ROW, WIRE_ROW | {"goal": ""}]
    assert finish("wire", {"rows": rows}, options) == 0
    written = json.loads((tmp_path / "wire.json").read_text(encoding="utf-8"))
    assert (written["rows"], written["provenance"].keys()) == (rows, provenance.provenance().keys())


def test_provenance_names_the_command_the_commit_and_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["/bin/archipelago", "bench", "wire", "--output", "a b"])
    found = provenance.provenance()
    assert found["command"] == "archipelago bench wire --output 'a b'"
    assert datetime.fromisoformat(found["date"]).utcoffset() == timedelta(0)
    assert found["versions"]["jax"] == jax.__version__
    assert found["device"] == f"{jax.device_count()} × cpu"
    monkeypatch.delitem(sys.modules, "jax")
    monkeypatch.setattr(provenance, "accelerators", lambda: Accelerators("cuda", ("0", "1"), "H100"))
    assert provenance.provenance()["device"] == "2 × H100"


def test_a_commit_is_that_of_a_checkout_of_ours(tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    (tmp_path / "file").write_text("first")
    (tmp_path / "venv").mkdir()
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--message", "a"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout[:12]
    assert provenance.commit.__wrapped__(tmp_path) == head
    (tmp_path / "file").write_text("changed")
    assert provenance.commit.__wrapped__(tmp_path) == f"{head}-dirty"
    assert provenance.commit.__wrapped__(tmp_path / "venv") == "", "an installation in another repository"


# -- figures ----------------------------------------------------------------------------------------------------------


def test_the_first_round_of_the_wire_does_not_count_and_the_ratio_is_a_median() -> None:
    theirs, ours = iter([1.0, 1.0, 1.0, 6.0]), iter([100.0, 2.0, 4.0, 8.0])
    row = wire.row("in memory", 8_000_000, *taking_turns([lambda: next(theirs), lambda: next(ours)], 3))
    assert (row["ours"], row["theirs"], row["ratio"]) == (2, 8, 0.5)


def test_the_figures_of_an_island_are_medians_of_pairs_and_differences_of_peaks() -> None:
    on = [
        TimedTurn(1.1, 2.5, 900 << 20, 1000),
        TimedTurn(1.2, 3.0, 700 << 20, 1000),
        TimedTurn(1.5, 4.0, 800 << 20, 500),
    ]
    off = [TimedTurn(1.0, 2.0, 600 << 20), TimedTurn(1.0, 2.0, 500 << 20), TimedTurn(1.0, 2.0, 550 << 20)]
    turns = IslandTurns(10, 1000, 25 << 18, on, off, held_bytes=100 << 20)
    alone = TimedTurn(1.0, 2.0, 400 << 20)
    # With 0.5 of 0.6 syncs, rounds were stretched. 100 of 25 MiB are held, and 4 more may be.
    for backend, interval, goals in (("gpu", 20, [1.01, 8.0]), ("gpu", 16, [8.0]), ("cpu", 20, [8.0])):
        config = replace(RunConfig(), sync=replace(RunConfig().sync, interval=interval))
        rows = accelerator.step_rows(config, backend, turns, alone)
        assert [row["goal"] for row in rows if row["goal"]] == goals
        step, syncs, cpu, tokens, parameter, beside, between, held = rows
        assert (step["ours"], step["theirs"]) == pytest.approx((120.0, 100.0))
        assert step["ratio"] == (pytest.approx(1.2) if interval == 20 else "")
        assert (cpu["ratio"], syncs["ratio"], tokens["ratio"]) == pytest.approx((1.5, interval / 20, 1 / 1.2))
        assert parameter["ours"] == pytest.approx(1e6), "the median of 0.5, 1 and 4 ms"
        assert (beside["ours"], between["ours"], held["ours"], held["theirs"]) == (500, 200, 100, 25)
    profiled = replace(turns, device=DeviceTimes(copies=0.02, hidden=0.015, whole=0.5, waits=0.01))
    waits, copied = accelerator.step_rows(RunConfig(), "gpu", profiled, alone)[5:7]
    assert (waits["ours"], waits["theirs"], waits["ratio"]) == pytest.approx((10, 500, 0.02))
    assert (copied["ours"], copied["theirs"], copied["ratio"]) == pytest.approx((15, 20, 0.75))


def test_the_pieces_of_syncs_beside_steps_are_those_of_one_sync_of_the_model() -> None:
    on = [TimedTurn(1.0, 1.0, 1, synced) for synced in (999, 2000, 6000)]  # 1 + 3 syncs after the first turn
    turns = IslandTurns(10, 1000, 1, on, on, 1, pieces={"quantise": Spent(0.4, 0.2)})
    rows = accelerator.piece_rows(turns, {"merge": Spent(0.04, 0.08)})
    assert [(row["what"], row["ours"], row["theirs"]) for row in rows] == [
        ("  merger: merge, ms", pytest.approx(10), pytest.approx(20)),
        ("  island: quantise, ms", pytest.approx(100), pytest.approx(50)),
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="it binds processes to cores")
def test_an_island_takes_the_memory_of_an_accelerator_that_up_gives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn, environments = TimedTurn(1.0, 1.0, 1), dict[str, Any]()

    @contextmanager
    def child(work: Callable[..., None], *arguments: Any, environment: Any = None) -> Iterator[Any]:
        environments[work.__name__] = environment
        pairs = [(turn, turn)] * accelerator.TURNS_QUICK[0]
        island = iter([*pairs, IslandTurns(10, 1, 1, [turn], [turn], 1)])
        yield SimpleNamespace(receive=lambda: next(island) if work.__name__ == "sync_and_not" else turn)

    names = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(accelerator, "child", child)
    monkeypatch.setattr(accelerator, "own_redis", lambda: nullcontext(SimpleNamespace(pid=0, url="")))
    monkeypatch.setattr(accelerator, "halves_of_the_cores", lambda: (set[int](), os.sched_getaffinity(0)))
    shares: dict[Literal["cpu", "gpu"], str] = {"cpu": "0.900", "gpu": "0.800"}
    for spectra, share in shares.items():
        options = accelerator.AcceleratorOptions(quick=True, spectra=spectra)
        accelerator.measured_turns(RunConfig(), options, tmp_path)
        expected = dict(zip(names, (share, "true"), strict=True))
        assert environments["sync_and_not"] == environments["train_only"] == expected


def test_steps_in_pytorch_have_a_goal_if_their_rounds_were_not_stretched(capsys: pytest.CaptureFixture[str]) -> None:
    for syncs, goal in ((2.0, 1.01), (1.5, "")):
        turns = TorchTurns(48, on=[4.8, 5.28, 4.8], off=[4.8, 4.8, 4.8], syncs=[syncs] * 3)
        step, counted = accelerator.torch_rows(RunConfig(), "gpu", turns)
        assert (step["ours"], step["ratio"], step["goal"]) == (pytest.approx(100.0), 1.0 if goal else "", goal)
        assert (counted["ours"], counted["theirs"]) == (syncs, 2.0)
        assert ("stretched" in capsys.readouterr().err) == (goal == "")


def test_batches_and_codecs_of_an_island_have_defaults_and_settings_win() -> None:
    found = accelerator.settled(accelerator.MEASURED, backend="cpu")
    assert (found.model.size, found.wire.up, found.wire.down) == ("tiny", "int4", "int4")
    assert found.tokens_per_step < accelerator.settled(accelerator.MEASURED, backend="gpu").tokens_per_step
    mine = replace(RunConfig(), model=ModelConfig("tiny-moe"), wire=WireConfig(up="int8"))  # its batch is the usual one
    for backend in ("cpu", "gpu"):
        kept = accelerator.settled(mine, backend)
        assert (kept.model, kept.wire, kept.data) == (mine.model, mine.wire, mine.data)


def test_a_batch_that_is_given_counts_although_it_is_the_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = []
    for flags, text in (
        ([], ""),
        (["--data.batch_size=1"], "[data]\nbatch_size = 1"),
        (["--data.sequence-length", "64"], "[data]\nsequence_length = 64"),
    ):
        file = tmp_path / "settings.toml"
        file.write_text(text, encoding="utf-8")
        for words, path in ((flags, None), ([], file)):
            monkeypatch.setattr("sys.argv", ["archipelago", "bench", "accelerator", *words])
            found.append(accelerator.settled(accelerator.MEASURED, "gpu", path).data.batch_size)
    assert found[::2] == found[1::2] == [16, 1, 1], "by a flag or in a file"


# -- predictions of `largest` ------------------------------------------------------------------------------------------


def test_a_billion_parameters_fit_a_machine_of_24_gib() -> None:
    largest.require_room(largest.predict(10**9, 128, 2)[1], 20 << 30)
    with failing(ConfigError, "bench.memory") as refused:
        largest.require_room(largest.predict(10**9, 128, 2)[1], 16 << 30)
    share = float(refused.value.remedy.split()[2])
    assert 0.5 < share < 1.0
    largest.require_room(largest.predict(int(0.98 * share * 10**9), 128, 2)[1], 16 << 30)


# -- torchft beside bench sync ----------------------------------------------------------------------------------------


TINY = SyncOptions(parameters=12_000, quick=True)
STAND_IN = """#!/bin/sh
echo '{"torchft": "9.9", "torch": "9.9"}'
while read -r line; do
    echo '{"seconds": 2.0, "committed": false, "errors": []}'
done
"""


def _script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "python"
    path.write_text(text, encoding="utf-8")
    path.chmod(0o700)
    return str(path)


def test_tensors_have_one_shape() -> None:
    assert sum(tensor.size for tensor in SyncOptions().tensors) == pytest.approx(10e6, rel=1e-3)
    assert sum(tensor.size for tensor in TINY.tensors) == 12_000


def test_both_sides_take_turns_and_warm_ups_do_not_count(tmp_path: Path) -> None:
    syncs = iter(Synced(seconds, True, 10.0) for seconds in (*[9.0] * bench_sync.WARM_UPS, 4.0, 2.0, 1.0))
    with torchft(TINY, _script(tmp_path, STAND_IN)) as (name, theirs):
        found = taking_turns([lambda: next(syncs), theirs], TINY.rounds, bench_sync.WARM_UPS)
    seconds, committed, megabytes = bench_sync.rows_of(found, name)
    assert (seconds["ours"], seconds["against"], seconds["theirs"], seconds["ratio"]) == (2.0, "torchft 9.9", 2.0, 1.0)
    assert (committed["ours"], committed["theirs"]) == (3, 0)
    assert megabytes["ours"] == 10.0


def test_a_torchft_that_cannot_run_or_ends_is_an_error(tmp_path: Path) -> None:
    with failing(BrokerError, "bench.process-failed"), torchft(TINY, "/no/such/python"):
        pass
    for end in ("exit 1", 'echo \'{"torchft": "9.9"}\'; read -r line; exit 3'):
        python = _script(tmp_path, f"#!/bin/sh\n{end}\n")
        with failing(BrokerError, "bench.process-failed"), torchft(TINY, python) as (_, sync_once):
            sync_once()
