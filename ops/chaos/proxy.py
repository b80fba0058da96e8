"""A TCP proxy on loopback that simulates a bad link: it throttles, delays, cuts and heals its connections.

It moves the bytes on an event loop in its own thread. Each direction has one rate, which all connections share in turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import struct
import threading
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

from archipelago.broker.machine import LOOPBACK

#: Bytes that pass at a time. Pieces are small, so that connections take turns and a new rate applies at once.
PIECE_BYTES = 8 << 10
#: Pieces of one connection and direction that only the delay holds back.
PIECES_IN_FLIGHT = 64
#: A direction that was idle may send the bytes of at most this time at once.
BURST_SECONDS = 0.02
CALL_SECONDS = 10.0
#: How soon a new rate applies to bytes that wait.
CHANGE_SECONDS = 0.05
#: The value of SO_LINGER with which closing a socket resets its connection.
LINGER_OFF = struct.pack("ii", 1, 0)


@dataclass
class Direction:
    """One direction of all connections together.

    Attributes:
        bytes_per_second: Its rate, which may be infinite.
        free_at: When the bytes that have passed would have left a link of that rate.
    """

    bytes_per_second: float
    free_at: float = -math.inf

    def take_turn(self, count: int, now: float) -> float:
        """Let `count` more bytes pass after those of all connections before them. Return when they have passed."""
        self.free_at = max(self.free_at, now - BURST_SECONDS) + count / self.bytes_per_second
        return self.free_at

    def set_rate(self, bytes_per_second: float, now: float) -> None:
        """Change the rate from now on."""
        self.bytes_per_second, self.free_at = bytes_per_second, now


class LoopServer:
    """A server on an event loop in a thread of its own. It serves within its `with` block."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True)
        self._thread.start()
        self._call(self._begin())
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End all connections and the thread. A second call does nothing."""
        if (loop := self._loop) is not None:
            self._call(self._end())
            self._loop = None
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join()
            loop.close()

    def _call(self, what: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine on the loop, from another thread."""
        assert self._loop is not None  # noqa: S101
        asyncio.run_coroutine_threadsafe(what, self._loop).result(CALL_SECONDS)

    async def _begin(self) -> None:
        raise NotImplementedError

    async def _end(self) -> None:
        raise NotImplementedError


#: Pieces of one connection and direction, and when each is due. An empty piece is the end.
_Pieces = asyncio.Queue[tuple[float, bytes]]


