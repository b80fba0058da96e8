"""The proxy: the rate of a direction with its own time, and real sockets through a throttled, cut and healed link."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from archipelago.ops.chaos.proxy import BURST_SECONDS, PIECE_BYTES, Direction, Proxy
from tests.conftest import Until

#: Timeout of sockets that should receive something.
PATIENCE = 30.0


# -- the rate ------------------------------------------------------------------------------------------------------


def played(direction: Direction, counts: list[int], now: float) -> float:
    """Send these pieces in turn, as early as the direction allows. Return the time of the last one."""
    for count in counts:
        now = max(now, direction.take_turn(count, now))
    return now


@given(st.lists(st.integers(0, PIECE_BYTES), min_size=1, max_size=60), st.floats(1e3, 1e9), st.floats(0.0, 1e6))
def test_bytes_go_neither_faster_than_the_rate_nor_much_slower(counts: list[int], rate: float, began: float) -> None:
    took = played(Direction(rate), counts, began) - began
    slack = 1e-9 * began + 1e-9
    assert took >= sum(counts) / rate - BURST_SECONDS - slack
    assert took <= sum(counts) / rate + slack


def test_an_idle_direction_allows_one_burst_and_an_infinite_rate_never_waits() -> None:
    direction = Direction(1e6)
    assert played(direction, [PIECE_BYTES] * 2, 1000.0) == 1000.0, "a burst must go at once"
    assert played(direction, [PIECE_BYTES] * 100, 1000.0) - 1000.0 == pytest.approx(0.8192, rel=0.05)
    endless = Direction(math.inf)
    assert played(endless, [PIECE_BYTES] * 100, 5.0) == 5.0
    endless.set_rate(1e6, 6.0)
    assert endless.take_turn(PIECE_BYTES, 6.0) > 6.0, "a time without a limit allows no burst"


# -- the proxy -----------------------------------------------------------------------------------------------------


class Echo:
    """A server that echoes each connection and remembers how it ended."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.ends: list[str] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(1 << 16):
                    connection.sendall(data)
                connection.sendall(b"goodbye")
                self.ends.append("end")
            except OSError:
                self.ends.append("reset")


@pytest.fixture
def echo() -> Iterator[Echo]:
    made = Echo()
    yield made
    made.listener.shutdown(socket.SHUT_RDWR)
    made.listener.close()


def connected(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE)


def asked(client: socket.socket, data: bytes) -> bytes:
    """Send data and return the answer."""
    sender = threading.Thread(target=client.sendall, args=(data,))
    sender.start()
    found = b""
    while len(found) < len(data):
        part = client.recv(1 << 16)
        assert part, "the connection ended"
        found += part
    sender.join()
    return found


def seconds_for(client: socket.socket, size: int) -> float:
    """Return the seconds of a round trip of `size` bytes."""
    data = bytes(range(256)) * (size // 256)
    began = time.perf_counter()
    assert asked(client, data) == data
    return time.perf_counter() - began


@contextmanager
def linked(echo: Echo, megabits: float = math.inf) -> Iterator[tuple[Proxy, socket.socket]]:
    with Proxy(echo.port) as proxy, closing(connected(proxy)) as one:
        proxy.set_rate(megabits)
        yield proxy, one


def test_the_rate_can_change(echo: Echo, until: Until) -> None:
    least = 0.9 * (1 << 18) / 0.5e6
    with linked(echo, 4.0) as (proxy, client):
        assert seconds_for(client, 1 << 18) >= least, "it was faster than the rate"
        proxy.set_rate(0.001)  # A piece takes a minute.
        client.sendall(bytes(4 * PIECE_BYTES))
        proxy.set_rate(40.0)
        left = 4 * PIECE_BYTES  # The higher rate holds for waiting bytes, too.
        while left:
            left -= len(client.recv(left))
        # On a loaded machine, any one transfer may be slow.
        until(lambda: seconds_for(client, 1 << 18) < least / 2, "a transfer that is faster than the lower rate allows")


def test_the_delay_is_added_each_way_and_may_change(echo: Echo) -> None:
    with linked(echo) as (proxy, client):
        for seconds in (0.1, 0.2, 0.0):
            proxy.delay_seconds = seconds
            assert seconds_for(client, 256) >= 2 * seconds


def test_a_partition_stalls_old_connections_refuses_new_ones_and_heals(echo: Echo) -> None:
    with linked(echo) as (proxy, client):
        assert asked(client, b"before") == b"before"
        proxy.cut()
        proxy.cut()  # Both are idempotent.
        with pytest.raises(ConnectionRefusedError):
            connected(proxy)
        client.sendall(b"meanwhile")
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.recv(1)
        assert proxy.connections == 1
        proxy.heal()
        proxy.heal()
        client.settimeout(PATIENCE)
        assert client.recv(9, socket.MSG_WAITALL) == b"meanwhile", "the partition lost bytes"
        with closing(connected(proxy)) as another:
            assert asked(another, b"after") == b"after"


# -- half-open connections -----------------------------------------------------------------------------------------


def test_a_half_open_connection_stays_silent_and_new_ones_work(echo: Echo, until: Until) -> None:
    with linked(echo) as (proxy, client):
        assert asked(client, b"before") == b"before"
        proxy.half_open()
        until(lambda: proxy.connections == 0, "the proxy to forget it")
        with closing(connected(proxy)) as another:
            assert asked(another, b"after") == b"after"
            client.sendall(b"into the void")  # The sender gets no error.
            proxy.cut()
            proxy.heal()
            client.settimeout(0.2)
            with pytest.raises(TimeoutError):
                client.recv(1)
            assert asked(another, b"still there") == b"still there"
        until(lambda: echo.ends == ["end"], "the server to see the other connection end")


def test_stop_ends_all_connections(echo: Echo, until: Until) -> None:
    threads = threading.active_count()
    with linked(echo, 0.001) as (proxy, silent):  # A piece takes a minute.
        silent.sendall(b"a")
        until(lambda: proxy.connections == 1, "the connection")
        proxy.half_open()
        until(lambda: proxy.connections == 0, "the proxy to forget it")
        with closing(connected(proxy)) as client:
            client.sendall(bytes(4 * PIECE_BYTES))
            until(lambda: proxy.connections == 1, "the other connection")
            proxy.stop()
            for each in (client, silent):
                each.settimeout(PATIENCE)
                with pytest.raises(ConnectionResetError):
                    while each.recv(1 << 16):
                        pass
        with pytest.raises(ConnectionRefusedError):
            connected(proxy)
    until(lambda: echo.ends == ["reset", "reset"], "the server to see both resets")
    until(lambda: threading.active_count() <= threads, "its threads to end")
