"""Chunks: how long each is kept, what damage does to a payload, and that no snapshot is read torn."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import redis

from archipelago.broker.errors import BrokerError, RunExistsError, UnreachableError, WireError
from archipelago.broker.messages import to_fields
from archipelago.broker.redis import chunks, stored_run
from archipelago.broker.redis.chunks import CHUNK_BYTES
from archipelago.broker.redis.keys import Keys
from archipelago.broker.redis.transport import RedisTransport
from archipelago.broker.wire import digest
from tests import samples
from tests.broker.redis.stored_keys import Connect, chunk_keys, lasting_chunks, wanted_chunks
from tests.failing import failing
from tests.samples import LARGE, REFUSAL, WIDTH, with_payloads

#: A payload of twenty chunks of 1 KiB.
MANY = bytes(range(256)) * 80
Damage = Callable[[Any, str], object]


# -- damage --------------------------------------------------------------------------------------------------------


def of_another_type(raw: Any, key: str) -> None:
    raw.delete(key)
    raw.rpush(key, "x")


DAMAGES: dict[str, Damage] = {
    "deleted": lambda raw, key: raw.delete(key),
    "empty": lambda raw, key: raw.set(key, b""),
    "cut": lambda raw, key: raw.set(key, LARGE[:100]),
    "longer": lambda raw, key: raw.append(key, b"more"),
    "of another type": of_another_type,
}


def damaged(transport: RedisTransport, raw: Any, payload: bytes, index: int, damage: Damage) -> str:
    """Publish a payload, damage one of its chunks, and return the fault of the delivery, which has the right header."""
    before, sent = chunk_keys(raw, transport.run), samples.contribution(payload)
    transport.island.publish(sent, payload)
    damage(raw, next(key for key in chunk_keys(raw, transport.run) - before if key.endswith(f":{index}")))
    (delivery,) = with_payloads(transport.merger.updates(0.0))
    assert delivery.contribution == sent
    assert delivery.payload == (b"" if delivery.fault else payload)
    return delivery.fault


def test_a_damaged_chunk_is_a_fault_of_the_delivery(
    transport: RedisTransport, raw: Any, request: pytest.FixtureRequest
) -> None:
    for name, damage in DAMAGES.items():
        assert damaged(transport, raw, LARGE, 1, damage), name
    request.getfixturevalue("small_chunks")
    for name, damage in DAMAGES.items():
        for index in (0, 7, 19):
            assert f"not {len(MANY)} bytes" in damaged(transport, raw, MANY, index, damage), (name, index)


@pytest.mark.parametrize("is_small", [True, False])
def test_no_chunk_is_read_beyond_its_size(
    transport: RedisTransport, raw: Any, is_small: bool, request: pytest.FixtureRequest
) -> None:
    if is_small:
        request.getfixturevalue("small_chunks")
    payload, end, sent_max = (MANY, 1 << 20, 64 << 10) if is_small else (LARGE, 8 << 20, 4 * CHUNK_BYTES)
    transport.island.publish(samples.contribution(payload), payload)
    for key in chunk_keys(raw, transport.run):
        if ":c:" in key:
            raw.setrange(key, end, b"x")
    before = raw.info("stats")["total_net_output_bytes"]
    (delivery,) = with_payloads(transport.merger.updates(0.0))
    assert f"not {len(payload)} bytes" in delivery.fault
    assert raw.info("stats")["total_net_output_bytes"] - before < sent_max


def test_a_pointer_at_the_chunks_of_others_leads_nowhere(transport: RedisTransport, raw: Any, epoch: int) -> None:
    """A refusal deletes the chunks of its entry. It must not delete the newest snapshot of the run."""
    transport.merger.commit(epoch, samples.commit([], LARGE))
    transport.island.publish(samples.contribution(LARGE, island="b"), LARGE)
    before = chunk_keys(raw, transport.run)
    fields = {**to_fields(samples.contribution(LARGE)), "chunks": "3"}
    for pointer in {key.split(":", 2)[2].rpartition(":")[0] for key in before}:
        name = pointer.removeprefix("b:")
        for forged in (name, f"../m:{name}", pointer):
            raw.xadd(Keys(transport.run).updates("a"), {**fields, "chunks_name": forged})
    transport.island.heartbeat(samples.heartbeat("a"))
    found = [delivery for delivery in with_payloads(transport.merger.updates(0.0)) if delivery.sender == "a"]
    assert len(found) >= 3
    assert all(delivery.fault for delivery in found)
    samples.refuse(transport, epoch, [(delivery.entry, REFUSAL) for delivery in found])
    assert chunk_keys(raw, transport.run) == before
    assert transport.reader.fragment(0)[1] == LARGE


def test_a_damaged_answer_is_an_error_and_can_be_withdrawn(transport: RedisTransport, raw: Any) -> None:
    key = Keys(transport.run).handover("a/x")
    damages: list[tuple[Callable[[str], object], str]] = [
        (raw.delete, "wire.payload"),
        (lambda _: raw.hset(key, "bytes", 1 << 50), "wire.payload"),
        (lambda _: raw.hset(key, mapping={"bytes": 10**6 * CHUNK_BYTES, "chunks": 10**6}), "wire.payload"),
        (lambda _: raw.hset(key, "payload", b"short"), "wire.payload"),
        (lambda _: raw.hset(key, "giver", "../.."), "wire.message"),
        (lambda _: raw.hdel(key, "chunks"), "wire.payload"),
    ]
    for damage, code in damages:
        transport.island.request_state("a/x")
        transport.island.hand_over("a/x", samples.handover(LARGE), LARGE)
        damage(min(key for key in chunk_keys(raw, transport.run) if ":h.y." in key))
        with failing(WireError, code):
            transport.island.handed_over("a/x")
        transport.island.withdraw_request("a/x")
        assert transport.island.handed_over("a/x") is None


def test_an_answer_may_hold_two_moments_a_parameter(transport: RedisTransport) -> None:
    """Such an answer is larger than any contribution or snapshot."""
    payload = bytes(12 * transport.reader.manifest().parameters)
    assert len(payload) > transport.chunks.payload_max()
    transport.island.request_state("a/x")
    transport.island.hand_over("a/x", samples.handover(payload), payload)
    assert transport.island.handed_over("a/x") == (samples.handover(payload), payload)


# -- how long chunks are kept -------------------------------------------------------------------------------------


def test_the_chunks_of_a_contribution_are_deleted_with_it(transport: RedisTransport, raw: Any, epoch: int) -> None:
    def there() -> int:
        return len([key for key in chunk_keys(raw, transport.run) if ":a:" in key])

    for sequence in range(4):
        transport.island.publish(samples.contribution(LARGE, sequence=sequence), LARGE)
    assert there() == 12
    assert chunk_keys(raw, transport.run) <= lasting_chunks(raw, transport.run)  # the merger may be away for long
    refused, first, second, third = (delivery.entry for delivery in transport.merger.updates(0.0))
    samples.refuse(transport, epoch, [(refused, REFUSAL)])
    assert there() == 9
    transport.merger.commit(epoch, samples.commit([first, second]))
    assert there() == 9
    transport.merger.commit(epoch, samples.commit([third], round_number=3, trim=[first, third]))
    assert there() == 3
    transport.merger.trim(epoch, [second])
    assert there() == 0


class NoTransactions:
    """A client whose connection breaks just before each transaction."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def pipeline(self, transaction: bool) -> Any:
        if transaction:
            raise redis.ConnectionError("the cable was pulled")
        return self._client.pipeline(transaction=False)

    def eval(self, *words: Any) -> Any:
        raise redis.ConnectionError("the cable was pulled")