class Proxy(LoopServer):
    """A proxy that listens on a port of loopback and forwards connections to another one.

    `up` is the direction to the target, and `down` the direction back. Methods may be called from any thread.

    Args:
        target_port: The port of the target, on loopback.

    Attributes:
        port: The port on which it listens.
        delay_seconds: The delay that is added to each direction. It may be changed at any time, for later bytes.
    """

    def __init__(self, target_port: int) -> None:
        super().__init__("proxy")
        self._target_port = target_port
        self.delay_seconds = 0.0
        self._up, self._down = Direction(math.inf), Direction(math.inf)
        self.port = 0
        self._open = asyncio.Event()
        self._server: asyncio.Server | None = None
        #: The tasks of connections, and the two ends of each.
        self._writers: dict[asyncio.Task[Any], set[asyncio.StreamWriter]] = {}
        self._forgotten: set[asyncio.StreamWriter] = set()

    def url(self, url: str) -> str:
        """Return the URL of the server behind `url` as a client reaches it through the proxy."""
        address = urlsplit(url)
        return address._replace(netloc=f":{address.password or ''}@{LOOPBACK}:{self.port}").geturl()

    # -- from any thread --------------------------------------------------------------------------------------------

    def set_rate(self, megabits: float) -> None:
        """Change the rate of each direction, in Mbit/s, also for waiting bytes. It must be positive."""
        for direction in (self._up, self._down):
            direction.set_rate(megabits * 1e6 / 8, time.monotonic())

    def cut(self, *, reset: bool = False) -> None:
        """Partition the link: refuse new connections, and stall the existing ones silently or `reset` them."""
        self._call(self._cut(reset))

    def heal(self) -> None:
        """End a partition. Stalled connections continue where they were."""
        self._call(self._heal())

    def half_open(self) -> None:
        """Forget all connections silently, as a router does that restarts.

        Both ends keep their halves, and nothing passes any more. New connections work.
        """
        self._call(self._forget())

    @property
    def connections(self) -> int:
        """The number of connections to the target, including stalled ones."""
        return sum(len(both) == 2 for both in list(self._writers.values()))

    # -- on the loop ------------------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        self._socket = _bound(0)
        self.port = self._socket.getsockname()[1]
        await self._heal()

    async def _cut(self, reset: bool) -> None:
        self._open.clear()
        if self._server is not None:
            self._server.close()  # Without a listening socket, the system refuses connections.
            self._server = None
            self._socket = _bound(self.port)  # This keeps the port without listening.
        if reset:
            for task, both in self._writers.items():
                for writer in both:
                    _reset(writer)
                task.cancel()

    async def _heal(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, sock=self._socket)
        self._open.set()

    async def _end(self) -> None:
        await self._cut(reset=True)
        for writer in self._forgotten:
            _reset(writer)
        await asyncio.gather(*self._writers, return_exceptions=True)
        self._socket.close()
        await asyncio.sleep(0)  # Closed transports free their sockets in the next turn of the loop.

    async def _forget(self) -> None:
        for task, both in self._writers.items():
            self._forgotten |= both
            task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, until both directions have ended or one side is gone."""
        task, both = asyncio.current_task(), {writer}
        assert task is not None  # noqa: S101
        self._writers[task] = both
        try:
            far_reader, far_writer = await asyncio.open_connection(LOOPBACK, self._target_port)
            both.add(far_writer)
            async with asyncio.TaskGroup() as group:
                for start, end, way in ((reader, far_writer, self._up), (far_reader, writer, self._down)):
                    pieces: _Pieces = asyncio.Queue(PIECES_IN_FLIGHT)
                    group.create_task(self._read(start, pieces, way))
                    group.create_task(self._deliver(pieces, end))
        except* OSError:
            for one in both:
                _reset(one)  # An error of one side resets the other one.
        except* asyncio.CancelledError:
            pass  # The proxy ends, or has forgotten this connection.
        finally:
            del self._writers[task]
            for one in both - self._forgotten:
                one.close()

    async def _read(self, reader: asyncio.StreamReader, pieces: _Pieces, way: Direction) -> None:
        """Forward one direction of a connection, including its end. The other direction continues."""
        piece = b"more"
        while piece:
            piece = await reader.read(PIECE_BYTES)
            await self._await_turn(way, len(piece))
            await pieces.put((time.monotonic() + self.delay_seconds, piece))

    async def _await_turn(self, direction: Direction, count: int) -> None:
        await self._open.wait()
        turn = direction.take_turn(count, time.monotonic())
        # A new rate applies to waiting bytes, too.
        while (wait := min(turn, direction.free_at) - time.monotonic()) > 0:
            await asyncio.sleep(min(wait, CHANGE_SECONDS))
        await self._open.wait()

    async def _deliver(self, pieces: _Pieces, writer: asyncio.StreamWriter) -> None:
        while True:
            due, piece = await pieces.get()
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            await self._open.wait()
            if not piece:
                break
            writer.write(piece)
            await writer.drain()
        if writer.can_write_eof() and not writer.is_closing():
            writer.write_eof()


def _bound(port: int) -> socket.socket:
    """Bind a socket to that port of loopback, or to a free one for 0, without listening."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind((LOOPBACK, port))
    return made


def _reset(writer: asyncio.StreamWriter) -> None:
    raw = writer.get_extra_info("socket")
    if raw is not None:
        with contextlib.suppress(OSError):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_OFF)
    writer.transport.abort()
