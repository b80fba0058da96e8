"""Addresses with TLS, by test certificates, and Unix sockets.

The installed server has no TLS, so a proxy in Python stands before it and ends the encryption. Clusters and Sentinels
with TLS are in `test_tls_clusters.py`.
"""

from __future__ import annotations

import contextlib
import random
import select
import socket
import socketserver
import ssl
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from archipelago.broker.errors import BadUrlError, BrokerError, UnreachableError
from archipelago.broker.machine import LOOPBACK
from archipelago.broker.redis.transport import connect
from archipelago.ops.launch.embedded_redis import RedisServer, find_program
from tests import samples
from tests.certificates import Certificates, Identity
from tests.conftest import Until
from tests.failing import failing

WIDTH = 200_000
#: Five chunks, of which the last one is short.
LARGE = random.Random(0).randbytes((4 << 20) + 4567)


# -- the TLS proxy --------------------------------------------------------------------------------------------------


class TlsProxy(socketserver.ThreadingTCPServer):
    """Ends the TLS of each connection and forwards it to a server. Answers go out in pieces of odd sizes.

    Attributes:
        target: The port of the server.
        context: The TLS context of the proxy.
        bytes_left: Bytes of answers that still go through before the connection is cut.
    """

    daemon_threads = True

    def __init__(self, target: int, context: ssl.SSLContext) -> None:
        super().__init__((LOOPBACK, 0), _Forwarding)
        self.target, self.context, self.bytes_left = target, context, sys.maxsize

    @contextlib.contextmanager
    def serving(self) -> Iterator[int]:
        """Serve on a free port."""
        thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self.server_address[1]
        finally:
            self.shutdown()
            thread.join()
            self.server_close()


class _Forwarding(socketserver.BaseRequestHandler):
    server: TlsProxy

    def handle(self) -> None:
        context: Any = self.server.context
        with context.wrap_socket(self.request, server_side=True, do_handshake_on_connect=False) as secure:
            with contextlib.suppress(OSError):  # Some tests make handshakes fail.
                secure.do_handshake()
                with socket.create_connection((LOOPBACK, self.server.target)) as back:
                    self._forward(secure, back)
            with contextlib.suppress(OSError):
                secure.shutdown(socket.SHUT_WR)
                while secure.recv(1 << 16):  # Closing with unread bytes would lose the alert of a refusal.
                    pass

    def _forward(self, secure: ssl.SSLSocket, back: socket.socket) -> None:
        sizes = random.Random(1)
        while True:
            ready, _, _ = select.select([secure, back], [], [])
            if secure in ready:
                if not (request := secure.recv(1 << 16)):
                    return
                back.sendall(request + secure.recv(secure.pending()) if secure.pending() else request)
            if back in ready:
                answer = back.recv(sizes.choice((1, 2, 100, 16_000, 100_000)))
                self.server.bytes_left -= len(answer)
                if not answer or self.server.bytes_left < 0:
                    return
                secure.sendall(answer)


def context_of(identity: Identity, asks_for: Identity | None = None) -> ssl.SSLContext:
    """Return a server's TLS context. `asks_for` is the authority that must have signed the clients."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(identity.certificate, identity.key)
    if asks_for is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(asks_for.certificate)
    return context


class Secured:
    """A proxy before the server that shows the server's certificate, and its addresses."""

    def __init__(self, server: RedisServer, certificates: Certificates) -> None:
        self.proxy = TlsProxy(server.port, context_of(certificates.server))
        self._server, self.authority = server, certificates.authority.certificate
        self.port = 0

    def url(self, host: str = LOOPBACK, port: int = 0, **options: object) -> str:
        """Return the server's address through this proxy, or through the one at another port."""
        password = self._server.url.removeprefix("redis://").partition("@")[0]
        words = "&".join(f"{key}={value}" for key, value in options.items())
        return f"rediss://{password}@{host}:{port or self.port}/0?{words}"


@pytest.fixture(scope="module")
def secured(server: RedisServer, certificates: Certificates) -> Iterator[Secured]:
    made = Secured(server, certificates)
    with made.proxy.serving() as made.port:
        yield made


@contextlib.contextmanager
def in_the_file_system() -> Iterator[str]:
    """Start a server with a password that listens only on a Unix socket."""
    program = find_program()
    with tempfile.TemporaryDirectory(prefix="unix-") as folder:  # The path of a socket has 107 bytes at most.
        path, password = Path(folder) / "redis.sock", uuid.uuid4().hex
        settings = {"port": "0", "unixsocket": str(path), "requirepass": password, "save": "", "dir": folder}
        options = [word for name, value in settings.items() for word in (f"--{name}", value)]
        process = subprocess.Popen([str(program.path), *options], stdout=subprocess.DEVNULL)
        try:
            yield f"unix://:{password}@{path}?db=2"
        finally:
            process.terminate()
            process.wait()


