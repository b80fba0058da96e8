"""What storms do to a link beside throttling and cutting it: half-open connections, and a delay that changes."""

from __future__ import annotations

import socket
import time
from contextlib import closing

import pytest

from tests.conftest import Until
from tests.ops.chaos.test_proxy import PATIENCE, Echo, asked, connected, echo, linked

__all__ = ["echo"]


def test_a_half_open_connection_is_silent_for_ever_and_new_ones_work(echo: Echo, until: Until) -> None:
    with linked(echo) as (proxy, client):
        assert asked(client, b"before") == b"before"
        proxy.half_open()
        until(lambda: proxy.connections == 0, "nothing goes through it any more")
        with closing(connected(proxy)) as another:
            assert asked(another, b"after") == b"after"
            client.sendall(b"into the void")  # as a sender whose peer's router has forgotten it: no error
            proxy.cut()
            proxy.heal()
            client.settimeout(0.2)
            with pytest.raises(TimeoutError):
                client.recv(1)
            assert asked(another, b"still there") == b"still there"
        until(lambda: echo.ends == ["end"], "the server heard of the other one's end only")


def test_stopping_ends_half_open_ones_too(echo: Echo, until: Until) -> None:
    with linked(echo) as (proxy, client):
        assert asked(client, b"before") == b"before"
        proxy.half_open()
        proxy.half_open()
        until(lambda: proxy.connections == 0, "nothing goes through it any more")
        proxy.stop()
        client.settimeout(PATIENCE)
        with pytest.raises(ConnectionResetError):
            client.recv(1)
        until(lambda: echo.ends == ["reset"], "the server felt it")


def test_a_delay_may_come_and_go(echo: Echo) -> None:
    with linked(echo) as (proxy, client):
        assert asked(client, b"before") == b"before"
        proxy.delay_seconds = 0.2
        began = time.monotonic()
        assert asked(client, b"late") == b"late"
        assert time.monotonic() - began >= 0.4
        proxy.delay_seconds = 0.0
        assert asked(client, b"after") == b"after"
        client.shutdown(socket.SHUT_WR)
