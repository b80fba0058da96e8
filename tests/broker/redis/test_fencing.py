"""The fenced write: lost epochs, broken connections, other instances, full servers, and round trips."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from redis.connection import AbstractConnection

from archipelago.broker.commits import Renewal
from archipelago.broker.errors import (
    BrokerError,
    ConfigError,
    FencedError,
    UnknownRunError,
    UnreachableError,
    WithdrawnError,
)
from archipelago.broker.messages import Call, Marker, Resume
from archipelago.broker.ranges import RANGES_MAX
from archipelago.broker.redis.keys import Keys
from archipelago.broker.redis.lease import EPOCH_MAX
from archipelago.broker.redis.transport import RedisTransport
from tests import samples
from tests.broker.redis.stored_keys import Connect, chunk_keys
from tests.failing import failing
from tests.samples import LARGE, REFUSAL, with_payloads


@pytest.mark.parametrize("queued", [False, True], ids=["while it is watched", "before it is sent"])
def test_a_connection_that_breaks_within_a_watch_is_unreachable(
    transport: RedisTransport, raw: Any, epoch: int, queued: bool
) -> None:
    """redis-py raises the same error for a broken connection and for a changed key."""
    with pytest.raises(UnreachableError), transport.connection.watching("watched") as pipe:
        if queued:
            pipe.multi()
            pipe.hset("anything", "field", "1")
        raw.client_kill_filter(_type="normal", skipme=True)
        pipe.execute() if queued else pipe.immediate_execute_command("GET", "anything")
    transport.merger.announce(epoch, Call(1, 0))
    assert not raw.exists("anything")


def test_a_server_that_forgot_the_scripts_is_sent_them_again(transport: RedisTransport, raw: Any, epoch: int) -> None:
    transport.merger.announce(epoch, Call(1, 0))
    raw.script_flush()
    transport.merger.announce(epoch, Call(2, 1))
    transport.merger.release(epoch)
    raw.script_flush()
    assert transport.merger.acquire("another", 5.0) == epoch + 1


def test_a_merger_of_a_run_that_was_created_again_has_no_run(
    transport: RedisTransport, connections: Connect, raw: Any, epoch: int
) -> None:
    transport.merger.announce(epoch, Call(1, 0))
    raw.delete(Keys(transport.run).manifest)
    writes: list[Callable[[], object]] = [
        lambda: transport.merger.announce(epoch, Call(2, 1)),
        lambda: transport.merger.acquire("m", 5.0),
    ]
    for write in writes:
        with failing(UnknownRunError, "broker.unknown-run"):
            write()
    raw.set(Keys(transport.run).manifest, "x")
    for write in writes:
        with failing(ConfigError, "config.manifest") as damaged:
            write()
        assert "--force" in damaged.value.remedy, "the islands that live stay, and rm refuses to delete their run"
    raw.delete(Keys(transport.run).manifest)
    manifest = replace(samples.manifest(transport.run), uid="another")
    connections().create(manifest, samples.first_snapshots(manifest))
    for write in writes:
        with failing(UnknownRunError, "broker.other-run"):
            write()


def test_a_lost_epoch_is_not_used_again(transport: RedisTransport, raw: Any, epoch: int) -> None:
    """Commands of the old epoch may still be in flight."""
    raw.delete(Keys(transport.run).epoch, Keys(transport.run).lease)
    assert transport.merger.acquire("merger", 5.0) == epoch + 1
    with pytest.raises(FencedError):
        transport.merger.announce(epoch, Call(1, 0))


def test_a_fence_ends_the_epoch_whatever_its_key_holds(transport: RedisTransport, raw: Any, epoch: int) -> None:
    transport.merger.lease.fence()
    with pytest.raises(FencedError):
        transport.merger.announce(epoch, Call(1, 0))
    assert transport.merger.acquire("merger", 5.0) == epoch + 2
    for damaged in ("x", "-7 merger", f"{EPOCH_MAX + 1} merger", " "):
        raw.set(Keys(transport.run).epoch, damaged)
        transport.merger.lease.fence()
        assert raw.get(Keys(transport.run).epoch) == b"1 none", damaged


def test_the_epochs_go_on_in_a_run_that_is_created_again(transport: RedisTransport, raw: Any, epoch: int) -> None:
    """An older merger that is still alive stays fenced."""
    raw.delete(Keys(transport.run).manifest)
    samples.begin(transport)
    transport.merger.release(epoch)
    assert transport.merger.acquire("another", 1.0) == epoch + 1


def test_what_another_instance_may_have_forgotten_is_not_built_on(
    transport: RedisTransport, epoch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round is the last one there, too, but contributions, chunks and compactions may be missing."""
    full = samples.commit([]).compaction
    assert full is not None
    transport.merger.commit(epoch, samples.commit([], b"", difference=b"one", after_round=0))
    placed = transport.merger.place(epoch, full)
    with failing(BrokerError, code="broker.other-round"):
        transport.merger.trim(epoch, [], after_round=3)
    monkeypatch.setattr(transport.merger.lease, "_instance", "another")
    writes: list[Callable[[], object]] = [
        lambda: transport.merger.commit(epoch, samples.commit([], round_number=3, after_round=1)),
        lambda: transport.merger.compact(epoch, placed, after_round=1),
        lambda: transport.merger.trim(epoch, [], after_round=1),
        lambda: transport.merger.trim(epoch, []),
        lambda: transport.merger.announce(epoch, Marker(1, 1)),
        lambda: samples.refuse(transport, epoch, [("a/1-0", REFUSAL)]),
        lambda: transport.merger.renew(epoch, "m", 60.0),
    ]
    for write in writes:
        with failing(BrokerError, code="broker.other-round"):
            write()
    assert transport.merger.acquire("merger", 60.0) == epoch + 1
    transport.merger.compact(epoch + 1, placed, after_round=1)


