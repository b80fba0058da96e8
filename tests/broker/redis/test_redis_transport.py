"""Tests that need a real Redis.

They cover addresses, passwords, old servers, data that was changed from outside, keys that remain, and torn reads.
"""

from __future__ import annotations

import logging
import socket
import socketserver
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import redis
from redis.connection import AbstractConnection

from archipelago.broker.address import redacted
from archipelago.broker.corpus_shards import Place
from archipelago.broker.entries import parse_entry
from archipelago.broker.errors import (
    ArchipelagoError,
    BadUrlError,
    BrokerError,
    FencedError,
    RunExistsError,
    ServerTooOldError,
    UnreachableError,
    WireError,
)
from archipelago.broker.messages import Call, Contribution, Evaluation, Note, Pending, Refusal, to_fields
from archipelago.broker.redis import chunks, client, connection, data_hash, failures, islands, leases
from archipelago.broker.redis.chunks import CHUNK_BYTES
from archipelago.broker.redis.client import SILENT_SECONDS, SOCKET_SECONDS, client_at
from archipelago.broker.redis.keys import REGISTRY, Keys
from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.broker.transport import START, Delivery, Memory
from archipelago.broker.wire import digest
from archipelago.ops.launch.embedded_redis import Server, start_server
from archipelago.ops.launch.redis_program import find_program
from tests import samples
from tests.conftest import PATIENCE_SECONDS, Until
from tests.failing import failing

WIDTH = 100_000
#: A payload of three chunks.
LARGE = bytes(range(256)) * 10_000
SECRET = "Pa55" + "w0rd"
MANY_CHUNKS = {"bytes": 10**6 * CHUNK_BYTES, "chunks": 10**6}
REFUSAL = Refusal("a", "x", 0, 1, 0, 100, "no")

Connect = Callable[[], RedisTransport]


@pytest.fixture
def raw(server: Server) -> Iterator[Any]:
    """A plain redis-py client of the server."""
    with redis.Redis.from_url(server.url) as client:
        yield client


@pytest.fixture
def connections(server: Server) -> Iterator[Connect]:
    """A function that opens connections to one run. The run does not exist yet."""
    run = f"run-{uuid.uuid4().hex[:8]}"
    opened: list[RedisTransport] = []

    def open_one() -> RedisTransport:
        opened.append(connect(server.url, run))
        return opened[-1]

    yield open_one
    for transport in opened:
        transport.close()


@pytest.fixture
def transport(connections: Connect) -> RedisTransport:
    """A connection to a run that was just created."""
    made = connections()
    manifest = samples.manifest(made.run, width=WIDTH)
    made.create(manifest, samples.first_snapshots(manifest))
    return made


@pytest.fixture
def epoch(transport: RedisTransport) -> int:
    """The epoch of a merger that holds the lease."""
    found = transport.merger.acquire("merger", 60.0)
    assert found is not None
    return found


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the chunk size to 1 KiB, so that payloads of a few KiB are split into chunks."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1024)
    monkeypatch.setattr(chunks, "INLINE_BYTES", 512)


def keys(raw: Any, run: str) -> set[str]:
    """Return all keys whose names contain the name of the run."""
    return {key.decode() for key in raw.scan_iter(match=f"*{run}*", count=1000)}


def is_chunk(key: str) -> bool:
    return ":c:" in key or ":m:" in key


def chunk_keys(raw: Any, run: str) -> set[str]:
    return {key for key in keys(raw, run) if is_chunk(key)}


def with_payloads(deliveries: Sequence[Delivery]) -> list[Delivery]:
    return [delivery.with_payload() for delivery in deliveries]


# -- addresses ----------------------------------------------------------------------------------------------------


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        while line := self.rfile.readline():
            words = []
            for _ in range(int(line[1:])):
                size = int(self.rfile.readline()[1:])
                words.append(self.rfile.read(size + 2)[:-2].decode())
            answer = self.server.answer(words)  # type: ignore[attr-defined]
            if answer is None:
                return
            self.wfile.write(answer)


@contextmanager
def answering(answer: Callable[[list[str]], bytes | None], path: Path | None = None) -> Iterator[str]:
    """Start a server that replies to each command with `answer`, and yield its address.

    The server closes the connection when `answer` returns None.
    """
    kind: Any = socketserver.ThreadingTCPServer if path is None else socketserver.ThreadingUnixStreamServer
    with kind(("127.0.0.1", 0) if path is None else str(path), _Handler) as served:
        served.daemon_threads = True
        served.answer = answer
        thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"unix://{path}" if path else f"redis://127.0.0.1:{served.server_address[1]}"
        finally:
            served.shutdown()
            thread.join()


def server_of(version: str, first: str = "redis_version") -> Callable[[list[str]], bytes]:
    """Return a function that answers INFO with a version, and refuses every other command."""

    def answer(words: list[str]) -> bytes:
        if words[0] == "INFO":
            text = f"# Server\r\n{first}:{version}\r\n"
            return f"${len(text)}\r\n{text}\r\n".encode()
        return f"-ERR unknown command `{words[0]}`, with args beginning with: {words[1:]}\r\n".encode()

    return answer