def test_an_upload_without_its_pointer_expires(transport: RedisTransport, raw: Any, epoch: int) -> None:
    before, first = chunk_keys(raw, transport.run), transport.reader.fragment(0)
    transport = RedisTransport(cast(Any, NoTransactions(transport.connection.redis)), transport.run)
    with failing(UnreachableError):
        transport.island.publish(samples.contribution(LARGE), LARGE)
    with failing(UnreachableError):
        transport.merger.commit(epoch, samples.commit([], LARGE, own=LARGE, difference=LARGE))
    torn = chunk_keys(raw, transport.run) - before
    assert len(torn) == 12
    assert all(0 < raw.ttl(key) <= stored_run.PLACED_SECONDS for key in torn)
    assert all(raw.ttl(key) <= 600 for key in torn if ":c:" in key)  # The island's retry goes on with these.
    assert lasting_chunks(raw, transport.run) == before
    assert transport.reader.backlog() == 0
    assert transport.reader.fragment(0) == first


class BreakingLink(redis.Connection):
    """A connection that breaks after a quarter of the payload `LARGE`, once that has arrived."""

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        for part in command if isinstance(command, list | tuple) else [command]:
            self.left = getattr(self, "left", len(LARGE) // 4) - len(part)
            if self.left < 0:
                del self.left
                bare: Any = self._sock
                bare.shutdown(socket.SHUT_WR)
                while bare.recv(1 << 16):  # the server answers all that has arrived, and hangs up
                    pass
                self.disconnect()  # type: ignore[no-untyped-call]
                raise redis.ConnectionError("the link broke")
            super().send_packed_command([part], check_health)  # type: ignore[no-untyped-call]


def far_away(connections: Connect) -> RedisTransport:
    """Return a connection over a link that breaks again and again."""
    made = connections()
    pool = made.connection.redis.connection_pool
    pool.connection_class = BreakingLink
    pool.disconnect()
    pool.reset()
    return made


def sent_at_last(send: Callable[[], object], raw: Any, run: str) -> set[str]:
    """Call `send` until nothing breaks, and return its chunks. Attempts that fail leave no other chunks behind."""
    before, lasting = chunk_keys(raw, run), lasting_chunks(raw, run)
    for _ in range(6):
        try:
            send()
            return chunk_keys(raw, run) - before
        except UnreachableError:
            assert len(chunk_keys(raw, run) - before) <= 26
            assert lasting_chunks(raw, run) == lasting
    raise AssertionError("the payload never got through")


def test_an_upload_goes_on_where_the_link_broke(
    transport: RedisTransport, connections: Connect, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 100_000)
    far, sent, answer = far_away(connections), samples.contribution(LARGE), samples.handover(LARGE)
    uploaded = sent_at_last(lambda: far.island.publish(sent, LARGE), raw, transport.run)
    assert len(uploaded) == 26
    assert uploaded <= lasting_chunks(raw, transport.run)
    (delivery,) = with_payloads(transport.merger.updates(0.0))
    assert (delivery.fault, delivery.payload) == ("", LARGE)
    for who in ("new/z", "other/z"):
        transport.island.request_state(who)
        assert len(sent_at_last(partial(far.island.hand_over, who, answer, LARGE), raw, transport.run)) == 26
    transport.island.withdraw_request("new/z")
    assert transport.island.handed_over("other/z") == (answer, LARGE)


def uploaded_in_vain(transport: RedisTransport, raw: Any) -> list[str]:
    """Upload the contribution with the payload `LARGE`, break the connection, and return the chunks in order."""
    before = chunk_keys(raw, transport.run)
    broken = RedisTransport(cast(Any, NoTransactions(transport.connection.redis)), transport.run)
    with failing(UnreachableError):
        broken.island.publish(samples.contribution(LARGE), LARGE)
    return sorted(chunk_keys(raw, transport.run) - before)


def listed_for_a_minute(raw: Any, key: str) -> None:
    of_another_type(raw, key)
    raw.expire(key, 60)


def test_a_retry_replaces_chunks_that_are_wrong(transport: RedisTransport, raw: Any, epoch: int) -> None:
    wrong: dict[str, Damage] = {
        **{name: DAMAGES[name] for name in ("deleted", "longer")},
        "cut": lambda raw, key: raw.set(key, b"x", keepttl=True),
        "of another type": listed_for_a_minute,
    }
    for name, damage in wrong.items():
        for index in range(3):
            torn = uploaded_in_vain(transport, raw)
            damage(raw, torn[index])
            received = raw.info("stats")["total_net_input_bytes"]
            transport.island.publish(samples.contribution(LARGE), LARGE)
            assert raw.info("stats")["total_net_input_bytes"] - received < 1.5 * CHUNK_BYTES, (name, index)
            assert set(torn) <= lasting_chunks(raw, transport.run), (name, index)
            (delivery,) = with_payloads(transport.merger.updates(0.0))
            assert (delivery.fault, delivery.payload) == ("", LARGE), (name, index)
            samples.refuse(transport, epoch, [(delivery.entry, REFUSAL)])
            assert not set(torn) & chunk_keys(raw, transport.run), (name, index)


def test_an_entry_that_arrives_late_keeps_its_chunks(
    transport: RedisTransport, connections: Connect, raw: Any, epoch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The retry has found all chunks. Then the entry of the first attempt arrives, and its merger must find them."""
    sent, other, torn = samples.contribution(LARGE), connections(), uploaded_in_vain(transport, raw)
    before_first(chunks.ChunkStore, "settle", lambda: other.island.publish(sent, LARGE), monkeypatch)
    with failing(UnreachableError):
        transport.island.publish(sent, LARGE)
    assert transport.reader.backlog() == 1
    transport.island.publish(sent, LARGE)
    first, second = transport.merger.updates(0.0)
    assert set(torn) < lasting_chunks(raw, transport.run)
    samples.refuse(transport, epoch, [(second.entry, REFUSAL)])
    assert first.with_payload().payload == LARGE


def test_a_slow_upload_does_not_expire(transport: RedisTransport, raw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "SENT_AHEAD", 1)
    seconds = [0.0]

    class Slow(NoTransactions):
        """Each pipeline takes four minutes, as seen from the island. The server's chunks have lost as much."""

        _is_sent = False  # then the chunks are watched, and stay as they are

        def pipeline(self, transaction: bool) -> Any:
            self._is_sent |= transaction
            if not self._is_sent:
                seconds[0] += 240.0
                for key in raw.scan_iter(match=f"*{transport.run}*:c:*", count=1000):
                    raw.expire(key, raw.ttl(key) - 240)
            return self._client.pipeline(transaction=transaction)

    monkeypatch.setattr(chunks, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    slow = RedisTransport(cast(Any, Slow(transport.connection.redis)), transport.run)
    payload = LARGE * 3
    slow.island.publish(samples.contribution(payload), payload)
    assert len([key for key in lasting_chunks(raw, transport.run) if ":c:a:" in key]) == 8


def test_a_repeated_commit_keeps_its_chunks(transport: RedisTransport, raw: Any, epoch: int) -> None:
    for _ in range(2):
        transport.merger.commit(epoch, samples.commit([], LARGE, own=LARGE))
    assert lasting_chunks(raw, transport.run) == wanted_chunks(raw, transport.run)
    assert transport.reader.fragment(0)[1] == transport.merger.outer(0, 1) == LARGE


def test_a_difference_of_a_version_that_is_made_again_leaves_no_chunks(
    transport: RedisTransport, raw: Any, epoch: int
) -> None:
    """After a return to a checkpoint, rounds that were closed before close again."""
    for _ in range(2):
        transport.merger.commit(epoch, samples.commit([], b"", difference=LARGE))
    assert len([key for key in lasting_chunks(raw, transport.run) if ":m:d0.1." in key]) == 3


@pytest.mark.usefixtures("small_chunks")
def test_at_most_two_versions_of_a_snapshot_are_kept(transport: RedisTransport, raw: Any, epoch: int) -> None:
    """Memory stays bounded even if versions follow each other fast."""
    counts = []
    for number in range(1, 8):
        transport.merger.commit(epoch, samples.commit([], bytes([number]) * 3000, number))
        counts.append(len([key for key in chunk_keys(raw, transport.run) if ":m:f0." in key]))
    assert counts == [3, *[6] * 6]
    assert len([key for key in chunk_keys(raw, transport.run) if ":m:o0." in key]) <= 3


def test_an_upload_that_a_full_server_refuses_leaves_no_chunks(
    transport: RedisTransport, raw: Any, epoch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "SENT_AHEAD", 1)
    used = raw.info("memory")["used_memory"]
    full = samples.commit([], bytes(16 << 20)).compaction
    assert full is not None
    raw.config_set("maxmemory", used + (8 << 20))
    try:
        with pytest.raises(BrokerError):
            transport.merger.place(epoch, full)
        assert raw.keys(f"*{transport.run}*:m:f0.1.*") == []
    finally:
        raw.config_set("maxmemory", 0)


# -- races --------------------------------------------------------------------------------------------------------


def before_first(subject: Any, name: str, act: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `act` happen just before the first call of that method."""
    method, waiting = getattr(subject, name), [act]

    def late(*arguments: Any, **options: Any) -> Any:
        if waiting:
            waiting.pop()()
        return method(*arguments, **options)

    monkeypatch.setattr(subject, name, late)


@pytest.mark.parametrize("by", ["create", "restore"])
def test_only_one_of_two_concurrent_creations_succeeds(
    connections: Connect, raw: Any, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """The loser has already uploaded its chunks. The winner's chunks must be complete, and must not expire."""
    winner, loser = connections(), connections()
    manifest = samples.manifest(winner.run, width=WIDTH)
    first = samples.first_snapshots(manifest, value=1.0)
    before_first(loser.chunks, "place" if by == "create" else "of", lambda: winner.create(manifest, first), monkeypatch)
    with pytest.raises(RunExistsError):
        if by == "create":
            loser.create(manifest, samples.first_snapshots(manifest, value=2.0))
        else:
            loser.restore(samples.image(manifest, [(samples.contribution(LARGE), LARGE)], noise=LARGE))
    assert [winner.reader.fragment(p) for p in (0, 1)] == first
    assert (winner.reader.backlog(), winner.reader.merger_state()) == (0, "")
    assert lasting_chunks(raw, winner.run) == wanted_chunks(raw, winner.run)


def version(number: int) -> bytes:
    """Return a payload of several chunks. Its content and its size differ from those of nearby versions."""
    return bytes([number % 251]) * (3000 + 700 * (number % 5))


@pytest.mark.usefixtures("small_chunks")
def test_a_snapshot_is_never_read_torn(transport: RedisTransport, connections: Connect, epoch: int) -> None:
    reader, versions = connections(), 100
    failed: list[BaseException] = []

    def write() -> None:
        try:
            for number in range(1, versions + 1):
                commit = samples.commit([], version(number), 2 * number - 1, own=version(number))
                transport.merger.commit(epoch, commit)
        except BaseException as error:  # noqa: BLE001 - shown by the assertion below
            failed.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    seen = [0]
    while seen[-1] < versions and not failed:
        snapshot, payload = reader.reader.fragment(0)
        assert (len(payload), digest(payload)) == (snapshot.bytes, snapshot.digest)
        assert snapshot.version >= seen[-1]
        seen.append(snapshot.version)
    thread.join()
    assert failed == []
    assert len(set(seen)) > 5


@pytest.mark.usefixtures("small_chunks")
def test_a_slow_reader_reads_the_newer_snapshot(
    transport: RedisTransport, connections: Connect, epoch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The snapshot is replaced between the read of its pointer and the read of its chunks, which have expired."""
    monkeypatch.setattr(stored_run, "PREVIOUS_SECONDS", 0)
    reader = connections()
    transport.merger.commit(epoch, samples.commit([], version(1), 1))
    replace = samples.commit([], version(2), 3)
    before_first(reader.chunks, "fetch", lambda: transport.merger.commit(epoch, replace), monkeypatch)
    snapshot, payload = reader.reader.fragment(0)
    assert (snapshot.version, payload) == (2, version(2))
