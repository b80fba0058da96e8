"""The link of an island to several shards: one that hangs holds up none of the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from archipelago.broker.memory.transport import MemoryBroker
from archipelago.broker.shards.reader import ShardedReader
from archipelago.broker.shards.transport import WholeRun
from archipelago.broker.transport import Transport
from archipelago.islands.data.sharding import shard_order
from archipelago.islands.sync.connection import link as link_module
from archipelago.islands.sync.connection.link import Link
from tests import samples
from tests.conftest import PATIENCE_SECONDS, Until
from tests.intercept import Intercepted
from tests.sharded import create_sharded


class Hanging(Intercepted):
    """A connection whose calls hang while `answers` is not set."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.answers, self.hangs = threading.Event(), threading.Event()
        self.answers.set()

    def intercept(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self.answers.is_set():
            if name == "heartbeat":
                self.hangs.set()
            self.answers.wait()
        return method(*args, **kwargs)


@pytest.fixture
def run() -> WholeRun:
    """A run of two shards, of which the second one can hang."""
    made = create_sharded(MemoryBroker().connect("demo"))
    home, further = made.shards
    made.shards = [home, Hanging(further)]
    made.reader = ShardedReader([shard.reader for shard in made.shards], made.reader.manifest())
    return made


@pytest.fixture
def link(run: WholeRun, monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    monkeypatch.setattr(link_module, "HEARTBEAT_SECONDS", 0.01)
    monkeypatch.setattr(link_module, "BLOCK_SECONDS", 0.01)
    manifest = run.reader.manifest()
    made = Link(run, manifest, "a/x", shard_order(manifest.config.data.shards, manifest.config.seed))
    made.join()
    made.start()
    yield made
    hanging(run).answers.set()
    made.stop(PATIENCE_SECONDS)


def hanging(run: WholeRun) -> Hanging:
    further = run.shards[1]
    assert isinstance(further, Hanging)
    return further


def told(shard: Transport) -> int:
    """Return the steps of the island by the newest heartbeat that a shard has."""
    presences = shard.reader.presences()
    return presences[0].heartbeat.steps if presences else 0


def test_a_shard_that_hangs_keeps_no_heartbeat_from_the_others(run: WholeRun, link: Link, until: Until) -> None:
    home, further = run.shards[0], hanging(run)
    run.shards[0].merger.acquire("merger", 100.0)
    link.beat(samples.heartbeat(island="a", steps=1))
    until(lambda: told(home) == 1 and told(further.inner) == 1, "a heartbeat in both shards")
    further.answers.clear()
    until(further.hangs.is_set, "a heartbeat that hangs")
    for steps in (2, 3):
        link.beat(samples.heartbeat(island="a", steps=steps))
        until(lambda steps=steps: told(home) == steps, "a heartbeat in shard 0")
    assert link.is_served
    assert told(further.inner) == 1
    further.answers.set()
    until(lambda: told(further.inner) == 3, "a heartbeat in the shard that answers again")


def test_an_island_leaves_when_all_shards_know_it(run: WholeRun, link: Link, until: Until) -> None:
    further = hanging(run)
    link.beat(samples.heartbeat(island="a", steps=1))
    assert link.drain(PATIENCE_SECONDS)
    further.answers.clear()
    link.beat(samples.heartbeat(island="a", steps=2, state="left"))
    until(further.hangs.is_set, "the farewell that hangs")
    assert not link.drain(0.05)
    further.answers.set()
    assert link.drain(PATIENCE_SECONDS)
    assert [told(shard) for shard in (run.shards[0], further.inner)] == [2, 2]
