"""A connection to one run in a Redis, and what may go wrong with it. The only module that imports `redis`.

Its errors become ours here, and so does what a server says about itself. The client never retries: a retried XADD after
a stall makes two entries, so repeats are said by the caller, with identities.
"""

from __future__ import annotations

import ctypes
import io
import mmap
import re
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.connection import PythonRespSerializer
from redis.retry import Retry

from archipelago.broker.errors import BrokerError, ServerTooOldError, UnreachableError
from archipelago.broker.redis.chunks import Raw
from archipelago.broker.redis.keys import Keys
from archipelago.broker.redis.replies import next_id
from archipelago.broker.transport import START, Memory

SOCKET_SECONDS = 20.0
SILENT_SECONDS = 8
"""A host that answers nothing for so long is gone, where the system can tell; a slow link needs more patience."""
CUTOFF_BYTES = 6000
"""arguments longer than this go to the socket as they lie, without being copied into the command"""
ATTEMPTS = 16
"""at a change that others disturb by changing the same key"""
PAGE = 256
"""entries read at a time"""
OLDEST = (6, 2)
HUGE_FROM_BYTES = 4 << 20
"""from which size on a buffer gets huge pages, as numpy does it"""

T = TypeVar("T")
Client = redis.Redis


class DisturbedError(Exception):
    """A key that a transaction watched was changed by somebody else, and nothing was written."""


def client_at(url: str) -> Client:
    """Raises ValueError or TypeError for what it cannot read; speaks to nobody yet."""
    tcp: dict[str, Any] = {
        "socket_connect_timeout": 5.0, "socket_keepalive": True, "socket_keepalive_options": _probes(),
    }  # fmt: skip
    client = redis.Redis.from_url(
        url,
        protocol=2,  # the third begins with HELLO, which old servers and some proxies do not know
        socket_timeout=SOCKET_SECONDS,
        retry=Retry(NoBackoff(), 0),
        retry_on_error=[],
        # In place of hiredis's, which copies large arguments slowly, and twice.
        command_packer=PythonRespSerializer(CUTOFF_BYTES, _encoded),
        **({} if url.startswith("unix:") else tcp),
    )
    pool = client.connection_pool
    try:
        pool.connection_class(**pool.connection_kwargs)  # not connected: shows what it thinks of its options
    except redis.RedisError as error:
        raise ValueError(str(error)) from None
    if url.startswith("rediss:"):
        _require_credentials(pool.connection_kwargs)
    return client


def _probes() -> dict[int, int]:
    """TCP options by which the system ends a connection whose other end is silent, as far as it has them.

    A link that is merely slow acknowledges what gets through, so this may be far shorter than SOCKET_SECONDS.
    """
    wanted = {
        "TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": SILENT_SECONDS - 3,
        "TCP_USER_TIMEOUT": SILENT_SECONDS * 1000,  # probes are for idle connections, this for unacknowledged bytes
    }  # fmt: skip
    return {getattr(socket, name): value for name, value in wanted.items() if hasattr(socket, name)}


def _require_credentials(options: Mapping[str, Any]) -> None:
    """Raises ValueError for files and terms that cannot be used: the client would call most of them an outage."""
    context = ssl.create_default_context()
    context.minimum_version = options.get("ssl_min_version", context.minimum_version)
    ca = {kind: options.get(f"ssl_ca_{name}") for kind, name in (("cafile", "certs"), ("capath", "path"))}
    certificate, key = options.get("ssl_certfile"), options.get("ssl_keyfile")
    try:
        if any(ca.values()):
            context.load_verify_locations(**ca)
    except OSError as error:  # SSLError is one, too
        raise ValueError(f"ssl_ca_certs or ssl_ca_path: {error.strerror}") from None
    try:
        if certificate or key:
            context.load_cert_chain(certificate or "", key, options.get("ssl_password") or "")
    except OSError as error:
        raise ValueError(f"ssl_certfile, ssl_keyfile or ssl_password: {error.strerror}") from None


def _distrusted(error: BaseException | None) -> ssl.SSLError | None:
    """What a failed handshake was about, where trying again mends nothing; None for an outage."""
    while error is not None:
        refused = isinstance(error, ssl.SSLError) and re.search("WRONG_VERSION|_ALERT_", error.reason or "")
        if isinstance(error, ssl.SSLError) and (refused or isinstance(error, ssl.SSLCertVerificationError)):
            return error
        error = error.__cause__ or error.__context__  # so the library hides what its own error came from
    return None


def _encoded(value: Any) -> bytes | memoryview:
    """An argument as it travels. Raises TypeError for what none of our commands takes."""
    if isinstance(value, bytes | memoryview):
        return value
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value).encode()
    raise TypeError(f"{type(value).__name__} is no argument of a command")


def fake_client(name: str) -> Client:
    """A Redis within this process; the same one for the same name."""
    import fakeredis

    client: Client = fakeredis.FakeRedis(host=name, port=1)
    return client


