"""Judge the facts about a Redis for `archipelago doctor`. Pure: facts in, findings out."""

from __future__ import annotations

import ipaddress
import math
import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from archipelago.broker.errors import BrokerError
from archipelago.broker.invitation import Members, Role
from archipelago.broker.redis.checkup import Bandwidth, ServerFacts
from archipelago.broker.redis.failures import OLDEST
from archipelago.broker.transport import MEMORY_SHARE_MAX
from archipelago.ops.watch.formatting import seconds_text, size

Level = Literal["ok", "warning", "problem"]

#: Above this share of the memory limit the doctor warns. Above `MEMORY_SHARE_MAX`, islands stop sending.
TIGHT_SHARE = 0.6
#: Above this round trip, rounds wait longer for their announcements than for anything else.
SLOW_SECONDS = 0.5
SKEW_SECONDS = 1.0
#: Credentials that end within this time are worth a warning.
SOON_SECONDS = 24 * 3600
CLIENTS_SHARE = 0.8
#: The most connections that an island has at once: three pumps, leases, and one for queries.
CONNECTIONS_AN_ISLAND = 6
#: And for each further shard of the run: what sends and what receives.
CONNECTIONS_A_SHARD = 2
#: The output that a server must buffer for one reader: a page of events and three chunks, with room to spare.
BUFFER_BYTES = 32 << 20


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        level: How serious it is.
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


def warning(code: str, what: str, remedy: str) -> Finding:
    """Return a finding with which training still works."""
    return Finding("warning", code, what, remedy)


def problem(code: str, what: str, remedy: str) -> Finding:
    """Return a finding that has to be fixed first."""
    return Finding("problem", code, what, remedy)


def is_local(host: str) -> bool:
    """Return whether connections to a host stay on this machine. An empty host is a socket's path."""
    try:
        return not host or host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def quantile(samples: Sequence[float], share: float) -> float:
    """Return the smallest sample that at least this share of the samples do not exceed."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def latency(samples: Sequence[float]) -> Finding:
    """Judge round trips, in seconds."""
    median, slowest = statistics.median(samples), quantile(samples, 0.99)
    what = f"The round trip takes {seconds_text(median)}, p99 {seconds_text(slowest)} ({len(samples)} pings)."
    if median < SLOW_SECONDS:
        return ok("latency", what)
    return warning(
        "latency.slow",
        f"{what} Islands do not wait for it, but learn about each round that much later.",
        "Choose longer intervals (--sync.interval).",
    )


def bandwidth(found: Bandwidth) -> Finding:
    """Judge the rates of one connection."""
    if found.why_not:
        return warning(
            "bandwidth.unknown",
            f"The bandwidth was not measured ({found.why_not}).",
            "Free memory there, then run doctor again.",
        )
    both = (f"{_megabits(rate)} Mbit/s {way}" for rate, way in ((found.up, "up"), (found.down, "down")))
    return ok("bandwidth", f"One connection carries {', '.join(both)}.")


def _megabits(bytes_a_second: float) -> str:
    rate = 8e-6 * bytes_a_second
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def server_checks(
    facts: ServerFacts, host: str, *, has_tls: bool, role: Role | None = None, shards: int = 1
) -> list[Finding]:
    """Return all findings about a server, in the order of the report.

    `shards` is the number of the run's shards that the server holds.

    What the server does not tell to a member is not that member's business, so it is left out.
    """
    found = _all_server_checks(facts, host, has_tls=has_tls, user_role=role, shards=shards)
    return [finding for finding in found if role is None or not finding.code.endswith(".unknown")]


def _all_server_checks(
    facts: ServerFacts, host: str, *, has_tls: bool, user_role: Role | None, shards: int
) -> list[Finding]:
    return [
        version(facts.info),
        *role(facts.info),
        persistence(facts),
        *disk_trouble(facts.info),
        memory(facts.info),
        policy(facts),
        *evictions(facts.info),
        clients(facts, shards),
        *buffers(facts.settings),
        rights(facts.denied, facts.excess, user_role),
        encryption(host, has_tls=has_tls),
        password(facts.needs_password, host),
        clock(facts.clock_ahead_seconds),
    ]


_ASK_INFO = "Allow this user INFO and CONFIG GET: ACL SETUSER NAME +info +config|get."


def version(info: Mapping[str, Any]) -> Finding:
    """Compare with the oldest version that has the commands that we need."""
    redis = str(info.get("redis_version", ""))
    if not redis:
        return warning("version.unknown", "The server does not tell its version.", _ASK_INFO)
    name = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {redis}"
    numbers = tuple(int(part) for part in re.findall(r"\d+", redis)[:2])
    oldest = ".".join(map(str, OLDEST))
    if numbers < OLDEST:
        return problem(
            "version.too-old",
            f"{name} lacks commands that we need.",
            f"Upgrade to Redis {oldest} or Valkey 7.2, or newer.",
        )
    return ok("version", f"The server is {name}. We need {oldest} or newer.")


#: The subject and fault of what the connection already refuses, by its code.
_UNUSABLE = {
    "broker.address": "role.address", "broker.permission": "rights.denied",
    "broker.server-too-old": "version.too-old", "broker.access": "reach.access",
}  # fmt: skip


def unusable(error: BrokerError) -> Finding:
    """Return the finding about a server to which no connection could be made."""
    return problem(_UNUSABLE.get(error.code, "reach.failed"), error.what, error.remedy)


def role(info: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield problems of a server that is not a primary with its own keys."""
    if info.get("role") == "slave":
        yield problem("role.replica", "This server is a replica, which takes no writes.", "Name its primary instead.")


