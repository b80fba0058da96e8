"""Each kind of address, end to end: TLS with test certificates, also to clusters and Sentinels, and Unix sockets.

The installed server has no TLS, so a proxy in Python stands before it and ends the encryption. Clusters and Sentinels
are of the machine's Redis, which has TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from archipelago.broker.errors import BadUrlError, BrokerError, UnreachableError
from archipelago.broker.redis import client
from archipelago.broker.redis.bulk import HUGE_FROM_BYTES
from archipelago.broker.redis.transport import connect
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.ops.launch.embedded_redis import Server
from archipelago.ops.launch.redis_probe import LOOPBACK
from archipelago.ops.launch.redis_program import find_program
from tests import samples
from tests.certificates import Certificates, Identity
from tests.conftest import Until
from tests.failing import failing

WIDTH = 200_000
#: Five chunks, of which the last one is short.
LARGE = random.Random(0).randbytes(HUGE_FROM_BYTES + 4567)


# -- the TLS proxy --------------------------------------------------------------------------------------------------


class TlsProxy:
    """Ends the TLS of each connection and forwards it to a server. Answers go out in pieces of odd sizes."""

    def __init__(self, target: int, context: ssl.SSLContext) -> None:
        self._target, self._context = target, context
        self._random = random.Random(1)
        self._tasks: set[asyncio.Task[None]] = set()
        #: Bytes of answers that still go through before the connection is cut.
        self.bytes_left = sys.maxsize

    @contextlib.contextmanager
    def serving(self) -> Iterator[int]:
        """Serve on a free port."""
        loop, listening = asyncio.new_event_loop(), socket.create_server((LOOPBACK, 0))
        loop.set_exception_handler(lambda *_: None)  # Some tests make handshakes fail.
        serving = loop.run_until_complete(asyncio.start_server(self._serve, sock=listening, ssl=self._context))
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            asyncio.run_coroutine_threadsafe(self._end(serving), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    async def _end(self, serving: asyncio.Server) -> None:
        serving.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        back, forth = await asyncio.open_connection(LOOPBACK, self._target)
        try:
            ways = [asyncio.ensure_future(self._up(reader, forth)), asyncio.ensure_future(self._down(back, writer))]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
        finally:
            for end in (writer, forth):
                end.transport.abort()
            self._tasks.discard(task)

    async def _up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()

    async def _down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(self._random.choice((1, 2, 100, 16_000, 100_000))):
            self.bytes_left -= len(data)
            if self.bytes_left < 0:
                return
            writer.write(data)
            await writer.drain()


def context_of(identity: Identity, asks_for: Identity | None = None) -> ssl.SSLContext:
    """Return a server's TLS context. `asks_for` is the authority that must have signed the clients."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(identity.certificate, identity.key)
    if asks_for is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(asks_for.certificate)
    return context


def secure_url(server: Server, port: int, host: str = LOOPBACK, **options: object) -> str:
    """Return the server's address through a proxy."""
    password = server.url.removeprefix("redis://").partition("@")[0]
    return f"rediss://{password}@{host}:{port}/0?" + "&".join(f"{key}={value}" for key, value in options.items())


@contextlib.contextmanager
def secured(server: Server, certificates: Certificates) -> Iterator[str]:
    with TlsProxy(server.port, context_of(certificates.server)).serving() as port:
        yield secure_url(server, port, ssl_ca_certs=certificates.authority.certificate, ssl_cert_reqs="required")


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


#: Addresses of several servers, and the fixtures that start these.
SEVERAL = {"rediss+cluster": "tls_cluster", "rediss+sentinel": "tls_watched"}


@pytest.fixture(params=["rediss", "unix", *(pytest.param(kind, marks=pytest.mark.full) for kind in SEVERAL)])
def url(request: pytest.FixtureRequest, until: Until) -> Iterator[str]:
    """Return an address of each kind."""
    reaching: contextlib.AbstractContextManager[str]
    if request.param == "unix":
        reaching = in_the_file_system()
    elif request.param in SEVERAL:
        reaching = contextlib.nullcontext(request.getfixturevalue(SEVERAL[request.param]).url)
    else:
        reaching = secured(request.getfixturevalue("server"), request.getfixturevalue("certificates"))
    with reaching as found:
        until(lambda: answers(found), "the server to answer")
        yield found


def answers(url: str) -> bool:
    try:
        connect(url, "anyone").close()
    except UnreachableError:
        return False
    return True


