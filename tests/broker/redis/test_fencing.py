"""The fenced write: lost epochs, broken connections, other instances, full servers, round trips and one hash tag."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
from redis.connection import AbstractConnection

from archipelago.broker.errors import BrokerError, FencedError, UnreachableError
from archipelago.broker.messages import Call, Pending
from archipelago.broker.redis import chunks
from archipelago.broker.redis.keys import REGISTRY, Keys
from archipelago.broker.redis.transport import RedisTransport
from archipelago.broker.transport import START
from tests import samples
from tests.broker.redis.stored_keys import (
    LARGE,
    REFUSAL,
    WIDTH,
    Connect,
    chunk_keys,
    is_chunk,
    keys,
    lasting_chunks,
    wanted_chunks,
    with_payloads,
)
from tests.failing import failing


@pytest.mark.parametrize("queued", [False, True], ids=["while it is watched", "before it is sent"])
def test_a_connection_that_breaks_within_the_fence_is_unreachable(
    transport: RedisTransport, raw: Any, epoch: int, queued: bool
) -> None:
    """A broken connection is no lost lease.

    redis-py raises the same error for a broken connection and for a changed key. A merger stops after the second one.
    """
    with pytest.raises(UnreachableError), transport.merger.lease.fenced(epoch) as pipe:
        if queued:
            pipe.hset("anything", "field", "1")
        raw.client_kill_filter(_type="normal", skipme=True)
        if not queued:
            pipe.immediate_execute_command("GET", "anything")
    transport.merger.announce(epoch, Call(1, 0))
    assert not raw.exists("anything")


def test_a_lost_epoch_is_not_used_again(transport: RedisTransport, raw: Any, epoch: int) -> None:
    """Commands of the old epoch may still be in flight."""
    raw.delete(Keys(transport.run).epoch, Keys(transport.run).lease)
    assert transport.merger.acquire("merger", 5.0) == epoch + 1
    with pytest.raises(FencedError):
        transport.merger.announce(epoch, Call(1, 0))


def test_the_epochs_go_on_in_a_run_that_is_created_again(transport: RedisTransport, raw: Any, epoch: int) -> None:
    """An older merger that is still alive stays fenced."""
    raw.delete(Keys(transport.run).manifest)
    manifest = samples.manifest(transport.run)
    transport.create(manifest, samples.first_snapshots(manifest))
    transport.merger.release(epoch)
    assert transport.merger.acquire("another", 1.0) == epoch + 1


def test_what_another_instance_may_have_forgotten_is_not_built_on(
    transport: RedisTransport, epoch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round is the last one there, too, but contributions, chunks and compactions may be missing."""
    full = samples.commit([]).compaction
    assert full is not None
    transport.merger.commit(epoch, samples.commit([], b"", difference=b"one", log="{}", after_round=0))
    placed = transport.merger.place(epoch, full)
    for module in ("connection", "lease"):
        monkeypatch.setattr(f"archipelago.broker.redis.{module}.instance_in", lambda *sections: "another")
    writes: list[Callable[[], object]] = [
        lambda: transport.merger.commit(epoch, samples.commit([], round_number=3, after_round=1)),
        lambda: transport.merger.compact(epoch, placed, after_round=1),
        lambda: transport.merger.trim(epoch, [], after_round=1),
    ]
    for write in writes:
        with failing(BrokerError, code="broker.other-round"):
            write()
    transport.merger.renew(epoch, "m", 60.0)
    assert transport.merger.acquire("m", 60.0) == epoch + 1
    transport.merger.compact(epoch + 1, placed, after_round=1)