_REFUSALS = {
    "MISCONF|Errors writing to": (
        "cannot write to its disk, and takes no writes", "Free space there: then all goes on by itself."
    ),
    "used memory > 'maxmemory'": (
        "is at its memory's limit, and takes no writes", "Raise its `maxmemory`: then all goes on by itself."
    ),
    "read only replica": ("is a replica, and takes no writes", "Name its primary."),
}  # fmt: skip
"""by what the server answers: what it means, and what to do. The client library takes some codes off the answers"""


def _refusal(answer: str) -> tuple[str, str]:
    """A command that the server refused, in words, and the remedy."""
    known = (words for pattern, words in _REFUSALS.items() if re.search(pattern, answer))
    return next(known, ("refused a command", "See its log and `INFO`."))


def is_full(error: BrokerError) -> bool:
    """The server is at its memory's limit."""
    return isinstance(error.__cause__, redis.exceptions.OutOfMemoryError)


def is_gone(error: BrokerError) -> bool:
    """The consumer group is not there, or was deleted while we waited for it."""
    cause = error.__cause__
    return isinstance(cause, redis.ResponseError) and bool(re.search("NOGROUP|UNBLOCKED", str(cause)))


def is_wrong_kind(error: BrokerError) -> bool:
    """Another kind of value lies under the key."""
    return "WRONGTYPE" in str(error.__cause__)


def _read_string(connection: Any, into: memoryview) -> bool:
    """Whether the next answer is a string of just that size; if so, it is there now."""
    bare = connection._sock  # the library has no public way past its parser, which has nothing read ahead here
    if isinstance(bare, socket.socket):
        head, end = b"$%d\r\n" % len(into), b"\r\n"
        return _comes(bare, head) and _fill(bare, into) and _comes(bare, end)
    try:
        answer = connection.read_response()  # fakeredis has no sockets
    except redis.ResponseError:
        return False
    if not isinstance(answer, bytes) or len(answer) != len(into):
        return False
    into[:] = answer
    return True


def _want_huge_pages(fresh: memoryview) -> None:
    """Without them a large fresh buffer is a fault for each 4 KiB, which takes longer than its bytes. Only advice."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux alone has it
    if advice is None or len(fresh) < HUGE_FROM_BYTES:
        return
    start = ctypes.addressof(ctypes.c_char.from_buffer(fresh))
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (start + len(fresh) - first) // mmap.PAGESIZE * mmap.PAGESIZE
    ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), ctypes.c_int(advice))


def _comes(bare: socket.socket, expected: bytes) -> bool:
    """Whether these bytes come next; stops at the first that differs, as no more than that may come."""
    found = b""
    while expected.startswith(found) and len(found) < len(expected):
        part = bare.recv(len(expected) - len(found))
        if not part:
            raise ConnectionError("the server closed the connection")
        found += part
    return found == expected


def _fill(bare: socket.socket, into: memoryview) -> bool:
    start = 0
    while start < len(into):
        read = bare.recv_into(into[start:])
        if not read:
            raise ConnectionError("the server closed the connection")
        start += read
    return True


def block_ms(seconds: float) -> int | None:
    """For BLOCK: shorter than the socket's patience, None for not at all."""
    return max(1, int(min(seconds, SOCKET_SECONDS / 2) * 1000)) if seconds > 0 else None


