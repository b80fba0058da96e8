"""Workers that start before their Redis or their merger: they wait, and no call ends them, whichever fails first.

The workers run in the test's process and train a small task.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from archipelago.broker.config import RunConfig
from archipelago.broker.errors import UnreachableError
from archipelago.broker.process import AwaitedRun, Patience
from archipelago.broker.redis.keys import REGISTRY
from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.islands.options import IslandOptions
from archipelago.islands.running import run_island
from archipelago.islands.tasks.ours import first_snapshots
from archipelago.islands.tasks.task import load_task
from archipelago.islands.tasks.workload import Workload, task_config
from archipelago.merger.main import MergerOptions, main
from archipelago.merger.service import Merger
from archipelago.merger.serving import serve
from tests.intercept import Intercepted
from tests.small import SMALL

TASK = """
import numpy as np
from archipelago import Task

def init(seed):
    return {name: np.ones((8, 4), np.float32) for name in ("one", "two")}

def loss(params, batch):
    return sum(((value - batch.mean()) ** 2).mean() for value in params.values())

def batches(run):
    while True:
        yield np.zeros((4, 8), np.float32)

task = Task(init, loss, batches)
"""
CONFIG = RunConfig(inner=SMALL.inner, sync=replace(SMALL.sync, fragments=2))


class Stuttering(Intercepted):
    """A connection on which the first call of each method fails.

    Attributes:
        is_to_stop: Whether to send this process a signal once a merger serves.
    """

    def __init__(self, transport: RedisTransport) -> None:
        super().__init__(transport)
        self.connection = transport.connection
        self.calls: Counter[str] = Counter()
        self.is_to_stop = False

    def intercept(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.calls[name] += 1
        if self.is_to_stop and name == "look" and self.calls[name] > 2:
            os.kill(os.getpid(), signal.SIGTERM)
        if self.calls[name] == 1 and name != "close":
            raise UnreachableError("the connection was reset")
        return method(*args, **kwargs)


@pytest.fixture
def task(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(TASK)
    return str(path)


@pytest.fixture
def transport(task: str) -> Iterator[RedisTransport]:
    made, file = connect(f"fakeredis://{uuid.uuid4().hex}", "demo"), load_task(task)
    work = Workload.of(file, task_config(CONFIG, file))
    manifest = work.describe("demo")
    made.create(manifest, first_snapshots(manifest, work.model.init()))
    yield made
    made.close()


@pytest.fixture
def stuttering(transport: RedisTransport, monkeypatch: pytest.MonkeyPatch) -> Stuttering:
    """Let the options of every worker give a connection that stutters. A worker tries again at once."""
    made = Stuttering(transport)
    monkeypatch.setattr(AwaitedRun, "connect", lambda _: made)
    monkeypatch.setattr(
        AwaitedRun, "patience", lambda options, stopped: Patience(options.wait_seconds, stopped, pause=lambda _: None)
    )
    return made


def test_a_merger_waits_also_for_its_run_and_may_end_in_an_outage(
    transport: RedisTransport,
    stuttering: Stuttering,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("archipelago.merger.shards.serve", partial(serve, pause=lambda _: None))
    stuttering.is_to_stop = True
    redis, key = transport.connection.redis, transport.connection.keys.manifest
    redis.delete(REGISTRY)
    redis.rename(key, "aside")

    def pause(_: float) -> None:
        """Let the run be there once the merger has found none."""
        if stuttering.calls["manifest"] > 1 and redis.exists("aside"):
            redis.rename("aside", key)

    monkeypatch.setattr(AwaitedRun, "patience", lambda of, stopped: Patience(of.wait_seconds, stopped, pause=pause))
    assert main(MergerOptions(run="demo", folder=tmp_path, wait_seconds=20.0, json=True)) == 0
    assert stuttering.calls["manifest"] > 2
    assert transport.reader.runs() == ["demo"], "the merger has written the name again"
    assert "served" in {note.kind for note in transport.reader.notes(100)}
    assert json.loads(capsys.readouterr().out) == {"run": "demo", "finished": False}


def island(task: str, folder: Path, wait_seconds: float) -> IslandOptions:
    return IslandOptions(
        run="demo", task=task, folder=folder, name="oslo", wait_seconds=wait_seconds, json=True,
        log_json=True,
    )  # fmt: skip


def test_an_island_waits(transport: RedisTransport, stuttering: Stuttering, task: str, tmp_path: Path) -> None:
    assert run_island(island(task, tmp_path, 20.0), lambda: bool(transport.reader.backlog())) == 0
    assert stuttering.calls["publish"] > 1
    assert transport.reader.backlog()


def test_an_island_says_that_there_is_no_merger_and_the_run_waits_for_one(
    transport: RedisTransport,
    task: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(AwaitedRun, "connect", lambda _: transport)
    ended = threading.Event()
    mergers: list[threading.Thread] = []
    steps_alone: list[int] = []

    def look() -> bool:
        """Start a merger once the island has made more steps than the run has."""
        beats = [presence.heartbeat for presence in transport.reader.presences()]
        if not mergers and beats and beats[0].steps > 2 * CONFIG.inner.steps:
            steps_alone.append(beats[0].global_step)
            mergers.append(threading.Thread(target=partial(serve, Merger(transport), ended.is_set)))
            mergers[0].start()
        return False

    assert run_island(island(task, tmp_path, 20.0), look) == 0
    ended.set()
    mergers[0].join()
    printed = capsys.readouterr()
    logged = [json.loads(line) for line in printed.err.splitlines()]
    assert "island.no-merger" in [line.get("code") for line in logged]
    assert 0 < steps_alone[0] < CONFIG.inner.steps // 2
    assert json.loads(printed.out) == {"island": "oslo", "run": "demo", "state": "done"}
    assert transport.reader.counters().refused == 0
    assert transport.reader.tape(1)[0].step >= CONFIG.inner.steps - CONFIG.sync.interval
