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
import time
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import psutil
import pytest

from archipelago.broker.errors import BrokerError
from archipelago.ops.launch import embedded_redis, parent_death, redis_folder, redis_probe, redis_program
from archipelago.ops.launch.embedded_redis import Server, running, start_server
from archipelago.ops.launch.redis_program import Kind, Program, find_program
from tests.conftest import Until, gone
from tests.failing import failing

pytestmark = pytest.mark.processes

LAUNCHER = """
import sys, time
from pathlib import Path
from archipelago.ops.launch import parent_death
from archipelago.ops.launch.embedded_redis import start_server
from archipelago.ops.launch.redis_program import find_program
parent_death.HAS_DEATH_SIGNAL = sys.argv[2] == "death-signal"
with start_server(Path(sys.argv[1]), find_program(sys.argv[3])) as server:
    print(server.pid, server.url, flush=True)
    time.sleep(600)
"""


def ask(server: Server, *words: str, password: str | None = None) -> bytes:
    """Return the reply to one command. The default password is the one in the URL."""
    secret = urlsplit(server.url).password or "" if password is None else password
    return redis_probe.ask(server.port, secret, *words)[-1]


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def valkey() -> Program:
    return find_program("valkey (wheel)")


@pytest.fixture
def path_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the only folder on PATH."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin"


# -- finding a program ---------------------------------------------------------------------------------------------


def test_a_program_on_the_path_comes_first(path_folder: Path) -> None:
    redis = script(path_folder / "redis-server", "echo Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc-5.3.0")
    script(path_folder / "valkey-server", "echo Valkey server v=8.1.3 sha=00000000:0")
    assert find_program() == Program("redis-server", redis, "7.0.15")
    assert find_program("valkey-server").version == "8.1.3"


@pytest.mark.parametrize("body", ["echo Redis server v=6.0.16 sha=0", "echo nonsense", "exit 1"])
def test_a_program_that_is_too_old_or_unknown_is_skipped(path_folder: Path, body: str) -> None:
    script(path_folder / "redis-server", body)
    assert find_program().kind == "valkey (wheel)"
    with failing(BrokerError, "broker.no-program"):
        find_program("redis-server")


def test_the_program_of_the_wheel_has_a_version(valkey: Program) -> None:
    assert valkey.path is not None
    assert valkey.path.name == "valkey-server"
    assert int(valkey.version.split(".")[0]) >= 8


def test_fakeredis_is_the_last_resort(path_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_program, "_wheel_binary", lambda: None)
    assert find_program() == Program("fakeredis", None, find_program("fakeredis").version)


# -- serving ------------------------------------------------------------------------------------------------------


def test_the_server_requires_its_password(tmp_path: Path, valkey: Program) -> None:
    with start_server(tmp_path / "redis", valkey) as server:
        assert server.alive()
        assert ask(server, "PING") == b"+PONG"
        assert ask(server, "PING", password="").startswith(b"-NOAUTH")
        assert ask(server, "PING", password="guess").startswith(b"-NOAUTH")
        assert len(urlsplit(server.url).password or "") >= 32


def test_the_server_listens_on_loopback_only(tmp_path: Path, valkey: Program) -> None:
    with start_server(tmp_path / "redis", valkey) as server:
        sockets = psutil.Process(server.pid).net_connections(kind="inet")
        assert [tuple(each.laddr) for each in sockets if each.status == psutil.CONN_LISTEN] == [
            ("127.0.0.1", server.port)
        ]


def test_the_server_has_our_settings(tmp_path: Path, valkey: Program) -> None:
    wanted = {"maxmemory-policy": b"noeviction", "appendonly": b"yes", "appendfsync": b"everysec", "save": b""}
    wanted |= {"protected-mode": b"yes"}
    with start_server(tmp_path / "redis", valkey) as server:
        password = urlsplit(server.url).password or ""
        with socket.create_connection(("127.0.0.1", server.port)) as link, link.makefile("rb") as replies:
            link.sendall(f"AUTH {password}\r\n".encode())
            assert redis_probe.read_reply(replies) == b"+OK"
            for name, value in wanted.items():
                link.sendall(f"CONFIG GET {name}\r\n".encode())
                assert redis_probe.read_reply(replies) == b"*2"
                assert (redis_probe.read_reply(replies), redis_probe.read_reply(replies)) == (name.encode(), value)


def test_the_password_is_in_a_private_file_and_on_no_command_line(tmp_path: Path, valkey: Program) -> None:
    with start_server(tmp_path / "redis", valkey) as server:
        password = urlsplit(server.url).password or ""
        config = tmp_path / "redis" / redis_folder.CONFIG
        assert password in config.read_text()
        assert stat.S_IMODE(config.stat().st_mode) == 0o600
        assert stat.S_IMODE(config.parent.stat().st_mode) == 0o700
        command_line = psutil.Process(server.pid).cmdline()
        assert str(tmp_path / "redis") in command_line
        assert not any(password in word for word in command_line)
        assert password not in server.describe() + repr(server) + (tmp_path / "redis" / redis_folder.LOG).read_text()


