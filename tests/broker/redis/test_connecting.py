"""Connecting: addresses that are refused, servers that cannot be reached or used, passwords, and waiting."""

from __future__ import annotations

import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from archipelago.broker.address import redacted
from archipelago.broker.errors import ArchipelagoError, BadUrlError, BrokerError, UnreachableError
from archipelago.broker.redis import client
from archipelago.broker.redis.client import SILENT_SECONDS, SOCKET_SECONDS, client_at
from archipelago.broker.redis.connection import RedisConnection
from archipelago.broker.redis.failures import Failures
from archipelago.broker.redis.keys import REGISTRY
from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.ops.chaos.proxy import Proxy
from archipelago.ops.launch.embedded_redis import RedisServer
from tests.failing import failing

SECRET = "Pa55" + "w0rd"


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


def server_of(version: str) -> Callable[[list[str]], bytes]:
    """Return a function that answers INFO with a version, and refuses every other command."""

    def answer(words: list[str]) -> bytes:
        if words[0] == "INFO":
            text = f"# Server\r\nredis_version:{version}\r\n"
            return f"${len(text)}\r\n{text}\r\n".encode()
        return f"-ERR unknown command `{words[0]}`, with args beginning with: {words[1:]}\r\n".encode()

    return answer


INVALID = (
    "", "localhost:6379", "http://localhost:6379", "Redis//localhost", "redis:/localhost", "redis://", "redis://:6379",
    "redis://localhost:port", "redis://localhost:99999", "redis://localhost:-1", "redis://localhost/my-run",
    "redis://localhost/0#1", "redis://[::1", "redis://..:6379", f"redis://{'a' * 300}:6379",
    "redis://localhost?colour=red", "redis://localhost?socket_timeout=soon", "unix://", "unix://relative/path",
)  # fmt: skip


def test_an_invalid_address_is_an_error() -> None:
    for url in INVALID:
        with failing(BadUrlError) as caught:
            connect(url, "run")
        assert repr(url) in str(caught.value)


def test_a_server_that_does_not_answer_is_unreachable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        closed: int = probe.getsockname()[1]
    for url in (f"redis://127.0.0.1:{closed}", f"rediss://127.0.0.1:{closed}", f"unix://{tmp_path}/none"):
        with failing(UnreachableError) as caught:
            connect(url, "run")
        assert "TLS" not in str(caught.value), "it plays no part"
    for answer in (None, b"-LOADING Redis is loading the dataset in memory\r\n"):
        with answering(lambda _, answer=answer: answer) as url, failing(UnreachableError):  # type: ignore[misc]
            connect(url, "run")
    monkeypatch.setattr(client, "SOCKET_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent, failing(UnreachableError):
        connect(f"redis://127.0.0.1:{silent.getsockname()[1]}", "run")


def test_a_server_without_tls_fails_as_soon_as_one_that_cannot_be_reached() -> None:
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as plain, failing(UnreachableError) as caught:
        connect(f"rediss://127.0.0.1:{plain.getsockname()[1]}?socket_connect_timeout=0.1", "run")
    assert time.monotonic() - began < SOCKET_SECONDS
    assert "redis://" in caught.value.remedy


def test_an_outage_has_the_remedy_of_its_cause() -> None:
    for error, remedy in (
        (redis.ConnectionError("max number of clients reached"), "maxclients"),
        (redis.ConnectionError("ClusterDownError: Hash slot not served"), "--cluster fix"),
        (redis.ConnectionError("AskError: 6211 127.0.0.1:7001"), "--cluster check"),
        (redis.ConnectionError("Error 104 while writing to socket. Connection reset by peer."), "without a password"),
    ):
        found = Failures("redis://hub", None).translation(error)
        assert isinstance(found, UnreachableError) and remedy in found.remedy, error


@pytest.mark.skipif(sys.platform != "linux", reason="other systems call these options otherwise, or lack them")
def test_tcp_timeouts_detect_a_silent_host_before_the_socket_timeout(server: RedisServer) -> None:
    client = client_at(server.url)
    client.ping()
    connection: Any = client.connection_pool.get_connection()
    asked, unacknowledged = (
        connection._sock.getsockopt(socket.IPPROTO_TCP, option)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_USER_TIMEOUT)
    )
    assert asked < SILENT_SECONDS == unacknowledged / 1000 < SOCKET_SECONDS
    client.close()


