"""A run that other machines join: its server with TLS, its administrator, and the invitations of our own processes."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from archipelago.broker import invitation as invitations
from archipelago.broker import signing
from archipelago.broker.errors import ConfigError
from archipelago.broker.invitation import ADMIN, SUFFIX, Invitation, Role, key_text
from archipelago.broker.redis.transport import RedisTransport
from archipelago.ops.launch.administration import ADMIN_FILE, Administrator, Guest, public_text
from archipelago.ops.launch.embedded_redis import Server
from archipelago.ops.launch.redis_folder import Opening

#: The folder, in the run's folder, with the join files of the processes that `up` starts.
JOINS: Final = "joins"
#: An address that no machine has (RFC 5737). It only makes the system choose the address with which it would send.
_ELSEWHERE: Final = ("192.0.2.1", 9)


def opening_of(host: str | None) -> Opening:
    """Return how other machines reach a server here.

    Args:
        host: An address of this machine, to listen there only; or another name or address under which others reach
            this machine, to listen everywhere; or None to find out the address.

    Raises:
        ConfigError: `host` cannot be a name or an address.
    """
    if host is not None and not _is_host(host):
        raise ConfigError(
            f"--host cannot be {host!r:.80}", "Give a name or an address of this machine.", code="config.host"
        )
    name = socket.gethostname()
    names = (name,) if _is_host(name) else ()
    if host is None:
        return Opening(_own_address(), (), names)
    return Opening(host, (host,) if _is_ours(host) else (), names)


def _is_host(text: str) -> bool:
    """Return whether the text can be a name or an address in a URL and in a certificate."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        parts = text.split(".")
        return text.isascii() and len(text) < 254 and all(part.replace("-", "").isalnum() for part in parts)
    return "%" not in text


def _is_ours(host: str) -> bool:
    """Return whether that is an address of this machine, other than loopback."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    with socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return not address.is_unspecified


def _own_address() -> str:
    """Return the address with which this machine sends to others; the one of loopback if it is on no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ELSEWHERE)
            address: str = probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"
    return address


def administrator_at(server: Server, run: str, folder: Path) -> Invitation:
    """Return what connects to a server of our own as its administrator, with the key of the run's mergers."""
    file = folder / ADMIN_FILE
    private = invitations.read(file).private_key if file.exists() else ""
    private = private or key_text(signing.generate()[0])
    return Invitation(server.url, run, ADMIN, ADMIN, private, public_text(private), server.authority)


class OpenRun:
    """The members of a run that other machines join.

    Args:
        transport: The administrator's connection.
        server: The server.
        folder: The run's folder.
    """

    def __init__(self, transport: RedisTransport, server: Server, folder: Path) -> None:
        self._server, self._folder = server, folder
        self._administrator = Administrator(transport, server.public_url, folder)
        self.file = self._administrator.file

    def begin(self) -> None:
        """Give the run its key, before anything is written into it."""
        self._administrator.open()

    def invite_ours(self, islands: Iterable[str]) -> dict[str, str]:
        """Invite the processes that `up` starts, and return their join files by name.

        They get new credentials at each start.
        """
        ours: list[tuple[str, Role]] = [("merger", "merger"), ("evaluate", "operator"), ("standby", "viewer")]
        ours += [(name, "island") for name in islands]
        joins = {name: str(self._invite(name, role)) for name, role in ours}
        self._administrator.keep_users()
        return joins

    def _invite(self, name: str, role: Role) -> Path:
        file = (self._folder / JOINS / f"{name}{SUFFIX}").absolute()
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        guest = Guest(name, role, url=self._server.url)
        invitations.write(file, self._administrator.invite(guest, may_replace=file.exists()))
        return file