@pytest.fixture(scope="module")
def closed_port() -> int:
    """A port on which no process listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:6379",
        "http://localhost:6379",
        "Redis//localhost",
        "redis:/localhost",
        "redis://",
        "redis://:6379",
        "redis://localhost:port",
        "redis://localhost:99999",
        "redis://localhost:-1",
        "redis://localhost/my-run",
        "redis://localhost/0#1",
        "redis://[::1",
        "redis://..:6379",
        f"redis://{'a' * 300}:6379",
        "redis://localhost?colour=red",
        "redis://localhost?socket_timeout=soon",
        "unix://",
        "unix://relative/path",
    ],
)
def test_an_invalid_address_is_an_error(url: str) -> None:
    with failing(BadUrlError) as caught:
        connect(url, "run")
    assert repr(url) in str(caught.value)


def test_a_closed_port_is_unreachable(closed_port: int, tmp_path: Path) -> None:
    for url in (f"redis://127.0.0.1:{closed_port}", f"rediss://127.0.0.1:{closed_port}", f"unix://{tmp_path}/none"):
        with failing(UnreachableError):
            connect(url, "run")


def test_a_silent_server_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "SOCKET_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent, failing(UnreachableError):
        connect(f"redis://127.0.0.1:{silent.getsockname()[1]}", "run")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems call these options otherwise, or lack them")
def test_tcp_timeouts_detect_a_silent_host_before_the_socket_timeout(server: Server) -> None:
    client = client_at(server.url)
    client.ping()
    connection: Any = client.connection_pool.get_connection()
    asked, unacknowledged = (
        connection._sock.getsockopt(socket.IPPROTO_TCP, option)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_USER_TIMEOUT)
    )
    assert asked < SILENT_SECONDS == unacknowledged / 1000 < SOCKET_SECONDS
    client.close()


def test_a_server_that_closes_the_connection_is_unreachable() -> None:
    with answering(lambda _: None) as url, pytest.raises(UnreachableError):
        connect(url, "run")


def test_a_server_that_is_loading_is_unreachable() -> None:
    answer = b"-LOADING Redis is loading the dataset in memory\r\n"
    with answering(lambda _: answer) as url, failing(UnreachableError):
        connect(url, "run")


def test_a_web_server_is_not_taken_for_redis() -> None:
    answer = b"HTTP/1.1 400 Bad Request\r\n\r\n"
    with answering(lambda _: answer) as url, failing(BrokerError, "broker.not-redis"):
        connect(url, "run")


@pytest.mark.parametrize("version", ["5.0.7", "6.0.16", "4", "unstable"])
def test_an_old_server_is_refused(version: str) -> None:
    with answering(server_of(version)) as url, failing(ServerTooOldError):
        connect(url, "run")


@pytest.mark.parametrize("version", ["6.2.0", "7.2.4", "10.0.1"])
def test_a_new_enough_server_is_accepted(version: str, tmp_path: Path) -> None:
    with answering(server_of(version)) as url:
        connect(url, "run").close()
    with answering(server_of(version), tmp_path / "socket") as url:
        connect(url, "run").close()


def test_a_missing_database_is_an_error(server: Server) -> None:
    with failing(BrokerError, "broker.refused-command"):
        connect(server.url.removesuffix("/0") + "/9999", "run")


# -- passwords ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("user", ["", f":{SECRET}@", f"somebody:{SECRET}@", f"{SECRET}@"])
def test_a_wrong_password_is_an_access_error(server: Server, user: str) -> None:
    url = f"redis://{user}127.0.0.1:{server.port}"
    with failing(BrokerError, "broker.access") as caught:
        connect(url, "run")
    assert not isinstance(caught.value, UnreachableError)  # A retry would not help.
    assert SECRET not in str(caught.value)


def test_a_user_without_permission_gets_an_error_of_its_own(
    transport: RedisTransport, server: Server, raw: Any
) -> None:
    raw.acl_setuser("reader", enabled=True, reset=True, passwords=[f"+{SECRET}"], keys=["*"], commands=["+info"])
    reader = connect(f"redis://reader:{SECRET}@127.0.0.1:{server.port}", transport.run)
    try:
        with failing(BrokerError, "broker.permission"):
            reader.reader.manifest()
    finally:
        reader.close()
        raw.acl_deluser("reader")


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{SECRET}@127.0.0.1:1",
        f"redis://user:{SECRET}@127.0.0.1:1/0",
        f"redis://{SECRET}@127.0.0.1:1",
        f"redis://127.0.0.1:1?password={SECRET}",
        f"redis://127.0.0.1:1/0?db=1&Password={SECRET}",
        f"unix://:{SECRET}@/tmp/none",
        f"http://:{SECRET}@127.0.0.1",
        f"user:{SECRET}@127.0.0.1:1",
        f"{SECRET}@127.0.0.1",
        f"redis://:{SECRET}@127.0.0.1:port",
        f"redis://:x@{SECRET}@127.0.0.1:1",
        f"redis://:x/{SECRET}@127.0.0.1:1",
        f"redis://:{SECRET}/x@127.0.0.1:1",
        f"redis://:{SECRET}?x@127.0.0.1:1",
        f"redis://:x?{SECRET}@127.0.0.1:1",
        f"redis://:{SECRET}#x@127.0.0.1:1",
        f"redis://:x#{SECRET}@127.0.0.1:1",
        f"redis://user:{SECRET}?x@127.0.0.1:1",
        f"redis://:x://{SECRET}@127.0.0.1:1",
        f"redis://:[{SECRET}@127.0.0.1:1",
        f"redis://:{SECRET}@[::1:1",
        f"redis://:{SECRET}@{'a' * 300}:1",
        f"redis://:{SECRET}@127.0.0.1:1?colour=red",
    ],
)
def test_no_error_shows_a_password(url: str) -> None:
    assert SECRET not in redacted(url)
    with pytest.raises(ArchipelagoError) as caught:
        connect(url, "run")
    assert SECRET not in str(caught.value)
    assert "***" in str(caught.value)


def test_a_password_of_digits_is_not_taken_for_a_port() -> None:
    with failing(BadUrlError) as caught:
        connect("redis://:12/34@127.0.0.1:1", "run")
    assert "12" not in str(caught.value).replace("127.0.0.1", "")


def test_a_password_in_a_servers_reply_is_redacted() -> None:
    with answering(server_of("5.0.7")) as url, pytest.raises(BrokerError) as caught:
        connect(url.replace("://", f"://:{SECRET}@"), "run")
    assert "unknown command `AUTH`" in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:1/2", "redis://host:1/2"),
        ("redis://:p@host:1/2", "redis://:***@host:1/2"),
        ("rediss://user:p@ss@host", "rediss://user:***@host"),
        ("unix:///tmp/a@b.sock?db=1", "unix:///tmp/a@b.sock?db=1"),
        ("unix:///tmp/r.sock?password=p&db=1", "unix:///tmp/r.sock?password=***&db=1"),
    ],
)
def test_only_the_password_of_an_address_is_redacted(url: str, shown: str) -> None:
    assert redacted(url) == shown


# -- damaged and forged contributions -----------------------------------------------------------------------------


def test_a_flooded_stream_is_read_in_part(transport: RedisTransport, raw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An island may append anything to the evaluations. Their readers must not run out of memory."""
    for number in range(7):
        fields = to_fields(Evaluation(number, 0, 0, 0.0, 1.0)) | {"filler": "x" * 600}
        raw.xadd(Keys(transport.run).evaluations, fields)
    monkeypatch.setattr(connection, "PAGE", 2)
    assert [each.round for each in transport.reader.evaluations()] == list(range(7))
    monkeypatch.setattr(connection, "NEWEST_BYTES_MAX", 2000)
    assert [each.round for each in transport.reader.evaluations()] == [3, 4, 5, 6]


def test_the_fields_of_a_contribution_are_text(transport: RedisTransport, raw: Any) -> None:
    for payload in (b"\xff" * 100, LARGE):
        transport.island.publish(samples.contribution(payload, island="a.b-c_9"), payload)
    inline, pointer = (fields for _, fields in raw.xrange(Keys(transport.run).updates("a.b-c_9")))
    assert inline.pop(b"payload") == b"\xff" * 100
    assert pointer[b"chunks"] == b"3"
    assert list(pointer)[: len(inline)] == list(inline)  # The readable fields come first.
    for fields in (inline, pointer):
        text = {name.decode("ascii"): value.decode("ascii") for name, value in fields.items()}
        assert text["island"] == "a.b-c_9"
        assert len(str(text)) < 600


@pytest.mark.parametrize(
    ("damage", "is_readable"),
    [
        (lambda raw, key: raw.delete(key), False),
        (lambda raw, key: raw.set(key, b""), False),
        (lambda raw, key: raw.set(key, LARGE[:100]), False),
        (lambda raw, key: raw.append(key, b"more"), True),  # Bytes beyond the end of a chunk are never read.
        (lambda raw, key: (raw.delete(key), raw.rpush(key, "x")), False),
    ],
    ids=["deleted", "empty", "cut", "longer", "of another type"],
)
def test_a_damaged_chunk_is_a_fault_of_the_delivery(
    transport: RedisTransport, raw: Any, damage: Callable[[Any, str], object], is_readable: bool
) -> None:
    sent = samples.contribution(LARGE)
    transport.island.publish(sent, LARGE)
    middle = next(key for key in chunk_keys(raw, transport.run) if key.endswith(":1"))
    damage(raw, middle)
    (delivery,) = with_payloads(transport.merger.updates(0.0))
    assert delivery.contribution == sent
    assert bool(delivery.fault) is not is_readable
    assert delivery.payload == (LARGE if is_readable else b"")


