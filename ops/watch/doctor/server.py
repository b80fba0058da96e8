"""Check the Redis of a run for `archipelago doctor`: its servers, the way to them, and the rights of this user."""

from __future__ import annotations

import ipaddress
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from archipelago.broker.address import Kind
from archipelago.broker.codecs import codec
from archipelago.broker.footprint import redis_parts
from archipelago.broker.invitation import Role
from archipelago.broker.manifest import Manifest
from archipelago.broker.redis.checkup import Bandwidth, NodeFacts, ServerFacts
from archipelago.broker.redis.failures import KEEPS_ALL, OLDEST
from archipelago.broker.transport import MEMORY_SHARE_MAX
from archipelago.ops.watch.formatting import seconds_text, size

Level = Literal["ok", "warning", "problem"]

#: Above this share of the memory limit the doctor warns. Above `MEMORY_SHARE_MAX`, islands stop sending.
TIGHT_SHARE = 0.6
#: Above this round trip, rounds wait longer for their announcements than for anything else.
SLOW_SECONDS = 0.5


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        level: How serious it is: with a warning training still works, and a problem has to be fixed first.
        code: A stable name, SUBJECT.FAULT or SUBJECT.ok. Programs and tests compare codes, never sentences.
        what: The fact, and why it matters.
        remedy: The action for the user. Empty if all is well.
    """

    level: Level
    code: str
    what: str
    remedy: str = ""

    @property
    def subject(self) -> str:
        """The part of the code that names the checked subject."""
        return self.code.partition(".")[0]


def ok(subject: str, what: str) -> Finding:
    """Return a finding that needs no attention."""
    return Finding("ok", f"{subject}.ok", what)


#: Make a finding with which training still works, and one that has to be fixed first, from code, fact and remedy.
warning, problem = partial(Finding, "warning"), partial(Finding, "problem")

# -- the server -------------------------------------------------------------------------------------------------------


def server_checks(facts: ServerFacts, host: str, *, has_tls: bool, role: Role | None = None) -> list[Finding]:
    """Return all findings about a server, in the order of the report. Without a role, the user is an administrator.

    What the server does not tell to a member is not that member's business.
    """
    info = facts.info
    return [
        *version(info, facts.settings),
        *persistence(facts),
        *memory(info),
        *evictions(facts),
        *([] if role else untold(facts)),
        *unknown(facts.unknown),
        rights(facts.denied, role),
        *privacy(facts.needs_password, host, has_tls=has_tls),
    ]


def untold(facts: ServerFacts) -> Iterator[Finding]:
    """Yield a warning if the server does not let this user read its facts. Managed servers forbid INFO and CONFIG."""
    if missing := [what for what, told in (("INFO", facts.info), ("CONFIG GET", facts.settings)) if not told]:
        yield warning(
            "server.untold",
            f"This user may not call {' and '.join(missing)}, so some settings of the server are not checked.",
            "ACL SETUSER NAME +info +config|get, or check persistence, memory and eviction by yourself.",
        )


def unknown(commands: Sequence[str]) -> Iterator[Finding]:
    """Find commands that a setting of the server took away."""
    if commands:
        yield problem(
            "server.unknown-command",
            f"The server does not know {', '.join(commands)}, which a run needs.",
            "Remove `rename-command` from its configuration file, and start it again; use ACLs in its place.",
        )


def version(info: Mapping[str, Any], settings: Mapping[str, str]) -> Iterator[Finding]:
    """Name the server, and find a replica, or a lack of them. The connection has refused a version that is too old."""
    if redis := str(info.get("redis_version", "")):
        name = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {redis}"
        yield ok("version", f"The server is {name}. We need {'.'.join(map(str, OLDEST))} or newer.")
    if info.get("role") == "slave":
        yield problem("role.replica", "This server is a replica, which takes no writes.", "Name its primary instead.")
    good, needed = info.get("min_slaves_good_slaves"), int(settings.get("min-replicas-to-write") or 1)
    if good is not None and good < needed:  # INFO has it only if some are needed
        what = f"{good} of the {needed} replicas that this server needs follow it, so it refuses writes."
        yield problem("role.no-replicas", what, "Start more, or lower min-replicas-to-write.")


def persistence(facts: ServerFacts) -> Iterator[Finding]:
    """Judge whether the data survives a restart of the server, and whether its last writes to disk failed."""
    on = facts.settings.get("appendonly") or {0: "no", 1: "yes"}.get(facts.info.get("aof_enabled", -1), "")
    fsync = facts.settings.get("appendfsync", "")
    if on == "yes" and fsync == "no":
        yield warning(
            "persistence.no-fsync",
            "The server keeps an append-only file, but appendfsync is no. A crash may lose half a minute.",
            "CONFIG SET appendfsync everysec.",
        )
    elif on == "yes":
        yield ok("persistence", f"The server keeps an append-only file{f' (appendfsync {fsync})' if fsync else ''}.")
    elif on:
        kept = "only occasional snapshots (save)" if facts.settings.get("save") else "nothing on disk"
        yield warning(
            "persistence.none",
            f"The server keeps no append-only file: it keeps {kept}. A restart of the server sets the run back.",
            "CONFIG SET appendonly yes, and set it in the configuration file. `merger --resume` recovers a run.",
        )
    for name in ("rdb_last_bgsave_status", "aof_last_write_status", "aof_last_bgrewrite_status"):
        if facts.info.get(name, "ok") != "ok":
            yield problem(
                "disk.failed",
                f"The server's last write to disk failed ({name}). It may refuse writes now.",
                "Read the server's log. The disk may be full.",
            )


def memory(info: Mapping[str, Any]) -> Iterator[Finding]:
    """Compare the memory in use with the server's limit, or with the machine's memory."""
    used, limit = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    machine = int(info.get("total_system_memory", 0))
    share = used / (limit or machine) if limit or machine else 0.0
    of = f"of {size(limit)} (maxmemory)" if limit else f"without a limit, on a machine with {size(machine)}"
    what, hold_back = f"The server uses {size(used)} {of}.", f"Islands send nothing above {MEMORY_SHARE_MAX:.0%}."
    remedy = "Raise maxmemory, or remove other data there."
    if share >= TIGHT_SHARE:
        is_full = share >= MEMORY_SHARE_MAX
        yield (problem if is_full else warning)(
            f"memory.{'full' if is_full else 'tight'}", f"{what} {hold_back}", remedy
        )
    elif used:
        yield ok("memory", what)


def run_memory(manifest: Manifest, shards: int, islands: int, info: Mapping[str, Any]) -> Finding:
    """Compare the peak memory of a number of shards, when that many islands train, with the server's limit."""
    share, limit = shards / manifest.shards, int(info.get("maxmemory", 0))
    parts = redis_parts(
        manifest.config, math.ceil(share * manifest.parameters), max(manifest.sizes), max(1, islands),
        math.ceil(share * len(manifest.fragments)),
    )  # fmt: skip
    needed, records = sum(parts.values()), parts["the tape"] + parts["the merger's state"]
    what = f"With {max(1, islands)} islands the run takes up to {size(needed)} here, {size(records)} of it for its "
    what += "tape and the merger's state."
    if limit and needed > MEMORY_SHARE_MAX * limit:
        return warning("memory.small", what, "Raise maxmemory, or begin a run with several shards (--shards).")
    return ok("memory", what)


