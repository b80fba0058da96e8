"""What `archipelago doctor` thinks of what it found at a Redis. Pure: facts in, findings out."""

from __future__ import annotations

import ipaddress
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from archipelago.broker.redis.checkup import Bandwidth, ServerFacts
from archipelago.ops.watch.formatting import seconds_text, size

Level = Literal["ok", "warning", "problem"]

OLDEST = (6, 2)
HOLD_BACK_SHARE = 0.8
"""of the server's memory limit: islands send nothing beyond it (`islands.link.MEMORY_SHARE_MAX`)"""
TIGHT_SHARE = 0.6
SLOW_SECONDS = 0.5
"""a round trip from which on rounds wait for their announcements more than for anything else"""
SKEW_SECONDS = 1.0
CLIENTS_SHARE = 0.8
CONNECTIONS_AN_ISLAND = 6
"""at most at once: three pumps, leases, and what it looks up"""
BUFFER_BYTES = 32 << 20
"""that a server must be willing to hold for one reader: a page of events and three chunks, with room to spare"""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    level: Level
    subject: str
    what: str
    remedy: str = ""
    """what to do about it; empty where all is well"""


def ok(subject: str, what: str) -> Finding:
    """All is well."""
    return Finding("ok", subject, what)


def is_local(host: str) -> bool:
    """Whether what goes there stays on this machine; an empty host is a socket's path."""
    try:
        return not host or host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def quantile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least this share of them do not exceed."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def latency(samples: Sequence[float]) -> Finding:
    """Of round trips, in seconds."""
    median, slowest = statistics.median(samples), quantile(samples, 0.99)
    what = f"round trip {seconds_text(median)}, p99 {seconds_text(slowest)} ({len(samples)} pings)"
    if median < SLOW_SECONDS:
        return ok("latency", what)
    remedy = "Islands do not wait, but hear of each round that much later: longer intervals (--sync.interval) suit it."
    return Finding("warning", "latency", what, remedy)


def bandwidth(found: Bandwidth) -> Finding:
    """What one connection carried."""
    if found.why_not:
        return Finding("warning", "bandwidth", f"not measured: {found.why_not}", "Make room there, then look again.")
    both = (f"{_megabits(rate)} Mbit/s {way}" for rate, way in ((found.up, "up"), (found.down, "down")))
    return ok("bandwidth", ", ".join(both) + " (one connection)")


def _megabits(bytes_a_second: float) -> str:
    rate = 8e-6 * bytes_a_second
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def server_checks(facts: ServerFacts, host: str, *, has_tls: bool) -> list[Finding]:
    """All that its facts tell, in the order of the report."""
    return [
        version(facts.info),
        *role(facts.info),
        persistence(facts),
        *disk_trouble(facts.info),
        memory(facts.info),
        policy(facts),
        *evictions(facts.info),
        clients(facts),
        *buffers(facts.settings),
        rights(facts.denied),
        encryption(host, has_tls=has_tls),
        password(facts.needs_password, host),
        clock(facts.clock_ahead_seconds),
    ]


def version(info: Mapping[str, Any]) -> Finding:
    """Against the oldest that has what the streams need."""
    redis = str(info.get("redis_version", ""))
    if not redis:
        return Finding("warning", "version", "it does not say (INFO is not there, or not allowed)", _ASK_INFO)
    name = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {redis}"
    numbers = tuple(int(part) for part in re.findall(r"\d+", redis)[:2])
    if numbers < OLDEST:
        return Finding("problem", "version", f"{name} is too old", "Upgrade to Redis 6.2 or Valkey 7.2, or newer.")
    return ok("version", f"{name} (6.2 is the oldest that works)")


_ASK_INFO = "Let this user run INFO and CONFIG GET to have it checked: ACL SETUSER NAME +info +config|get."


def role(info: Mapping[str, Any]) -> Iterator[Finding]:
    """Nothing on a server of its own that takes writes."""
    if info.get("role") == "slave":
        yield Finding("problem", "role", "a replica, which takes no writes", "Give the address of the primary.")
    if info.get("cluster_enabled"):
        yield Finding("problem", "role", "a node of a cluster, and a run's keys are on one server",
                      "Give a Redis that is not in cluster mode.")  # fmt: skip


def persistence(facts: ServerFacts) -> Finding:
    """Whether it comes back with what it had."""
    on = facts.settings.get("appendonly") or {0: "no", 1: "yes"}.get(facts.info.get("aof_enabled", -1), "")
    fsync = facts.settings.get("appendfsync", "")
    if not on:
        return Finding("warning", "persistence", "it does not say whether it keeps an append-only file", _ASK_INFO)
    if on != "yes":
        kept = "only snapshots now and then (save)" if facts.settings.get("save") else "nothing on disk"
        return Finding(
            "warning", "persistence", f"no append-only file, {kept}: a restart sends the run back",
            "CONFIG SET appendonly yes, and in its configuration file; `merger --resume` mends what is lost.",
        )  # fmt: skip
    if fsync == "no":
        return Finding(
            "warning", "persistence", "append-only file, but appendfsync is no: a crash may lose half a minute",
            "CONFIG SET appendfsync everysec.",
        )  # fmt: skip
    return ok("persistence", f"append-only file{f', appendfsync {fsync}' if fsync else ''}")


def disk_trouble(info: Mapping[str, Any]) -> Iterator[Finding]:
    """What its last writes to disk ran into."""
    names = {"rdb_last_bgsave_status": "snapshot", "aof_last_write_status": "append to its file",
             "aof_last_bgrewrite_status": "rewrite of its file"}  # fmt: skip
    for name, what in names.items():
        if info.get(name, "ok") != "ok":
            yield Finding("problem", "disk", f"its last {what} failed ({name})",
                          "See its log: the disk may be full; it may refuse writes until then.")  # fmt: skip


