"""Leases on data and requests for state in Redis: their keys, races between islands, and their commands."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from archipelago.broker.ranges import ReadPosition
from archipelago.broker.redis.keys import Keys
from archipelago.broker.redis.transport import RedisTransport
from tests import samples
from tests.broker.redis.stored_keys import Connect
from tests.conftest import Until


def test_an_unreadable_cursor_restarts_at_zero(
    transport: RedisTransport, raw: Any, epoch: int, caplog: pytest.LogCaptureFixture
) -> None:
    raw.hset(Keys(transport.run).data, mapping={"0": b"\xff", "1": "0:8"})
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert transport.reader.cursors() == {"1": (0, 8)}
    assert len(caplog.records) == 1
    assert "the cursor of range 0 cannot be read" in caplog.text
    assert transport.island.lease_range(["0", "1"], "a/x") == ReadPosition("0", 0, 0)
    transport.merger.commit(epoch, samples.commit([], cursors={"0": (0, 4)}))
    assert transport.reader.cursors() == {"0": (0, 4), "1": (0, 8)}


def disturb_leases(transport: RedisTransport, disturb: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call `disturb` with 1, 2, 3, … between each read of the range fields and the write of the lease."""
    read, times = transport.connection.parsed_cursors, iter(range(1, 1000))

    def read_and_disturb(fields: Any) -> Any:
        found = read(fields)
        disturb(next(times))
        return found

    monkeypatch.setattr(transport.connection, "parsed_cursors", read_and_disturb)


@pytest.mark.parametrize("cursor", [(0, 64), (1, 0)], ids=["it moves", "its pass ends"])
@pytest.mark.parametrize("when", [1, 2], ids=["during the choice", "during the lease"])
def test_a_lease_starts_at_the_cursor_of_a_concurrent_commit(
    transport: RedisTransport,
    connections: Connect,
    epoch: int,
    monkeypatch: pytest.MonkeyPatch,
    cursor: tuple[int, int],
    when: int,
) -> None:
    """Otherwise the island would read the sequences again that were just merged."""
    island = connections()

    def commit_once(n: int) -> None:
        if n == when:
            transport.merger.commit(epoch, samples.commit([], cursors={"0": cursor}))

    disturb_leases(island, commit_once, monkeypatch)
    assert island.island.lease_range(["0"], "a/x") == ReadPosition("0", *cursor)
    assert island.island.leased(["0"], "a/x") == {"0"}


def commands(raw: Any, work: Callable[[], object]) -> int:
    """Return how many commands the server executes during the work."""
    before = raw.info("stats")["total_commands_processed"]
    work()
    return int(raw.info("stats")["total_commands_processed"] - before)


def test_a_lease_takes_no_command_for_each_island(transport: RedisTransport, raw: Any) -> None:
    """While ranges are free, an island does not ask which other islands live."""
    counts = {}
    for count in (16, 64):
        for n in range(count):
            transport.island.lease_range([str(n)], f"i{n}/x")
        who = f"i{count - 1}/x"
        counts[count] = (
            commands(raw, partial(transport.island.leased, [str(count - 1)], who)),
            commands(raw, partial(transport.island.lease_range, [str(count + 100)], who)),
        )
    assert counts[64] == counts[16]


@pytest.mark.parametrize("damage", [b"", b"\xff", b"b/y", b"b/y:1", b"b/y:0" * 1000, None], ids=str)
def test_a_damaged_lease_is_free_and_lost(transport: RedisTransport, raw: Any, damage: bytes | None) -> None:
    transport.island.heartbeat(samples.heartbeat("a", incarnation="x"))
    transport.island.heartbeat(samples.heartbeat("b", incarnation="y"))
    assert transport.island.lease_range(["0"], "a/x") == ReadPosition("0", 0, 0)
    key = Keys(transport.run).taken("0")
    raw.delete(key)
    if damage is None:
        raw.rpush(key, "a/x:0")
    else:
        raw.set(key, damage)
    assert transport.island.leased(["0"], "a/x") == frozenset()
    assert transport.island.lease_range(["0"], "b/y") == ReadPosition("0", 0, 0)
    assert transport.island.lease_range(["0"], "a/x") is None


def test_requests_among_thousands_of_others_are_found(
    transport: RedisTransport, connections: Connect, raw: Any, until: Until
) -> None:
    other = connections()
    for number in range(400):
        other.island.request_state(f"nobody-{number}/x")
    for island in ("a", "b"):  # last, because they expire, and the requests may take long
        transport.island.heartbeat(samples.heartbeat(island, "joining"))
    key = Keys(transport.run).requests
    assert raw.expire(key, 100)
    other.island.request_state("b/x")
    assert raw.ttl(key) <= 100, "those of islands that died end, although others come"
    until(lambda: transport.island.open_requests() == ["b/x"], "the request is found")
    assert transport.island.promise_answer("b/x", "a/x")
    assert [transport.island.open_requests() for _ in range(9)] == [[]] * 9