def test_a_commit_takes_few_round_trips(transport: RedisTransport, epoch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A merger that is far from its Redis waits for each of them."""
    entries = [transport.island.publish(samples.contribution(sequence=n), b"payload") for n in range(3)]
    transport.merger.updates(0.0)
    transport.reader.heads()  # reads the manifest, once
    send, read, said = AbstractConnection.send_packed_command, AbstractConnection.read_response, [""]

    def noting(what: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **options: Any) -> Any:
            if said[-1] != what:
                said.append(what)
            return method(*arguments, **options)

        return noted

    monkeypatch.setattr(AbstractConnection, "send_packed_command", noting("asked", send))
    monkeypatch.setattr(AbstractConnection, "read_response", noting("answered", read))
    transport.merger.commit(epoch, samples.commit(entries, b"", difference=LARGE, log="{}", after_round=0))
    steps = ["the entries", "the difference", "the watch", "the checks", "the transaction"]
    assert said.count("answered") == len(steps)
    assert transport.reader.books().merged == 3


def test_many_entries_are_counted_correctly(transport: RedisTransport, epoch: int) -> None:
    """There are more than one request reads, and more than one script takes."""
    entries = [transport.island.publish(samples.contribution(sequence=n), b"payload") for n in range(600)]
    while transport.merger.updates(0.0, count=500):
        pass
    transport.merger.commit(epoch, samples.commit(entries[::2]))
    assert transport.reader.pending() == Pending(300, 30_000)
    transport.merger.trim(epoch, entries)
    assert (transport.reader.pending(), transport.reader.backlog()) == (Pending(300, 30_000), 300)
    assert len(transport.merger.unacknowledged()) == 300


# -- a full server -------------------------------------------------------------------------------------------------


@pytest.fixture
def full(raw: Any) -> Iterator[Callable[[], object]]:
    """A function that fills the server. The server then refuses every command that may take memory."""
    yield lambda: raw.config_set("maxmemory", "1mb")
    raw.config_set("maxmemory", 0)


def test_memory_is_that_of_the_server(transport: RedisTransport, full: Callable[[], object]) -> None:
    before = transport.reader.memory()
    assert before.limit == 0
    transport.island.publish(samples.contribution(LARGE), LARGE)
    assert transport.reader.memory().used - before.used > len(LARGE) // 2
    full()
    assert transport.reader.memory().limit == 1 << 20


def test_a_full_server_can_be_trimmed(
    transport: RedisTransport, raw: Any, epoch: int, full: Callable[[], object]
) -> None:
    """Without a trim the merger could not commit, and a full server would never get free memory."""
    before = chunk_keys(raw, transport.run)
    entries = [
        transport.island.publish(samples.contribution(LARGE, sequence=n), LARGE, samples.actions(n)) for n in range(3)
    ]
    found = with_payloads(transport.merger.updates(0.0))
    transport.merger.commit(epoch, samples.commit(entries[:2]))
    logged = transport.merger.actions(START)
    full()
    with failing(BrokerError, "broker.refused-memory"):
        transport.island.publish(samples.contribution(), b"payload")
    assert transport.reader.pending() == Pending(1, 100)
    assert transport.merger.read(entries) == found
    transport.merger.trim(epoch, entries, logged[1][0])
    assert [transport.island.holds(entry) for entry in entries] == [False, False, True]
    assert (transport.reader.backlog(), transport.reader.books().kept) == (1, 0)
    assert transport.merger.actions(START) == logged[2:]
    assert len([key for key in chunk_keys(raw, transport.run) - before if ":c:a:x." in key]) == 3
    transport.merger.trim(epoch, [], logged[2][0])
    assert transport.merger.actions(START) == []


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
        assert transport.island.holds(entry)
        assert transport.reader.books().kept == 1
    with failing(FencedError):
        transport.merger._trim_when_full(epoch, [entry], transport.updates.look([entry]), {})
    assert transport.reader.books().kept == 1


# -- keys ---------------------------------------------------------------------------------------------------------


def test_only_the_expected_keys_remain(transport: RedisTransport, raw: Any, epoch: int) -> None:
    run = transport.run
    assert lasting_chunks(raw, run) == chunk_keys(raw, run) == wanted_chunks(raw, run)
    transport.island.heartbeat(samples.heartbeat())
    entries: list[str] = []
    for number in range(1, 7):
        for sequence in (2 * number, 2 * number + 1):
            transport.island.publish(samples.contribution(LARGE, sequence=sequence, round=number), LARGE)
        merged, refused = transport.merger.updates(0.0)
        transport.merger.announce(epoch, Call(number, transport.reader.manifest().fragment_of(number)))
        commit = samples.commit([merged.entry], LARGE[::-1], number, outer=LARGE * 2)
        p = (number - 1) % 2
        commit = replace(commit, snapshot=replace(commit.snapshot, fragment=p), tape=replace(commit.tape, fragment=p))
        transport.merger.commit(epoch, replace(commit, cursors={"0": (0, number)}))
        transport.merger.refuse(epoch, [(refused.entry, REFUSAL)])
        transport.island.record_actions(samples.actions(number))
        entries.append(merged.entry)
    transport.island.claim_checkpoint("a")
    transport.merger.trim(epoch, entries, transport.merger.actions(START)[-2][0])
    wanted = wanted_chunks(raw, run)
    assert len(wanted) == 2 * (3 + 5)
    assert lasting_chunks(raw, run) == wanted
    names = {key.removeprefix(f"{{{run}:s0}}:") for key in keys(raw, run) if not is_chunk(key)}
    assert names == {
        "manifest", "islands", "island:a", "updates:a", "snapshots", "tape", "lease", "epoch", "state", "books",
        "head:0", "head:1", "fragment:0", "fragment:1", "outer:0", "outer:1", "data", "actions:a",
    }  # fmt: skip
    replaced = chunk_keys(raw, run) - wanted
    assert replaced  # A reader may still be reading them.
    assert all(0 < raw.ttl(key) <= chunks.PREVIOUS_SECONDS for key in replaced)
    assert raw.sismember(REGISTRY, run)


class Spying:
    """A client that records which keys each of its transactions names."""

    def __init__(self, inner: Any) -> None:
        self._client = inner
        self.transactions: list[set[str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def pipeline(self, transaction: bool) -> Any:
        made = self._client.pipeline(transaction=transaction)
        if transaction:
            self.transactions.append(set())
            for name in ("watch", "delete", "hset", "unlink", "xadd", "set", "expire", "persist", "hincrby", "hdel",
                         "hsetnx", "xack", "xdel", "xtrim", "xgroup_create", "sadd", "get", "hget", "hgetall",
                         "exists", "hexists"):  # fmt: skip
                setattr(made, name, partial(self._named, getattr(made, name), self.transactions[-1]))
        return made

    @staticmethod
    def _named(call: Callable[..., Any], keys: set[str], *args: Any, **kwargs: Any) -> Any:
        many = call.__name__ in ("watch", "delete", "unlink")
        keys |= set(args if many else args[:1])
        return call(*args, **kwargs)


def test_the_keys_of_each_transaction_share_one_hash_tag(connections: Connect) -> None:
    """A Redis cluster refuses transactions over several hash tags."""
    base = connections()
    spying = Spying(base.connection.redis)
    transport = RedisTransport(cast(Any, spying), base.run)
    manifest = samples.manifest(transport.run, width=WIDTH)
    transport.restore(samples.image(manifest, [(samples.contribution(LARGE), LARGE)], outer=LARGE))
    island, merger = transport.island, transport.merger
    epoch = merger.acquire("merger", 60.0)
    assert epoch is not None
    merger.renew(epoch, "merger", 60.0)
    island.lease_shard(["0"], "a/x")
    entries = [island.publish(samples.contribution(LARGE, sequence=n), LARGE, samples.actions(n)) for n in (1, 2)]
    merger.updates(0.0)
    merger.refuse(epoch, [(entries[1], REFUSAL)])
    commit = samples.commit([entries[0]], LARGE, 3, cursors={"0": (1, 0)})
    merger.commit(epoch, replace(commit, outer=LARGE, difference=LARGE))
    merger.announce(epoch, Call(1, 0))
    merger.trim(epoch, [entries[0]], merger.actions(START)[0][0])
    transport.reader.steer({"merging": "paused", "checkpoint": ""})
    island.request_state("b/y")
    island.promise_answer("b/y", "a/x")
    island.hand_over("b/y", samples.handover(LARGE), LARGE)
    island.withdraw_request("b/y")
    merger.release(epoch)
    named = [keys for keys in spying.transactions if keys]
    assert len(named) >= 12
    assert {key.partition("}")[0] for keys in named for key in keys} == {f"{{{base.run}:s0"}
