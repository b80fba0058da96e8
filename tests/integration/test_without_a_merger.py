"""An island that starts before its merger: it says so at once, and the run waits for the merger."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import archipelago.islands.main
import archipelago.islands.running
from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.islands.creation import describe, first_snapshots
from archipelago.islands.main import IslandOptions
from archipelago.merger.service import Merger
from archipelago.merger.serving import serve
from tests.islands.test_main import CORPUS
from tests.small import SMALL


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisTransport]:
    monkeypatch.setattr("archipelago.islands.tasks.ours.training_text", lambda *_: CORPUS)
    monkeypatch.setattr(archipelago.islands.running, "keep_compiled", lambda: None)
    made = connect(f"fakeredis://{uuid.uuid4().hex}", "demo")
    manifest = describe("demo", SMALL, CORPUS.identity)
    made.create(manifest, first_snapshots(manifest))
    monkeypatch.setattr(IslandOptions, "connect", lambda _: made)
    yield made
    made.close()


@pytest.mark.full
def test_the_run_waits_for_its_merger(
    transport: RedisTransport,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ended = threading.Event()
    mergers: list[threading.Thread] = []
    steps_alone: list[int] = []

    def look() -> bool:
        """Start a merger once the island has made more steps than the run has."""
        beats = [presence.heartbeat for presence in transport.reader.presences()]
        if not mergers and beats and beats[0].steps > 2 * SMALL.inner.steps:
            steps_alone.append(beats[0].global_step)
            merger = Merger(transport)
            mergers.append(threading.Thread(target=serve, args=(merger, ended.is_set)))
            mergers[0].start()
        return False

    monkeypatch.setattr(archipelago.islands.main, "stop_on_signals", lambda: look)
    options = IslandOptions(run="demo", folder=tmp_path, name="oslo", scan_steps=1, json=True, log_json=True)
    assert archipelago.islands.main.main(options) == 0
    ended.set()
    mergers[0].join()
    printed = capsys.readouterr()
    logged = [json.loads(line) for line in printed.err.splitlines()]
    assert "island.no-merger" in [line.get("code") for line in logged]
    assert 0 < steps_alone[0] < SMALL.inner.steps // 2
    found = json.loads(printed.out)
    assert found["state"] == "done"
    assert found["refused"] == 0
    assert transport.reader.tape(1)[0].step >= SMALL.inner.steps - SMALL.sync.interval
