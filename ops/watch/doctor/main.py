"""`archipelago doctor`: check whether a site can join a run, and say what to do if it cannot.

Only `accelerators` and `spectra` load JAX.
"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from archipelago.broker.address import redacted
from archipelago.broker.errors import ArchipelagoError, BadUrlError, BrokerError, ConfigError, require_number
from archipelago.broker.footprint import available_here
from archipelago.broker.invitation import ADMIN, Invitation, Role
from archipelago.broker.machine import install_hint, usable_cores
from archipelago.broker.manifest import Corpus, Manifest
from archipelago.broker.observe.logs import printable
from archipelago.broker.observe.merge_load import SPECTRA_REMEDY
from archipelago.broker.presence import Presence
from archipelago.broker.process import RUN_VARIABLE, URL_VARIABLE, RunAddress, keep_compiled, print_json
from archipelago.broker.redis.checkup import Bandwidth, RedisCheckup
from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.broker.shards.reader import numbered
from archipelago.broker.transport import refusal
from archipelago.islands.mesh import usable_devices
from archipelago.ops.simulation.cycle import SpectraWay, footprint_here, spectra_loads
from archipelago.ops.watch.doctor import server as checks
from archipelago.ops.watch.doctor.server import Finding, ok, problem, warning
from archipelago.ops.watch.formatting import seconds_text, size
from archipelago.ops.watch.run_view import size_in_words

PINGS = 200
#: The share of the measuring time for pings. The rest is for the bandwidth, half of it for each direction.
PING_SHARE = 0.25
#: The run name of the connection if the user names no run.
NO_RUN = "any"
SECONDS_MAX = 120.0
MARKS = {"ok": Text("ok", "green"), "warning": Text("warning", "bold yellow"), "problem": Text("PROBLEM", "bold red")}
NVIDIA = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class DoctorOptions(RunAddress):
    """Check a site before it joins a run: its Redis, the link to it, and this machine. Without a URL, only the latter.

    Each finding says what to do about it. The measurement sends bursts of a few MB through one key of about 1 MiB, and
    deletes the key. The exit status is 1 if there is a problem, and 0 if there are only warnings.
    """

    seconds: float = 4.0
    """The approximate time for measuring the link. 0 measures no bandwidth and writes nothing."""
    json: bool = False
    """Print one JSON object."""


def main(options: DoctorOptions) -> int:
    """Check everything, and print it part by part. Return 1 if there is a problem."""
    require_number("--seconds", options.seconds, f"Choose 0 to {SECONDS_MAX:g}.", most=SECONDS_MAX)
    url, run = options.url or os.environ.get(URL_VARIABLE), options.run or os.environ.get(RUN_VARIABLE)
    invited = options.invitation()
    url, run = (invited.url, run or invited.run) if invited else (url, run)
    out = Console(highlight=False, quiet=options.json)
    busy = Console(stderr=True, quiet=options.json)
    server = CheckedServer([])
    if url:
        with busy.status("asking the Redis, and measuring the link"):
            server = check_server(url, run, options.seconds, invited)
        out.print(section(f"redis  {redacted(url)}", server.findings), "")
    manifest = server.manifest
    if (platforms := os.environ.get("JAX_PLATFORMS")) and "cpu" not in platforms:
        os.environ["JAX_PLATFORMS"] += ",cpu"  # on which spectra are tried
    with busy.status("loading JAX"):
        keep_compiled()
        here = check_machine(server)
    out.print(section("this machine", here), "")
    findings = [*server.findings, *here]
    problems, warnings = (sum(f.level == level for f in findings) for level in ("problem", "warning"))
    if options.json:
        print_json({
            "redis": redacted(url) if url else None,
            "run": manifest.run if manifest else None,
            "problems": problems,
            "warnings": warnings,
            "findings": [vars(finding) | {"subject": finding.subject} for finding in findings],
        })  # fmt: skip
    noted = f", {warnings} warning{'s' * (warnings > 1)}" if warnings else ""
    if problems:
        out.print(f"{problems} problem{'s' * (problems > 1)} to fix first", style="bold red")
    else:
        out.print(f"ready{noted}", style="bold yellow" if warnings else "bold green")
    return 1 if problems else 0


def section(title: str, findings: Sequence[Finding]) -> Table:
    """Return one part of the report: a line for each finding, with the remedy and its code below it."""
    table = Table(box=None, pad_edge=False, show_header=False, title=Text(title, "bold"), title_justify="left")
    table.add_column(min_width=7, no_wrap=True)
    table.add_column(style="dim", min_width=11, no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        text = Text(printable(finding.what))
        if finding.remedy:
            text.append(f"\n→ {finding.remedy}", "italic").append(f" [{finding.code}]", "dim")
        table.add_row(MARKS[finding.level], finding.subject, text)
    return table


# -- the Redis -----------------------------------------------------------------------------------------------------


@dataclass
class CheckedServer:
    """The findings about a Redis, and what the checks of this machine read."""

    findings: list[Finding]
    manifest: Manifest | None = None
    presences: Sequence[Presence] = ()
    link: Bandwidth = field(default_factory=Bandwidth)
    round_trip_seconds: float = 0.0


def check_server(url: str, run: str | None, seconds: float, invited: Invitation | None = None) -> CheckedServer:
    """Check a Redis. A server that does not answer is a finding too. Raise BadUrlError."""
    found = CheckedServer([])
    try:
        with closing(_check_run(connect(url, run or NO_RUN, invited), url, run, found)) as transport:
            role, name = _check_members(transport, found) if found.manifest else (None, NO_RUN)
            for mine in _shards_by_server(transport, found.manifest.shards if found.manifest else 1):
                numbers = [shard.connection.shard or 0 for shard in mine]
                checkup = RedisCheckup(mine[0].connection, role=role, name=name, shards=numbers)
                if mine[0] is transport:
                    _check_link(checkup, seconds, found)
                _check_one(checkup, numbers, found, is_first=mine[0] is transport)
    except BadUrlError:
        raise
    except BrokerError as error:
        found.findings.append(problem("reach.failed", error.what, error.remedy))
    return found


def _check_run(transport: RedisTransport, url: str, run: str | None, found: CheckedServer) -> RedisTransport:
    """Return a connection to the run to check: the named one, or the only one there."""
    try:
        runs = transport.reader.runs()
        if run is None and len(runs) == 1:
            transport.close()
            transport = connect(url, runs[0])
        if run is None and len(runs) != 1:
            what = f"Its runs are {', '.join(runs)}. Name one with --run." if runs else "It has no runs yet."
            found.findings.append(ok("run", what))
            return transport
        found.manifest = manifest = transport.reader.manifest()
        found.presences = transport.reader.presences()
        live = sum(presence.is_live for presence in found.presences)
        what = f"Run {manifest.run!r} has {size_in_words(manifest)}, and {live} live island{'s' * (live != 1)}."
        found.findings.append(ok("run", what))
        if transport.reader.is_served() is False and (why := refusal(transport.reader)):
            found.findings.append(problem("merger.missing", "No merger serves the run.", why))
    except (BrokerError, ConfigError) as error:
        found.findings.append(problem("run.missing", error.what, error.remedy))
    return transport


def _check_members(transport: RedisTransport, found: CheckedServer) -> tuple[Role | None, str]:
    """Find out whose credentials these are. Return the role and the name; None and any name for an administrator."""
    members = transport.membership.all()
    invited, user = transport.invitation, RedisCheckup(transport.connection).options.get("username")
    known = {member.user: (name, member) for name, member in members.by_name.items() if member.user}
    if user in known:
        name, member = known[user]
        found.findings.append(ok("credentials", f"These are the credentials of {name!r} with the role {member.role}."))
        return member.role, name
    if invited is not None and invited.role != ADMIN:
        what = f"The run has no member {invited.name!r} with these credentials. Nothing of it is accepted."
        remedy = "Ask for new ones: `archipelago invite NAME --replace`."
        found.findings.append(problem("credentials.no-member", what, remedy))
        return invited.role, invited.name
    if faults := ", ".join(sorted(members.faults)):
        what = f"The records of {faults} cannot be read, so nothing of theirs is accepted."
        found.findings.append(problem("members.damaged", what, "Invite them again with --replace."))
    return None, NO_RUN


def _shards_by_server(transport: RedisTransport, shards: int) -> list[list[RedisTransport]]:
    """Return the connections to the shards of the run, those at one server together. A cluster has several servers."""
    if shards == 1:
        return [[transport]]
    out: dict[str, list[RedisTransport]] = {}
    for own in (transport, *(transport.of_shard(shard) for shard in range(1, shards))):
        out.setdefault(own.reader.instance(), []).append(own)
    return list(out.values())


def _check_link(checkup: RedisCheckup, seconds: float, found: CheckedServer) -> None:
    samples = checkup.round_trips(seconds * PING_SHARE, PINGS)
    found.round_trip_seconds = statistics.median(samples)
    found.findings.append(checks.latency(samples))
    if seconds and checkup.role not in ("viewer", "operator"):  # which have no key that a measurement can use
        try:
            link = checkup.bandwidth(seconds * (1 - PING_SHARE) / 2, found.round_trip_seconds)
        except BrokerError as error:
            found.findings.append(problem(error.code, error.what, error.remedy))
            return
        found.findings.append(checks.bandwidth(link))
        if not checks.is_local(str(checkup.options.get("host", ""))):  # loopback is as fast as the processor is free
            found.link = link


def _check_one(checkup: RedisCheckup, shards: Sequence[int], found: CheckedServer, *, is_first: bool) -> None:
    """Check a server that holds shards of the run. If it does not hold the first, what is well there is not told."""
    facts, (kind, nodes) = checkup.facts(), checkup.servers()
    node = next((node for node in nodes if node.is_holder), None)
    host = node.host if node else str(checkup.options.get("host", ""))
    judged = checks.server_checks(facts, host, has_tls=checkup.has_tls, role=checkup.role)
    if found.manifest:
        live = sum(presence.is_live for presence in found.presences)
        judged.append(checks.run_memory(found.manifest, len(shards), live, facts.info))
    is_part = found.manifest is not None and len(shards) < found.manifest.shards
    which, own = numbered("shard", shards) if is_part else "", [node] if node else []
    placed = checks.topology(kind, nodes if is_first else own, facts.settings.get("min-replicas-to-write", ""), which)
    if is_first:
        found.findings += [*judged, *placed]
        return
    found.findings += [ok("shards", checks.place_in_words(each, which)) for each in own]
    judged += placed
    found.findings += [
        dataclasses.replace(each, what=f"The server of {which}: {each.what}") for each in judged if each.level != "ok"
    ]


# -- this machine ------------------------------------------------------------------------------------------------------


def check_machine(server: CheckedServer) -> list[Finding]:
    """Check this machine, and what an island of the run would do here."""
    manifest, devices = server.manifest, accelerators()
    on_device = devices.level != "problem" and import_module("jax").default_backend() != "cpu"
    found = [
        machine(available_here(), footprint_here(manifest) if manifest else None, on_device),
        devices,
    ]
    steps = [p.heartbeat.step_seconds for p in server.presences if p.is_training and p.heartbeat.step_seconds > 0]
    step_seconds = statistics.median(steps) if steps else math.nan
    if devices.level != "problem":  # then JAX starts
        found.append(spectra(manifest, step_seconds))
    if manifest is None:
        return found
    if not manifest.config.has_user_loops:  # users' loops bring their own data
        found.append(corpus(manifest.corpus))
    if server.round_trip_seconds:
        found.append(checks.sync(server.link, server.round_trip_seconds, manifest, step_seconds))
    return found


def machine(available_bytes: int, needed: Mapping[str, int] | None, on_device: bool = False) -> Finding:
    """Compare the memory with the `footprint` of the run; None if no run is known.

    `on_device`: an island's memory is mostly that of its accelerator, which is not compared.
    """
    what = (
        f"This machine has {usable_cores()} cores, {size(available_bytes)} of free memory, and Python "
        f"{sys.version.split()[0]}."
    )
    if needed is None:
        return ok("machine", what)
    island, merger = needed["an island"], needed["the merger"]
    what += f" The merger of the run needs about {size(merger)}, and an island {size(island)} on a CPU."
    if on_device or island <= available_bytes:
        return ok("machine", what)
    return warning("machine.small", what, "Train on an accelerator, or choose a smaller model.")


def corpus(wanted: Corpus) -> Finding:
    """Check that the corpus of the run is here."""
    from archipelago.islands.data.corpus import STDLIB, is_prepared, open_corpus

    name, copy = wanted.name, "Copy its folder from the machine that created the run."
    try:
        if name == STDLIB and not is_prepared(name):
            what = f"The corpus {name!r} is not on this machine yet. `archipelago prepare {name}` makes it."
            return ok("corpus", what)
        found = open_corpus(name, verifies=True)
    except ArchipelagoError as error:
        if error.code == "data.missing":
            return problem("corpus.missing", error.what, copy)
        return problem("corpus.damaged", error.what, error.remedy)
    if found.digest != wanted.digest:
        what = f"The corpus {name!r} has the digest {found.digest[:8]}…, and the run's has {wanted.digest[:8]}…."
        return problem("corpus.different", what, f"{copy} The same name may be another text elsewhere.")
    return ok("corpus", f"The corpus {name!r} of the run is here ({size(wanted.bytes)}, digest {found.digest[:8]}…).")


def accelerators() -> Finding:
    """List the devices that JAX finds. Loading JAX takes seconds."""
    try:
        devices = usable_devices()
    except ConfigError as error:
        return problem(error.code, f"{error.what}.", error.remedy)
    kinds: dict[str, int] = {}
    for device in devices:
        kinds[device.device_kind] = kinds.get(device.device_kind, 0) + 1
    found = ", ".join(f"{count} × {kind}" if count > 1 else kind for kind, count in kinds.items())
    if devices[0].platform == "cpu" and NVIDIA.exists() and os.environ.get("JAX_PLATFORMS", "") != "cpu":
        return warning(
            "devices.unused-gpu",
            f"JAX finds only {found}, although the driver of a GPU is installed.",
            install_hint("cuda"),
        )
    limit = (devices[0].memory_stats() or {}).get("bytes_limit", 0) if devices[0].platform != "cpu" else 0
    each = f", and takes {size(limit)} of each by default" if limit else ""
    what = "An island uses as many of them as divide its batch, unless --mesh says otherwise."
    return ok("devices", f"JAX finds {found}{each}. {what}")


def spectra(manifest: Manifest | None, step_seconds: float) -> Finding:
    """Try how fast a merger here changes spectra of matrices, and predict whether it keeps up with the run.

    Args:
        manifest: The run; None if no run is known.
        step_seconds: The time of an inner step; NaN if it is unknown.
    """
    from archipelago.merger.spectra import default_threads
    from archipelago.merger.spectra_trial import trial

    found, threads = trial(), default_threads()
    what = f"A merger here changes spectra by {found.name}, {found.rate / 1e9:.0f} GFLOP/s a "
    what += f"thread, on {threads} thread{'s' * (threads != 1)} (--threads)."
    if manifest is None:
        return ok("spectra", what)
    way, interval_seconds = SpectraWay("here", threads * found.rate), step_seconds * manifest.config.sync.interval
    loads = spectra_loads(manifest.tensors, manifest.config.merge, interval_seconds, ways=[way])
    if not loads:
        return ok("spectra", "The merge rules of the run change no spectra.")
    if math.isnan(interval_seconds):
        return ok("spectra", f"{what} Those of a cycle of the run take {seconds_text(loads[0].seconds)}.")
    what += f" In this run, {loads[0].describe()}."
    is_slow = loads[0].stretch > 1.0
    return warning("spectra.slow", what, SPECTRA_REMEDY) if is_slow else ok("spectra", what)
