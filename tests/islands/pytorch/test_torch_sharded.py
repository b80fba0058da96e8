"""An island of two processes with FSDP2 on the CPU, over gloo: never the whole model in one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from archipelago.broker.errors import UnknownRunError
from archipelago.broker.redis.transport import connect
from archipelago.merger.service import Merger
from archipelago.ops.launch.embedded_redis import start_server
from tests import pytorch
from tests.conftest import Until

pytorch.required()

pytestmark = [pytest.mark.full, pytest.mark.processes]

SCRIPT = Path(__file__).with_name("sharded_script.py")
#: One of the codecs fills its blocks of this size with zeros.
BLOCK = 4096


def run(scenario: str, folder: Path, url: str = "") -> list[dict[str, Any]]:
    """Run a scenario of the script, and return what each process found."""
    command = [sys.executable, str(SCRIPT), scenario, str(folder), url]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return [json.loads(found.read_text()) for found in sorted(folder.glob("[01].json"))]


def test_two_processes_send_and_adopt_the_bits_of_one_device(tmp_path: Path) -> None:
    leader, other = run("bits", tmp_path)
    assert leader["different"] == other["different"] == []
    fragment, model = leader["bounds"]
    assert leader["largest"] <= -(-fragment // BLOCK) * BLOCK < model, "one fragment at a time"
    assert other["largest"] == 0, "only the leader has whole tensors"


def test_wrong_use_is_refused_in_every_process(tmp_path: Path) -> None:
    leader, other = run("refused", tmp_path)
    of_all = {
        "calls": "loop.not-together",
        "twice": "loop.sharded",
        "meshes": "loop.sharded",
        "first fsdp": "loop.sharded",
    }
    assert leader == {**of_all, "nan": "loop.not-finite", "no run": "broker.unknown-run"}
    assert other == {**of_all, "nan": "loop.leader-left", "no run": "loop.leader-left"}


def test_an_island_of_two_processes_creates_trains_gives_and_takes(tmp_path: Path, until: Until) -> None:
    with start_server(tmp_path / "redis") as server, merging(server.url, until) as merger:
        leader, other = run("island", tmp_path, server.url)
        books, beats = merger().transport.reader.books(), merger().transport.reader.presences()
    assert leader["new"] == other["new"] == [True, False]
    assert leader["weights"] == other["weights"]
    assert leader["step"] == other["step"] > 0
    assert leader["alone"] == "peer both", "one process takes the state of two"
    assert leader["moments"] == "peer alone", "two processes take the state of one"
    assert leader["has_moments"]
    assert other["has_moments"]
    assert leader["steps"] == other["steps"]
    assert min(leader["steps"]) > 0
    assert books.merged > 12
    assert books.refused == 0
    assert {beat.heartbeat.island for beat in beats} <= {"both", "again", "alone"}


def test_a_lost_process_ends_the_island(tmp_path: Path, until: Until) -> None:
    with start_server(tmp_path / "redis") as server, merging(server.url, until) as merger:
        (leader,) = run("lost", tmp_path, server.url)
        beats = merger().transport.reader.presences()
    assert leader == {"ended": "RuntimeError", "finished": True}
    assert all(beat.heartbeat.state == "left" for beat in beats)


@contextmanager
def merging(url: str, until: Until) -> Iterator[Callable[[], Merger]]:
    """Serve the run `own` as soon as it is there. Returns a function that gives the merger."""
    stop, mergers, transport = threading.Event(), [], connect(url, "own")

    def is_there() -> bool:
        try:
            return bool(transport.reader.manifest())
        except UnknownRunError:
            return False

    def serve() -> None:
        while not stop.is_set() and not is_there():
            stop.wait(0.05)
        if stop.is_set():
            return
        merger = Merger(connect(url, "own"), holder="merger")
        if not merger.acquire():
            return
        merger.load()
        mergers.append(merger)
        while not stop.is_set():
            merger.turn(0.01)

    def merger() -> Merger:
        until(lambda: bool(mergers), "the merger to serve")
        return mergers[0]

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield merger
    finally:
        stop.set()
        thread.join()
        transport.close()
