"""Ask a starting Redis server for its state, before there is a client for it.

The client library retries, pools connections and raises on LOADING. A start needs only three simple queries, so this
module speaks the protocol (RESP) itself.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

LOOPBACK = "127.0.0.1"

#: Where `free_port` looks. Linux gives outgoing connections ports from 32768 on, macOS and Windows from 49152 on.
#: Such a port may be lost to a connection before the intended server listens.
OWN_PORTS = range(20_000, 32_000)

#: `silent`: no answer. `foreign`: another program, which does not accept the password. `loading`: our server reads its
#: data.
State = Literal["silent", "foreign", "loading", "ready"]


@dataclass(frozen=True)
class Tls:
    """How to reach a server that other machines reach, too.

    Attributes:
        user: The user to log in as.
        authority: The file with the certificate of the authority to trust.
    """

    user: str
    authority: Path


def server_state(port: int, password: str, tls: Tls | None = None) -> State:
    """Return the state of the server on that port of this machine."""
    try:
        *greeting, reply = ask(port, password, "PING", tls=tls)
    except (OSError, ValueError):
        return "silent"
    if any(line != b"+OK" for line in greeting):
        return "foreign"
    if reply == b"+PONG":
        return "ready"
    return "loading" if reply.startswith(b"-LOADING") else "foreign"


def server_pid(port: int, password: str, tls: Tls | None = None) -> int | None:
    """Return the process ID that the server states, or None (fakeredis has no INFO)."""
    with contextlib.suppress(OSError, ValueError):
        if match := re.search(rb"^process_id:(\d+)", ask(port, password, "INFO", "server", tls=tls)[-1], re.MULTILINE):
            return int(match[1])
    return None


def ask(port: int, password: str, *words: str, tls: Tls | None = None) -> list[bytes]:
    """Return the replies to AUTH (if there is a password) and to one command."""
    login = ("AUTH", tls.user, password) if tls else ("AUTH", password)
    commands = [login, words] if password else [words]
    with _connected(port, tls) as connection, connection.makefile("rb") as replies:
        for command in commands:
            parts = "".join(f"${len(word.encode())}\r\n{word}\r\n" for word in command)
            connection.sendall(f"*{len(command)}\r\n{parts}".encode())
        return [read_reply(replies) for _ in commands]


def _connected(port: int, tls: Tls | None) -> socket.socket:
    plain = socket.create_connection((LOOPBACK, port), timeout=1.0)
    if tls is None:
        return plain
    with contextlib.ExitStack() as stack:
        stack.enter_context(plain)
        secure = ssl.create_default_context(cafile=tls.authority).wrap_socket(plain, server_hostname=LOOPBACK)
        stack.pop_all()  # the secure socket closes the plain one
    return secure


def read_reply(replies: IO[bytes]) -> bytes:
    """Return the next line, or the next bulk string."""
    line = replies.readline()
    return replies.read(int(line[1:]) + 2)[:-2] if line.startswith(b"$") else line.rstrip()


def is_free(port: int) -> bool:
    """Return whether a server could listen on that port of this machine."""
    with socket.socket() as probe:
        # The server sets this too, so that connections in TIME_WAIT from the last server do not block the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def free_port() -> int:
    """Return a port that was free just now. The system gives it to no outgoing connection."""
    while True:
        port = secrets.choice(OWN_PORTS)
        if is_free(port):
            return port


def two_free_ports() -> int:
    """Return a port like `free_port`. The next port was free, too."""
    while True:
        port = free_port()
        if is_free(port + 1):
            return port
