"""An absent merger, and a Redis that is nearly full or full: islands train on and stretch their interval.

The memory of Redis stays bounded, and nothing that waits is trimmed. The tests use a real server and virtual time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis

from archipelago.broker.commits import START
from archipelago.broker.config import STEPS_MAX, MergeConfig, WireConfig
from archipelago.broker.errors import BrokerError
from archipelago.broker.messages import Refusal
from archipelago.broker.redis.keys import Keys
from archipelago.broker.redis.transport import connect
from archipelago.broker.transport import MEMORY_SHARE_MAX
from archipelago.merger.service import Merger
from archipelago.ops.experiments.virtual_time import VirtualRun
from archipelago.ops.launch.embedded_redis import start_server
from tests.conftest import Until
from tests.integration import virtual

pytestmark = pytest.mark.processes

#: The server's maxmemory in bytes.
LIMIT = 64 << 20
#: Bytes by which connections and the allocator vary.
SLACK = 1 << 20
OTHERS = "another-user"
#: Seconds per step of each island.
SPEEDS = [1.0, 1.0, 1.7]
Identity = tuple[str, str, int]


class Absent:
    """A merger that does nothing."""

    def __init__(self) -> None:
        self.rounds = self

    def deadline(self) -> None:
        return None

    def turn(self, block_seconds: float = 0.0) -> bool:
        return False


class Patient(Absent):
    """A merger that loads its state again after a refused write, as `serve` does."""

    def __init__(self, merger: Merger) -> None:
        super().__init__()
        self.merger, self.refused, self._loaded = merger, 0, True

    def turn(self, block_seconds: float = 0.0) -> bool:
        try:
            if not self._loaded:
                self.merger.load()
                self._loaded = True
            return self.merger.turn(0.0)
        except BrokerError:
            self._loaded = False
            self.refused += 1
            return False


#: Payloads of this run are sent as chunks.
CONFIG = replace(
    virtual.CONFIG,
    inner=replace(virtual.CONFIG.inner, steps=STEPS_MAX),
    merge=MergeConfig(embedding="average", rest="average"),
    wire=WireConfig(up="bfloat16", thin="", down="float32"),
)


class BoundedRun:
    """A run in virtual time whose merger can be replaced. `raw` is a client for plain commands."""

    def __init__(self, url: str, raw: Any, until: Until) -> None:
        name = "bounded"
        raw.config_set("maxmemory", LIMIT)
        self.raw, self.keys, self._until = raw, Keys(name), until
        self.run = VirtualRun(virtual.work(CONFIG, rows=2048), SPEEDS, connect=partial(connect, url, name), run=name)
        self.transport = self.run.transport
        self.merger = self.run.merger
        self.run.advance_until(lambda: self.merger.rounds.closed >= 6)

    def merged_by(self, merger: Any) -> None:
        self.run.mergers[0] = merger

    def train(self, count: int) -> None:
        """Let the first island make `count` more steps, and assert that the others train as long."""
        islands = self.run.islands
        before, began = {name: island.totals.steps for name, island in islands.items()}, self.run.clock.now

        self.run.advance_until(lambda: islands["island-0"].totals.steps >= before["island-0"] + count)
        for (name, island), seconds in zip(islands.items(), SPEEDS, strict=True):
            assert (island.totals.steps - before[name]) * seconds >= self.run.clock.now - began - 2 * seconds, (
                "an island waited"
            )

    @property
    def sent(self) -> int:
        return self.transport.reader.counters().published

    @property
    def used(self) -> int:
        """Memory that the server uses, in bytes, once it has freed what was deleted and its disk has taken the rest.

        While its disk is busy, the server holds up to two seconds of writes for the append-only file.
        """
        self._until(
            lambda: self._info("lazyfree_pending_objects") == self._info("aof_buffer_length") == 0,
            "the server to have written and freed everything",
        )
        return self._info("used_memory")

    def _info(self, field: str) -> int:
        return int(self.raw.info()[field])

    def fill(self) -> None:
        """Let another user fill half of the memory."""
        for _ in range(32):
            self.raw.append(OTHERS, bytes(1 << 20))

    def waiting(self) -> set[Identity]:
        """Return the contributions in the stream."""
        rows = [fields for name in self.run.islands for _, fields in self.raw.xrange(self.keys.updates(name))]
        return {(r[b"island"].decode(), r[b"incarnation"].decode(), int(r[b"sequence"])) for r in rows}

    def merged(self) -> set[Identity]:
        """Return the merged contributions. Assert that each was merged once."""
        found = [(m.island, m.incarnation, m.sequence) for e in self.transport.reader.tape(4096) for m in e.members]
        assert len(found) == len(set(found))
        return set(found)

    def check_counters(self) -> None:
        """Assert that the counters balance and that only retries were refused."""
        counters = self.transport.reader.counters()
        assert counters.published == counters.merged + counters.refused + self.transport.reader.backlog()
        events = [event for _, event in self.transport.reader.events(START, 0.0, 1 << 20)]
        assert [event.reason for event in events if isinstance(event, Refusal) and not event.repeat] == []


@pytest.fixture
def bounded(tmp_path: Path, until: Until) -> Iterator[BoundedRun]:
    with start_server(tmp_path / "redis") as server, redis.Redis.from_url(server.url) as raw:
        yield BoundedRun(server.url, raw, until)


@pytest.mark.full
def test_redis_stays_small_without_a_merger_and_when_it_is_full_nothing_is_lost(bounded: BoundedRun) -> None:
    bounded.merged_by(Absent())
    bounded.train(100)
    used, sent = bounded.used, bounded.sent
    bounded.train(500)
    assert bounded.used - used < SLACK
    assert bounded.used < LIMIT // 4
    assert bounded.sent == sent, "more than the window was sent"
    waiting = bounded.waiting()
    assert 0 < len(waiting) == bounded.transport.reader.backlog() <= CONFIG.sync.window * len(SPEEDS)
    chunks = list(bounded.raw.scan_iter(match=f"*{bounded.keys.run}:s0}}:c:island-*", count=1000))
    assert chunks, "no payload is large enough for this test"
    assert all(bounded.raw.ttl(key) == -1 for key in chunks), "waiting contributions would expire"

    # Another user fills the memory up to the share that islands leave to the merger.
    bounded.fill()
    bounded.raw.config_set("maxmemory", int(bounded.used / (MEMORY_SHARE_MAX + 0.05)))
    bounded.merged_by(bounded.merger)
    bounded.train(60)
    assert bounded.sent == sent, "islands used the memory that the merger needs"
    assert waiting <= bounded.merged(), "a waiting contribution was lost"
    assert bounded.transport.reader.backlog() == 0
    assert all(island.link.pumps.trouble for island in bounded.run.islands.values())

    bounded.raw.delete(OTHERS)
    bounded.train(40)
    assert bounded.sent > sent + 10
    assert not any(island.link.pumps.trouble for island in bounded.run.islands.values())
    steps = max(m.steps for e in bounded.transport.reader.tape(48) for m in e.members)
    assert steps > 500, "the interval did not stretch"
    assert bounded.used - used < SLACK
    bounded.merged_by(Absent())
    bounded.train(40)
    waiting, sent, closed = bounded.waiting(), bounded.sent, bounded.merger.rounds.closed
    bounded.fill()
    bounded.raw.config_set("maxmemory", 16 << 20)
    patient = Patient(bounded.merger)
    bounded.merged_by(patient)
    bounded.train(20)
    assert patient.refused > 10
    assert (bounded.waiting(), bounded.sent, bounded.merger.rounds.closed) == (waiting, sent, closed)

    bounded.raw.delete(OTHERS)
    bounded.train(60)
    assert waiting <= bounded.merged()
    assert bounded.sent > sent + 10
    bounded.check_counters()