def evictions(facts: ServerFacts) -> Iterator[Finding]:
    """Judge the policy at the memory limit. The server must refuse writes and evict nothing."""
    policy = str(facts.settings.get("maxmemory-policy") or facts.info.get("maxmemory_policy", ""))
    if policy == KEEPS_ALL:
        what = f"The server evicts nothing (maxmemory-policy {KEEPS_ALL}). At its limit it refuses writes."
        yield ok("eviction", what)
    elif policy:
        yield (problem if int(facts.info.get("maxmemory", 0)) else warning)(
            "eviction.policy",
            f"maxmemory-policy is {policy}. At its limit the server deletes keys, even contributions and parameters.",
            f"CONFIG SET maxmemory-policy {KEEPS_ALL}, and set it in the server's configuration file.",
        )


# -- users ------------------------------------------------------------------------------------------------------------


def rights(denied: Sequence[str], role: Role | None = None) -> Finding:
    """Judge whether this user may run all commands of its role. None is an administrator."""
    who = f"a member with the role {role} needs" if role else "workers need"
    if denied:
        names = " ".join(f"+{name.lower()}" for name in denied)
        return problem(
            "rights.denied",
            f"This user may not run {', '.join(denied)} on all keys of this run that {who}.",
            "Ask for new credentials: `archipelago invite NAME --replace`, with the version that the run uses."
            if role
            else f"ACL SETUSER NAME {names}, with ~{{RUN:* and ~archipelago:* among its keys. "
            "`archipelago invite` makes users with exactly the rights of a role.",
        )
    return ok("rights", f"This user may run every command that {who} on this run's keys.")