def test_data_and_url_survive_a_stop(tmp_path: Path, valkey: Program) -> None:
    with start_server(tmp_path / "redis", valkey) as first:
        assert ask(first, "SET", "key", "value") == b"+OK"
    assert not first.alive()
    with start_server(tmp_path / "redis", valkey) as second:
        assert ask(second, "GET", "key") == b"value"
        assert second.url == first.url
        assert second.pid != first.pid


def test_a_running_server_is_found_by_its_folder(tmp_path: Path, valkey: Program) -> None:
    assert running(tmp_path / "nothing") is None
    with start_server(tmp_path, valkey) as server:
        assert running(tmp_path) == server.url
    assert running(tmp_path) is None


def test_the_url_changes_only_its_port_if_that_is_taken(tmp_path: Path, valkey: Program) -> None:
    with start_server(tmp_path / "redis", valkey) as first:
        assert ask(first, "SET", "key", "value") == b"+OK"
    with socket.create_server(("127.0.0.1", first.port)), start_server(tmp_path / "redis", valkey) as second:
        assert second.port != first.port
        assert urlsplit(second.url).password == urlsplit(first.url).password
        assert ask(second, "GET", "key") == b"value"


@pytest.mark.parametrize("name", ["two words", 'qu"ote\\and é', "/".join(["a" * 200] * 6)])
def test_the_folder_may_have_any_name(tmp_path: Path, valkey: Program, name: str) -> None:
    for _ in range(2):
        with start_server(tmp_path / name, valkey) as server:
            assert ask(server, "SET", "key", "value") == b"+OK"
        assert list((tmp_path / name).glob("appendonly*"))


def test_the_hint_names_the_installed_client(path_folder: Path, tmp_path: Path, valkey: Program) -> None:
    with start_server(tmp_path / "redis", valkey) as server:
        named = f"redis://default:{server.url.partition('://:')[2]}"
        assert server.cli_hint() == f"redis-cli -u {named}"
        script(path_folder / "valkey-cli", "")
        assert server.cli_hint() == f"valkey-cli -u {named}"
        script(path_folder / "redis-cli", "")
        assert server.cli_hint() == f"redis-cli -u {named}"
        assert {valkey.version, f"127.0.0.1:{server.port},"} <= set(server.describe().split())


def test_fakeredis_serves(tmp_path: Path, until: Until) -> None:
    with start_server(tmp_path / "redis", find_program("fakeredis")) as server:
        assert server.url == f"redis://127.0.0.1:{server.port}/0"
        assert ask(server, "PING") == b"+PONG"
        assert psutil.Process(server.pid).is_running()
    until(lambda: gone(server.pid), "the fake server is gone")


# -- ending ---------------------------------------------------------------------------------------------------------


def test_stop_may_be_called_twice_and_after_a_death(tmp_path: Path, valkey: Program, until: Until) -> None:
    server = start_server(tmp_path / "redis", valkey)
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: not server.alive(), "the server is dead")
    server.stop()
    server.stop()
    with start_server(tmp_path / "redis", valkey) as again:
        assert again.url == server.url


@pytest.mark.parametrize("native", [True, False])
def test_stop_kills_a_server_that_does_not_react(
    tmp_path: Path, valkey: Program, monkeypatch: pytest.MonkeyPatch, native: bool, until: Until
) -> None:
    monkeypatch.setattr(embedded_redis, "STOP_SECONDS", 0.2)
    monkeypatch.setattr(parent_death, "HAS_DEATH_SIGNAL", native and parent_death.HAS_DEATH_SIGNAL)
    server = start_server(tmp_path / "redis", valkey)
    psutil.Process(server.pid).suspend()
    server.stop()
    until(lambda: gone(server.pid), "the suspended server is gone")


@pytest.mark.parametrize(
    "tie",
    [
        pytest.param(
            "death-signal",
            marks=pytest.mark.skipif(not parent_death.HAS_DEATH_SIGNAL, reason="only Linux has a parent-death signal"),
        ),
        "watch",
    ],
)
def test_the_server_dies_with_a_killed_launcher(tmp_path: Path, valkey: Program, tie: str, until: Until) -> None:
    folder = tmp_path / "redis"
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(folder), tie, valkey.kind], stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        pid, url = launcher.stdout.readline().split()
        with failing(BrokerError, "broker.folder-in-use") as refused:
            start_server(folder, valkey)
        assert str(launcher.pid) in str(refused.value)
        launcher.kill()
        launcher.wait()
        with start_server(folder, valkey) as heir:
            assert heir.url == url
        until(lambda: gone(int(pid)), "the killed launcher's server is gone")


# -- failures --------------------------------------------------------------------------------------------------------


