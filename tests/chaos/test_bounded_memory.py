"""A merger that is absent or far too slow, and a Redis that is nearly full: islands train on and stretch their
interval, Redis stays small, and nothing that waits to be merged is trimmed. On a real server, in virtual time.
"""

from __future__ import annotations

import statistics
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import redis

from archipelago.broker.config import RunConfig, WireConfig
from archipelago.broker.errors import BrokerError
from archipelago.broker.messages import Refusal
from archipelago.broker.redis.keys import Keys
from archipelago.broker.redis.transport import connect
from archipelago.broker.transport import START
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.islands.sync.link import MEMORY_SHARE_MAX
from archipelago.merger.service import Merger
from archipelago.ops.experiments.virtual_time import VirtualRun
from archipelago.ops.launch.embedded_redis import Server, start_server
from tests.chaos.crew import Identity, steps

pytestmark = pytest.mark.processes

LIMIT = 64 << 20
"""bytes: the server's maxmemory"""
SLACK = 1 << 20
"""bytes: what connections and the allocator take now and then"""
OTHERS = "somebody-elses"
SPEEDS = [1.0, 1.0, 1.7]
"""seconds a step of each island"""


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with little memory."""
    with start_server(tmp_path_factory.mktemp("small") / "redis") as running:
        yield running


@pytest.fixture
def raw(small_server: Server) -> Iterator[Any]:
    """A client of the server's own commands; afterwards the server is empty, and as large as before."""
    with redis.Redis.from_url(small_server.url) as client:
        client.config_set("maxmemory", LIMIT)
        yield client
        client.config_set("maxmemory", LIMIT)
        client.flushall()


class Absent:
    """Stands where a merger would, and does nothing."""

    def __init__(self) -> None:
        self.rounds = self

    def deadline(self) -> None:
        return None

    def turn(self, block_seconds: float = 0.0) -> bool:
        return False


class Slow(Absent):
    """A merger that turns to the run only every so many seconds."""

    def __init__(self, merger: Merger, clock: Callable[[], float], seconds: float) -> None:
        super().__init__()
        self.merger, self.clock, self.seconds = merger, clock, seconds
        self._turned_at = float("-inf")

    def turn(self, block_seconds: float = 0.0) -> bool:
        if self.clock() - self._turned_at < self.seconds:
            return False
        self._turned_at = self.clock()
        return self.merger.turn(0.0)


class Patient(Absent):
    """A merger that begins from what Redis holds when a write was refused, as `serve` does."""

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


class Voyage:
    """A run in virtual time whose merger comes and goes."""

    def __init__(self, url: str, raw: Any, corpus: OpenCorpus, config: RunConfig) -> None:
        name = f"voyage-{uuid.uuid4().hex[:8]}"
        self.raw, self.keys, self.config = raw, Keys(name), config
        self.run = VirtualRun(config, corpus, cast(Any, steps), SPEEDS, connect=partial(connect, url, name), run=name)
        self.transport = self.run.transport
        self.merger = self.run.merger
        self.run.advance_until(lambda: self.merger.rounds.closed >= 6)

    def merged_by(self, merger: Any) -> None:
        self.run.merger = merger

    def train(self, count: int, each: Callable[[], None] = lambda: None) -> None:
        """The first island makes so many more steps; all others train as long."""
        islands = self.run.islands
        before, began = {name: island.totals.steps for name, island in islands.items()}, self.run.clock.now

        def done() -> bool:
            each()
            return islands["island-0"].totals.steps >= before["island-0"] + count

        self.run.advance_until(done)
        for (name, island), seconds in zip(islands.items(), SPEEDS, strict=True):
            assert (island.totals.steps - before[name]) * seconds >= self.run.clock.now - began - 2 * seconds, (
                "it waited"
            )

    @property
    def used(self) -> int:
        """Bytes that the server has in use."""
        return int(self.raw.info("memory")["used_memory"])

    @property
    def pending_max(self) -> int:
        return self.config.sync.window * len(SPEEDS)

    def fill(self) -> None:
        """Somebody else puts half of the memory to use."""
        for _ in range(32):
            self.raw.append(OTHERS, bytes(1 << 20))

    def waiting(self) -> set[Identity]:
        """What lies in the stream."""
        rows = [fields for _, fields in self.raw.xrange(self.keys.updates)]
        return {(r[b"island"].decode(), r[b"incarnation"].decode(), int(r[b"sequence"])) for r in rows}

    def merged(self) -> set[Identity]:
        """What was merged; nothing twice."""
        found = [(m.island, m.incarnation, m.sequence) for e in self.transport.reader.tape(4096) for m in e.members]
        assert len(found) == len(set(found))
        return set(found)

    def check_books(self) -> None:
        """They balance, and nothing was refused but second copies."""
        books = self.transport.reader.books()
        assert books.published == books.merged + books.refused + self.transport.reader.backlog()
        events = [event for _, event in self.transport.reader.events(START, 0.0, 1 << 20)]
        assert [event.reason for event in events if isinstance(event, Refusal) and not event.repeat] == []


