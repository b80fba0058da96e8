"""Tell which kind of server an address leads to, and refuse those that cannot hold a run.

A run needs a primary that evicts nothing, and an address that says whether it is a node of a cluster. The functions
are pure: they judge what INFO answers. A server that does not tell (fakeredis has no INFO) is taken for one that works.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from archipelago.broker.address import Kind
from archipelago.broker.errors import BrokerError, ServerTooOldError

#: The oldest Redis that has the commands that streams need.
OLDEST = (6, 2)
#: The policy at the memory limit under which a server refuses writes and deletes nothing.
KEEPS_ALL = "noeviction"
MEND_POLICY = f"CONFIG SET maxmemory-policy {KEEPS_ALL}, and set it in the server's configuration"
_DELETES = "At its memory limit the server deletes keys, even contributions and parameters."

Info = Mapping[str, Any]


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
        kind: The kind of the address.

    Raises:
        ServerTooOldError: The server lacks commands that the streams need.
        BrokerError: It is a node of a cluster (`broker.cluster`) or a sentinel (`broker.sentinel`).
    """
    if (found := version_of(info)) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ServerTooOldError(
            f"{where} is Redis {'.'.join(map(str, found)) or 'of an unknown version'}, and {oldest} is the oldest that "
            "works",
            "Upgrade it. Or run `archipelago up` without a URL, which starts a new server.",
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
        code="broker.cluster",
    )


def _is_sentinel(where: str, sentinel: Info) -> BrokerError:
    primaries = [found for name, found in sentinel.items() if re.fullmatch(r"master\d+", name)]
    known = [str(each["name"]) for each in primaries if isinstance(each, dict) and "name" in each]
    return BrokerError(
        f"{where} is a Sentinel, which only watches other servers",
        "Write redis+sentinel://HOST:PORT,HOST:PORT/SERVICE with the addresses of the Sentinels and the name of the "
        f"primary{f' ({chr(32).join(known)})' if known else ''}. Workers then follow it through a failover.",
        code="broker.sentinel",
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
    if (policy := evicting(memory)) and int(memory.get("maxmemory", 0)):
        raise BrokerError(
            f"the maxmemory-policy of {where} is {policy}. {_DELETES}",
            f"{MEND_POLICY} (where the Redis is managed: in its parameters).",
            code="broker.evicts",
        )


def eviction_warning(where: str, memory: Info) -> str:
    """Return a warning about a server whose policy deletes keys at its memory limit; empty for any other server."""
    policy = evicting(memory)
    return f"the maxmemory-policy of {where} is {policy}. {_DELETES} {MEND_POLICY}." if policy else ""


def evicting(memory: Info) -> str:
    """Return the policy of a server that would delete keys; empty if it deletes none or does not tell."""
    policy = str(memory.get("maxmemory_policy", KEEPS_ALL))
    return "" if policy == KEEPS_ALL else policy