class RedisConnection:
    """One run at one server. Threads may share it: each call takes its own connection from a pool."""

    def __init__(self, client: Client, run: str, where: str = "the Redis") -> None:
        self.run = run
        self._keys = Keys(run)
        self._redis: Any = client  # redis-py's annotations mix its sync and async answers
        self._where = where
        self._password = client.connection_pool.connection_kwargs.get("password")
        self._has_info = True

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (redis.AuthenticationError, redis.exceptions.NoPermissionError) as error:
            raise BrokerError(
                f"{self._where} refuses us ({self._said(error)})",
                "Check user and password in the URL: redis://USER:PASSWORD@HOST:PORT.",
            ) from error
        except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
            if (fault := _distrusted(error)) is not None:
                raise self._insecure(fault) from error
            silent = f"{self._where} does not answer ({self._said(error)})"
            plain = " Without TLS its address begins with redis://." if self._where.startswith("rediss:") else ""
            raise UnreachableError(silent, f"Is it running, and may this machine reach it?{plain}") from error
        except redis.ResponseError as error:
            what, remedy = _refusal(str(error))
            raise BrokerError(f"{self._where} {what} ({self._said(error)})", remedy) from error
        except redis.InvalidResponse as error:
            raise BrokerError(
                f"{self._where} does not answer as a Redis does ({self._said(error)})", "Check the port."
            ) from error
        except redis.RedisError as error:
            raise BrokerError(
                f"{self._where} cannot be used ({self._said(error)})", "Check the options in its URL."
            ) from error

    def _insecure(self, fault: ssl.SSLError) -> BrokerError:
        if isinstance(fault, ssl.SSLCertVerificationError):
            return BrokerError(
                f"the certificate of {self._where} is not to be trusted ({fault.verify_message})",
                "Name who signed it: rediss://HOST:PORT?ssl_ca_certs=FILE. It must be made out to the HOST of the URL.",
            )
        return BrokerError(
            f"no TLS with {self._where} ({self._said(fault)})",
            "Check the port, or write redis:// where it has no TLS. To a server that asks who we are, show it: "
            "rediss://HOST:PORT?ssl_certfile=FILE&ssl_keyfile=FILE.",
        )

    def _said(self, error: Exception) -> str:
        """The error on one line; servers quote commands that they do not know, and so the password."""
        text = " ".join(str(error).split())
        return text.replace(self._password, "***") if self._password else text

    def require_version(self) -> None:
        """Raises ServerTooOldError when the server lacks what the streams need."""
        info = self._info("server")
        if not self._has_info:
            return  # fakeredis, which has all else that we need
        found = str(info.get("redis_version", "0"))
        if tuple(int(part) for part in re.findall(r"\d+", found)[:2]) < OLDEST:
            raise ServerTooOldError(
                f"{self._where} is Redis {found}, and 6.2 is the oldest that works",
                "Upgrade it, or leave the URL out: `archipelago up` then starts one of its own.",
            )

    def _info(self, section: str) -> dict[str, Any]:
        """Empty where there is no INFO: fakeredis."""
        if not self._has_info:
            return {}
        with self._translated():
            try:
                return dict(self._redis.info(section))
            except redis.ResponseError as error:
                if not re.match(r"unknown command .?info\b", str(error), re.IGNORECASE):
                    raise
                self._has_info = False
                self._redis.connection_pool.disconnect(False)  # its TCP server hangs up after an error
                return {}

    def instance(self) -> str:
        with self._translated():
            return str(self._info("server").get("run_id", ""))

    def memory(self) -> Memory:
        info = self._info("memory")
        return Memory(int(info.get("used_memory", 0)), int(info.get("maxmemory", 0)))

    @contextmanager
    def _watching(self, *keys: str) -> Iterator[Any]:
        """A transaction that sees these keys until `multi`, and that Redis takes only if they stay as they are.

        Raises DisturbedError where they do not.
        """
        with self._translated(), self._redis.pipeline(transaction=True) as pipe:
            try:
                pipe.watch(*keys)
                yield pipe
            except redis.WatchError as error:
                if isinstance(error.__context__, redis.ConnectionError | redis.TimeoutError | OSError):
                    raise error.__context__ from None  # so the library names a connection that broke meanwhile
                raise DisturbedError from None

    def _attempted(self, key: str, change: Callable[[Any], T]) -> T | None:
        """What `change` returns, once Redis has taken what it queued with `key` as it found it.

        None when others came in between too often.
        """
        for _ in range(ATTEMPTS):
            try:
                with self._watching(key) as pipe:
                    out = change(pipe)
                    if len(pipe):
                        pipe.execute()
                    return out
            except DisturbedError:
                continue
        return None

    def _pages(self, key: str, after: str = START, count: int = PAGE) -> Iterator[tuple[str, Raw]]:
        """All entries of a stream beyond that id, read `count` at a time."""
        while True:
            with self._translated():
                found = self._redis.xrange(key, next_id(after), "+", count)
            for entry, raw in found:
                yield entry.decode(), raw
            if len(found) < count:
                return
            after = found[-1][0].decode()

    def _tolerant(self, *commands: tuple[Any, ...]) -> list[Any]:
        """The answers to reading commands from one pipeline, None for those that miss the stream or its group.

        No transaction: a server at its memory's limit refuses every one, and its merger must see what it can let go.
        """
        with self._redis.pipeline(transaction=False) as pipe:
            for name, *arguments in commands:
                getattr(pipe, name)(*arguments)
            answers = pipe.execute(raise_on_error=False)
        for answer in answers:
            if isinstance(answer, Exception) and not re.search("NOGROUP|no such key", str(answer)):
                raise answer
        return [None if isinstance(answer, Exception) else answer for answer in answers]

    def _joined(self, commands: Sequence[tuple[Any, ...]], sizes: Sequence[int], ahead: int) -> bytes | None:
        """The answers to reading commands, end to end; None unless they are strings of just these sizes.

        Large answers go from the socket to where they stay, which a parser would copy twice. `ahead` commands more are
        on their way meanwhile: the server need not wait for us to ask again, nor hold more than that in its buffers.
        """
        whole = io.BytesIO(bytes(sum(sizes)))  # filled in place, and given away at the end without a copy
        _want_huge_pages(whole.getbuffer())
        pool = self._redis.connection_pool
        connection = pool.get_connection()
        complete = False
        try:
            sent = start = 0
            for index, size in enumerate(sizes):
                for command in commands[sent : index + 1 + ahead]:
                    connection.send_command(*command)
                    sent += 1
                if not _read_string(connection, whole.getbuffer()[start : start + size]):
                    return None
                start += size
            complete = True
        finally:
            if not complete:
                connection.disconnect()  # answers may still be on their way to it
            pool.release(connection)
        return whole.getvalue()

    def close(self) -> None:
        self._redis.close()
