"""Translate the errors of redis-py and of servers into errors of archipelago, and refuse servers that can hold no run.

A run needs a primary that evicts nothing, and an address that says whether it is a node of a cluster.
fakeredis, which does not tell its kind, is taken for a server that works.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from typing import Any

import redis

from archipelago.broker.address import Kind
from archipelago.broker.errors import BrokerError, UnreachableError

#: Pattern of the server's answer: what it means, and what to do. The client library strips some codes off the answers.
_REFUSALS = {
    "Errors writing to": (
        "broker.refused-append", "cannot write its append-only file to its disk, so it refuses writes",
        "Free space there; the run then goes on by itself."
    ),
    "MISCONF": (
        "broker.refused-disk", "cannot write to its disk, so it refuses writes",
        "Free space there; the run then goes on by itself."
    ),
    "used memory > 'maxmemory'": (
        "broker.refused-memory", "has reached its memory limit, so it refuses writes",
        "Raise its `maxmemory`; the run then goes on by itself.",
    ),
    "WRONGTYPE": (
        "broker.refused-wrong-type", "holds another type of value under that key", "Delete the key, or restore it."
    ),
    "NOREPLICAS|Not enough good replicas": (
        "broker.refused-replicas", "has too few replicas that follow it, so it refuses writes",
        "Start its replicas, or lower `min-replicas-to-write`; the run then goes on by itself.",
    ),
    "cluster support disabled": (
        "broker.refused-no-cluster", "is no node of a cluster", "Write redis:// in place of redis+cluster://."
    ),
    "unknown command .?SENTINEL": (
        "broker.refused-no-sentinel", "is no Sentinel", "Name the Sentinels, not the servers that they watch."
    ),
    "read only replica": (
        "broker.refused-replica", "is a replica, so it refuses writes", "Use the address of its primary."
    ),
}  # fmt: skip
#: Pattern of an outage that has a cause of its own: what to do.
_OUTAGES = {
    "max number of clients": "Raise its `maxclients`, or end processes that use it.",
    "AskError|TryAgainError|ClusterDownError|owns the slot": (
        "A slot is being moved or has no owner. A failover ends that by itself; otherwise "
        "`redis-cli --cluster check HOST:PORT` shows it, and `redis-cli --cluster fix HOST:PORT` mends it."
    ),
}
#: What only a node of a cluster answers.
_OF_CLUSTERS = (redis.exceptions.AskError, redis.exceptions.ClusterDownError, redis.exceptions.ClusterCrossSlotError)
#: The oldest Redis whose access control tells reading from writing, and gives rights on some keys only.
OLDEST = (7, 0)
#: The policy at the memory limit under which a server refuses writes and deletes nothing.
KEEPS_ALL = "noeviction"
MEND_POLICY = f"CONFIG SET maxmemory-policy {KEEPS_ALL}, and set it in the server's configuration"
_DELETES = "At its memory limit the server deletes keys, even contributions and parameters."
Info = Mapping[str, Any]


class Failures:
    """Translates the errors of one connection.

    Args:
        where: The server's address without its password, as messages name it.
        password: Removed from the texts of errors; servers quote commands that they do not know.
        is_invited: Whether user and password come from a join file.
    """

    def __init__(self, where: str, password: str | None, *, is_invited: bool = False) -> None:
        self.where = where
        self._password = password
        self._is_invited = is_invited

    def translation(self, error: Exception) -> BrokerError:
        """Return our error in place of one of the client library, or of a socket."""
        said = self._text(error)
        if isinstance(error, redis.exceptions.NoPermissionError):
            return BrokerError(
                f"{self.where} does not permit this ({said})",
                "`archipelago doctor` shows what this user may do. Ask an administrator of the Redis for more rights: "
                "`archipelago invite` makes users with exactly those of a role.",
                code="broker.permission",
            )
        if isinstance(error, redis.AuthenticationError):
            return BrokerError(
                f"{self.where} refuses access ({said})",
                "The invitation may have been revoked, or replaced by a newer one. Ask the administrator who invited "
                "you."
                if self._is_invited
                else f"Check user and password in the URL: redis://USER:PASSWORD@HOST:PORT.{self._of_sentinels()}",
                code="broker.access",
            )
        if isinstance(error, redis.ConnectionError | redis.TimeoutError | OSError):
            if (fault := tls_fault(error)) is not None:
                return self._insecure(fault)
            usual = f"Is it running, and can this machine reach it?{self._other_scheme(said)}"
            remedy = next((known for pattern, known in _OUTAGES.items() if re.search(pattern, said)), usual)
            return UnreachableError(f"{self.where} does not answer ({said})", remedy)
        if isinstance(error, _OF_CLUSTERS):
            return is_cluster(self.where, said)
        if isinstance(error, redis.ResponseError):
            code, what, remedy = _refusal(str(error))
            return BrokerError(f"{self.where} {what} ({said})", remedy, code=code)
        if isinstance(error, redis.InvalidResponse):
            what = f"{self.where} does not speak the Redis protocol ({said})"
            return BrokerError(what, "Check the port.", code="broker.address")
        return BrokerError(f"{self.where} cannot be used ({said})", "Check the options in its URL.")

    def _insecure(self, fault: ssl.SSLError) -> BrokerError:
        if isinstance(fault, ssl.SSLCertVerificationError):
            return BrokerError(
                f"the certificate of {self.where} cannot be trusted ({fault.verify_message})",
                "Name the authority that signed it at the end of the URL: ?ssl_ca_certs=FILE. "
                "The certificate must be issued for the host that answers, or for a HOST of the URL.",
                code="broker.tls",
            )
        return BrokerError(
            f"TLS with {self.where} failed ({self._text(fault)})",
            "Check the port, or write redis:// for a server without TLS. If the server asks for a client certificate: "
            "rediss://HOST:PORT?ssl_certfile=FILE&ssl_keyfile=FILE.",
            code="broker.tls",
        )

    def _other_scheme(self, text: str) -> str:
        """Return a hint for a server that was reached, and may not answer because of TLS or of its protected mode."""
        if self.where.startswith("rediss"):
            return "" if "refused" in text else " An address without TLS begins with redis://."
        reached = "connecting to" not in text
        hint = " An address with TLS begins with rediss://. "
        hint += "A Redis without a password answers only its own machine (protected mode)."
        return hint if reached and self.where.startswith("redis") else ""

    def _of_sentinels(self) -> str:
        """Return a hint for Sentinels, which may be what refuses access."""
        own = "sentinel_username=NAME&sentinel_password=SECRET"
        return f" Those of Sentinels are options: ?{own}." if "+sentinel:" in self.where else ""

    def _text(self, error: Exception) -> str:
        """Return the error on one line and without the password."""
        text = " ".join(str(error).split())
        return text.replace(self._password, "***") if self._password else text


def _refusal(answer: str) -> tuple[str, str, str]:
    known = (words for pattern, words in _REFUSALS.items() if re.search(pattern, answer))
    return next(known, ("broker.refused-command", "refused a command", "See its log and `INFO`."))


def refused_writes(info: Info) -> tuple[str, ...]:
    """Return by which code and why a server with this INFO refuses writes, and what to do; empty if it takes them.

    After a failed snapshot it may take them, by settings that INFO does not tell; nor does INFO tell how many
    replicas are needed, if there is one.
    """
    limit = int(info.get("maxmemory", 0))
    answers = {
        "used memory > 'maxmemory'": 0 < limit <= int(info.get("used_memory", 0)),
        "read only replica": info.get("role") == "slave",
        "Errors writing to": info.get("aof_last_write_status") == "err" and info.get("aof_enabled", 1),
        "MISCONF": info.get("rdb_last_bgsave_status") == "err",
        "NOREPLICAS": info.get("min_slaves_good_slaves") == 0,  # INFO has it only if some are needed
    }
    return next((_refusal(answer) for answer, refuses in answers.items() if refuses), ())


def tls_fault(error: BaseException | None) -> ssl.SSLError | None:
    """Return the cause of a failed handshake that no retry can mend; None for an outage."""
    while error is not None:
        refused = isinstance(error, ssl.SSLError) and re.search("WRONG_VERSION|_ALERT_", error.reason or "")
        if isinstance(error, ssl.SSLError) and (refused or isinstance(error, ssl.SSLCertVerificationError)):
            return error
        error = error.__cause__ or error.__context__  # the library hides the cause of its own error there
    return None


def version_of(info: Info) -> tuple[int, ...]:
    """Return the version of the server, as Redis counts it, in two numbers; empty if it does not tell."""
    return tuple(int(part) for part in re.findall(r"\d+", str(info.get("redis_version", "")))[:2])


def mode_of(info: Info) -> str:
    """Return `standalone`, `cluster` or `sentinel`; empty if the server does not tell. Valkey names the field anew."""
    return str(info.get("redis_mode") or info.get("server_mode") or "")


def require_kind(where: str, info: Info, sentinel: Info, kind: Kind = "server") -> None:
    """Raise BrokerError for a server on which no run can live, or not at this kind of address.

    Args:
        where: The server's address without its password.
        info: The section `server` of INFO.
        sentinel: The section `sentinel`, which names the primaries that a sentinel watches.

    Raises:
        BrokerError: It is older than `OLDEST` (`broker.server-too-old`), or it is a node of a cluster or a Sentinel
            (`broker.address`).
    """
    if (found := version_of(info)) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise BrokerError(
            f"{where} is Redis {'.'.join(map(str, found)) or 'of an unknown version'}, and {oldest} is the oldest that "
            "works",
            "Upgrade it. Or run `archipelago up` without a URL, which starts a new server.",
            code="broker.server-too-old",
        )
    if mode_of(info) == "cluster" and kind != "cluster":
        raise is_cluster(where)
    if mode_of(info) == "sentinel":
        raise _is_sentinel(where, sentinel)


def is_cluster(where: str, said: str = "") -> BrokerError:
    """Return the error of a node of a cluster. `said` is its answer to a command."""
    answered = f" ({said})" if said else ""
    return BrokerError(
        f"{where} is a node of a Redis Cluster{answered}",
        "Write redis+cluster:// in place of redis:// (rediss+cluster:// in place of rediss://), and name several nodes "
        "if you can: redis+cluster://HOST:PORT,HOST:PORT.",
        code="broker.address",
    )


def _is_sentinel(where: str, sentinel: Info) -> BrokerError:
    primaries = [found for name, found in sentinel.items() if re.fullmatch(r"master\d+", name)]
    known = [str(each["name"]) for each in primaries if isinstance(each, dict) and "name" in each]
    return BrokerError(
        f"{where} is a Sentinel, which only watches other servers",
        "Write redis+sentinel://HOST:PORT,HOST:PORT/SERVICE with the addresses of the Sentinels and the name of the "
        f"primary{f' ({chr(32).join(known)})' if known else ''}. Workers then follow it through a failover.",
        code="broker.address",
    )


def require_lasting(where: str, replication: Info, memory: Info) -> None:
    """Raise BrokerError for a server that cannot take a new run.

    Args:
        where: The server's address without its password.
        replication: The section `replication` of INFO.
        memory: The section `memory`.

    Raises:
        BrokerError: It is a replica (`broker.refused-replica`), or it has a memory limit at which it deletes keys
            (`broker.evicts`).
    """
    if replication.get("role") == "slave":
        primary = f"{replication.get('master_host', '?')}:{replication.get('master_port', '?')}"
        raise BrokerError(
            f"{where} is a replica, so it refuses writes",
            f"Use the address of its primary: redis://{primary}.",
            code="broker.refused-replica",
        )
    if (error := eviction(where, memory)) and int(memory.get("maxmemory", 0)):
        raise error


def eviction(where: str, memory: Info) -> BrokerError | None:
    """Return the error of a server whose policy deletes keys at its memory limit, which may be none yet; else None."""
    if (policy := str(memory.get("maxmemory_policy", KEEPS_ALL))) == KEEPS_ALL:
        return None
    return BrokerError(
        f"the maxmemory-policy of {where} is {policy}. {_DELETES}",
        f"{MEND_POLICY} (where the Redis is managed: in its parameters).",
        code="broker.evicts",
    )
