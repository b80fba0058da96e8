"""Facts about all servers of an address, for `archipelago doctor`: who has copies, and what each would do with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import redis

from archipelago.broker.errors import BrokerError
from archipelago.broker.redis.connection import RedisConnection


@dataclass(frozen=True)
class NodeFacts:
    """One server. Numbers and texts are empty where it does not tell them, or does not let this user in.

    Attributes:
        where: Its host and port, or the path of its socket.
        host: Its host; empty for a socket.
        is_holder: Whether it is the primary that holds the run.
        is_primary: Whether it is a primary.
        primary: Host and port of the primary that it follows; empty for a primary.
        replicas: How many replicas follow it.
        policy: Its `maxmemory-policy`.
        has_log: Whether it keeps an append-only file; None if it does not tell.
        error: Why nothing is known of it; empty if it has answered.
    """

    where: str
    host: str = ""
    is_holder: bool = False
    is_primary: bool = False
    primary: str = ""
    replicas: int = 0
    policy: str = ""
    has_log: bool | None = None
    error: str = ""


def node_facts(connection: RedisConnection) -> list[NodeFacts]:
    """Ask each server of the address, with this user's credentials. Raises UnreachableError if none can be found."""
    with connection.translated():
        holder = connection.info("server").get("run_id", "")
        return [_facts(connection, node, str(holder)) for node in connection.servers.nodes()]


def _facts(connection: RedisConnection, node: Any, holder: str) -> NodeFacts:
    options = node.connection_pool.connection_kwargs
    host = str(options.get("host", ""))
    where = f"{host}:{options.get('port', '')}" if host else str(options.get("path", ""))
    try:
        with connection.translated():
            found: dict[str, Any] = {}
            for section in ("server", "replication", "memory", "persistence"):
                found |= node.info(section)
    except BrokerError as error:
        cause = error.__cause__
        refused = isinstance(cause, redis.AuthenticationError | redis.exceptions.NoPermissionError)
        return NodeFacts(where, host, error="refused" if refused else "silent")
    is_primary = found.get("role") == "master"
    return NodeFacts(
        where,
        host,
        is_holder=found.get("run_id") == holder,
        is_primary=is_primary,
        primary="" if is_primary else f"{found.get('master_host', '?')}:{found.get('master_port', '?')}",
        replicas=int(found.get("connected_slaves", 0)),
        policy=str(found.get("maxmemory_policy", "")),
        has_log=bool(found["aof_enabled"]) if "aof_enabled" in found else None,
    )