def test_all_fields_of_the_state_are_those_of_the_last_write(transport: RedisTransport, raw: Any, epoch: int) -> None:
    """A write sends only those that have changed, unless someone has changed them, too."""
    key, steps = Keys(transport.run).state, ("nothing", "deleted", "a list", "another digest")
    for number, damage in enumerate(steps):
        if damage in ("deleted", "a list"):
            raw.delete(key)
        if damage == "a list":
            raw.rpush(key, "x")
        elif damage == "another digest":
            raw.hset(key, mapping={"digest": '"x"', "closed": "9"})
        state = {"accounts": {f"i{number}": [1], "kept": [None]}, "closed": 3, "digest": f"{number}"}
        text = json.dumps(state, sort_keys=True)
        with failing(BrokerError, "broker.damaged") if damage == "a list" else nullcontext():
            transport.merger.refuse(epoch, [], text, {})
        assert transport.reader.merger_state() == text, damage


@pytest.fixture
def trips(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return a function that counts the round trips so far: a merger that is far from its Redis waits for each."""
    send, read, said = AbstractConnection.send_packed_command, AbstractConnection.read_response, [""]

    def noting(what: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **options: Any) -> Any:
            if said[-1] != what:
                said.append(what)
            return method(*arguments, **options)

        return noted

    monkeypatch.setattr(AbstractConnection, "send_packed_command", noting("asked", send))
    monkeypatch.setattr(AbstractConnection, "read_response", noting("answered", read))
    return lambda: said.count("answered")


def test_a_commit_takes_few_round_trips(transport: RedisTransport, epoch: int, trips: Callable[[], int]) -> None:
    entries = [transport.island.publish(samples.contribution(sequence=n), b"payload") for n in range(3)]
    transport.merger.updates(0.0)
    transport.reader.heads()  # reads the manifest, once
    transport.merger.refuse(epoch, [], '{"digest": "0"}', {})  # sends the script and reads the state, once
    before = trips()
    transport.merger.commit(epoch, samples.commit(entries, b"", difference=LARGE, after_round=0))
    assert trips() - before == len(["the difference", "the script"])
    assert len(transport.reader.tape(9)) == 1


def test_an_idle_turn_takes_one_round_trip(
    transport: RedisTransport, raw: Any, epoch: int, trips: Callable[[], int]
) -> None:
    """It renews the lease, reads what islands and operators say, and waits."""
    transport.island.heartbeat(samples.heartbeat("a"))
    renewal = Renewal(epoch, "merger", 1000.0)
    transport.merger.look(0.0, 64, renewal, around=True)
    before = trips()
    seen = transport.merger.look(0.0, 64, renewal, around=True)
    assert trips() - before == 1
    assert [each.heartbeat.island for each in seen.presences or ()] == ["a"]
    assert raw.pttl(Keys(transport.run).lease) > 900_000


def test_a_turn_without_islands_waits_like_any_other_and_ends_when_the_first_one_comes(
    transport: RedisTransport, epoch: int, connections: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = list[float]()
    monkeypatch.setattr("archipelago.broker.redis.merger.time", SimpleNamespace(sleep=waits.append))
    assert transport.merger.look(0.25, around=True).presences == []
    connections().island.heartbeat(samples.heartbeat("a"))
    assert transport.merger.look(0.25, around=True).presences
    assert waits == [0.25]


def test_a_write_sends_what_has_changed_of_a_large_state(transport: RedisTransport, raw: Any, epoch: int) -> None:
    accounts = {f"island-{number}": [number, "x" * 300] for number in range(1000)}
    sent, text = [], ""
    for number in range(3):
        accounts["island-7"] = [number, "y"]
        text = json.dumps({"accounts": accounts, "digest": f"{number}"}, sort_keys=True)
        before = raw.info("stats")["total_net_input_bytes"]
        transport.merger.refuse(epoch, [], text, {})
        sent.append(raw.info("stats")["total_net_input_bytes"] - before)
    assert transport.reader.merger_state() == text
    assert sent[0] > 300_000 > 20_000 > sent[2]


def test_many_entries_are_counted_correctly(transport: RedisTransport, epoch: int) -> None:
    """There are more than one request reads, and more than one script takes."""
    entries = [transport.island.publish(samples.contribution(sequence=n), b"payload") for n in range(600)]
    while transport.merger.updates(0.0, count=500):
        pass
    transport.merger.commit(epoch, samples.commit(entries[::2]))
    assert samples.pending(transport) == (300, 30_000)
    transport.merger.trim(epoch, entries)
    assert (samples.pending(transport), transport.reader.backlog()) == ((300, 30_000), 300)
    transport.merger.rewind()
    assert len(transport.merger.updates(0.0, count=500)) == 300


def test_a_commit_names_the_island_whose_contribution_is_gone(transport: RedisTransport, raw: Any, epoch: int) -> None:
    """An island's role lets it shorten its stream."""
    entries = [transport.island.publish(samples.contribution(island=name), b"payload") for name in ("a", "b.c-d")]
    raw.xtrim(Keys(transport.run).updates("b.c-d"), maxlen=0)
    with pytest.raises(WithdrawnError) as found:
        transport.merger.commit(epoch, samples.commit(entries))
    assert found.value.island == "b.c-d"
    assert (transport.reader.tape(9), transport.reader.backlog()) == ([], 1)


def test_a_write_has_any_number_of_cursors_and_of_entries(transport: RedisTransport, epoch: int) -> None:
    """Lua unpacks a few thousand values at most, and would fail after the first commands of the write."""
    cursors = {str(number): (0, number) for number in range(RANGES_MAX)}
    transport.merger.take_up(epoch, Resume(0, epoch), cursors, {})
    assert transport.connection.cursors() == cursors
    transport.merger.trim(epoch, [f"a/{number}-0" for number in range(1, 20_001)])


# -- a full server -------------------------------------------------------------------------------------------------


@pytest.fixture
def full(raw: Any) -> Iterator[Callable[[], object]]:
    """A function that fills the server. The server then refuses every command that may take memory."""
    yield lambda: raw.config_set("maxmemory", "1mb")
    raw.config_set("maxmemory", 0)


def test_a_full_server_can_be_trimmed(
    transport: RedisTransport, raw: Any, epoch: int, full: Callable[[], object]
) -> None:
    """Without a trim the merger could not commit, and a full server would never get free memory."""
    before = chunk_keys(raw, transport.run)
    entries = [transport.island.publish(samples.contribution(LARGE, sequence=n), LARGE) for n in range(3)]
    found = with_payloads(transport.merger.updates(0.0))
    transport.merger.commit(epoch, samples.commit(entries[:2]))
    full()
    with failing(BrokerError, "broker.refused-memory"):
        transport.island.publish(samples.contribution(), b"payload")
    assert samples.pending(transport) == (1, 100)
    assert transport.merger.read(entries) == found
    transport.merger.trim(epoch, entries)
    assert [transport.island.holds(entry) for entry in entries] == [False, False, True]
    assert transport.reader.backlog() == 1
    assert len([key for key in chunk_keys(raw, transport.run) - before if ":c:a:x." in key]) == 3


def test_an_older_merger_neither_trims_nor_renews_at_a_full_server(
    transport: RedisTransport, connections: Connect, raw: Any, epoch: int, full: Callable[[], None]
) -> None:
    entry = transport.island.publish(samples.contribution(), b"payload")
    transport.merger.updates(0.0)
    transport.merger.commit(epoch, samples.commit([entry]))
    full()
    transport.merger.renew(epoch, "merger", 1000.0)
    assert raw.pttl(Keys(transport.run).lease) > 900_000
    raw.config_set("maxmemory", 0)
    assert connections().merger.acquire("merger", 60.0) == epoch + 1
    for is_full in (False, True):
        if is_full:
            full()
        with failing(FencedError):
            transport.merger.renew(epoch, "merger", 1000.0)
        with failing(FencedError):
            transport.merger.trim(epoch, [entry])
        assert raw.pttl(Keys(transport.run).lease) <= 60_000
        assert not transport.merger.read([entry])[0].fault
