"""The list of runs: those of one Redis and of a folder, with what differs between them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from archipelago.broker.errors import BrokerError
from archipelago.broker.memory.transport import MemoryBroker, MemoryTransport
from archipelago.broker.messages import Evaluation
from archipelago.ops.dashboard.app import Board, application
from archipelago.ops.experiments.virtual_time import VirtualClock
from archipelago.ops.watch import run_summary
from archipelago.ops.watch.run_list import FRESH_SECONDS, RUNS_MOST, ComparedRuns
from archipelago.ops.watch.watcher import Watcher
from tests import samples

REPORT = {
    "run": "old", "finished": True, "unit": "bits per byte", "held_out_last": 3.0, "steps": 70, "islands": 2,
    "tokens_trained": 900, "curve": [[0, 8.0], [900, 3.0]],
}  # fmt: skip


@pytest.fixture
def broker() -> MemoryBroker:
    """Return a broker with the runs `sample` and `fast`, whose batches differ."""
    broker = MemoryBroker(clock=lambda: 100.0)
    for name, batch in (("sample", 8), ("fast", 32)):
        base = samples.manifest(name).config
        found = samples.manifest(name, replace(base, data=replace(base.data, batch_size=batch)))
        transport = broker.connect(name)
        transport.create(found, samples.first_snapshots(found))
        transport.reader.record_evaluation(Evaluation(0, 0, 500, 1.7e9, 8.0 - batch / 8))
    broker.connect("sample").island.heartbeat(samples.heartbeat("a"))
    return broker


def listed(found: ComparedRuns) -> list[tuple[str, str, str, float | None]]:
    return [(row["run"], row["where"], row["state"], row["held_out"]) for row in found.newest()["runs"]]


def test_the_runs_of_a_redis_and_of_a_folder(broker: MemoryBroker, tmp_path: Path) -> None:
    for name, report in (("old", REPORT), ("sample", REPORT | {"run": "sample"}), ("damaged", {"run": "damaged"})):
        (tmp_path / name).mkdir()
        (tmp_path / name / run_summary.TEXT).write_text(json.dumps(report), encoding="utf-8")
    found = ComparedRuns(broker.connect, "sample", tmp_path, VirtualClock(100.0))
    assert listed(found) == [
        ("sample", "redis", "starting", 7.0), ("fast", "redis", "new", 4.0),
        ("old", str(tmp_path / "old"), "finished", 3.0),
    ]  # fmt: skip
    own, fast, old = found.newest()["runs"]
    assert (own["differs"], fast["differs"]) == ([], ["data.batch_size: 32 → 8"])
    assert (fast["curve"], old["curve"]) == ([(500, 4.0)], [(0.0, 8.0), (900.0, 3.0)])

    def opened(name: str) -> MemoryTransport:
        if name == "fast":
            raise BrokerError("no permission", "Ask for it.")
        return broker.connect(name)

    assert [name for name, *_ in listed(ComparedRuns(opened, "sample", None, VirtualClock(100.0)))] == ["sample"]


def test_the_list_is_read_seldom_and_bounded(broker: MemoryBroker) -> None:
    clock, count = VirtualClock(100.0), 0

    def opened(name: str) -> MemoryTransport:
        nonlocal count
        count += 1
        return broker.connect(name)

    found = ComparedRuns(opened, "sample", None, clock)
    found.newest()
    before = count
    found.newest()
    assert count == before
    for n in range(2 * RUNS_MOST):
        more = samples.manifest(f"run-{n}")
        broker.connect(more.run).create(more, samples.first_snapshots(more))
    clock.now += FRESH_SECONDS
    assert len(found.newest()["runs"]) == RUNS_MOST


def test_the_page_asks_for_the_list(broker: MemoryBroker) -> None:
    board = Board(Watcher(broker.connect("sample")))
    runs = ComparedRuns(broker.connect, "sample", None, VirtualClock(100.0))
    with TestClient(application(board, "token", runs=runs), "http://localhost") as client:
        assert [run["run"] for run in client.get("/api/runs").json()["runs"]] == ["sample", "fast"]
    with TestClient(application(board, "token"), "http://localhost") as client:
        assert client.get("/api/runs").json()["runs"] == []