def test_a_server_of_another_kind_or_of_an_old_version_is_refused(server: RedisServer, tmp_path: Path) -> None:
    with answering(lambda _: b"HTTP/1.1 400 Bad Request\r\n\r\n") as url, failing(BrokerError, "broker.address"):
        connect(url, "run")
    for version in ("5.0.7", "6.2.16", "4", "unstable"):
        with answering(server_of(version)) as url, failing(BrokerError, "broker.server-too-old"):
            connect(url, "run")
    for version in ("7.0.0", "7.2.4", "10.0.1"):
        with answering(server_of(version)) as url:
            connect(url, "run").close()
    with answering(server_of("7.0.0"), tmp_path / "socket") as url:
        connect(url, "run").close()
    with failing(BrokerError, "broker.refused-command"):
        connect(server.url.removesuffix("/0") + "/9999", "run")


# -- passwords ----------------------------------------------------------------------------------------------------


def test_a_user_without_permission_gets_an_error_of_its_own(
    transport: RedisTransport, server: RedisServer, raw: Any
) -> None:
    raw.acl_setuser("reader", enabled=True, reset=True, passwords=[f"+{SECRET}"], keys=["*"], commands=["+info"])
    reader = connect(f"redis://reader:{SECRET}@127.0.0.1:{server.port}", transport.run)
    try:
        with failing(BrokerError, "broker.permission"):
            reader.reader.manifest()
    finally:
        reader.close()
        raw.acl_deluser("reader")


WITH_PASSWORDS = (
    f"redis://:{SECRET}@127.0.0.1:1", f"redis://user:{SECRET}@127.0.0.1:1/0", f"redis://{SECRET}@127.0.0.1:1",
    f"redis://127.0.0.1:1?password={SECRET}", f"redis://127.0.0.1:1/0?db=1&Password={SECRET}",
    f"unix://:{SECRET}@/tmp/none", f"http://:{SECRET}@127.0.0.1", f"user:{SECRET}@127.0.0.1:1", f"{SECRET}@127.0.0.1",
    f"redis://:{SECRET}@127.0.0.1:port", f"redis://:x@{SECRET}@127.0.0.1:1", f"redis://:x/{SECRET}@127.0.0.1:1",
    f"redis://:{SECRET}/x@127.0.0.1:1", f"redis://:{SECRET}?x@127.0.0.1:1", f"redis://:x?{SECRET}@127.0.0.1:1",
    f"redis://:{SECRET}#x@127.0.0.1:1", f"redis://:x#{SECRET}@127.0.0.1:1", f"redis://user:{SECRET}?x@127.0.0.1:1",
    f"redis://:x://{SECRET}@127.0.0.1:1", f"redis://:[{SECRET}@127.0.0.1:1", f"redis://:{SECRET}@[::1:1",
    f"redis://:{SECRET}@{'a' * 300}:1", f"redis://:{SECRET}@127.0.0.1:1?colour=red",
)  # fmt: skip


def test_no_error_shows_a_password() -> None:
    for url in WITH_PASSWORDS:
        assert SECRET not in redacted(url)
        with pytest.raises(ArchipelagoError) as caught:
            connect(url, "run")
        assert SECRET not in str(caught.value), url
        assert "***" in str(caught.value), url
    with failing(BadUrlError) as caught:
        connect("redis://:12/34@127.0.0.1:1", "run")
    assert "12" not in str(caught.value).replace("127.0.0.1", ""), "digits were taken for a port"
    with answering(server_of("5.0.7")) as url, pytest.raises(BrokerError) as quoted:
        connect(url.replace("://", f"://:{SECRET}@"), "run")
    assert "unknown command `AUTH`" in str(quoted.value), "the server's reply is shown"
    assert SECRET not in str(quoted.value)


def test_a_name_among_those_of_all_runs_is_written_where_it_can_be(server: RedisServer) -> None:
    with closing(connect(server.url, "named")) as made:
        made.connection.register()
        assert made.connection.redis.smembers(REGISTRY) >= {b"named"}
    RedisConnection(client_at("redis://127.0.0.1:1"), "named").register()  # the run does not depend on it


def test_after_silence_no_call_waits_for_an_old_connection(server: RedisServer) -> None:
    """Also while another thread has the connection that was silent first, and was made again."""
    with Proxy(server.port) as proxy, closing(connect(f"{proxy.url(server.url)}?socket_timeout=0.3", "run")) as made:
        pool = made.connection.redis.connection_pool
        for each in [pool.get_connection() for _ in range(3)]:
            pool.release(each)
        proxy.half_open()
        with failing(UnreachableError):
            made.connection.instance()
        busy = pool.get_connection()
        assert made.connection.instance()
        pool.release(busy)
