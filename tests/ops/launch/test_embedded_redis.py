"""The embedded server: how its program is found, and how it starts, keeps its data and ends."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import psutil
import pytest
import redis

from archipelago.broker.errors import BrokerError
from archipelago.broker.machine import free_port
from archipelago.broker.redis.client import state_of
from archipelago.ops.launch import embedded_redis
from archipelago.ops.launch.embedded_redis import (
    CONFIG,
    LOG,
    Program,
    RedisServer,
    ServerAddress,
    find_program,
    start_server,
    url_of_running,
)
from tests.conftest import Until, gone
from tests.failing import failing

pytestmark = pytest.mark.processes

LAUNCHER = """
import sys, time
from pathlib import Path
from archipelago.ops.launch.embedded_redis import find_program, start_server
with start_server(Path(sys.argv[1]), find_program(sys.argv[2])) as server:
    print(server.pid, server.url, flush=True)
    time.sleep(600)
"""


def ask(server: RedisServer, *words: str) -> object:
    with redis.Redis.from_url(server.url) as client:
        return client.execute_command(*words)


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def valkey() -> Program:
    return find_program("valkey (wheel)")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, valkey: Program) -> Iterator[tuple[RedisServer, Path]]:
    """A server that no test stops, and its folder."""
    folder = tmp_path_factory.mktemp("served") / "redis"
    with start_server(folder, valkey) as server:
        yield server, folder


@pytest.fixture
def path_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the only folder on PATH."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin"


# -- finding a program ---------------------------------------------------------------------------------------------


def test_a_program_on_the_path_comes_before_the_one_of_the_wheel(path_folder: Path, valkey: Program) -> None:
    for body in ("echo Redis server v=6.2.16 sha=0", "echo nonsense", "exit 1"):
        script(path_folder / "redis-server", body)
        assert find_program() == valkey, body
        with failing(BrokerError, "broker.no-program"):
            find_program("redis-server")
    assert valkey.path.name == "valkey-server"
    assert int(valkey.version.split(".")[0]) >= 8
    first = script(path_folder / "redis-server", "echo Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc-5.3.0")
    script(path_folder / "valkey-server", "echo Valkey server v=8.1.3 sha=00000000:0")
    assert find_program() == Program("redis-server", first, "7.0.15")
    assert find_program("valkey-server").version == "8.1.3"


def test_an_open_server_needs_a_program_with_tls(path_folder: Path) -> None:
    assert find_program().kind == "valkey (wheel)"
    with failing(BrokerError, "broker.no-program"):
        find_program(with_tls=True)
    script(path_folder / "valkey-server", "echo Valkey server v=8.1.3 sha=00000000:0")
    assert find_program(with_tls=True).kind == "valkey-server"


# -- serving ------------------------------------------------------------------------------------------------------


def test_the_server_serves_this_machine_by_password_with_our_settings(served: tuple[RedisServer, Path]) -> None:
    server, _ = served
    assert server.alive()
    assert state_of(server.url) == ("ready", server.pid)
    for wrong in ("", ":guess@"):
        assert state_of(f"redis://{wrong}127.0.0.1:{server.port}") == ("away", 0)
    assert len(urlsplit(server.url).password or "") >= 32
    sockets = psutil.Process(server.pid).net_connections(kind="inet")
    listening = [tuple(each.laddr) for each in sockets if each.status == psutil.CONN_LISTEN]
    assert listening == [("127.0.0.1", server.port)]
    wanted = {"maxmemory-policy": "noeviction", "appendonly": "yes", "appendfsync": "everysec", "save": ""}
    wanted |= {"protected-mode": "yes"}
    with redis.Redis.from_url(server.url, decode_responses=True) as client:
        assert client.config_get(*wanted) == wanted


def test_the_password_is_in_a_private_file_and_on_no_command_line(served: tuple[RedisServer, Path]) -> None:
    server, folder = served
    password = urlsplit(server.url).password or ""
    config = folder / CONFIG
    assert password in config.read_text()
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    command_line = psutil.Process(server.pid).cmdline()
    assert str(folder / CONFIG) in command_line
    assert not any(password in word for word in command_line)
    assert password not in server.describe() + repr(server) + (folder / LOG).read_text()


def test_data_and_url_survive_a_stop_but_not_a_port_that_is_taken(tmp_path: Path, valkey: Program) -> None:
    folder = tmp_path / "redis"
    assert url_of_running(folder) == ""
    with start_server(folder, valkey) as first:
        assert ask(first, "SET", "key", "value")
        assert url_of_running(folder) == first.url
    assert not first.alive()
    assert url_of_running(folder) == ""
    with start_server(folder, valkey) as second:
        assert ask(second, "GET", "key") == b"value"
        assert (second.url, second.pid == first.pid) == (first.url, False)
    with socket.create_server(("127.0.0.1", first.port)), start_server(folder, valkey) as third:
        assert third.port != first.port
        assert urlsplit(third.url).password == urlsplit(first.url).password
        assert ask(third, "GET", "key") == b"value"


def test_the_folder_may_have_any_name(tmp_path: Path, valkey: Program) -> None:
    for name in ('qu"ote\\and é', "/".join(["a" * 200] * 6)):
        for _ in range(2):
            with start_server(tmp_path / name, valkey) as server:
                assert ask(server, "SET", "key", "value")
            assert list((tmp_path / name).glob("appendonly*")), name


# -- ending ---------------------------------------------------------------------------------------------------------


def test_a_dead_server_starts_again_and_stop_may_be_called_twice(tmp_path: Path, valkey: Program, until: Until) -> None:
    server = start_server(tmp_path / "redis", valkey)
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: not server.alive(), "the server is dead")
    url, first = server.url, server.pid
    assert server.tend()
    assert (server.alive(), server.url, server.pid == first, server.tend()) == (True, url, False, "")
    os.kill(server.pid, signal.SIGKILL)
    server.close()
    server.close()
    with start_server(tmp_path / "redis", valkey) as again:
        assert again.url == server.url


def test_stop_kills_a_server_that_does_not_react(
    tmp_path: Path, valkey: Program, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    monkeypatch.setattr(embedded_redis, "STOP_SECONDS", 0.2)
    server = start_server(tmp_path / "redis", valkey)
    psutil.Process(server.pid).suspend()
    server.close()
    until(lambda: gone(server.pid), "the suspended server is gone")


def test_the_server_dies_with_a_killed_launcher(tmp_path: Path, valkey: Program, until: Until) -> None:
    folder = tmp_path / "redis"
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(folder), valkey.kind], stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        pid, url = launcher.stdout.readline().split()
        with failing(BrokerError, "broker.folder") as refused:
            start_server(folder, valkey)
        assert str(launcher.pid) in str(refused.value)
        launcher.kill()
        launcher.wait()
        with start_server(folder, valkey) as heir:
            assert heir.url == url
        until(lambda: gone(int(pid)), "the killed launcher's server is gone")


# -- failures --------------------------------------------------------------------------------------------------------


def test_a_second_start_in_a_folder_is_refused_also_without_file_locks(
    tmp_path: Path, served: tuple[RedisServer, Path], valkey: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(_file: object, _flags: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    server, folder = served
    gc.collect()
    with failing(BrokerError, "broker.folder"):
        start_server(folder, valkey)
    assert ask(server, "PING")
    monkeypatch.setattr(fcntl, "flock", no_locks)
    monkeypatch.setattr(embedded_redis, "LEFTOVER_SECONDS", 0.1)
    with start_server(tmp_path / "redis", valkey), failing(BrokerError, "broker.folder"):
        start_server(tmp_path / "redis", valkey)


def test_a_program_that_fails_or_cannot_run_is_quoted(tmp_path: Path, valkey: Program) -> None:
    broken = script(tmp_path / "bin" / "redis-server", "echo no such module >&2; exit 3")
    for path, said in ((broken, "status 3"), (broken, "no such module"), (tmp_path / "missing", "status 127")):
        with failing(BrokerError, "broker.start-failed") as failed:  # The folder is unlocked again after a failure.
            start_server(tmp_path / "redis", Program("redis-server", path, "7.0"))
        assert said in str(failed.value)
    script(broken, "exit 3")
    with failing(BrokerError, "broker.start-failed") as failed:
        start_server(tmp_path / "redis", Program("redis-server", broken, "7.0"))
    assert str(failed.value).endswith("(nothing)"), "earlier starts do not explain this one"


def test_a_silent_program_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands still until the program runs, however slow the machine is, and then advances 2 s per look."""
    marker, ticks = tmp_path / "pid", iter(range(0, 1 << 20, 2))
    silent = Program("redis-server", script(tmp_path / "redis-server", f"echo $$ > '{marker}'; exec sleep 600"), "7.0")
    clock = SimpleNamespace(
        monotonic=lambda: next(ticks) if marker.exists() and marker.read_text().endswith("\n") else 0, sleep=time.sleep
    )
    monkeypatch.setattr(embedded_redis, "time", clock)
    monkeypatch.setattr(embedded_redis, "START_SECONDS", 1.5)
    with failing(BrokerError, "broker.start-failed"):
        start_server(tmp_path / "redis", silent)
    assert gone(int(marker.read_text()))