#: A payload of twenty chunks of 1 KiB.
MANY = bytes(range(256)) * 80


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    "damage",
    [
        lambda raw, key: raw.delete(key),
        lambda raw, key: raw.set(key, b""),
        lambda raw, key: raw.set(key, MANY[:100]),
        lambda raw, key: raw.append(key, b"more"),
        lambda raw, key: (raw.delete(key), raw.rpush(key, "x")),
    ],
    ids=["deleted", "empty", "cut", "longer", "of another type"],
)
@pytest.mark.parametrize("index", [0, 7, 19])
def test_one_damaged_chunk_of_many_is_a_fault_of_the_delivery(
    transport: RedisTransport, raw: Any, damage: Callable[[Any, str], object], index: int
) -> None:
    sent = samples.contribution(MANY)
    transport.island.publish(sent, MANY)
    damage(raw, next(key for key in chunk_keys(raw, transport.run) if key.endswith(f":{index}")))
    (delivery,) = with_payloads(transport.merger.updates(0.0))
    assert (delivery.contribution, delivery.payload) == (sent, b"")
    assert f"not {len(MANY)} bytes" in delivery.fault
    transport.island.publish(samples.contribution(MANY, sequence=1), MANY)
    (after,) = with_payloads(transport.merger.updates(0.0))
    assert (after.payload, after.fault) == (MANY, "")


@pytest.mark.usefixtures("small_chunks")
def test_no_chunk_of_many_is_read_beyond_its_size(transport: RedisTransport, raw: Any) -> None:
    transport.island.publish(samples.contribution(MANY), MANY)
    for key in chunk_keys(raw, transport.run):
        raw.setrange(key, 1 << 20, b"x")
    before = raw.info("stats")["total_net_output_bytes"]
    (delivery,) = with_payloads(transport.merger.updates(0.0))
    assert f"not {len(MANY)} bytes" in delivery.fault
    assert raw.info("stats")["total_net_output_bytes"] - before < 64 << 10


def test_no_large_chunk_is_read_beyond_its_size(transport: RedisTransport, raw: Any) -> None:
    transport.island.publish(samples.contribution(LARGE), LARGE)
    for key in chunk_keys(raw, transport.run):
        raw.setrange(key, 8 << 20, b"x")
    before = raw.info("stats")["total_net_output_bytes"]
    (delivery,) = with_payloads(transport.merger.updates(0.0))
    assert f"not {len(LARGE)} bytes" in delivery.fault
    assert raw.info("stats")["total_net_output_bytes"] - before < 4 * CHUNK_BYTES


def test_a_large_payload_is_downloaded_only_on_request(transport: RedisTransport, epoch: int) -> None:
    """A merger that refuses a contribution by its header never downloads the payload."""
    transport.island.publish(samples.contribution(LARGE), LARGE)
    (delivery,) = transport.merger.updates(0.0)
    assert (delivery.contribution, delivery.payload, delivery.fault) == (samples.contribution(LARGE), b"", "")
    assert delivery.with_payload().payload == LARGE
    transport.merger.refuse(epoch, [(delivery.entry, REFUSAL)])
    assert delivery.with_payload().fault


def test_a_deleted_pending_entry_can_be_refused(transport: RedisTransport, raw: Any, epoch: int) -> None:
    transport.island.publish(samples.contribution(), b"payload")
    (delivery,) = with_payloads(transport.merger.updates(0.0))
    raw.xdel(Keys(transport.run).updates("a"), parse_entry(delivery.entry)[1])
    (again,) = transport.merger.unacknowledged()
    assert (again.entry, again.contribution, again.payload) == (delivery.entry, None, b"")
    assert "deleted" in again.fault
    transport.merger.refuse(epoch, [(again.entry, REFUSAL)])
    assert transport.merger.unacknowledged() == []


FIELDS = {**to_fields(samples.contribution(LARGE)), "chunks": "3", "chunks_name": "somebody"}
FORGERIES: dict[str, dict[Any, Any]] = {
    "no known field": {"hello": "world"},
    "not text": {b"\xff": b"\xfe", **FIELDS, "island": b"\xff\xfe"},
    "an infinite loss": {**FIELDS, "loss": "inf"},
    "no payload": {k: v for k, v in FIELDS.items() if not k.startswith("chunks")},
    "no name": {k: v for k, v in FIELDS.items() if k != "chunks_name"},
    "no number of chunks": {**FIELDS, "chunks": "many"},
    "chunks that do not exist": FIELDS,
    "no chunks": {**FIELDS, "chunks": "0"},
    "a negative number of chunks": {**FIELDS, "chunks": "-3"},
    "a billion chunks": {**FIELDS, "chunks": str(10**9)},
    "a million chunks": {**FIELDS, "chunks": str(1 << 20)},
    "a petabyte": {**FIELDS, "chunks": "1000000", "bytes": str(10**6 * CHUNK_BYTES)},
    "a name that is not text": {**FIELDS, "chunks_name": b"\xff"},
}


@pytest.mark.parametrize("fields", FORGERIES.values(), ids=FORGERIES.keys())
def test_a_forged_entry_is_delivered_with_its_fault_and_can_be_refused(
    transport: RedisTransport, raw: Any, epoch: int, fields: dict[Any, Any]
) -> None:
    raw.xadd(Keys(transport.run).updates("a"), fields)
    transport.island.publish(samples.contribution(sequence=1), b"payload")
    forged, honest = with_payloads(transport.merger.updates(0.0))
    assert forged.fault
    assert forged.payload == b""
    assert (honest.fault, honest.payload) == ("", b"payload")
    transport.merger.refuse(epoch, [(forged.entry, REFUSAL)])
    transport.merger.commit(epoch, samples.commit([honest.entry]))
    assert (transport.reader.backlog(), transport.merger.unacknowledged()) == (0, [])


def test_a_forged_number_of_chunks_costs_nothing_to_refuse(transport: RedisTransport, raw: Any, epoch: int) -> None:
    transport.island.heartbeat(samples.heartbeat())
    raw.xadd(Keys(transport.run).updates("a"), {**FIELDS, "chunks": str(1 << 20)})
    (forged,) = with_payloads(transport.merger.updates(0.0))
    before = raw.info("stats")["total_net_input_bytes"]
    transport.merger.refuse(epoch, [(forged.entry, REFUSAL)])
    assert raw.info("stats")["total_net_input_bytes"] - before < 10_000  # The client does not send a million names.


