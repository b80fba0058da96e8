"""Floods: an island whose stream holds far too many entries does not hold up the rounds of the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from archipelago.broker.messages import Refusal
from archipelago.broker.redis.transport import RedisTransport
from archipelago.broker.redis.updates import FLOOD_ENTRIES
from archipelago.broker.transport import START
from archipelago.broker.wire import pack
from archipelago.merger.service import READ_COUNT_MAX, Merger
from tests import samples


def flood(transport: RedisTransport, count: int) -> None:
    """Append entries that nobody can read to the stream of the island `mallory`."""
    transport.island.heartbeat(samples.heartbeat("mallory", state="left"))
    raw: Any = transport.connection.redis
    for start in range(0, count, 5000):
        with raw.pipeline(transaction=False) as pipe:
            for _ in range(min(5000, count - start)):
                pipe.xadd(transport.connection.keys.updates("mallory"), {"x": "1"})
            pipe.execute()


def send(transport: RedisTransport, number: int) -> None:
    """Publish the contribution of island `a` to a round."""
    manifest = transport.reader.manifest()
    p = manifest.fragment_of(number)
    payload = pack(np.full(manifest.sizes[p], 0.1, np.float32), "float32", 1)
    base = transport.reader.fragment(p)[0].version
    transport.island.heartbeat(samples.heartbeat("a"))
    sent = samples.contribution(payload, sequence=number, round=number, fragment=p, base=base, codec="float32")
    transport.island.publish(sent, payload)


def test_rounds_close_while_a_flood_is_refused(transport: RedisTransport) -> None:
    merger = Merger(transport, live_poll_seconds=0.0)
    assert merger.acquire()
    merger.load()
    count, rounds, turns = 1000, 6, 0
    flood(transport, count)
    for number in range(1, rounds + 1):
        send(transport, number)
        while merger.state.closed < number:
            merger.turn(0.0)
            turns += 1
            assert turns * READ_COUNT_MAX < count, "the rounds waited until the flood was over"
    while transport.reader.backlog():
        merger.turn(0.0)
    books = transport.reader.books()
    assert (books.published, books.merged, books.refused) == (count + rounds, rounds, count)
    events = [event for _, event in transport.reader.events(START, 0.0, 1 << 20)]
    assert len([event for event in events if isinstance(event, Refusal)]) < 500


def test_a_flooded_stream_is_counted_and_not_read(transport: RedisTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    transport.island.publish(samples.contribution(), b"payload")
    flood(transport, FLOOD_ENTRIES + 1)
    transport.merger.updates(0.0, count=1)  # the group exists now, so the server knows how much waits
    read: list[str] = []
    pages = transport.connection.pages

    def noting(key: str, *rest: Any) -> Any:
        read.append(key)
        return pages(key, *rest)

    monkeypatch.setattr(transport.connection, "pages", noting)
    books = transport.reader.books()
    assert (books.published, books.published_tokens, books.kept) == (FLOOD_ENTRIES + 2, 100, 0)
    assert transport.connection.keys.updates("mallory") not in read
    assert transport.reader.backlog() == FLOOD_ENTRIES + 2
