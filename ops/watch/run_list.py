"""The runs of a Redis and of a folder, each in one line: what it trains, how far it is, and when it was last active."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from archipelago.broker import config as run_config
from archipelago.broker.config import RunConfig
from archipelago.broker.control import Control, run_steps
from archipelago.broker.errors import ArchipelagoError, BrokerError, ConfigError
from archipelago.broker.invitation import is_join_file
from archipelago.broker.process import URL_VARIABLE, connect_to
from archipelago.broker.redis.keys import is_name
from archipelago.broker.shards.transport import opened
from archipelago.broker.transport import MergerStatus, ReaderTransport
from archipelago.ops.launch.administration import ADMIN_FILE
from archipelago.ops.launch.embedded_redis import url_of_running
from archipelago.ops.watch import run_summary

#: What only a run writes into its folder. A folder without any of these is none.
PARTS = (
    "redis/server.conf", "merger/checkpoints", "merger/tensorboard", "islands/*/checkpoints", "islands/*/tensorboard",
    run_summary.TEXT,
)  # fmt: skip
#: The files whose times tell when a run in a folder was last active.
_ACTIVE = ("logs/*", "merger/checkpoints/*", "islands/*/*", run_summary.TEXT, "config.toml")


@dataclass(frozen=True)
class RunEntry:
    """One run.

    Attributes:
        run: Its name.
        where: `redis` for a run at the given Redis, else its folder.
        state: `new`, `training`, `paused`, `no islands`, `no merger`, `shard away` (it cannot be reached), `finished`,
            `ended` (its Redis, which is a part of its folder, does not run) or `unreadable`.
        model: The size of its model; empty if unknown.
        parameters: The number of its parameters; 0 if unknown.
        round: The last closed round, or the last one in a checkpoint.
        step, steps: The steps that it has made, and those that it will make.
        live, known: The islands that are live, and those of the last day.
        idle_seconds: Time since a heartbeat arrived or a round closed; NaN if nothing has happened yet.
    """

    run: str
    where: str
    state: str
    model: str = ""
    parameters: int = 0
    round: int = 0
    step: int = 0
    steps: int = 0
    live: int = 0
    known: int = 0
    idle_seconds: float = math.nan


def of_redis(url: str | None) -> list[RunEntry]:
    """Return the runs that this user may read at a Redis; without a URL, at $ARCHIPELAGO_URL. Raise BrokerError."""
    address = url or os.environ.get(URL_VARIABLE, "")
    finder = connect_to(address, None if is_join_file(address) else "any")  # A join file names its run.
    try:
        names = finder.reader.runs()
    finally:
        finder.close()
    return [_at(url, name, "redis") for name in names]


def of_folder(folder: Path) -> Iterator[RunEntry]:
    """Yield the runs in a folder, by name. Those whose own Redis runs are read from it."""
    try:
        paths = sorted(path for path in folder.iterdir() if is_run_folder(path))
    except OSError:
        return
    for path in paths:
        try:
            url = address_of(path)
        except OSError:  # Its Redis is another user's.
            yield RunEntry(path.name, str(path), "unreadable")
        else:
            yield _at(url, path.name, str(path)) if url else _stopped(path)


def is_run_folder(path: Path) -> bool:
    """Return whether a folder has been made by a run."""
    return is_name(path.name) and path.is_dir() and any(any(path.glob(part)) for part in PARTS)


def address_of(path: Path) -> str:
    """Return the address of a run's own Redis; empty if it does not run."""
    url = url_of_running(path / "redis")
    admin = path / ADMIN_FILE
    return str(admin) if url and admin.exists() else url


def _at(url: str | None, run: str, where: str) -> RunEntry:
    try:
        transport = connect_to(url, run)
        try:
            return entry_of(transport, where)
        finally:
            transport.close()
    except (BrokerError, ConfigError):
        return RunEntry(run, where, "unreadable")


def entry_of(transport: ReaderTransport, where: str) -> RunEntry:
    """Return the run of a connection. Raise BrokerError, and ConfigError for a damaged manifest."""
    manifest, run = opened(transport, for_display=True)
    reader = run.reader
    tape, presences = reader.tape(1), reader.presences()
    requests = reader.control()
    status, control = reader.merger_status() or MergerStatus(), Control.of(requests)
    live = sum(presence.is_live for presence in presences)
    step = tape[-1].step if tape else 0
    steps = run_steps(manifest.config, requests)
    ages = [presence.age_seconds for presence in presences] + [status.still_seconds] * bool(tape)
    if step >= steps:
        state = "finished"
    elif control.is_paused:
        state = "paused"
    elif live:
        state = "shard away" if status.unreachable else "training" if status.holder else "no merger"
    else:
        state = "no islands" if tape or presences else "new"
    return RunEntry(
        run=manifest.run, where=where, state=state, model=manifest.config.model.size, parameters=manifest.parameters,
        round=tape[-1].round if tape else 0, step=step, steps=steps, live=live, known=len(presences),
        idle_seconds=max(0.0, min(ages)) if ages else math.nan,
    )  # fmt: skip


def _stopped(path: Path) -> RunEntry:
    """Return a run from the files in its folder."""
    from archipelago.merger.storage import MergerFolder  # the dashboard, which uses this module, needs no merger

    config, report = RunConfig(), {}
    with suppress(ArchipelagoError):
        config = run_config.from_toml(path / "config.toml")
    with suppress(ArchipelagoError, ValueError, OSError):
        report = run_summary.read(path) or {}
    numbers: list[int] = []
    with suppress(ArchipelagoError):
        numbers = MergerFolder(path / "merger").store.numbers()
    is_known = (path / "config.toml").exists()
    return RunEntry(
        run=path.name,
        where=str(path),
        state="finished" if report.get("finished") else "ended",
        model=config.model.size if is_known else "",
        round=int(report.get("rounds") or max(numbers, default=0)),
        step=int(report.get("steps") or 0),
        steps=config.inner.steps if is_known else 0,
        known=int(report.get("islands") or 0),
        idle_seconds=idle_seconds(path),
    )


def idle_seconds(path: Path) -> float:
    """Return how long ago a run last wrote into its folder; NaN if it has written nothing."""
    times = []
    for pattern in _ACTIVE:
        for file in path.glob(pattern):
            with suppress(OSError):
                times.append(file.stat().st_mtime)
    return max(0.0, time.time() - max(times)) if times else math.nan
