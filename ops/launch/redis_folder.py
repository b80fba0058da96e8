"""The folder of an embedded server: its config file, log, lock and data.

The config file keeps the port and the password, so that the server has the same URL after each start.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import hashlib
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from archipelago.broker.errors import BrokerError
from archipelago.broker.files import PRIVATE, make_untracked, write_atomically
from archipelago.ops.launch.certificates import CertificateFolder
from archipelago.ops.launch.redis_probe import LOOPBACK, Tls
from archipelago.ops.launch.redis_program import Kind

#: The server rewrites its append-only file only beyond this size. One large payload exceeds the default of 64 MiB.
REWRITE_BYTES = 512 << 20
CONFIG, LOG, LOCK, USERS, CERTIFICATES = "server.conf", "server.log", "server.lock", "users.acl", "certificates"
#: The user that may do everything at a server that other machines reach. The user `default` is off there.
ADMINISTRATOR = "archipelago"


@dataclass(frozen=True)
class Opening:
    """How other machines reach a server.

    Attributes:
        host: The name or address that they use.
        listen: The addresses at which the server listens besides loopback; empty for all.
        names: Further names and addresses of this machine for the certificate.
    """

    host: str
    listen: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class RedisFolder:
    """The folder at `path`, an absolute path. It may not exist yet."""

    path: Path

    @property
    def config(self) -> Path:
        """The config file."""
        return self.path / CONFIG

    @property
    def log(self) -> Path:
        """The server's log."""
        return self.path / LOG

    @property
    def certificates(self) -> CertificateFolder:
        """The certificates of a server that other machines reach."""
        return CertificateFolder(self.path / CERTIFICATES)

    @property
    def tls(self) -> Tls:
        """How to reach such a server."""
        return Tls(ADMINISTRATOR, self.certificates.authority)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder for this process until the process ends: two servers would destroy the append-only file.

        Raises:
            BrokerError: Another process has locked it, or it cannot be written.
        """
        try:
            make_untracked(self.path.parent)
            self.path.mkdir(mode=0o700, exist_ok=True)
            lock = (self.path / LOCK).open("a+")
        except OSError as error:
            raise BrokerError(
                f"cannot write to {self.path}: {error.strerror}",
                "Choose another folder for the run.",
                code="broker.unwritable-folder",
            ) from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                raise self.occupied(lock.read()) from None
            except OSError:
                pass  # Some network file systems have no locks. A server that still answers is found in another way.
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            yield

    def occupied(self, owner: str = "") -> BrokerError:
        """Return the error of a folder whose server runs for another launcher, the process with the ID `owner`."""
        who = f" (process {owner})" if owner else ""
        return BrokerError(
            f"another launcher{who} is using the server in {self.path}",
            "Stop it first, or give this run another name.",
            code="broker.folder-in-use",
        )

    def last_address(self) -> tuple[int, str]:
        """Return the port and password of the last server, or port 0 and a new password if there was none."""
        text = self.config.read_text() if self.config.exists() else ""
        found = dict(re.findall(r'^(port|tls-port|requirepass|# password) "?([\w-]+)"?$', text, re.MULTILINE))
        password = found.get("requirepass") or found.get("# password") or secrets.token_urlsafe(24)
        return int(found.get("tls-port") or found.get("port", "0")), password

    def was_open(self) -> bool:
        """Return whether other machines could reach the last server."""
        return self.config.exists() and "\ntls-port " in self.config.read_text()

    def last_kind(self) -> Kind | None:
        """Return the kind of server that wrote the data. Another kind might not read them, or silently start empty."""
        first = self.config.read_text().partition("\n")[0] if self.config.exists() else ""
        return next((kind for kind in get_args(Kind) if first == f"# {kind}"), None)

    def write_config(
        self, kind: Kind, port: int, password: str, append_only: bool, opening: Opening | None = None
    ) -> None:
        """Write the config file. It holds the password, which must not appear on a command line.

        For a server that other machines reach, this writes its certificates and its users, too.
        """
        settings = {
            **(self._open(port, opening) if opening else self._closed(port, password)),
            "dir": _quoted(str(self.path)),
            "appendonly": "yes" if append_only else "no",
            "appendfsync": "everysec",
            "auto-aof-rewrite-min-size": str(REWRITE_BYTES),
            "rdbcompression": "no",  # Payloads are compressed already.
            "save": '""',
            "set-proc-title": "no",  # The command line in `ps` then shows whose server this is.
            # With full memory a write must fail. Eviction would lose contributions that no merger has read.
            "maxmemory-policy": "noeviction",
        }
        if opening:
            self._write_users(password)
        # The server has only a digest of the administrator's password.
        lines = [f"# {kind}", *([f"# password {password}"] if opening else [])]
        lines += [f"{key} {value}" for key, value in settings.items()]
        write_atomically(self.config, "\n".join(lines) + "\n", mode=PRIVATE)

    def _closed(self, port: int, password: str) -> dict[str, str]:
        return {"bind": LOOPBACK, "protected-mode": "yes", "port": str(port), "requirepass": password}

    def _open(self, port: int, opening: Opening) -> dict[str, str]:
        hosts = (opening.host, *opening.listen, *opening.names, LOOPBACK, "::1", "localhost")
        self.certificates.renew(hosts, datetime.datetime.now(datetime.UTC))
        listen = " ".join(dict.fromkeys((LOOPBACK, *opening.listen))) if opening.listen else "* -::*"
        return {
            "bind": listen,
            "protected-mode": "yes",
            "port": "0",
            "tls-port": str(port),
            "tls-cert-file": _quoted(str(self.certificates.server)),
            "tls-key-file": _quoted(str(self.certificates.server_key)),
            "tls-ca-cert-file": _quoted(str(self.certificates.authority)),
            "tls-auth-clients": "no",
            "aclfile": _quoted(str(self.path / USERS)),
        }

    def _write_users(self, password: str) -> None:
        """Write the file of users: the administrator, no user `default`, and the invited members as they were."""
        file = self.path / USERS
        ours = ("user default ", f"user {ADMINISTRATOR} ")
        kept = [line for line in file.read_text().splitlines() if not line.startswith(ours)] if file.exists() else []
        digest = hashlib.sha256(password.encode()).hexdigest()
        lines = [f"{ours[0]}off resetpass resetkeys resetchannels -@all", f"{ours[1]}on #{digest} ~* &* +@all", *kept]
        write_atomically(file, "\n".join(lines) + "\n", mode=PRIVATE)

    def log_size(self) -> int:
        """Return the size of the log in bytes."""
        return self.log.stat().st_size if self.log.exists() else 0

    def log_tail(self, start: int, lines: int = 12) -> str:
        """Return the last lines of the log after its first `start` bytes."""
        with self.log.open("rb") as file:
            file.seek(start)
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
