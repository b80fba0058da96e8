"""Read from one connection what redis-py would read less well: large answers, and several answers after a WATCH.

Large answers go from the socket into the buffer that keeps them, past the parser. redis-py has no public way to do
this, so `_read_string` uses the private attribute `_sock` of its connections. `tests/broker/redis/test_private_api.py`
names the versions that this was tried with.
"""

from __future__ import annotations

import ctypes
import io
import mmap
import socket
from collections.abc import Sequence
from typing import Any

import redis

from archipelago.broker.transport import Arrived

#: Buffers of at least this size get huge pages, as in numpy.
HUGE_FROM_BYTES = 4 << 20


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
