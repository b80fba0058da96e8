"""`archipelago island` on one of several hosts. Each process runs this command, and the first one leads."""

from __future__ import annotations

import logging
import os
import platform
import re
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from archipelago.broker.errors import ArchipelagoError, ConfigError, HostError, require_number
from archipelago.broker.manifest import installed_versions
from archipelago.broker.observe import logs
from archipelago.broker.process import FAILED, INTERRUPTED, OUTAGE, StoppedWaiting, keep_compiled, supervised_status
from archipelago.islands.options import IslandOptions, own_task, require_valid
from archipelago.islands.running import end_of_imports, run_island
from archipelago.islands.team.protocol import OTHER_FAILED, Said, leader_left

if TYPE_CHECKING:
    from archipelago.islands.team.jax_team import JaxTeam

#: No island has as many hosts.
HOSTS_MAX = 4096
PORT_MAX = 65535
#: How long processes may take to load until JAX connects them, besides `--wait-seconds`.
START_SECONDS = 60.0
#: Words of an error that tells of a lost process.
LOST = re.compile("gloo|nccl|rccl|coordination service", re.IGNORECASE)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HostRank:
    """The rank of this process among those of its island.

    Attributes:
        address: The address of JAX's coordinator, on the host of the leader.
        hosts: The number of processes.
        rank: The number of this one. The leader is 0.
    """

    address: str
    hosts: int
    rank: int


def host_rank(coordinator: str | None, hosts: int | None, rank: int | None) -> HostRank | None:
    """Return the rank of this process; None for an island of one. Raises ConfigError (`config.value`)."""
    if coordinator is None and (hosts, rank) in ((None, None), (1, None), (1, 0)):
        return None
    if coordinator is None or hosts is None or rank is None:
        raise ConfigError(
            "an island over several hosts needs --coordinator, --hosts and --host-rank",
            "Give all three.",
            code="config.value",
        )
    found = re.fullmatch(r"(?:\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]]+):([0-9]{1,5})", coordinator)
    if not found or not 0 < int(found[1]) <= PORT_MAX:
        raise ConfigError(
            f"--coordinator {coordinator!r:.80} is no address",
            "Give the first host and a free port of it, such as node0:9000.",
            code="config.value",
        )
    require_number("--hosts", hosts, f"Give a number from 1 to {HOSTS_MAX}.", least=1, most=HOSTS_MAX)
    require_number("--host-rank", rank, f"Give each host another number from 0 to {hosts - 1}.", most=hosts - 1)
    return HostRank(coordinator, hosts, rank) if hosts > 1 else None


def alike(options: IslandOptions, here: HostRank) -> dict[str, str]:
    """Return what all processes of an island must have alike, by its name in words: flags, and versions of packages."""
    versions = (f"{name} {version}" for name, version in sorted(installed_versions().items()))
    flags = {
        "--run": options.run, "--mesh": options.mesh, "--batch-size": options.batch_size or None, "--hosts": here.hosts,
    }  # fmt: skip
    return {"Python": platform.python_version(), "packages": ", ".join(versions)} | {
        flag: f"{value}" for flag, value in flags.items()
    }


def run_host(options: IslandOptions, here: HostRank, stopped: Callable[[], bool]) -> int:
    """Run this process of an island over several hosts until the island ends, and return the exit status.

    If another process is lost, a computation of this one fails. Or JAX has noticed it first, and aborts this process.
    """
    require_valid(options)
    options.log_as(f"host-{here.rank}", options.run)
    keep_compiled()
    try:
        return (_lead if here.rank == 0 else _follow)(options, connected(options, here), stopped)
    except (RuntimeError, ValueError) as error:  # JAX raises either
        if not LOST.search(str(error)):
            raise
        _end_now(error)


def _end_now(error: BaseException) -> NoReturn:
    """Say why this process ends, and end it. An orderly end would wait for processes that do not hear of it."""
    if isinstance(error, ArchipelagoError):
        logs.say_error(str(error), error.code)
    elif LOST.search(str(error)):
        reason = str(error).splitlines()[0][:200]
        remedy = "All its processes end. Start all of them again."
        logs.say_error(f"another process of this island is lost ({reason}). {remedy}", code="hosts.lost")
    else:
        sys.excepthook(type(error), error, error.__traceback__)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(_status(error))


def _status(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, ArchipelagoError):
        return supervised_status(error)
    return OUTAGE if LOST.search(str(error)) else FAILED


def connected(options: IslandOptions, here: HostRank) -> JaxTeam:
    """Wait for the other processes, and connect them. Raises the errors of `jax_team.connect`.

    JAX would abort a process that waits in vain, so a timer ends it before, with an error (`hosts.missing`). A signal
    ends it at once, because Python runs no handlers while JAX waits.
    """
    from archipelago.islands.team.jax_team import connect

    seconds = START_SECONDS + options.wait_seconds
    missing = HostError(
        f"not all {here.hosts} hosts of this island have come to {here.address} in {seconds:g} s",
        "Start all of them, check --coordinator, whose port must be open to all hosts, or raise --wait-seconds.",
        code="hosts.missing",
    )
    timer = threading.Timer(seconds, _end_now, (missing,))
    timer.daemon = True
    timer.start()
    handlers = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGINT)}
    log.info("host %s of %s waits at %s for the others", here.rank, here.hosts, here.address)
    try:
        return connect(here, alike(options, here), seconds + START_SECONDS)
    finally:
        timer.cancel()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _lead(options: IslandOptions, team: JaxTeam, stopped: Callable[[], bool]) -> int:
    try:
        status = run_island(options, lambda: stopped() or team.is_stopping, team=team)
    except BaseException as error:
        try:
            if getattr(error, "code", "") != OTHER_FAILED:  # then the others have ended
                team.exchange(Said(has_left=_status(error)))
        except (RuntimeError, ValueError):  # and so they have here
            _end_now(error)
        raise
    team.exchange(Said(finished=1, about=status))
    return status


def _follow(options: IslandOptions, team: JaxTeam, stopped: Callable[[], bool]) -> int:
    """Do what the leader of the hosts says until the island ends."""
    from archipelago.islands.prepared import prepared_for
    from archipelago.islands.team.computing import follow

    end_of_imports()
    manifest = team.share_manifest(None, _led(team.exchange(Said()), options).about)
    try:
        prepared = prepared_for(options, manifest, own_task(options, manifest))
        sample = prepared.sample()
        computation = prepared.workload.computation(manifest, prepared.placement, team)
    except ArchipelagoError as error:
        team.agree(supervised_status(error))
        raise
    team.agree()
    try:
        said = follow(team, computation, sample, stopped)
    except Exception as error:  # noqa: BLE001 - whatever it is, the leader does not hear of it
        _end_now(error)
    return _led(said, options).about


def _led(said: Said, options: IslandOptions) -> Said:
    """Return what the leader has said. Raise an error if it has left because of one."""
    if said.has_left == INTERRUPTED:
        raise StoppedWaiting(options.stopped_status)
    if said.has_left:
        raise leader_left(said.has_left)
    return said
