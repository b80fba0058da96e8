"""An island of two processes: DistributedDataParallel on the CPU, over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest

import archipelago
from archipelago.broker.errors import ConfigError
from archipelago.broker.redis.transport import connect
from archipelago.ops.launch.embedded_redis import Server, start_server
from tests import pytorch
from tests.conftest import Until
from tests.failing import failing
from tests.islands.own_loop.any_framework import served

torch = pytorch.required()

from archipelago.islands.pytorch.joining import Joining  # noqa: E402 - it imports torch
from archipelago.islands.pytorch.parallel import Follower, Leader, Said  # noqa: E402 - it imports torch
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
    try:
        until(lambda: connect(server.url, "own").reader.uid() or processes[0].poll(), "the run to be created")
        with served(server.url) as merger:
            said = [process.communicate()[0].split() for process in processes]
            books, beats = merger.transport.reader.books(), merger.transport.reader.presences()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0]
    assert said[0] == said[1], "clock, parameters and moments"
    assert int(said[0][0]) >= 120
    assert books.merged >= 4
    assert books.refused == 0
    assert {beat.heartbeat.island for beat in beats} <= {"both"}


class Alone:
    """A team whose other processes end while they take the first parameters."""

    def exchange(self, said: Said) -> Said:
        return said

    def share(self, tensors: Any) -> None:
        raise RuntimeError("Connection closed by peer")


def test_a_leader_without_its_team_leaves_the_run(monkeypatch: pytest.MonkeyPatch, until: Until) -> None:
    monkeypatch.setattr("archipelago.islands.pytorch.parallel.Team", lambda group: Alone())
    url = f"fakeredis://{uuid.uuid4().hex}"
    assert archipelago.pytorch.create(url, "own", module(), steps=10)
    before = threading.active_count()
    leader = Leader(None, Joining(url, "own", module(), island="both"))
    with pytest.raises(RuntimeError, match="closed by peer"), leader:
        pass
    until(lambda: threading.active_count() <= before, "the threads of the link to end")
    assert any("closed by peer" in note.text for note in connect(url, "own").reader.notes(10))
    with archipelago.pytorch.join(url, "own", module(), island="both"):
        pass


def test_all_processes_read_the_same_length_of_the_run(monkeypatch: pytest.MonkeyPatch, until: Until) -> None:
    monkeypatch.setattr(Alone, "share", lambda self, tensors: None)
    monkeypatch.setattr("archipelago.islands.pytorch.parallel.Team", lambda group: Alone())
    url = f"fakeredis://{uuid.uuid4().hex}"
    assert archipelago.pytorch.create(url, "own", module(), steps=10)
    with Leader(None, Joining(url, "own", module(), island="both")) as run:
        assert run._loop is not None
        link = run._loop.link
        connect(url, "own").reader.steer({"inner.steps": "7"})
        until(lambda: link.run_steps == 7, "the leader to hear of the change")
        assert run.steps == 10, "the others were not told yet"
        run.sync()
        assert run.steps == 7


class Lost:
    """A team whose leader has left."""

    def exchange(self, said: Said) -> Said:
        return Said(has_left=True)


def test_a_process_whose_leader_has_left_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("archipelago.islands.pytorch.parallel.Team", lambda *_: Lost())
    follower = Follower(None, Joining(None, "own", module()))
    with failing(ConfigError, "loop.left"):
        follower.sync()
    with failing(ConfigError, "loop.leader-left"), follower:
        pass
