"""Read from one connection what redis-py would read less well: large answers, and several answers after a WATCH.

Large answers go from the socket into the buffer that keeps them, past the parser. redis-py has no public way to do
this, so `_read_string` uses the private attribute `_sock` of its connections. `tests/broker/redis/test_private_api.py`
names the versions that this was tried with.

The chunks of snapshots may come from a replica, so that the primary's own link carries fewer bytes. Only chunks that
mergers wrote are read there. Their names are never used twice, and what points to them comes from the primary. So a
replica can only be late, away or wrong, and never old: a chunk that it lacks, or whose payload has another digest, is
read from the primary. Everything else is read from the primary and written to it.
"""

from __future__ import annotations

import ctypes
import io
import logging
import mmap
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import redis

from archipelago.broker.address import parse_address, redacted
from archipelago.broker.errors import BadUrlError
from archipelago.broker.redis.client import RedisClient, client_at
from archipelago.broker.redis.failures import tls_fault
from archipelago.broker.signing import Raw
from archipelago.broker.transport import Arrived
from archipelago.broker.wire import digest

#: Buffers of at least this size get huge pages, as in numpy.
HUGE_FROM_BYTES = 4 << 20
#: A replica that does not answer within this time is passed by.
ANSWER_SECONDS = 5.0
#: A replica that did not answer is asked again after this time.
PAUSE_SECONDS = 10.0
#: The same kind of trouble is logged once in this time.
REMIND_SECONDS = 60.0
log = logging.getLogger(__name__)


def read_joined(
    client: Any, commands: Sequence[tuple[Any, ...]], sizes: Sequence[int], ahead: int, arrived: Arrived
) -> bytes | None:
    """Return the answers to reading commands, joined; None unless they are strings of exactly these sizes.

    A parser would copy large answers twice.

    Args:
        client: The redis-py client whose pool lends the connection.
        commands: One command for each answer.
        sizes: Bytes of each answer.
        ahead: How many further commands are sent before an answer is read. The server then need not wait for the
            next command, and its output buffer holds no more than this many answers.
        arrived: Called after each answer with all bytes so far. Further answers come in meanwhile.
    """
    whole = io.BytesIO(bytes(sum(sizes)))  # filled in place; getvalue() then needs no copy
    _want_huge_pages(whole.getbuffer())
    pool = client.connection_pool
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
            arrived(whole.getbuffer()[:start])
        complete = True
    finally:
        if not complete:
            connection.disconnect()  # more answers may be on their way to it
        pool.release(connection)
    return whole.getvalue()


def asked_together(connection: Any, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Send commands over one connection without waiting in between, and return the raw answers.

    After a WATCH, redis-py itself waits for each answer before it sends the next command. An error that a server
    answers with is returned.
    """
    for command in commands:
        connection.send_command(*command)
    answers: list[Any] = []
    for _ in commands:
        try:
            answers.append(connection.read_response())
        except redis.ResponseError as error:
            answers.append(error)
    return answers


def _read_string(connection: Any, into: memoryview) -> bool:
    """Read the next answer into the buffer; False unless it is a string of exactly that size."""
    bare = connection._sock  # the parser has read nothing ahead at this point
    if isinstance(bare, socket.socket):
        head, end = b"$%d\r\n" % len(into), b"\r\n"
        return _expect(bare, head) and _fill(bare, into) and _expect(bare, end)
    try:
        answer = connection.read_response()  # fakeredis has no sockets
    except redis.ResponseError:
        return False
    if not isinstance(answer, bytes) or len(answer) != len(into):
        return False
    into[:] = answer
    return True


def _want_huge_pages(fresh: memoryview) -> None:
    """Ask for huge pages, which avoid one page fault per 4 KiB of a large new buffer."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)  # only Linux has it
    if advice is None or len(fresh) < HUGE_FROM_BYTES:
        return
    start = ctypes.addressof(ctypes.c_char.from_buffer(fresh))
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (start + len(fresh) - first) // mmap.PAGESIZE * mmap.PAGESIZE
    ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), ctypes.c_int(advice))


def _expect(bare: socket.socket, expected: bytes) -> bool:
    """Read these bytes; False at the first read that differs, because the server may send no more."""
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


class ReadReplica:
    """A replica that holds the same chunks as the primary, or fewer.

    Args:
        client: The client of the replica.
        where: Its address without a password.
        clock: Monotonic seconds.
    """

    def __init__(self, client: RedisClient, where: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._client, self._where, self._clock = client, where, clock
        self._asked_after = float("-inf")
        self._told: dict[str, float] = {}
        #: Bytes that were read here and not from the primary.
        self.bytes = 0

    def read(
        self, raw: Raw, commands: Sequence[tuple[Any, ...]], sizes: Sequence[int], ahead: int, arrived: Arrived
    ) -> bytes | None:
        """Return the answers to reading commands, joined; None if the primary must be asked.

        Args:
            raw: The fields that point to the chunks, which hold the digest of the payload where it is known.
            commands: One for each chunk.
            sizes: Bytes of each chunk.
            ahead: See `read_joined`.
            arrived: See `read_joined`.
        """
        if self._clock() < self._asked_after:
            return None
        try:
            payload = read_joined(self._client, commands, sizes, ahead, arrived)
        except (redis.RedisError, OSError) as error:
            self._asked_after = self._clock() + PAUSE_SECONDS
            self._tell("it does not answer", tls_fault(error) or error)
            return None
        if payload is None:
            self._tell("it lacks a payload, or refuses this user")
            return None
        if b"digest" in raw and digest(payload).encode() != raw[b"digest"]:
            self._tell("it holds another payload than the primary")
            return None
        self.bytes += len(payload)
        return payload

    def _tell(self, why: str, error: Exception | None = None) -> None:
        now = self._clock()
        if now - self._told.get(why, float("-inf")) >= REMIND_SECONDS:
            detail = f" ({type(error).__name__})" if error else ""
            text = "reading from the primary in place of the replica at %s: %s%s"
            log.warning(text, self._where, why, detail, extra={"code": "replica.passed-by"})
            self._told[why] = now

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def replica_at(url: str, authority: str = "") -> ReadReplica:
    """Return the replica at that address, not yet connected. `authority` is as in `client_at`.

    Raises:
        BadUrlError: The address cannot be used.
    """
    try:
        parse_address(url)
        client = client_at(url, authority)
    except (ValueError, TypeError):  # the message may quote a part of a password
        raise BadUrlError(
            f"--read-from {redacted(url)!r} cannot be read as the address of a Redis",
            "Write redis://HOST:PORT or rediss://USER:PASSWORD@HOST:PORT of a replica of the run's Redis.",
        ) from None
    client.connection_pool.connection_kwargs |= {"socket_timeout": ANSWER_SECONDS, "redis_connect_func": _read_only}
    return ReadReplica(client, redacted(url))


def _read_only(connection: Any) -> None:
    """Log in to a server, and let a replica in a cluster answer; it would name its primary (MOVED) otherwise."""
    connection.on_connect()
    connection.send_command("READONLY")
    with suppress(redis.ResponseError):  # the server is no node of a cluster, or forbids the command to this user
        connection.read_response()
