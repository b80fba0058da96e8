"""A TCP proxy on loopback that is a bad link on purpose: thin, slow, cut and healed while connections go through it.

The pure part says when how many bytes may go (`Bucket`, time as an argument); the rest moves them, on an event loop in
a thread of its own. The two directions are throttled apart, each over all of its connections together, in turn.
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
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

LOOPBACK = "127.0.0.1"
PIECE_BYTES = 8 << 10
"""read, and let through, at a time: small, so that connections take turns and a change of rate is felt at once"""
PIECES_IN_FLIGHT = 64
"""of one connection and direction, let through and held back by the delay only"""
BURST_SECONDS = 0.02
"""A direction that was idle for so long or longer may send what it missed in that time at once, and no more."""
START_SECONDS = 10.0
LINGER_OFF = struct.pack("ii", 1, 0)
"""as SO_LINGER: closing resets"""


@dataclass
class Bucket:
    """A token bucket over bytes; seconds come from any clock that does not go back."""

    bytes_per_second: float
    """may be infinite"""
    tokens: float = 0.0
    filled_at: float = 0.0

    @property
    def burst_bytes(self) -> float:
        """What it holds at most; always a whole piece, or that could never go."""
        return max(float(PIECE_BYTES), self.bytes_per_second * BURST_SECONDS)

    def wait_seconds(self, count: int, now: float) -> float:
        """Takes `count` bytes (up to a piece) and returns 0, or takes none and says how long until they may go."""
        self._fill(now)
        if math.isinf(self.bytes_per_second):
            return 0.0
        if self.tokens >= count:
            self.tokens -= count
            return 0.0
        # An instant more than the division says: its rounding must not make anyone wait twice for the last byte.
        return (count - self.tokens) / self.bytes_per_second + 1e-6

    def set_rate(self, bytes_per_second: float, now: float) -> None:
        """Another rate from now on."""
        self._fill(now)
        self.bytes_per_second = bytes_per_second
        self.tokens = min(self.tokens, self.burst_bytes)

    def _fill(self, now: float) -> None:
        if not math.isinf(self.bytes_per_second):
            passed = max(0.0, now - self.filled_at)
            self.tokens = min(self.burst_bytes, self.tokens + passed * self.bytes_per_second)
        self.filled_at = max(self.filled_at, now)


def bytes_per_second(megabits: float) -> float:
    """Of so many Mbit/s. Raises ValueError unless that is more than nothing."""
    if not megabits > 0:
        raise ValueError(f"{megabits} Mbit/s is no rate; `cut` stops everything")
    return megabits * 1e6 / 8


@dataclass
class _Direction:
    """One way through the proxy, for all connections together."""

    bucket: Bucket
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """first come, first served: so connections share the rate piece by piece"""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    bytes: int = 0
    """let through so far"""


_Pieces = asyncio.Queue[tuple[float, bytes]]
"""of one connection and direction: what was let through, and when it is due; an empty piece is the end"""


class Proxy:
    """Listens on a port of loopback and forwards to a target. `up` is towards the target, `down` back from it.

    Every method may be called from any thread while it runs.
    """

    def __init__(
        self,
        target_host: str,
        target_port: int,
        megabits_up: float = math.inf,
        megabits_down: float = math.inf,
        delay_seconds: float = 0.0,
    ) -> None:
        """`delay_seconds` is one way, and added to each direction. Raises ValueError for a rate that is none."""
        self.target = (target_host, target_port)
        self.delay_seconds = delay_seconds
        """may be set at any time; counts for what comes from then on"""
        now = time.monotonic()
        self._up = _Direction(Bucket(bytes_per_second(megabits_up), filled_at=now))
        self._down = _Direction(Bucket(bytes_per_second(megabits_down), filled_at=now))
        self._socket = _bound(0)
        self.port: int = self._socket.getsockname()[1]
        self._open = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._writers: dict[asyncio.Task[Any], set[asyncio.StreamWriter]] = {}  # of each connection that goes through
        self._forgotten: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)

    # -- from any thread --------------------------------------------------------------------------------------------

    def start(self) -> Proxy:
        """Begins to listen."""
        self._thread.start()
        self.heal()
        return self

    def stop(self) -> None:
        """Ends all connections and the thread. Safe to call again."""
        if self._thread.is_alive():
            self._call(self._end())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._socket.close()
        if not self._loop.is_closed():
            self._loop.close()

    def __enter__(self) -> Proxy:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def set_rates(self, megabits_up: float, megabits_down: float) -> None:
        """Other rates from now on, also for what waits already. Raises ValueError for a rate that is none."""
        self._call(self._change(bytes_per_second(megabits_up), bytes_per_second(megabits_down)))

    def cut(self, *, reset: bool = False) -> None:
        """A partition: new connections are refused; existing ones stall without a word, or end with a `reset`."""
        self._call(self._cut(reset))

    def heal(self) -> None:
        """Everything goes through again: what stalled goes on where it was."""
        self._call(self._heal())

    def half_open(self) -> None:
        """Forgets its connections without a word, as a router that restarts: each end still has its own, and nothing
        comes through it ever again. New ones work.
        """
        self._call(self._forget())

    @property
    def bytes_up(self) -> int:
        """Let through towards the target so far."""
        return self._up.bytes

    @property
    def bytes_down(self) -> int:
        """Let through from the target so far."""
        return self._down.bytes

    @property
    def connections(self) -> int:
        """Connections that go through it now, stalled ones among them."""
        return len(self._writers)

    def _call(self, what: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(what, self._loop).result(START_SECONDS)

    # -- on the loop ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _change(self, up: float, down: float) -> None:
        for direction, rate in ((self._up, up), (self._down, down)):
            direction.bucket.set_rate(rate, time.monotonic())
            direction.changed.set()

    async def _cut(self, reset: bool) -> None:
        self._open.clear()
        if self._server is not None:
            self._server.close()  # the listening socket goes: the system itself refuses who comes
            self._server = None
            self._socket = _bound(self.port)  # silent, and nobody else gets the port
        if reset:
            self._reset_all()

    async def _heal(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, sock=self._socket)
        self._open.set()

    async def _end(self) -> None:
        await self._cut(reset=True)
        for writer in self._forgotten:
            _reset(writer)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # closed transports let go of their sockets in the next turn of the loop

    def _reset_all(self) -> None:
        for both in self._writers.values():
            for writer in both:
                _reset(writer)
        for task in self._tasks:
            task.cancel()

    async def _forget(self) -> None:
        for task, both in self._writers.items():
            self._forgotten |= both
            task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        except asyncio.CancelledError:
            pass  # the proxy ends, or has forgotten it
        finally:
            self._tasks.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until both directions have ended or either side is gone."""
        try:
            far_reader, far_writer = await asyncio.open_connection(*self.target)
        except OSError:
            _reset(writer)
            return
        both = {writer, far_writer}
        task = asyncio.current_task()
        assert task is not None  # noqa: S101
        self._writers[task] = both
        try:
            async with asyncio.TaskGroup() as group:
                for start, end, way in ((reader, far_writer, self._up), (far_reader, writer, self._down)):
                    pieces: _Pieces = asyncio.Queue(PIECES_IN_FLIGHT)
                    group.create_task(self._read(start, pieces, way))
                    group.create_task(self._deliver(pieces, end))
        except* OSError:
            for one in both:
                _reset(one)  # what one side did to us, the other one feels
        finally:
            del self._writers[task]
            for one in both - self._forgotten:
                one.close()

    async def _read(self, reader: asyncio.StreamReader, pieces: _Pieces, way: _Direction) -> None:
        """Lets one direction of a connection through, up to and including its end; the other one goes on."""
        piece = b"more"
        while piece:
            piece = await reader.read(PIECE_BYTES)
            await self._await_turn(way, len(piece))
            await pieces.put((time.monotonic() + self.delay_seconds, piece))

    async def _await_turn(self, direction: _Direction, count: int) -> None:
        async with direction.turn:
            await self._open.wait()
            while wait := direction.bucket.wait_seconds(count, time.monotonic()):
                direction.changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(direction.changed.wait(), wait)
                await self._open.wait()
            direction.bytes += count

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
    """A socket on that port of loopback, or on a free one, that does not listen: who connects is refused."""
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