def test_a_second_start_in_a_folder_is_refused(tmp_path: Path, valkey: Program) -> None:
    with start_server(tmp_path / "redis", valkey) as server:
        gc.collect()
        with failing(BrokerError, "broker.folder-in-use"):
            start_server(tmp_path / "redis", valkey)
        assert ask(server, "PING") == b"+PONG"


def test_a_second_start_is_refused_without_file_locks(
    tmp_path: Path, valkey: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(_file: object, _flags: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    monkeypatch.setattr(embedded_redis, "LEFTOVER_SECONDS", 0.1)
    with start_server(tmp_path / "redis", valkey), failing(BrokerError, "broker.folder-in-use"):
        start_server(tmp_path / "redis", valkey)


def test_a_program_that_fails_is_quoted(tmp_path: Path) -> None:
    broken = Program(
        "redis-server", script(tmp_path / "bin" / "redis-server", "echo no such module >&2; exit 3"), "7.0"
    )
    for _ in range(2):  # The folder is unlocked again after a failure.
        with failing(BrokerError, "broker.start-failed") as failed:
            start_server(tmp_path / "redis", broken)
        assert "status 3" in str(failed.value)
        assert "no such module" in str(failed.value), "the server's log"


def test_a_program_that_cannot_run_is_quoted(tmp_path: Path) -> None:
    missing = Program("redis-server", tmp_path / "redis-server", "7.0")
    with failing(BrokerError, "broker.start-failed") as failed:
        start_server(tmp_path / "redis", missing)
    assert "status 127" in str(failed.value)


def test_a_silent_program_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands still until the program runs, however slow the machine is."""
    marker = tmp_path / "pid"
    silent = Program("redis-server", script(tmp_path / "redis-server", f"echo $$ > '{marker}'; exec sleep 600"), "7.0")
    clock = SimpleNamespace(
        monotonic=lambda: 2.0 if marker.exists() and marker.read_text().endswith("\n") else 0.0, sleep=time.sleep
    )
    monkeypatch.setattr(embedded_redis, "time", clock)
    with failing(BrokerError, "broker.start-timeout"):
        start_server(tmp_path / "redis", silent, timeout_seconds=1.5)
    assert gone(int(marker.read_text()))


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path, valkey: Program) -> None:
    (tmp_path / "file").write_text("")
    with failing(BrokerError, "broker.unwritable-folder"):
        start_server(tmp_path / "file" / "redis", valkey)


@pytest.mark.parametrize("kind", ["valkey (wheel)", "fakeredis"])
def test_a_port_that_was_taken_meanwhile_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    free = redis_probe.free_port()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = iter([taken.getsockname()[1], free])
        monkeypatch.setattr(embedded_redis, "free_port", lambda: next(ports))
        with start_server(tmp_path / "redis", find_program(kind)) as server:
            assert server.port == free
            assert server.alive()


def test_the_search_ends_if_all_ports_are_taken(
    tmp_path: Path, valkey: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(embedded_redis, "PORT_ATTEMPTS", 2)
        monkeypatch.setattr(embedded_redis, "free_port", lambda: port)
        with failing(BrokerError, "broker.no-port"):
            start_server(tmp_path / "redis", valkey)


def test_a_server_may_load_for_longer_than_the_silence_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock advances 1 s per query. Loading may take longer than the limit, but silence may not."""
    states = iter(["silent", *["loading"] * 20, "silent", "ready"])
    ticks = iter(range(1000))
    monkeypatch.setattr(embedded_redis, "server_state", lambda *_: next(states, "silent"))
    monkeypatch.setattr(
        embedded_redis, "time", SimpleNamespace(monotonic=lambda: next(ticks), sleep=lambda _seconds: None)
    )
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        assert embedded_redis._await_ready(process, 1, "", 5.0)
        assert not embedded_redis._await_ready(process, 1, "", 5.0)
        process.kill()


@pytest.mark.parametrize(
    ("replies", "state"),
    [
        (b"+OK\r\n+PONG\r\n", "ready"),
        (b"+OK\r\n-LOADING the dataset is being loaded\r\n", "loading"),
        (b"-WRONGPASS invalid password\r\n-NOAUTH\r\n", "foreign"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "foreign"),
        (b"$nonsense\r\n", "silent"),
        (b"", "foreign"),
    ],
)
def test_the_state_follows_from_the_replies(replies: bytes, state: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        code = (
            "import socket, sys; listener = socket.socket(fileno=int(sys.argv[1])); link, _ = listener.accept(); "
            "link.recv(4096); link.sendall(bytes.fromhex(sys.argv[2])); link.shutdown(socket.SHUT_WR); link.recv(4096)"
        )
        argv = [sys.executable, "-c", code, str(listener.fileno()), replies.hex()]
        with subprocess.Popen(argv, pass_fds=[listener.fileno()]):
            assert redis_probe.server_state(port, "secret") == state