def memory(info: Mapping[str, Any]) -> Finding:
    """Used, against its limit, or against the machine's memory."""
    used, limit = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    machine = int(info.get("total_system_memory", 0))
    if not used:
        return Finding("warning", "memory", "it does not say what it uses", _ASK_INFO)
    whole = limit or machine
    share = used / whole if whole else 0.0
    of = f"of {size(limit)} (maxmemory)" if limit else f"without a limit, on a machine of {size(machine)}"
    what = f"{size(used)} used, {of}"
    if share >= HOLD_BACK_SHARE:
        return Finding("problem", "memory", f"{what}: islands hold back from {HOLD_BACK_SHARE:.0%} on",
                       "Remove what else is there, or raise maxmemory.")  # fmt: skip
    if share >= TIGHT_SHARE:
        remedy = f"Islands hold back from {HOLD_BACK_SHARE:.0%} on: raise maxmemory, or remove what else is there."
        return Finding("warning", "memory", what, remedy)
    return ok("memory", what)


def policy(facts: ServerFacts) -> Finding:
    """What happens at the limit: it must refuse writes, and evict nothing."""
    found = str(facts.settings.get("maxmemory-policy") or facts.info.get("maxmemory_policy", ""))
    if not found:
        return Finding("warning", "eviction", "it does not say its maxmemory-policy", _ASK_INFO)
    if found == "noeviction":
        return ok("eviction", "maxmemory-policy noeviction: at its limit it refuses writes and drops nothing")
    limited = bool(int(facts.info.get("maxmemory", 0)))
    return Finding(
        "problem" if limited else "warning", "eviction",
        f"maxmemory-policy {found}: at its limit it drops keys, contributions and parameters among them",
        "CONFIG SET maxmemory-policy noeviction, and in its configuration file.",
    )  # fmt: skip


def evictions(info: Mapping[str, Any]) -> Iterator[Finding]:
    """Whether it has dropped keys."""
    if count := int(info.get("evicted_keys", 0)):
        yield Finding("warning", "eviction", f"it has dropped {count:,} keys since it was started",
                      "Check runs that were there with `archipelago status`; set noeviction.")  # fmt: skip


def clients(facts: ServerFacts) -> Finding:
    """Connected, against the most that it takes."""
    connected = int(facts.info.get("connected_clients", 0))
    most = int(facts.info.get("maxclients") or facts.settings.get("maxclients") or 0)
    if not connected:
        return Finding("warning", "clients", "it does not say how many are connected", _ASK_INFO)
    if not most:
        return ok("clients", f"{connected:,} connected")
    left = max(0, most - connected) // CONNECTIONS_AN_ISLAND
    what = f"{connected:,} of {most:,} connections, room for about {left:,} islands"
    if connected > CLIENTS_SHARE * most or not left:
        return Finding("warning", "clients", what, "CONFIG SET maxclients to more.")
    return ok("clients", what)


def buffers(settings: Mapping[str, str]) -> Iterator[Finding]:
    """Limits on what the server holds for a reader: one that is cut off comes back and is cut off again."""
    found = re.search(r"\bnormal (\d+) (\d+) (\d+)", settings.get("client-output-buffer-limit", ""))
    if found and 0 < (hard := min(int(limit) or 1 << 62 for limit in found.groups()[:2])) < BUFFER_BYTES:
        yield Finding("problem", "buffers", f"it cuts readers off at {size(hard)} (client-output-buffer-limit normal)",
                      "CONFIG SET client-output-buffer-limit 'normal 0 0 0'.")  # fmt: skip


def rights(denied: Sequence[str]) -> Finding:
    """Whether this user may do all that workers do."""
    if not denied:
        return ok("rights", "this user may run every command that workers need on this run's keys")
    names = " ".join(f"+{name.lower()}" for name in denied)
    return Finding("problem", "rights", f"this user may not run {', '.join(denied)} on this run's keys",
                   f"ACL SETUSER NAME {names}, with ~RUN:* ~{{RUN:* and ~archipelago:* among its keys.")  # fmt: skip


def encryption(host: str, *, has_tls: bool) -> Finding:
    """Whether others can read what travels."""
    if has_tls:
        return ok("encryption", "TLS")
    if is_local(host):
        return ok("encryption", "none, and none needed: it stays on this machine")
    return Finding("warning", "encryption", "none: password and parameters travel as plain text",
                   "Use rediss://, or a tunnel or private network that encrypts.")  # fmt: skip


def password(needed: bool | None, host: str) -> Finding:
    """Whether strangers are turned away."""
    if needed:
        return ok("password", "needed: a stranger is turned away")
    if needed is None:
        return Finding("warning", "password", "could not be found out whether one is needed", "Set requirepass.")
    remedy = "CONFIG SET requirepass SECRET, and in its configuration file; then redis://:SECRET@HOST:PORT."
    if is_local(host):
        return Finding("warning", "password", "none: everybody on this machine may read and write", remedy)
    return Finding("problem", "password", "none: whoever reaches the port may read and write all of it", remedy)


def clock(ahead_seconds: float) -> Finding:
    """The server's against ours. No clocks are compared by anything that trains."""
    if abs(ahead_seconds) < SKEW_SECONDS:
        return ok("clock", f"within {1e3 * abs(ahead_seconds):.0f} ms of this machine's")
    way = "ahead of" if ahead_seconds > 0 else "behind"
    return Finding("warning", "clock", f"{abs(ahead_seconds):,.1f} s {way} this machine's",
                   "Training compares no clocks, so only times in logs suffer; NTP mends them.")  # fmt: skip
