"""Judge the servers behind an address for `archipelago doctor`: copies, failover, and each node. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from archipelago.broker.address import Kind
from archipelago.broker.redis.checkup import NodeFacts
from archipelago.broker.redis.failures import KEEPS_ALL
from archipelago.ops.watch.doctor.checks import Finding, ok, problem, warning

_NAMES = {"server": "one server", "cluster": "a Redis Cluster", "sentinel": "a primary that Sentinels watch"}


def topology(kind: Kind, nodes: Sequence[NodeFacts], min_replicas: str) -> list[Finding]:
    """Return the findings about all servers of an address.

    Args:
        kind: The kind of the address.
        nodes: All servers.
        min_replicas: The setting of the primary that holds the run; empty if it does not tell.
    """
    holder = next((node for node in nodes if node.is_holder), None)
    return [_overview(kind, nodes, holder), *_copies(kind, holder, min_replicas), *_each(nodes)]


def _overview(kind: Kind, nodes: Sequence[NodeFacts], holder: NodeFacts | None) -> Finding:
    primaries = sum(node.is_primary for node in nodes)
    others = sum(bool(node.primary) for node in nodes)
    copies = f", {_count(holder.replicas)} of it" if holder else ""
    where = f" This run's keys lie on {holder.where}{copies}." if holder and kind != "server" else ""
    seen = f" of {primaries} primaries and {_count(others)}" if kind == "cluster" else ""
    return ok("topology", f"The address names {_NAMES[kind]}{seen}.{where}")


def _count(replicas: int) -> str:
    return f"{replicas} replica{'s' * (replicas != 1)}"


def _copies(kind: Kind, holder: NodeFacts | None, min_replicas: str) -> Iterator[Finding]:
    """Yield what a failover would lose."""
    if holder is None or (kind == "server" and not holder.replicas):
        return
    if not holder.replicas:
        yield warning(
            "topology.no-replica",
            f"No replica follows {holder.where}, so nothing takes over when it fails.",
            "Start a replica of it.",
        )
    elif min_replicas in ("", "0"):
        unknown = " (the server does not tell the setting)" if not min_replicas else ""
        yield warning(
            "topology.min-replicas",
            f"{holder.where} takes writes without any replica{unknown}. Cut off from them, it would acknowledge writes "
            "that a failover forgets. The run then repeats the lost rounds.",
            "CONFIG SET min-replicas-to-write 1 and min-replicas-max-lag 10 on every server that may become primary.",
        )


def _each(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Yield what makes a single server unfit to hold the run after a failover."""
    for node in nodes:
        if node.error == "refused":
            yield problem(
                "topology.refused",
                f"{node.where} refuses this user, so it could not go on with the run after a failover. Each server has "
                "users of its own.",
                "Invite the member again (`archipelago invite NAME --replace`), which makes its user on all servers, "
                "or copy the users there.",
            )
        elif node.error:
            yield warning("topology.silent", f"{node.where} does not answer.", "Start it, or remove it.")
        elif node.policy not in ("", KEEPS_ALL) and not node.is_holder:
            yield problem(
                "topology.evicts",
                f"maxmemory-policy of {node.where} is {node.policy}. As the primary it would delete keys at its limit.",
                "CONFIG SET maxmemory-policy noeviction there, and set it in its configuration file.",
            )
    if missing := [node.where for node in nodes if node.has_log is False and not node.is_holder]:
        yield warning(
            "topology.no-log",
            f"{', '.join(missing)} keep{'s' * (len(missing) == 1)} no append-only file.",
            "CONFIG SET appendonly yes there, and set it in the configuration file.",
        )