def test_a_server_may_load_for_longer_than_the_silence_limit(
    tmp_path: Path, valkey: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock advances 1 s per look. Loading may take longer than the limit, but silence may not."""
    states = iter(["away", *["loading"] * 20, "away", "ready"])
    ticks = iter(range(1000))
    monkeypatch.setattr(embedded_redis, "state_of", lambda *_: (next(states, "away"), 7))
    monkeypatch.setattr(
        embedded_redis, "time", SimpleNamespace(monotonic=lambda: next(ticks), sleep=lambda _seconds: None)
    )
    monkeypatch.setattr(embedded_redis, "START_SECONDS", 5.0)
    with start_server(tmp_path / "first", valkey) as server:
        assert server.pid == 7
    with failing(BrokerError, "broker.start-failed"):
        start_server(tmp_path / "second", valkey)


def test_what_is_no_server_of_ours_is_away(tmp_path: Path) -> None:
    def answer(listener: socket.socket, replies: bytes) -> None:
        link, _ = listener.accept()
        with link:
            link.recv(4096)
            link.sendall(replies)
            link.shutdown(socket.SHUT_WR)
            link.recv(4096)

    for replies in (b"-WRONGPASS invalid password\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"$nonsense\r\n", b""):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=answer, args=(listener, replies))
            thread.start()
            assert state_of(f"redis://:secret@127.0.0.1:{listener.getsockname()[1]}") == ("away", 0), replies
            thread.join()
    assert state_of(f"redis://:secret@127.0.0.1:{free_port()}") == ("away", 0)
    # A missing or damaged certificate must raise nothing here. The next start of the server says what to do about it.
    authority = tmp_path / "authority.pem"
    assert ServerAddress(free_port(), "secret", authority).state() == ("away", 0)
    authority.write_text("nonsense")
    assert ServerAddress(free_port(), "secret", authority).state() == ("away", 0)