# -- end to end -----------------------------------------------------------------------------------------------------


def test_a_round_through_each_address(url: str) -> None:
    """Payloads are large, so that their chunks are read directly from the socket."""
    assert url.partition(":")[0] in ("rediss", "unix", *SEVERAL)
    run = f"run-{uuid.uuid4().hex[:8]}"
    island, merger = connect(url, run), connect(url, run)
    try:
        manifest = samples.manifest(run, width=WIDTH)
        island.create(manifest, samples.first_snapshots(manifest))
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
        assert island.reader.books().merged == 1
        island.island.request_state("a/x")
        assert merger.island.promise_answer("a/x", "b/y")
        merger.island.hand_over("a/x", samples.handover(LARGE), LARGE)
        assert island.island.handed_over("a/x") == (samples.handover(LARGE), LARGE)
    finally:
        island.close()
        merger.close()


def test_a_truncated_answer_is_an_outage(server: Server, certificates: Certificates) -> None:
    """The connection breaks in the middle of a chunk. The next request gets a whole answer."""
    proxy = TlsProxy(server.port, context_of(certificates.server))
    run = f"run-{uuid.uuid4().hex[:8]}"
    with proxy.serving() as port:
        transport = connect(secure_url(server, port, ssl_ca_certs=certificates.authority.certificate), run)
        manifest = samples.manifest(run, width=WIDTH)
        transport.create(manifest, samples.first_snapshots(manifest))
        transport.island.publish(samples.contribution(LARGE), LARGE)
        (header,) = transport.merger.updates(0.0)
        proxy.bytes_left = len(LARGE) // 2
        with pytest.raises(UnreachableError):
            header.with_payload()
        proxy.bytes_left = sys.maxsize
        assert header.with_payload().payload == LARGE
        transport.close()