def answers(url: str) -> bool:
    try:
        connect(url, "anyone").close()
    except UnreachableError:
        return False
    return True


# -- end to end -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["rediss", "unix"])
def test_a_round_through_each_address(kind: str, secured: Secured, until: Until) -> None:
    """Payloads are large, so that their chunks are read directly from the socket."""
    with contextlib.ExitStack() as stack:
        url = secured.url(ssl_ca_certs=secured.authority, ssl_cert_reqs="required")
        if kind == "unix":
            url = stack.enter_context(in_the_file_system())
            until(lambda: answers(url), "the server to answer")
        run = f"run-{uuid.uuid4().hex[:8]}"
        island, merger = (stack.enter_context(closing(connect(url, run))) for _ in range(2))
        samples.begin(island, width=WIDTH)
        island.island.heartbeat(samples.heartbeat())
        sent = samples.contribution(LARGE)
        island.island.publish(sent, LARGE)
        epoch = merger.merger.acquire("merger", 60.0)
        assert epoch is not None
        (header,) = merger.merger.updates(5.0)
        delivery = header.with_payload()
        assert (delivery.contribution, delivery.payload, delivery.fault) == (sent, LARGE, "")
        merger.merger.commit(epoch, samples.commit([delivery.entry], LARGE[::-1]))
        snapshot, payload = island.reader.fragment(0)
        assert (snapshot.version, payload) == (1, LARGE[::-1])
        assert island.reader.counters().merged == 1


def test_a_truncated_answer_is_an_outage(secured: Secured) -> None:
    """The connection breaks in the middle of a chunk. The next request gets a whole answer."""
    run = f"run-{uuid.uuid4().hex[:8]}"
    with closing(connect(secured.url(ssl_ca_certs=secured.authority), run)) as transport:
        samples.begin(transport, width=WIDTH)
        transport.island.publish(samples.contribution(LARGE), LARGE)
        (header,) = transport.merger.updates(0.0)
        secured.proxy.bytes_left = len(LARGE) // 2
        with pytest.raises(UnreachableError):
            header.with_payload()
        secured.proxy.bytes_left = sys.maxsize
        assert header.with_payload().payload == LARGE


# -- refusals -------------------------------------------------------------------------------------------------------


def test_a_certificate_must_be_of_the_host_and_of_a_trusted_authority(
    secured: Secured, certificates: Certificates, tmp_path: Path
) -> None:
    authority, other = secured.authority, certificates.stranger.certificate
    with TlsProxy(secured.proxy.target, context_of(certificates.stranger)).serving() as stranger:
        for wrong in (
            secured.url(port=stranger, ssl_ca_certs=authority),
            secured.url(),  # A private authority must be named.
            secured.url(host="localhost", ssl_ca_certs=authority),
        ):
            with failing(BrokerError, "broker.tls") as caught:
                connect(wrong, "run")
            assert not isinstance(caught.value, UnreachableError), "a retry cannot help"
        for good in (
            secured.url(port=stranger, ssl_ca_certs=other),
            secured.url(port=stranger, ssl_cert_reqs="none"),
            secured.url(host="localhost", ssl_ca_certs=authority, ssl_check_hostname=False),
        ):
            connect(good, "run").close()


def test_a_server_may_ask_for_a_client_certificate(secured: Secured, certificates: Certificates) -> None:
    context = context_of(certificates.server, asks_for=certificates.authority)
    island, stranger = certificates.island, certificates.stranger
    with TlsProxy(secured.proxy.target, context).serving() as port:
        url = secured.url(port=port, ssl_ca_certs=secured.authority)
        connect(f"{url}&ssl_certfile={island.certificate}&ssl_keyfile={island.key}", "run").close()
        for wrong in ("", f"&ssl_certfile={stranger.certificate}&ssl_keyfile={stranger.key}"):
            with failing(BrokerError, "broker.tls") as caught:
                connect(url + wrong, "run")
            assert not isinstance(caught.value, UnreachableError)


def test_bad_options_of_an_address_are_refused(server: RedisServer, tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.touch()
    for options in (
        "ssl_ca_certs=/none/ca.pem",
        f"ssl_ca_certs={tmp_path}",
        f"ssl_ca_certs={empty}",
        "ssl_certfile=/none/island.pem",
        "ssl_keyfile=/none/island.key",
        f"ssl_certfile={empty}",
        "ssl_cert_reqs=maybe",
        "ssl_min_version=3",
        "ssl_nonsense=1",
    ):
        with pytest.raises(BadUrlError):
            connect(f"rediss://{LOOPBACK}:{server.port}?{options}", "run")