def is_local(host: str) -> bool:
    """Return whether connections to a host stay on this machine. An empty host is a socket's path."""
    try:
        return not host or host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def privacy(needs_password: bool | None, host: str, *, has_tls: bool) -> Iterator[Finding]:
    """Judge whether others can read the traffic, and whether the server requires a password."""
    if has_tls:
        yield ok("encryption", "The connection uses TLS.")
    elif is_local(host):
        yield ok("encryption", "The connection stays on this machine and needs no encryption.")
    else:
        yield warning(
            "encryption.none",
            "The connection is not encrypted. The password and the parameters travel as plain text.",
            "Use rediss://, or a tunnel or private network that encrypts.",
        )
    if needs_password:
        yield ok("password", "The server asks for a password.")
    elif needs_password is False:
        who = "Anyone on this machine" if is_local(host) else "Anyone who reaches the port"
        yield (warning if is_local(host) else problem)(
            "password.none",
            f"The server has no password. {who} may write.",
            "CONFIG SET requirepass SECRET, set it in the configuration file, and use redis://:SECRET@HOST:PORT.",
        )


# -- all servers of an address ----------------------------------------------------------------------------------------

_NAMES = {"server": "one server", "cluster": "a Redis Cluster", "sentinel": "a primary that Sentinels watch"}


def topology(kind: Kind, nodes: Sequence[NodeFacts], min_replicas: str, shards: str = "") -> Iterator[Finding]:
    """Yield the findings about all servers of an address: copies, and what a failover would lose.

    Args:
        min_replicas: The setting of the primary that holds the run; empty if that does not tell.
        shards: The shards that this primary holds, if others hold some, too.
    """
    holder = next((node for node in nodes if node.is_holder), None)
    where = f" {place_in_words(holder, shards)}" if holder and kind != "server" else ""
    primaries, others = sum(node.is_primary for node in nodes), sum(bool(node.primary) for node in nodes)
    seen = f" of {primaries} primaries and {_count(others)}" if kind == "cluster" else ""
    yield ok("topology", f"The address names {_NAMES[kind]}{seen}.{where}")
    if holder and not holder.replicas and kind != "server":
        what = f"No replica follows {holder.where}, so nothing takes over when it fails."
        yield warning("topology.no-replica", what, "Start a replica of it.")
    elif holder and holder.replicas and min_replicas in ("", "0"):
        unknown = " (the server does not tell the setting)" if not min_replicas else ""
        yield warning(
            "topology.min-replicas",
            f"{holder.where} takes writes without any replica{unknown}. Cut off from them, it would acknowledge writes "
            "that a failover forgets. The run then repeats the lost rounds.",
            "CONFIG SET min-replicas-to-write 1 and min-replicas-max-lag 10 on every server that may become primary.",
        )
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
        elif not node.is_holder and (node.policy not in ("", KEEPS_ALL) or node.has_log is False):
            log = "" if node.has_log in (True, None) else " and keeps no append-only file"
            yield (warning if node.policy in ("", KEEPS_ALL) else problem)(
                "topology.settings",
                f"{node.where} has the maxmemory-policy {node.policy or 'unknown'}{log}. As the primary it would lose "
                "data at its memory limit or when it restarts.",
                f"CONFIG SET maxmemory-policy {KEEPS_ALL} and appendonly yes there, and set them in its file.",
            )