@pytest.fixture
def archipelago(corpus: OpenCorpus, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return a function that starts a command in a process. Its standard error goes to `VERB.log`."""
    started: list[subprocess.Popen[str]] = []

    def start(verb: str, *arguments: str) -> subprocess.Popen[str]:
        with (tmp_path / f"{verb}.log").open("w") as log:
            command = [sys.executable, "-P", "-m", "archipelago.ops", verb, *arguments]
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.full
@pytest.mark.processes
def test_a_run_through_each_address(
    url: str, archipelago: Callable[..., subprocess.Popen[str]], tmp_path: Path, until: Until
) -> None:
    run = f"run-{uuid.uuid4().hex[:8]}"
    small = ["--data.sequence-length=32", "--data.batch-size=4", "--data.shards=8", "--data.held-out-sequences=32"]
    settings = [*small, "--data.corpus=small-text", "--inner.steps=100000", "--sync.interval=12"]
    made = archipelago("init", url, "--run", run, *settings)
    assert made.wait() == 0, (tmp_path / "init.log").read_text()
    archipelago("merger", url, "--run", run)
    island = archipelago("island", url, "--run", run)
    look = connect(url, run)
    until(lambda: look.reader.books().merged >= 4, "some rounds")
    look.close()
    status = archipelago("status", url, "--run", run, "--json")
    assert json.loads(status.communicate()[0])["live"] == 1
    island.terminate()
    assert island.wait() == 0, (tmp_path / "island.log").read_text()
    for log in tmp_path.glob("*.log"):
        assert "Traceback" not in log.read_text()


# -- refusals -------------------------------------------------------------------------------------------------------


def test_a_server_with_an_untrusted_certificate_is_refused(server: Server, certificates: Certificates) -> None:
    with TlsProxy(server.port, context_of(certificates.stranger)).serving() as port:
        with failing(BrokerError, "broker.certificate") as caught:
            connect(secure_url(server, port, ssl_ca_certs=certificates.authority.certificate), "run")
        assert not isinstance(caught.value, UnreachableError), "a retry cannot help"
        connect(secure_url(server, port, ssl_ca_certs=certificates.stranger.certificate), "run").close()
        connect(secure_url(server, port, ssl_cert_reqs="none"), "run").close()


def test_a_private_authority_must_be_named(server: Server, certificates: Certificates) -> None:
    with (
        TlsProxy(server.port, context_of(certificates.server)).serving() as port,
        failing(BrokerError, "broker.certificate"),
    ):
        connect(secure_url(server, port), "run")


def test_a_certificate_of_another_host_is_refused(server: Server, certificates: Certificates) -> None:
    authority = certificates.authority.certificate
    with TlsProxy(server.port, context_of(certificates.server)).serving() as port:
        with failing(BrokerError, "broker.certificate"):
            connect(secure_url(server, port, host="localhost", ssl_ca_certs=authority), "run")
        url = secure_url(server, port, host="localhost", ssl_ca_certs=authority, ssl_check_hostname=False)
        connect(url, "run").close()


def test_a_server_may_ask_for_a_client_certificate(server: Server, certificates: Certificates) -> None:
    authority = certificates.authority.certificate
    context = context_of(certificates.server, asks_for=certificates.authority)
    with TlsProxy(server.port, context).serving() as port:
        connect(secure_url(server, port, ssl_ca_certs=authority) + shown(certificates.island), "run").close()
    for wrong in ("", shown(certificates.stranger)):
        with one_handshake(context) as port, failing(BrokerError, "broker.tls") as caught:
            connect(secure_url(server, port, ssl_ca_certs=authority) + wrong, "run")
        assert not isinstance(caught.value, UnreachableError)


def shown(identity: Identity) -> str:
    return f"&ssl_certfile={identity.certificate}&ssl_keyfile={identity.key}"


@contextlib.contextmanager
def one_handshake(context: ssl.SSLContext) -> Iterator[int]:
    """Accept one connection and send the TLS alert if it is refused, which asyncio does not."""
    with socket.create_server((LOOPBACK, 0)) as listening:

        def take() -> None:
            bare, _ = listening.accept()
            with context.wrap_socket(bare, server_side=True, do_handshake_on_connect=False) as secure:
                with contextlib.suppress(ssl.SSLError):
                    secure.do_handshake()
                with contextlib.suppress(OSError):
                    secure.shutdown(socket.SHUT_WR)
                    while secure.recv(1 << 16):  # Closing with unread bytes would lose the alert.
                        pass

        thread = threading.Thread(target=take)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            thread.join()


def test_a_server_without_tls(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the end of a line that never comes."""
    monkeypatch.setattr(client, "SOCKET_SECONDS", 0.5)
    with failing(UnreachableError):
        connect(secure_url(server, server.port), "run")


def test_a_server_of_another_protocol() -> None:
    with socket.create_server((LOOPBACK, 0)) as listening:

        def greet() -> None:
            with listening.accept()[0] as connection, contextlib.suppress(OSError):
                connection.sendall(b"220 mail.example ESMTP\r\n" * 10)
                while connection.recv(1 << 16):
                    pass

        thread = threading.Thread(target=greet)
        thread.start()
        with failing(BrokerError, "broker.tls") as caught:
            connect(f"rediss://{LOOPBACK}:{listening.getsockname()[1]}", "run")
        thread.join()
    assert not isinstance(caught.value, UnreachableError)


def test_a_server_with_tls_only(server: Server, certificates: Certificates) -> None:
    with TlsProxy(server.port, context_of(certificates.server)).serving() as port, pytest.raises(BrokerError):
        connect(f"redis://{LOOPBACK}:{port}", "run")


@pytest.mark.parametrize(
    "options",
    [
        "ssl_ca_certs=/none/ca.pem",
        "ssl_ca_certs={folder}",
        "ssl_ca_certs={empty}",
        "ssl_certfile=/none/island.pem",
        "ssl_keyfile=/none/island.key",
        "ssl_certfile={empty}",
        "ssl_cert_reqs=maybe",
        "ssl_min_version=3",
        "ssl_nonsense=1",
    ],
)
def test_bad_options_of_an_address_are_refused(server: Server, tmp_path: Path, options: str) -> None:
    empty = tmp_path / "empty.pem"
    empty.touch()
    with pytest.raises(BadUrlError):
        connect(f"rediss://{LOOPBACK}:{server.port}?" + options.format(folder=tmp_path, empty=empty), "run")


@pytest.mark.processes
def test_commands_report_an_untrusted_certificate_as_a_user_error(
    server: Server, certificates: Certificates, archipelago: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    with TlsProxy(server.port, context_of(certificates.stranger)).serving() as port:
        url = secure_url(server, port, ssl_ca_certs=certificates.authority.certificate)
        for verb in ("status", "island", "merger"):
            assert archipelago(verb, url, "--run", "run").wait() == 2
            said = (tmp_path / f"{verb}.log").read_text()
            assert "Traceback" not in said