def test_a_pointer_at_the_chunks_of_others_leads_nowhere(transport: RedisTransport, raw: Any, epoch: int) -> None:
    """A refusal deletes the chunks of its entry. It must not delete the newest snapshot of the run."""
    transport.merger.commit(epoch, samples.commit([], LARGE))
    transport.island.publish(samples.contribution(LARGE, island="b"), LARGE)
    before = chunk_keys(raw, transport.run)
    for pointer in {key.split(":", 2)[2].rpartition(":")[0] for key in before}:
        name = pointer.removeprefix("b:")
        for forged in (name, f"../m:{name}", pointer):
            raw.xadd(Keys(transport.run).updates("a"), {**FIELDS, "chunks_name": forged})
    transport.island.heartbeat(samples.heartbeat("a"))
    found = [delivery for delivery in with_payloads(transport.merger.updates(0.0)) if delivery.sender == "a"]
    assert len(found) >= 3
    assert all(delivery.fault for delivery in found)
    transport.merger.refuse(epoch, [(delivery.entry, REFUSAL) for delivery in found])
    assert chunk_keys(raw, transport.run) == before
    assert transport.reader.fragment(0)[1] == LARGE


def test_a_repeated_contribution_has_its_own_chunks(
    transport: RedisTransport, connections: Connect, epoch: int
) -> None:
    """The merger refuses the repeat and deletes its chunks. The first payload must survive this."""
    for _ in range(2):
        transport.island.publish(samples.contribution(LARGE), LARGE)
    first, second = transport.merger.updates(0.0)
    transport.merger.refuse(epoch, [(second.entry, REFUSAL)])
    (waiting,) = connections().merger.unacknowledged()
    assert waiting.entry == first.entry
    assert waiting.with_payload().payload == LARGE


# -- data that was changed from outside ---------------------------------------------------------------------------


def test_a_destroyed_group_is_created_again_without_loss(transport: RedisTransport, raw: Any, until: Until) -> None:
    sent = [samples.contribution(sequence=n) for n in range(4)]
    for contribution in sent[:2]:
        transport.island.publish(contribution, b"payload")
    transport.merger.updates(0.0, count=1)
    raw.xgroup_destroy(Keys(transport.run).updates("a"), "merger")
    for contribution in sent[2:]:
        transport.island.publish(contribution, b"payload")
    found: list[Contribution | None] = []

    def have_all() -> bool:
        found.extend(delivery.contribution for delivery in transport.merger.updates(0.0))
        return len(found) >= 4

    until(have_all, "all four contributions")
    assert found == sent
    assert len(transport.merger.unacknowledged()) == 4


@pytest.mark.parametrize(
    "destroy",
    [lambda raw, key: raw.xgroup_destroy(key, "merger"), lambda raw, key: raw.delete(key)],
    ids=["group", "stream"],
)
def test_a_waiting_reader_survives_the_loss_of_its_group(
    transport: RedisTransport, connections: Connect, raw: Any, until: Until, destroy: Callable[[Any, str], object]
) -> None:
    found: list[Any] = []
    failed: list[BaseException] = []

    def read() -> None:
        try:
            found.extend(transport.merger.updates(PATIENCE_SECONDS))
        except BaseException as error:  # noqa: BLE001 - shown by the assertion below
            failed.append(error)

    entry = transport.island.publish(samples.contribution(), b"payload")
    transport.merger.updates(0.0)
    raw.xdel(Keys(transport.run).updates("a"), parse_entry(entry)[1])  # an empty stream, on which the reader can wait
    reader = threading.Thread(target=read)
    reader.start()
    until(lambda: raw.info("clients")["blocked_clients"] == 1, "the reader to wait")
    destroy(raw, Keys(transport.run).updates("a"))
    connections().island.publish(samples.contribution(), b"payload")
    reader.join()
    assert failed == []
    assert [delivery.contribution for delivery in found] == [samples.contribution()]


def test_a_deleted_stream_starts_empty(transport: RedisTransport, raw: Any, epoch: int) -> None:
    entry = transport.island.publish(samples.contribution(), b"payload")
    transport.merger.updates(0.0)
    transport.merger.commit(epoch, samples.commit([entry]))
    raw.delete(Keys(transport.run).updates("a"))
    assert (transport.reader.backlog(), transport.reader.pending()) == (0, Pending(0, 0))
    assert transport.merger.updates(0.0) == []
    assert transport.merger.unacknowledged() == []
    transport.island.publish(samples.contribution(sequence=1), b"payload")
    assert transport.reader.backlog() == 1  # The kept entry is gone, and no longer counts.
    assert len(transport.merger.updates(0.0)) == 1


def test_a_new_group_receives_the_kept_entries_again(transport: RedisTransport, raw: Any, epoch: int) -> None:
    merged, waiting = (transport.island.publish(samples.contribution(sequence=n), b"payload") for n in range(2))
    transport.merger.updates(0.0)
    transport.merger.commit(epoch, samples.commit([merged]))
    raw.xgroup_destroy(Keys(transport.run).updates("a"), "merger")
    assert transport.reader.pending() == Pending(2, 200)  # The next reader receives both entries.
    assert transport.merger.updates(0.0) == []
    assert [delivery.entry for delivery in transport.merger.updates(0.0)] == [merged, waiting]
    assert (transport.reader.backlog(), transport.reader.books().kept) == (2, 0)
    transport.merger.refuse(epoch, [(merged, REFUSAL)])
    transport.merger.commit(epoch, samples.commit([waiting]))
    assert (transport.reader.backlog(), transport.reader.pending(), transport.reader.books().kept) == (
        0,
        Pending(0, 0),
        1,
    )


def test_entries_that_are_merged_without_a_group_stay(transport: RedisTransport, raw: Any, epoch: int) -> None:
    """No compaction covers them. The new group delivers them once more, and they are acknowledged again."""
    entry = transport.island.publish(samples.contribution(), b"payload")
    transport.merger.updates(0.0)
    raw.xgroup_destroy(Keys(transport.run).updates("a"), "merger")
    transport.merger.commit(epoch, samples.commit([entry], b"", difference=b"one", log="{}"))
    assert transport.merger.updates(0.0) == []
    assert [delivery.entry for delivery in transport.merger.updates(0.0)] == [entry]
    transport.merger.acknowledge(epoch, [entry])
    assert (transport.reader.backlog(), transport.reader.books().kept) == (0, 1)


def test_nothing_points_to_an_upload_whose_chunks_are_gone(transport: RedisTransport, raw: Any, epoch: int) -> None:
    """A failover may have forgotten them after they were uploaded."""
    large = bytes(1 << 20)
    transport.merger.commit(epoch, samples.commit([], b"", difference=b"one", log="{}"))
    full = samples.commit([], large).compaction
    assert full is not None
    placed = transport.merger.place(epoch, full)
    raw.delete(*raw.keys(f"*{transport.run}*:m:f0.1.*"))
    with failing(BrokerError, code="broker.other-round"):
        transport.merger.compact(epoch, placed, after_round=1)
    assert transport.reader.fragment(0)[0].version == 0
    assert transport.merger.log(0, 1) == "{}"


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


