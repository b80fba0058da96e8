"""Workers that start during an outage of Redis: no call ends them, whichever meets the outage first."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import archipelago.islands.main
import archipelago.islands.running
import archipelago.merger.main
from archipelago.broker.errors import UnreachableError
from archipelago.broker.process import AwaitedRun
from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.islands.creation import describe, first_snapshots
from archipelago.merger.serving import serve
from tests.failing import failing
from tests.intercept import Intercepted
from tests.islands.test_main import CORPUS
from tests.small import SMALL


class Stuttering(Intercepted):
    """A connection on which the first and the third call of each method fail."""

    def __init__(self, transport: RedisTransport) -> None:
        super().__init__(transport)
        self.connection = transport.connection
        self.calls: Counter[str] = Counter()

    def intercept(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.calls[name] += 1
        if self.calls[name] in (1, 3):
            raise UnreachableError("the connection was reset")
        return method(*args, **kwargs)


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisTransport]:
    monkeypatch.setattr("archipelago.broker.process.PAUSE_SECONDS", 0.01)
    monkeypatch.setattr("archipelago.islands.tasks.ours.training_text", lambda *_: CORPUS)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # The merger sets it as well.
    for module in (archipelago.islands.running, archipelago.merger.main):
        monkeypatch.setattr(module, "keep_compiled", lambda: None)
    monkeypatch.setattr(archipelago.merger.main, "keep_freed_memory", lambda: None)
    monkeypatch.setattr("archipelago.merger.serving.serve", partial(serve, pause=lambda _: None))
    made = connect(f"fakeredis://{uuid.uuid4().hex}", "demo")
    manifest = describe("demo", SMALL, CORPUS.identity)
    made.create(manifest, first_snapshots(manifest))
    yield made
    made.close()


@pytest.fixture
def stuttering(transport: RedisTransport, monkeypatch: pytest.MonkeyPatch) -> Stuttering:
    made = Stuttering(transport)
    monkeypatch.setattr(AwaitedRun, "connect", lambda _: made)
    return made


def until(module: Any, monkeypatch: pytest.MonkeyPatch, holds: Callable[[], object]) -> None:
    """Stop the worker, as a signal does, once `holds`."""
    monkeypatch.setattr(module, "stop_on_signals", lambda: lambda: bool(holds()))


def test_a_merger_waits(
    transport: RedisTransport, stuttering: Stuttering, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    until(archipelago.merger.main, monkeypatch, lambda: stuttering.calls["updates"] > 1)
    assert (
        archipelago.merger.main.main(
            archipelago.merger.main.MergerOptions(run="demo", folder=tmp_path, wait_seconds=20.0)
        )
        == 0
    )
    assert stuttering.calls["manifest"] > 3
    assert "served" in {note.kind for note in transport.reader.notes(100)}


def test_a_merger_that_ends_in_an_outage(
    stuttering: Stuttering, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def served_and_then_an_outage() -> bool:
        if stuttering.calls["updates"] > 1:
            stuttering.calls["books"] = 2
        return stuttering.calls["updates"] > 1

    until(archipelago.merger.main, monkeypatch, served_and_then_an_outage)
    assert (
        archipelago.merger.main.main(
            archipelago.merger.main.MergerOptions(run="demo", folder=tmp_path, wait_seconds=20.0, json=True)
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out) == {"run": "demo", "round": 0, "merged": None, "finished": False}


def test_an_island_waits(
    transport: RedisTransport, stuttering: Stuttering, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    until(archipelago.islands.main, monkeypatch, lambda: transport.reader.backlog())
    options = archipelago.islands.main.IslandOptions(
        run="demo", folder=tmp_path, name="oslo", scan_steps=1, wait_seconds=20.0
    )
    assert archipelago.islands.main.main(options) == 0
    assert stuttering.calls["publish"] > 1
    assert transport.reader.backlog()


AT_THE_START = (
    "manifest",
    "control",
    "presences",
    "claim_checkpoint",
    "claim_name",
    "heads",
    "is_served",
    "instance",
    "last_event",
    "fragment",
)


@pytest.mark.parametrize("call", AT_THE_START)
def test_a_worker_without_patience_ends_at_once(call: str, stuttering: Stuttering, tmp_path: Path) -> None:
    stuttering.calls.update(dict.fromkeys(set(AT_THE_START) - {call}, 3))
    with failing(UnreachableError):
        archipelago.islands.main.main(
            archipelago.islands.main.IslandOptions(run="demo", folder=tmp_path, name="oslo", wait_seconds=0.0)
        )
    assert stuttering.calls[call] == 1, stuttering.calls