def place_in_words(holder: NodeFacts, shards: str) -> str:
    of = f" of {shards}" if shards else ""
    return f"This run's keys{of} lie on {holder.where}, {_count(holder.replicas)} of it."


def _count(replicas: int) -> str:
    return f"{replicas} replica{'s' * (replicas != 1)}"


# -- the link ----------------------------------------------------------------------------------------------------------


def latency(samples: Sequence[float]) -> Finding:
    """Judge round trips, in seconds."""
    median, slowest = statistics.median(samples), sorted(samples)[math.ceil(0.99 * len(samples)) - 1]
    what = f"The round trip takes {seconds_text(median)}, p99 {seconds_text(slowest)} ({len(samples)} pings)."
    if median < SLOW_SECONDS:
        return ok("latency", what)
    what += " Islands do not wait for it, but learn about each round that much later."
    return warning("latency.slow", what, "Choose longer intervals (--sync.interval).")


def bandwidth(link: Bandwidth) -> Finding:
    if link.why_not:
        what = f"The bandwidth was not measured ({link.why_not})."
        return warning("bandwidth.unknown", what, "Free memory there, then run doctor again.")
    return ok("bandwidth", f"One connection carries {size(link.up)}/s up, {size(link.down)}/s down.")


def sync(link: Bandwidth, round_trip_seconds: float, manifest: Manifest, step_seconds: float) -> Finding:
    """Predict what an island here sends and receives in a sync of the largest fragment, and whether steps hide it.

    Args:
        link: The rates of the link to the Redis; 0 if they are unknown, or if the Redis is on this machine.
        round_trip_seconds: The median round trip to it.
        step_seconds: The time of an inner step; NaN if it is unknown.
    """
    wire, sizes = manifest.config.wire, manifest.sizes
    stride = step_seconds * manifest.config.sync.interval / len(sizes)
    up, down = (codec(name).encoded_size(max(sizes)) for name in (wire.up, wire.down))
    what = f"An island here sends {size(up)} and receives {size(down)} in a sync of the largest fragment"
    what += "." if math.isnan(stride) else f", every {seconds_text(stride)}."
    if not (link.up and link.down):
        return ok("sync", what)
    seconds = max(up / link.up, down / link.down)  # Both directions run at once.
    ways = (f"{seconds_text(round_trip_seconds + each)}" for each in (up / link.up, down / link.down))
    what += " That takes {} up and {} down on this link.".format(*ways)
    if math.isnan(stride):
        return ok("sync", f"{what} Syncs should be at least {seconds_text(seconds)} apart (--sync.interval).")
    if seconds <= stride:
        return ok("sync", what)
    thin = codec(manifest.config.thin).encoded_size(max(sizes)) if manifest.config.thin else up
    if max(thin / link.up, down / link.down) <= stride:
        return ok(
            "sync", f"{what} It would send {size(thin)} instead ({manifest.config.thin}), because this is a thin link."
        )
    return warning(
        "sync.slow",
        f"{what} Inner steps hide {stride / seconds:.0%} of it: intervals would stretch {seconds / stride:.1f} times.",
        "Begin a run with a longer interval (--sync.interval) or fewer bits (--wire.up, --wire.down).",
    )