def test_a_commit_without_readable_books_writes_nothing(transport: RedisTransport, raw: Any, epoch: int) -> None:
    """Redis undoes no transaction of which one command fails, so it must not begin."""
    books = transport.connection.keys.books
    raw.delete(books)
    raw.rpush(books, "x")
    with pytest.raises(BrokerError):
        transport.merger.commit(epoch, samples.commit([], b"", difference=b"one", log="{}", after_round=0))
    assert transport.reader.tape(1) == []
    assert transport.reader.difference(0, 1) is None


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


def test_an_entry_can_be_refused_without_a_group(transport: RedisTransport, raw: Any, epoch: int) -> None:
    entry = transport.island.publish(samples.contribution(), b"payload")
    transport.merger.updates(0.0)
    raw.xgroup_destroy(Keys(transport.run).updates("a"), "merger")
    transport.merger.refuse(epoch, [(entry, REFUSAL)])
    assert (transport.reader.backlog(), transport.reader.books().refused) == (0, 1)


def test_an_unreadable_entry_is_pending_without_tokens(transport: RedisTransport, raw: Any) -> None:
    raw.xadd(Keys(transport.run).updates("a"), {**FIELDS, "loss": "inf"})
    transport.island.publish(samples.contribution(), b"payload")
    assert transport.reader.pending() == Pending(2, 100)


def test_unreadable_actions_are_skipped(transport: RedisTransport, raw: Any, caplog: pytest.LogCaptureFixture) -> None:
    transport.island.record_actions(samples.actions(0))
    ((first, _),) = transport.merger.actions(START)
    nonsense = [raw.xadd(Keys(transport.run).actions("a"), {"island": "../..", "index": "1"}) for _ in range(3)]
    transport.island.record_actions(samples.actions(1))
    with caplog.at_level(logging.WARNING):
        found = transport.merger.actions(first, count=2)  # There are more unreadable entries than one call reads.
    assert [actions for _, actions in found] == [samples.actions(1)]
    assert f"actions a/{nonsense[-1].decode()} cannot be read" in caplog.text


# -- leases on data -----------------------------------------------------------------------------------------------


def test_cursors_and_leases_are_text(transport: RedisTransport, raw: Any, epoch: int) -> None:
    transport.island.lease_shard(["17"], "a/x")
    transport.merger.commit(epoch, samples.commit([], cursors={"17": (0, 96), "site/3": (2, 0)}))
    transport.island.register_corpus("site", "1" * 32)
    assert raw.hgetall(Keys(transport.run).data) == {
        b"17": b"0:96",
        b"site/3": b"2:0",
    }
    assert raw.hgetall(Keys(transport.run).leases("a")) == {b"17": b"x:0:0"}
    assert raw.hgetall(Keys(transport.run).corpora) == {b"site": b"1" * 32}


def test_an_unreadable_cursor_restarts_at_zero(
    transport: RedisTransport, raw: Any, epoch: int, caplog: pytest.LogCaptureFixture
) -> None:
    raw.hset(Keys(transport.run).data, mapping={"0": b"\xff", "1": "0:8"})
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert transport.reader.cursors() == {"1": (0, 8)}
    assert len(caplog.records) == 1
    assert "the cursor of shard 0 cannot be read" in caplog.text
    assert transport.island.lease_shard(["0", "1"], "a/x") == Place("0", 0, 0)
    transport.merger.commit(epoch, samples.commit([], cursors={"0": (0, 4)}))
    assert transport.reader.cursors() == {"0": (0, 4), "1": (0, 8)}