@pytest.fixture
def voyage(small_server: Server, raw: Any, corpus: OpenCorpus, config: RunConfig) -> Voyage:
    large = WireConfig(up="bfloat16", thin="", down="float32")  # payloads that go as chunks
    config = replace(config, inner=replace(config.inner, steps=1 << 40), wire=large)
    return Voyage(small_server.url, raw, corpus, config)


def test_while_the_merger_is_absent_redis_stays_small_and_keeps_what_waits(voyage: Voyage) -> None:
    voyage.merged_by(Absent())
    voyage.train(200)
    used, sent = voyage.used, voyage.transport.reader.books().published
    voyage.train(1000)
    assert voyage.used - used < SLACK
    assert voyage.used < LIMIT // 4
    assert voyage.transport.reader.books().published == sent, "more than the window was sent"
    waiting = voyage.waiting()
    assert 0 < len(waiting) == voyage.transport.reader.backlog() <= voyage.pending_max
    chunks = list(voyage.raw.scan_iter(match=f"*{voyage.keys.run}:s0}}:c:island-*", count=1000))
    assert chunks, "no payload is large: this shows nothing"
    assert all(voyage.raw.ttl(key) == -1 for key in chunks), "what waits is not to expire"

    voyage.merged_by(voyage.merger)
    voyage.train(40)
    assert waiting <= voyage.merged(), "something that waited is gone"
    voyage.check_books()
    assert max(m.steps for e in voyage.transport.reader.tape(24) for m in e.members) > 1000, (
        "the interval did not stretch"
    )
    assert voyage.used - used < SLACK


def test_a_merger_ten_times_too_slow_stretches_the_interval(voyage: Voyage) -> None:
    stride = voyage.config.sync.interval / voyage.config.sync.fragments
    slow = Slow(voyage.merger, voyage.run.clock, 10 * stride * voyage.config.sync.window)
    voyage.merged_by(slow)
    most = 0

    def look() -> None:
        nonlocal most
        most = max(most, voyage.transport.reader.backlog())

    voyage.train(400, look)
    used, waiting = voyage.used, voyage.waiting()
    before = voyage.merger.rounds.closed
    voyage.train(800, look)
    assert most <= voyage.pending_max
    assert voyage.used - used < SLACK
    rounds = voyage.merger.rounds.closed - before
    assert 0.5 * 800 / (10 * stride) <= rounds <= 2 * 800 / (10 * stride), "that is not ten times too slow"
    taken = [m.steps for e in voyage.transport.reader.tape(rounds // 2) for m in e.members if m.island == "island-0"]
    assert statistics.median(taken) > 5 * voyage.config.sync.interval
    assert waiting <= voyage.merged() | voyage.waiting()
    voyage.check_books()


def test_near_the_limit_islands_hold_back_and_the_merger_goes_on(voyage: Voyage) -> None:
    voyage.merged_by(Absent())
    voyage.train(40)
    waiting, sent = voyage.waiting(), voyage.transport.reader.books().published
    assert waiting
    voyage.fill()
    voyage.raw.config_set("maxmemory", int(voyage.used / (MEMORY_SHARE_MAX + 0.05)))
    voyage.merged_by(voyage.merger)
    voyage.train(60)
    assert voyage.transport.reader.books().published == sent, "islands filled what the merger needs"
    assert waiting <= voyage.merged()
    assert voyage.transport.reader.backlog() == 0
    assert all("nearly full" in island.link.trouble for island in voyage.run.islands.values())

    voyage.raw.delete(OTHERS)
    voyage.train(40)
    assert voyage.transport.reader.books().published > sent + 10
    assert not any(island.link.trouble for island in voyage.run.islands.values())
    voyage.check_books()


def test_when_redis_is_full_everyone_trains_on_and_nothing_is_lost(voyage: Voyage) -> None:
    voyage.merged_by(Absent())
    voyage.train(40)
    waiting, sent = voyage.waiting(), voyage.transport.reader.books().published
    voyage.fill()
    voyage.raw.config_set("maxmemory", 16 << 20)
    patient = Patient(voyage.merger)
    voyage.merged_by(patient)
    closed = voyage.merger.rounds.closed
    voyage.train(60)
    assert patient.refused > 10
    assert voyage.merger.rounds.closed == closed
    assert (voyage.waiting(), voyage.transport.reader.books().published) == (waiting, sent)

    voyage.raw.delete(OTHERS)
    voyage.train(60)
    assert waiting <= voyage.merged()
    assert voyage.transport.reader.books().published > sent + 10
    voyage.check_books()
