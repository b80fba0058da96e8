"""Every verb of `archipelago bench` measures everything with its smallest flags, on real processes."""

from __future__ import annotations

import json
import multiprocessing
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from archipelago.broker.codecs import codec
from archipelago.ops.bench import harness, merge
from archipelago.ops.bench.harness import OF_ISLAND, OF_MERGER
from archipelago.ops.bench.sync import TORCHFT_PYTHON, SyncOptions, sync
from archipelago.ops.bench.wire import WireSize, wire
from archipelago.ops.commands import VERBS, VerbGroup, run
from tests.harness.forks import KINDS

pytestmark = [
    pytest.mark.full,
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="memory and processor time are read from /proc"),
]


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes that measure from one that has loaded JAX. They get no variables of their own then."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([*KINDS["commands"]])
    monkeypatch.setattr(harness, "PROCESSES", server)


#: The smallest flags of the verbs that have small ones, with few programs to compile.
SMALLEST = {
    "accelerator": (
        *("--quick", "--pieces", "--parts", "steps", "pytorch", "quantiser", "bits", "spectra"),
        *("--sync.interval", "4", "--sync.fragments", "1", "--merge.embedding", "average", "--merge.rest", "average"),
    ),
    "largest": ("--parameters", "15000", "--fragments", "3"),
}
#: Verbs that `tests/ops/experiments` runs, and verbs whose smallest size is too large, which are measured below.
ELSEWHERE = {"parity", "study", "sync", "merge", "wire"}


def measured(verb: str, folder: Path) -> dict[str, Any]:
    """Run a verb, and return its JSON. The measurements check themselves, such as that all contributions are merged."""
    assert run(["bench", verb, *SMALLEST[verb], "--output", str(folder)]) == 0
    found: dict[str, Any] = json.loads((folder / f"{verb}.json").read_text(encoding="utf-8"))
    assert len({tuple(row) for row in found["rows"]}) == 1, "the rows are printed as one table"
    return found


def test_all_verbs_are_measured() -> None:
    group = VERBS["bench"]
    assert isinstance(group, VerbGroup) and SMALLEST.keys() | ELSEWHERE == group.verbs.keys()


def test_what_an_island_costs_is_measured(tmp_path: Path) -> None:
    found = measured("accelerator", tmp_path)
    assert all(row["ours"] > 0 for row in found["rows"] if "to int4" in row["what"])
    bits = [row for row in found["rows"] if "differ from numpy's" in row["what"]]
    assert len(bits) >= 7 and sum("spectrum" in row["what"] for row in bits) == 2
    assert all(row["ours"] == 0 < row["theirs"] for row in bits)
    rows = {row["what"].strip(): row["ours"] for row in found["rows"]}
    pieces = [f"merger: {piece}, ms" for piece in OF_MERGER.values() if piece != "spectra"]  # the rule changes none
    pieces += [f"island: {piece}, ms" for piece in OF_ISLAND.values()]
    assert all(rows[piece] > 0 for piece in pieces), "each is the name of a function that a sync calls"
    island = found["model"]
    turns = island["turns"]
    assert all(on["synced"] > 0 for on in turns["on"])
    assert island["alone"]["peak_bytes"] > 4 * 3 * turns["parameters"]
    assert turns["held_bytes"] == 4 * turns["parameters"]
    assert list(Path(island["profile"]).rglob("*.xplane.pb")), "the profile"
    if find_spec("transformers") is not None:
        in_torch = island["pytorch"]
        assert min(*in_torch["on"], *in_torch["off"]) > 0 and sum(in_torch["syncs"]) > 0


def test_a_model_is_passed_whose_merger_is_killed(tmp_path: Path) -> None:
    found = measured("largest", tmp_path)
    assert (found["parameters"], found["fragments"], found["islands"]) == (15_000, 3, 2)
    rows = {row["what"]: row for row in found["rows"]}
    assert 0 < rows["  from the kill to the next closed round, s"]["ours"] < rows["the whole pass, s"]["ours"]
    most = 2e-9 * codec("int4").encoded_size(5_000) * 3
    for way in ("up", "down"):
        assert 0.5 * most < rows[f"bytes {way}, all islands, GB"]["ours"] < 1.1 * most + 600e-9, way
    peaks = [rows[f"peak memory: {process}, GB"]["ours"] for process in ("merger", "Redis")]
    assert max(peaks) < rows["peak memory: sum of all processes, GB"]["ours"]


# -- smaller than the verbs allow -------------------------------------------------------------------------------------


def test_payloads_are_measured_in_memory_and_with_an_append_only_file() -> None:
    rows = wire(WireSize(1 << 20, payloads=4, rounds=1))["rows"]
    assert [row["what"].split(", ")[1] for row in rows] == ["in memory", "append-only file"]
    assert all(row["ours"] > 0 and row["ratio"] > 0 for row in rows)


def test_contributions_of_few_and_of_many_islands_are_measured() -> None:
    (row,) = merge.many_islands(2, 4, 64, 40)
    assert row["ours"] > 0 and row["ratio"] > 0


TINY = SyncOptions(parameters=12_000, quick=True)


def test_a_sync_without_torchft_names_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(TORCHFT_PYTHON, raising=False)
    found = sync(TINY)
    seconds, committed, megabytes = (row["ours"] for row in found["rows"])
    assert (found["parameters"], committed) == (12_000, 3)
    assert seconds > 0 and megabytes > 0
    assert TORCHFT_PYTHON in capsys.readouterr().err
    assert {found["torchft"], *(row["theirs"] for row in found["rows"])} == {""}