def disturb_leases(transport: RedisTransport, disturb: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call `disturb` with 1, 2, 3, … between each read of the shard fields and the write of the lease."""
    read, times = data_hash.parse_cursors, iter(range(1, 1000))

    def read_and_disturb(connection: Any, fields: Any) -> Any:
        found = read(connection, fields)
        if connection is transport.connection:
            disturb(next(times))
        return found

    monkeypatch.setattr(leases, "parse_cursors", read_and_disturb)


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
    assert island.island.lease_shard(["0"], "a/x") == Place("0", *cursor)
    assert island.island.leased(["0"], "a/x") == {"0"}


def test_only_a_lease_of_the_same_shard_disturbs_a_lease(
    transport: RedisTransport, connections: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    island, seen = connections(), []

    def lease_another(n: int) -> None:
        seen.append(n)
        transport.island.heartbeat(samples.heartbeat(f"b{n}", incarnation="y"))
        transport.island.lease_shard(["0" if n == 2 else str(n)], f"b{n}/y")

    disturb_leases(island, lease_another, monkeypatch)
    assert island.island.lease_shard(["0", "20"], "a/x") == Place("20", 0, 0)
    assert transport.island.leased(["0"], "b2/y") == {"0"}
    assert len(seen) == 2 + 3, "a lease of another shard disturbed this one"


def commands(raw: Any, work: Callable[[], object]) -> int:
    """Return how many commands the server executes during the work."""
    before = raw.info("stats")["total_commands_processed"]
    work()
    return int(raw.info("stats")["total_commands_processed"] - before)


def test_leases_of_many_islands_take_commands_in_proportion(transport: RedisTransport, raw: Any) -> None:
    """An island that holds its shard reads no claims of others. A lease reads all claims twice."""
    counts = {}
    for count in (16, 64):
        for n in range(count):
            transport.island.lease_shard([str(n)], f"i{n}/x")
        who = f"i{count - 1}/x"
        counts[count] = (
            commands(raw, lambda who=who, n=count: transport.island.leased([str(n - 1)], who)),  # type: ignore[misc]
            commands(raw, lambda who=who, n=count: transport.island.lease_shard([str(n + 100)], who)),  # type: ignore[misc]
        )
    assert counts[64][0] == counts[16][0]
    assert counts[64][1] - counts[16][1] == 2 * (64 - 16)


@pytest.mark.parametrize("damage", ["lost", "of another type", "of another island"])
def test_the_mark_of_a_shard_is_only_a_hint(transport: RedisTransport, raw: Any, damage: str) -> None:
    transport.island.lease_shard(["0"], "a/x")
    mark = Keys(transport.run).taken("0")
    assert raw.ttl(mark) > 0
    raw.delete(mark)
    if damage == "of another type":
        raw.rpush(mark, "x")
    elif damage == "of another island":
        raw.set(mark, "b/y")
    assert transport.island.leased(["0"], "a/x") == {"0"}
    assert raw.get(mark) == b"a/x", "it is set again, so that the next look is short"
    transport.island.heartbeat(samples.heartbeat("a", incarnation="x"))
    assert transport.island.lease_shard(["0"], "b/y") is None


def test_a_lease_is_given_up_after_repeated_conflicts(
    transport: RedisTransport, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def disturb(n: int) -> None:
        seen.append(n)
        raw.set(Keys(transport.run).taken("0"), f"b/{n}")

    disturb_leases(transport, disturb, monkeypatch)
    assert transport.island.lease_shard(["0"], "a/x") is None
    assert len(seen) == 2 * connection.ATTEMPTS, "each attempt reads cursors for the choice and for the lease"
    assert transport.island.leased(["0"], "a/x") == frozenset()


def test_liveness_is_not_checked_while_shards_are_free(
    transport: RedisTransport, connections: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []

    def look(name: str) -> frozenset[str]:
        looked.append(name)
        return frozenset()

    for name in ("_live", "_busy"):
        monkeypatch.setattr(transport.island, name, partial(look, name))
    shards = ["0", "1", "2"]
    for n in range(3):
        assert transport.island.lease_shard(shards[n:], f"a/{n}") == Place(str(n), 0, 0)
    assert looked == []
    assert transport.island.lease_shard(shards, "b/y") == Place("0", 0, 0)
    assert looked == ["_live", "_busy"]  # One query covers all three holders.


# -- memory -------------------------------------------------------------------------------------------------------


def test_memory_is_that_of_the_server(transport: RedisTransport, raw: Any) -> None:
    before = transport.reader.memory()
    assert before.limit == 0
    transport.island.publish(samples.contribution(LARGE), LARGE)
    assert transport.reader.memory().used - before.used > len(LARGE) // 2
    raw.config_set("maxmemory", 8 << 30)
    try:
        assert transport.reader.memory().limit == 8 << 30
    finally:
        raw.config_set("maxmemory", 0)


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


def test_a_full_server_renews_the_lease_of_the_newest_epoch_only(
    transport: RedisTransport, connections: Connect, raw: Any, epoch: int, full: Callable[[], None]
) -> None:
    full()
    transport.merger.renew(epoch, "merger", 1000.0)
    left = raw.pttl(Keys(transport.run).lease)
    assert left > 900_000
    other = connections()
    raw.config_set("maxmemory", 0)
    assert other.merger.acquire("merger", 60.0) == epoch + 1
    full()
    with failing(FencedError):
        transport.merger.renew(epoch, "merger", 1000.0)
    assert raw.pttl(Keys(transport.run).lease) <= 60_000


def test_an_older_epoch_does_not_extend_the_lease(transport: RedisTransport, connections: Connect, raw: Any) -> None:
    epoch = transport.merger.acquire("merger", 60.0)
    assert epoch is not None
    assert connections().merger.acquire("merger", 60.0) == epoch + 1
    with failing(FencedError):
        transport.merger.renew(epoch, "merger", 1000.0)
    assert raw.pttl(Keys(transport.run).lease) <= 60_000


def test_an_older_merger_cannot_trim_a_full_server(transport: RedisTransport, connections: Connect, epoch: int) -> None:
    entry = transport.island.publish(samples.contribution(), b"payload")
    transport.merger.updates(0.0)
    transport.merger.commit(epoch, samples.commit([entry]))
    transport.merger.release(epoch)
    connections().merger.acquire("another", 60.0)
    with pytest.raises(FencedError):
        transport.merger._trim_when_full(epoch, [entry], transport.updates.look([entry]), {})
    assert transport.island.holds(entry)
    assert transport.reader.books().kept == 1


def test_refusals_of_the_server_have_codes() -> None:
    refusal = failures._refusal
    queued = "Command # 1 (SET a 2) of pipeline caused error: MISCONF Errors writing to the AOF file: No space left"
    assert refusal(queued)[0] == refusal("MISCONF Errors writing")[0] == "disk"
    assert refusal("You can't write against a read only replica.")[0] == "replica"
    for unknown in ("unknown command 'XADD'", ""):
        assert refusal(unknown)[0] == "command"


def test_unknown_memory_is_zero(tmp_path: Path) -> None:
    with start_server(tmp_path / "redis", find_program("fakeredis")) as fake:
        transport = connect(fake.url, "none")
        assert transport.reader.memory() == transport.reader.memory() == Memory(0, 0)
        assert transport.reader.runs() == []
        transport.close()


# -- between islands ----------------------------------------------------------------------------------------------


def test_a_handover_expires(transport: RedisTransport, raw: Any) -> None:
    before = keys(raw, transport.run)
    transport.island.request_state("a/x")
    transport.island.hand_over("a/x", samples.handover(LARGE), LARGE)
    made = {key for key in keys(raw, transport.run) - before if key != Keys(transport.run).requests}
    assert len(made) == 1 + 3
    assert all(0 < raw.ttl(key) <= islands.HANDOVER_SECONDS for key in made)
    assert raw.ttl(Keys(transport.run).requests) > 3600
    transport.island.withdraw_request("a/x")
    assert keys(raw, transport.run) == before


def test_dots_in_names_do_not_make_answer_keys_collide() -> None:
    assert Keys("run").handover("a.b/c") != Keys("run").handover("a/b.c")


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda raw, key, chunk: raw.delete(chunk), "wire.chunk-missing"),
        (lambda raw, key, chunk: raw.hset(key, "bytes", 1 << 50), "wire.chunk-count"),
        (
            lambda raw, key, chunk: raw.hset(key, mapping=MANY_CHUNKS),
            "wire.chunk-count",
        ),
        (lambda raw, key, chunk: raw.hset(key, "payload", b"short"), "wire.size"),
        (lambda raw, key, chunk: raw.hset(key, "giver", "../.."), "wire.message"),
        (lambda raw, key, chunk: raw.hdel(key, "chunks"), "wire.no-payload"),
    ],
    ids=["a chunk is gone", "a petabyte", "a million chunks", "another size", "a forged name", "half a pointer"],
)
def test_a_damaged_answer_is_an_error_and_can_be_withdrawn(
    transport: RedisTransport, raw: Any, damage: Callable[[Any, str, str], object], code: str
) -> None:
    transport.island.request_state("a/x")
    before = chunk_keys(raw, transport.run)
    transport.island.hand_over("a/x", samples.handover(LARGE), LARGE)
    damage(raw, Keys(transport.run).handover("a/x"), min(chunk_keys(raw, transport.run) - before))
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
    assert transport.island._handover_max() == len(payload) + (1 << 20)


def test_unreadable_events_are_skipped(transport: RedisTransport, raw: Any, epoch: int) -> None:
    stream = Keys(transport.run).snapshots
    transport.merger.announce(epoch, Call(1, 0))
    with raw.pipeline(transaction=False) as pipe:
        for n in range(300):  # One call does not read so many entries.
            pipe.xadd(stream, {"kind": "tidings" if n % 2 else "snapshot", "round": "x"})
        pipe.execute()
    ((first, event),) = transport.reader.events(START, 0.0)
    assert event == Call(1, 0)
    assert transport.reader.events(first, 0.0) == []
    assert transport.reader.events(first, 0.02) == []
    transport.merger.announce(epoch, Call(2, 1))
    assert [event for _, event in transport.reader.events(first, 5.0)] == [Call(2, 1)]


def test_invalid_names_are_skipped(transport: RedisTransport, raw: Any) -> None:
    """Other clients of the server may add anything to these sets. A reader must not fail on it."""
    keys = Keys(transport.run)
    transport.island.heartbeat(samples.heartbeat("oslo"))
    raw.sadd(keys.islands, b"\xff\xfe", "a b", "x" * 65)
    raw.sadd(REGISTRY, b"\xff\xfe")
    try:
        assert [presence.heartbeat.island for presence in transport.reader.presences()] == ["oslo"]
        assert transport.run in transport.reader.runs()
    finally:
        raw.srem(REGISTRY, b"\xff\xfe")


def test_an_unreadable_heartbeat_does_not_hide_the_others(
    transport: RedisTransport, raw: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for island in ("a", "b", "c"):
        transport.island.heartbeat(samples.heartbeat(island))
    raw.hset(Keys(transport.run).island("b"), "loss", "inf")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert [p.heartbeat.island for p in transport.reader.presences()] == ["a", "c"]
    assert [record.getMessage() for record in caplog.records] == [
        "the heartbeat of b cannot be read: heartbeat: loss: value error, infinite"
    ]
    raw.hset(Keys(transport.run).island("b"), "loss", "1.5")
    assert len(transport.reader.presences()) == 3


def test_a_long_wait_is_kept_below_the_socket_timeout(
    transport: RedisTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "SOCKET_SECONDS", 0.1)  # The timeout of the open socket stays 20 s.
    assert transport.reader.events(START, 3600.0) == []
    assert connection.block_ms(3600.0) == 50
    assert connection.block_ms(0.0) is None


# -- keys ---------------------------------------------------------------------------------------------------------


def lasting_chunks(raw: Any, run: str) -> set[str]:
    """Return the chunks that never expire."""
    return {key for key in chunk_keys(raw, run) if raw.ttl(key) == -1}


def wanted_chunks(raw: Any, run: str, fragments: int) -> set[str]:
    """Return the chunks to which the newest snapshots and the merger's states point."""
    found = set()
    for p in range(fragments):
        for key in (Keys(run).fragment(p), Keys(run).outer(p)):
            where = raw.hmget(key, "chunks_name", "chunks")
            if where[0]:
                found |= {Keys(run).chunk(where[0].decode(), index) for index in range(int(where[1]))}
    return found


def test_only_the_expected_keys_remain(transport: RedisTransport, raw: Any, epoch: int) -> None:
    run = transport.run
    assert lasting_chunks(raw, run) == chunk_keys(raw, run) == wanted_chunks(raw, run, 2)
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
    wanted = wanted_chunks(raw, run, 2)
    assert len(wanted) == 2 * (3 + 5)
    assert lasting_chunks(raw, run) == wanted
    names = {key.replace(run, "RUN") for key in keys(raw, run) if not is_chunk(key)}
    assert names == {
        "{RUN:s0}:manifest", "{RUN:s0}:islands", "{RUN:s0}:island:a", "{RUN:s0}:updates:a",
        "{RUN:s0}:snapshots", "{RUN:s0}:tape",
        "{RUN:s0}:lease", "{RUN:s0}:epoch", "{RUN:s0}:state", "{RUN:s0}:books", "{RUN:s0}:head:0",
            "{RUN:s0}:head:1", "{RUN:s0}:fragment:0",
        "{RUN:s0}:fragment:1", "{RUN:s0}:outer:0", "{RUN:s0}:outer:1", "{RUN:s0}:data", "{RUN:s0}:actions:a",
    }  # fmt: skip
    assert {key.replace(run, "RUN") for key in keys(raw, run) if raw.ttl(key) > 0 and not is_chunk(key)} == {
        "{RUN:s0}:island:a",
        "{RUN:s0}:lease",
    }
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


def test_the_chunks_of_a_contribution_are_deleted_with_it(transport: RedisTransport, raw: Any, epoch: int) -> None:
    before = chunk_keys(raw, transport.run)
    for sequence in range(4):
        transport.island.publish(samples.contribution(LARGE, sequence=sequence), LARGE)
    uploaded = chunk_keys(raw, transport.run) - before
    assert len(uploaded) == 12
    assert uploaded <= lasting_chunks(raw, transport.run)  # They must outlast any absence of the merger.
    refused, first, second, third = (delivery.entry for delivery in transport.merger.updates(0.0))
    transport.merger.refuse(epoch, [(refused, REFUSAL)])
    assert len(uploaded & chunk_keys(raw, transport.run)) == 9
    transport.merger.commit(epoch, samples.commit([first, second]))
    assert len(uploaded & chunk_keys(raw, transport.run)) == 9
    transport.merger.commit(epoch, samples.commit([third], round_number=3, trim=[first, third]))
    assert len(uploaded & chunk_keys(raw, transport.run)) == 3
    transport.merger.trim(epoch, [second])
    assert not uploaded & chunk_keys(raw, transport.run)


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


def test_an_upload_without_its_pointer_expires(transport: RedisTransport, raw: Any, epoch: int) -> None:
    before, first = chunk_keys(raw, transport.run), transport.reader.fragment(0)
    transport = RedisTransport(cast(Any, NoTransactions(transport.connection.redis)), transport.run)
    with failing(UnreachableError):
        transport.island.publish(samples.contribution(LARGE), LARGE)
    with failing(UnreachableError):
        transport.merger.commit(epoch, samples.commit([], LARGE, outer=LARGE))
    torn = chunk_keys(raw, transport.run) - before
    assert len(torn) == 9
    assert all(0 < raw.ttl(key) <= chunks.ORPHAN_SECONDS for key in torn)
    assert lasting_chunks(raw, transport.run) == before
    assert transport.reader.backlog() == 0
    assert transport.reader.fragment(0) == first


def test_a_repeated_commit_keeps_its_chunks(transport: RedisTransport, raw: Any, epoch: int) -> None:
    for _ in range(2):
        transport.merger.commit(epoch, samples.commit([], LARGE, outer=LARGE))
    wanted = wanted_chunks(raw, transport.run, 2)
    assert lasting_chunks(raw, transport.run) == wanted
    assert transport.reader.fragment(0)[1] == transport.merger.outer(0) == LARGE


# -- creating -----------------------------------------------------------------------------------------------------


def test_only_one_of_two_concurrent_creations_succeeds(
    connections: Connect, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loser has already uploaded its chunks. The winner's chunks must be complete, and must not expire."""
    winner, loser = connections(), connections()
    manifest = samples.manifest(winner.run, width=WIDTH)
    place = loser.chunks.place
    raced: list[bool] = []

    def place_late(name: str, payload: bytes) -> dict[str, str | bytes]:
        if not raced:
            raced.append(True)
            winner.create(manifest, samples.first_snapshots(manifest, value=1.0))
        return place(name, payload)

    monkeypatch.setattr(loser.chunks, "place", place_late)
    with pytest.raises(RunExistsError):
        loser.create(manifest, samples.first_snapshots(manifest, value=2.0))
    assert [winner.reader.fragment(p) for p in (0, 1)] == samples.first_snapshots(manifest, value=1.0)
    assert lasting_chunks(raw, winner.run) == wanted_chunks(raw, winner.run, 2)


def test_a_run_without_its_manifest_can_be_created_again(transport: RedisTransport, raw: Any, epoch: int) -> None:
    transport.island.publish(samples.contribution(), b"payload", samples.actions())
    transport.merger.commit(epoch, samples.commit([], cursors={"0": (1, 2)}))
    transport.island.register_corpus("site", "1" * 32)
    transport.island.request_state("a/x")
    raw.hset(Keys(transport.run).restored, mapping={"number": 3})
    raw.delete(Keys(transport.run).manifest)
    manifest = samples.manifest(transport.run)
    transport.create(manifest, samples.first_snapshots(manifest))
    assert (transport.reader.tape(9), transport.reader.events(START, 0.0), transport.reader.backlog()) == ([], [], 0)
    assert (transport.reader.merger_state(), transport.merger.outer(0), transport.reader.books().published) == (
        "",
        b"",
        0,
    )
    assert (transport.merger.actions(START), transport.reader.cursors(), transport.island.claim_checkpoint("a")) == (
        [],
        {},
        None,
    )
    assert transport.island.register_corpus("site", "2" * 32) == "2" * 32
    assert transport.island.promise_answer("a/x", "b/y") is False
    assert transport.reader.fragment(0) == samples.first_snapshots(manifest)[0]
    transport.merger.release(epoch)
    assert transport.merger.acquire("another", 1.0) == epoch + 1  # An older merger that is still alive stays fenced.


def test_a_restore_leaves_no_unused_chunk(connections: Connect, raw: Any) -> None:
    made = connections()
    manifest = samples.manifest(made.run, width=WIDTH)
    pending = [(samples.contribution(LARGE), LARGE)]
    broken = RedisTransport(cast(Any, NoTransactions(made.connection.redis)), made.run)
    with failing(UnreachableError):
        broken.restore(samples.image(manifest, pending, outer=LARGE))
    assert keys(raw, made.run) == set()  # It checks that the run is absent before it uploads anything.
    made.restore(samples.image(manifest, pending, outer=LARGE))
    published = {key for key in chunk_keys(raw, made.run) if ":c:a:x." in key}
    assert len(published) == 3
    assert lasting_chunks(raw, made.run) == chunk_keys(raw, made.run) == wanted_chunks(raw, made.run, 2) | published
    epoch = made.merger.acquire("merger", 60.0)
    assert epoch is not None
    (delivery,) = with_payloads(made.merger.updates(0.0))
    made.merger.commit(epoch, samples.commit([delivery.entry], round_number=3, trim=[delivery.entry]))
    assert lasting_chunks(raw, made.run) == wanted_chunks(raw, made.run, 2)
    assert not [key for key in chunk_keys(raw, made.run) if ":c:a:x." in key]


def test_a_restore_loses_against_a_concurrent_creation(
    connections: Connect, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    winner, loser = connections(), connections()
    manifest = samples.manifest(winner.run, width=WIDTH)
    prepared = loser.creation.prepared

    def prepared_late(image: Any) -> Callable[[Any], None]:
        winner.create(manifest, samples.first_snapshots(manifest))
        return prepared(image)

    monkeypatch.setattr(loser.creation, "prepared", prepared_late)
    with pytest.raises(RunExistsError):
        loser.restore(samples.image(manifest, [(samples.contribution(LARGE), LARGE)], outer=LARGE))
    assert (winner.reader.backlog(), winner.reader.merger_state(), winner.island.claim_checkpoint("a")) == (0, "", None)
    assert lasting_chunks(raw, winner.run) == wanted_chunks(raw, winner.run, 2)


# -- torn reads ---------------------------------------------------------------------------------------------------


def version(number: int) -> bytes:
    """Return a payload of several chunks. Its content and its size differ from those of nearby versions."""
    return bytes([number % 251]) * (3000 + 700 * (number % 5))


@pytest.mark.usefixtures("small_chunks")
def test_a_snapshot_is_never_read_torn(transport: RedisTransport, connections: Connect, epoch: int) -> None:
    reader, versions = connections(), 200
    failed: list[BaseException] = []

    def write() -> None:
        try:
            for number in range(1, versions + 1):
                commit = samples.commit([], version(number), 2 * number - 1, outer=version(number))
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
    monkeypatch.setattr(chunks, "PREVIOUS_SECONDS", 0)
    reader = connections()
    transport.merger.commit(epoch, samples.commit([], version(1), 1))
    fetch = reader.chunks.fetch
    replaced: list[bool] = []

    def fetch_late(raw: Any, size: int, **options: Any) -> bytes:
        if not replaced:
            replaced.append(True)
            transport.merger.commit(epoch, samples.commit([], version(2), 3))
        return fetch(raw, size, **options)

    monkeypatch.setattr(reader.chunks, "fetch", fetch_late)
    snapshot, payload = reader.reader.fragment(0)
    assert (snapshot.version, payload) == (2, version(2))
    assert replaced


def test_fakeredis_is_accepted(tmp_path: Path) -> None:
    with start_server(tmp_path / "redis", find_program("fakeredis")) as fake:
        transport = connect(fake.url, "none")
        assert transport.reader.runs() == []
        transport.close()


@pytest.mark.usefixtures("small_chunks")
def test_at_most_two_versions_of_a_snapshot_are_kept(transport: RedisTransport, raw: Any, epoch: int) -> None:
    """Memory stays bounded even if versions follow each other fast."""
    counts = []
    for number in range(1, 8):
        transport.merger.commit(epoch, samples.commit([], bytes([number]) * 3000, number))
        counts.append(len([key for key in chunk_keys(raw, transport.run) if ":m:f0." in key]))
    assert counts == [3, *[6] * 6]
    assert len([key for key in chunk_keys(raw, transport.run) if ":m:o0." in key]) <= 3


# -- steering -------------------------------------------------------------------------------------------------------


def test_a_control_key_of_another_type_is_ignored_when_read(transport: RedisTransport, raw: Any) -> None:
    raw.set(Keys(transport.run).control, "no hash")
    assert transport.reader.control() == {}
    assert transport.island.heartbeat(samples.heartbeat()) == {}
    assert transport.reader.presences()[0].heartbeat == samples.heartbeat()
    assert transport.island.lease_shard(["0"], "a/x") is not None
    with failing(BrokerError, "broker.refused-wrong-type"):
        transport.reader.steer({"merging": "paused"})


def test_a_notes_key_of_another_type_is_ignored_when_read(transport: RedisTransport, raw: Any) -> None:
    raw.set(Keys(transport.run).notes, "no stream")
    assert transport.reader.notes(9) == []
    with failing(BrokerError, "broker.refused-wrong-type"):
        transport.reader.note(Note(1.7e9, "a", "joined", "at round 3"))


def test_a_refused_heartbeat_is_an_error(transport: RedisTransport, raw: Any) -> None:
    raw.set(Keys(transport.run).island("a"), "no hash")
    with failing(BrokerError, "broker.refused-wrong-type"):
        transport.island.heartbeat(samples.heartbeat())


def test_unreadable_controls_and_notes_do_not_hide_the_others(transport: RedisTransport, raw: Any) -> None:
    keys = Keys(transport.run)
    raw.hset(keys.control, mapping={b"\xff": b"\xfe", "merging": "paused", "island.a": b"\xff"})
    assert transport.reader.control() == {"\ufffd": "\ufffd", "merging": "paused", "island.a": "\ufffd"}
    assert transport.island.heartbeat(samples.heartbeat()) == {"island.a": "\ufffd"}
    note = Note(1.7e9, "a", "joined", "at round 3")
    transport.reader.note(note)
    raw.xadd(keys.notes, {"who": "a", "kind": "left"})
    transport.reader.note(note)
    assert transport.reader.notes(9) == [note, note]