def persistence(facts: ServerFacts) -> Finding:
    """Judge whether the data survives a restart of the server."""
    on = facts.settings.get("appendonly") or {0: "no", 1: "yes"}.get(facts.info.get("aof_enabled", -1), "")
    fsync = facts.settings.get("appendfsync", "")
    if not on:
        return warning(
            "persistence.unknown", "The server does not tell whether it keeps an append-only file.", _ASK_INFO
        )
    if on != "yes":
        fault, kept = "snapshots", "only occasional snapshots (save)"
        if not facts.settings.get("save"):
            fault, kept = "none", "nothing on disk"
        return warning(
            f"persistence.{fault}",
            f"The server keeps no append-only file: it keeps {kept}. A restart of the server sets the run back.",
            "CONFIG SET appendonly yes, and set it in the configuration file. `merger --resume` recovers a run.",
        )
    if fsync == "no":
        return warning(
            "persistence.no-fsync",
            "The server keeps an append-only file, but appendfsync is no. A crash may lose half a minute.",
            "CONFIG SET appendfsync everysec.",
        )
    return ok("persistence", f"The server keeps an append-only file{f' (appendfsync {fsync})' if fsync else ''}.")


def disk_trouble(info: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield failures of the server's last writes to disk."""
    names = {
        "rdb_last_bgsave_status": ("snapshot", "snapshot"),
        "aof_last_write_status": ("append", "append to its append-only file"),
        "aof_last_bgrewrite_status": ("rewrite", "rewrite of its append-only file"),
    }
    for name, (fault, what) in names.items():
        if info.get(name, "ok") != "ok":
            yield problem(
                f"disk.{fault}-failed",
                f"The server's last {what} failed ({name}). It may refuse writes now.",
                "Read the server's log. The disk may be full.",
            )


def memory(info: Mapping[str, Any]) -> Finding:
    """Compare the memory in use with the server's limit, or with the machine's memory."""
    used, limit = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    machine = int(info.get("total_system_memory", 0))
    if not used:
        return warning("memory.unknown", "The server does not tell how much memory it uses.", _ASK_INFO)
    whole = limit or machine
    share = used / whole if whole else 0.0
    of = f"of {size(limit)} (maxmemory)" if limit else f"without a limit, on a machine with {size(machine)}"
    what, hold_back = f"The server uses {size(used)} {of}.", f"Islands send nothing above {MEMORY_SHARE_MAX:.0%}."
    if share >= MEMORY_SHARE_MAX:
        return problem("memory.full", f"{what} {hold_back}", "Remove other data there, or raise maxmemory.")
    if share >= TIGHT_SHARE:
        return warning("memory.tight", f"{what} {hold_back}", "Raise maxmemory, or remove other data there.")
    return ok("memory", what)


def policy(facts: ServerFacts) -> Finding:
    """Judge the policy at the memory limit. The server must refuse writes and evict nothing."""
    found = str(facts.settings.get("maxmemory-policy") or facts.info.get("maxmemory_policy", ""))
    if not found:
        return warning("eviction.unknown", "The server does not tell its maxmemory-policy.", _ASK_INFO)
    if found == "noeviction":
        return ok(
            "eviction", "The server evicts nothing (maxmemory-policy noeviction). At its limit it refuses writes."
        )
    is_limited = bool(int(facts.info.get("maxmemory", 0)))
    return Finding(
        "problem" if is_limited else "warning",
        "eviction.policy",
        f"maxmemory-policy is {found}. At its limit the server deletes keys, even contributions and parameters.",
        "CONFIG SET maxmemory-policy noeviction, and set it in the server's configuration file.",
    )


def evictions(info: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a warning if the server has evicted keys."""
    if count := int(info.get("evicted_keys", 0)):
        yield warning(
            "eviction.happened",
            f"The server has evicted {count:,} keys since it started.",
            "Check its runs with `archipelago status`, and set maxmemory-policy noeviction.",
        )


def clients(facts: ServerFacts, shards: int = 1) -> Finding:
    """Compare the connections with the server's limit. `shards` is the number of the run's shards there."""
    connected = int(facts.info.get("connected_clients", 0))
    most = int(facts.info.get("maxclients") or facts.settings.get("maxclients") or 0)
    if not connected:
        return warning("clients.unknown", "The server does not tell how many clients are connected.", _ASK_INFO)
    if not most:
        return ok("clients", f"{connected:,} clients are connected.")
    left = max(0, most - connected) // (CONNECTIONS_AN_ISLAND + CONNECTIONS_A_SHARD * (shards - 1))
    what = f"{connected:,} of {most:,} connections are in use. There is room for about {left:,} islands."
    if connected > CLIENTS_SHARE * most or not left:
        return warning("clients.many", what, "CONFIG SET maxclients to a larger number.")
    return ok("clients", what)


def buffers(settings: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a problem if the server's limit on output buffers would disconnect readers again and again."""
    found = re.search(r"\bnormal (\d+) (\d+) (\d+)", settings.get("client-output-buffer-limit", ""))
    if found and 0 < (hard := min(int(limit) or 1 << 62 for limit in found.groups()[:2])) < BUFFER_BYTES:
        yield problem(
            "buffers.small",
            f"The server disconnects readers at {size(hard)} of output (client-output-buffer-limit normal). Islands "
            f"need {size(BUFFER_BYTES)}.",
            "CONFIG SET client-output-buffer-limit 'normal 0 0 0'.",
        )


def rights(denied: Sequence[str], excess: Sequence[str] = (), role: Role | None = None) -> Finding:
    """Judge whether this user may run all commands of its role, and no others. None is an administrator."""
    who = f"a member with the role {role} needs" if role else "workers need"
    if denied and role:
        return problem(
            "rights.denied",
            f"This user may not run {', '.join(denied)} on all keys of this run that {who}.",
            "Ask for new credentials: `archipelago invite NAME --replace`, with the version that the run uses.",
        )
    if denied:
        names = " ".join(f"+{name.lower()}" for name in denied)
        return problem(
            "rights.denied",
            f"This user may not run {', '.join(denied)} on this run's keys.",
            f"ACL SETUSER NAME {names}, with ~{{RUN:* and ~archipelago:* among its keys. "
            "`archipelago invite` makes users with exactly the rights of a role.",
        )
    if excess:
        return warning(
            "rights.wide",
            f"This user may do more than {who}: {', '.join(excess)} on keys that others write.",
            "Use Redis 7 or newer, or Valkey: before, a Redis cannot tell reading from writing.",
        )
    return ok(
        "rights", f"This user may run every command that {who} on this run's keys{', and no others' * bool(role)}."
    )


def credentials(role: Role, name: str, expires: float | None, now: float) -> Finding:
    """Say whose credentials these are, and how long they last."""
    what = f"These are the credentials of {name!r} with the role {role}."
    if expires is None:
        return ok("credentials", what)
    what = f"{what[:-1]}, until {time.strftime('%Y-%m-%d %H:%M', time.localtime(expires))}."
    if expires - now > SOON_SECONDS:
        return ok("credentials", what)
    ended = expires <= now
    return Finding(
        "problem" if ended else "warning", f"credentials.{'expired' if ended else 'expire-soon'}", what,
        "Ask for new ones: `archipelago invite NAME --replace --expires 4w`.",
    )  # fmt: skip


def members(found: Members, now: float) -> Iterator[Finding]:
    """Yield what an administrator should know about the members of a run."""
    if ended := sorted(name for name, member in found.by_name.items() if member.has_expired(now)):
        yield warning(
            "members.expired",
            f"The time of {', '.join(ended)} has ended. Mergers refuse what they send, but their users still exist.",
            "The next `archipelago invite` or `archipelago revoke` of this run deletes them.",
        )
    if found.faults:
        yield problem(
            "members.damaged",
            f"The records of {', '.join(sorted(found.faults))} cannot be read, so nothing of theirs is accepted.",
            "Invite them again with --replace.",
        )


def encryption(host: str, *, has_tls: bool) -> Finding:
    """Judge whether others can read the traffic."""
    if has_tls:
        return ok("encryption", "The connection uses TLS.")
    if is_local(host):
        return ok("encryption", "The connection stays on this machine and needs no encryption.")
    return warning(
        "encryption.none",
        "The connection is not encrypted. The password and the parameters travel as plain text.",
        "Use rediss://, or a tunnel or private network that encrypts.",
    )


def password(needed: bool | None, host: str) -> Finding:
    """Judge whether the server requires a password."""
    if needed:
        return ok("password", "The server asks for a password.")
    if needed is None:
        return warning("password.unknown", "We could not find out whether the server asks for a password.",
                       "Set requirepass.")  # fmt: skip
    remedy = (
        "CONFIG SET requirepass SECRET, set it in the server's configuration file, and use redis://:SECRET@HOST:PORT."
    )
    if is_local(host):
        return warning("password.none-local", "The server has no password. Anyone on this machine may write.", remedy)
    return problem("password.none", "The server has no password. Anyone who reaches the port may write.", remedy)


def clock(ahead_seconds: float) -> Finding:
    """Compare the server's clock with ours. Training never compares clocks."""
    if abs(ahead_seconds) < SKEW_SECONDS:
        return ok("clock", f"The server's clock is within {1e3 * abs(ahead_seconds):.0f} ms of this machine's.")
    way = "ahead of" if ahead_seconds > 0 else "behind"
    return warning(
        "clock.skewed",
        f"The server's clock is {abs(ahead_seconds):,.1f} s {way} this machine's. Only times in logs are affected.",
        "Synchronise both with NTP.",
    )
