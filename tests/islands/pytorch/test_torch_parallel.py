"""An island of two processes: DistributedDataParallel on the CPU, over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest

from archipelago.broker.errors import ConfigError
from archipelago.broker.redis.transport import connect
from archipelago.merger.service import Merger
from archipelago.ops.launch.embedded_redis import Server, start_server
from tests import pytorch
from tests.conftest import Until
from tests.failing import failing

torch = pytorch.required()

from archipelago.islands.pytorch.parallel import Follower, Said  # noqa: E402 - it imports torch
from tests.islands.pytorch.torch_runs import module  # noqa: E402

pytestmark = [pytest.mark.full, pytest.mark.processes]

SCRIPT = Path(__file__).with_name("parallel_script.py")


def test_two_processes_are_one_island_with_the_same_bits(tmp_path: Path, until: Until) -> None:
    with start_server(tmp_path / "redis") as server:
        require_same_bits(server, tmp_path, until)


def require_same_bits(server: Server, folder: Path, until: Until) -> None:
    meeting = folder / uuid.uuid4().hex
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(meeting), server.url],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    stop = threading.Event()
    try:
        until(lambda: connect(server.url, "own").reader.uid() or processes[0].poll(), "the run to be created")
        merger = Merger(connect(server.url, "own"), holder="merger")
        assert merger.acquire()
        merger.load()

        def serve() -> None:
            while not stop.is_set():
                merger.turn(0.01)

        thread = threading.Thread(target=serve)
        thread.start()
        said = [process.communicate()[0].split() for process in processes]
        books, beats = merger.transport.reader.books(), merger.transport.reader.presences()
        stop.set()
        thread.join()
    finally:
        stop.set()
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0]
    assert said[0] == said[1], "clock, parameters and moments"
    assert int(said[0][0]) >= 120
    assert books.merged >= 4
    assert books.refused == 0
    assert {beat.heartbeat.island for beat in beats} <= {"both"}


class Lost:
    """A team whose leader has left."""

    def exchange(self, said: Said) -> Said:
        return Said(has_left=True)


def test_a_process_whose_leader_has_left_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("archipelago.islands.pytorch.parallel.Team", lambda group: Lost())
    follower = Follower(None, module(), [], (), None, None)
    with failing(ConfigError, "loop.left"):
        follower.sync()
    with failing(ConfigError, "loop.leader-left"), follower:
        pass
