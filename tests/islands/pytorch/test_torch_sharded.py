"""An island of two processes with FSDP2 on the CPU, over gloo: never the whole model in one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from archipelago.broker.messages import Books, Presence
from archipelago.broker.redis.transport import connect
from archipelago.ops.launch.embedded_redis import start_server
from tests import pytorch
from tests.conftest import Until
from tests.islands.own_loop.any_framework import served

pytorch.required()

pytestmark = [pytest.mark.full, pytest.mark.processes]

SCRIPT = Path(__file__).with_name("sharded_script.py")
#: One of the codecs fills its blocks of this size with zeros.
BLOCK = 4096


def start(scenario: str, folder: Path, url: str = "") -> subprocess.Popen[bytes]:
    """Start a scenario of the script."""
    command = [sys.executable, str(SCRIPT), scenario, str(folder), url]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})


def found_by(process: subprocess.Popen[bytes], folder: Path) -> list[dict[str, Any]]:
    """Wait for the script's end, and return what each of its processes found."""
    assert process.wait() == 0
    return [json.loads(found.read_text()) for found in sorted(folder.glob("[01].json"))]


def run_merged(
    scenario: str, folder: Path, url: str, until: Until
) -> tuple[list[dict[str, Any]], Books, list[Presence]]:
    """Run a scenario that creates the run `own`, and merge it. Return the run's last books and heartbeats, too."""
    process = start(scenario, folder, url)
    try:
        until(lambda: connect(url, "own").reader.uid() or process.poll() is not None, "the run to be created")
        with served(url) as merger:
            found = found_by(process, folder)
            return found, merger.transport.reader.books(), merger.transport.reader.presences()
    finally:
        process.kill()
        process.wait()


def test_two_processes_send_and_adopt_the_bits_of_one_device(tmp_path: Path) -> None:
    leader, other = found_by(start("bits", tmp_path), tmp_path)
    assert leader["different"] == other["different"] == []
    fragment, model = leader["bounds"]
    assert leader["largest"] <= -(-fragment // BLOCK) * BLOCK < model, "one fragment at a time"
    assert other["largest"] == 0, "only the leader has whole tensors"


def test_wrong_use_is_refused_in_every_process(tmp_path: Path) -> None:
    leader, other = found_by(start("refused", tmp_path), tmp_path)
    of_all = {
        "calls": "loop.not-together",
        "twice": "loop.sharded",
        "meshes": "loop.sharded",
        "first fsdp": "loop.sharded",
    }
    assert leader == {**of_all, "nan": "loop.not-finite", "no run": "broker.unknown-run"}
    assert other == {**of_all, "nan": "loop.leader-left", "no run": "loop.leader-left"}


def test_an_island_of_two_processes_creates_trains_gives_and_takes(tmp_path: Path, until: Until) -> None:
    with start_server(tmp_path / "redis") as server:
        (leader, other), books, beats = run_merged("island", tmp_path, server.url, until)
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


@pytest.mark.parametrize("scenario", ["stopped", "deaf"])
def test_sigterm_ends_all_processes_at_one_step_with_their_progress_sent(
    scenario: str, tmp_path: Path, until: Until
) -> None:
    with start_server(tmp_path / "redis") as server:
        (leader, other), books, (beat,) = run_merged(scenario, tmp_path, server.url, until)
    assert leader == other | {"unsent": 0}
    assert (leader["steps"], leader["status"]) == (31, 0 if scenario == "stopped" else 143)
    assert leader["finished"]
    assert beat.heartbeat.state == "left"
    assert books.published > 0
    assert beat.heartbeat.tokens_unsent == 0


def test_a_lost_process_ends_the_island(tmp_path: Path, until: Until) -> None:
    with start_server(tmp_path / "redis") as server:
        (leader,), _, beats = run_merged("lost", tmp_path, server.url, until)
    assert leader == {"ended": "RuntimeError", "finished": True}
    assert all(beat.heartbeat.state == "left" for beat in beats)
