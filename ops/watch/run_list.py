"""`archipelago runs`: the runs of a Redis and of a folder, each in one line."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from archipelago.broker import config as run_config
from archipelago.broker.errors import ArchipelagoError, BrokerError, ConfigError
from archipelago.broker.invitation import is_join_file
from archipelago.broker.observe.logs import printable
from archipelago.broker.process import URL_VARIABLE, connect_to, invitation_at, print_json
from archipelago.broker.redis.keys import is_name
from archipelago.broker.transport import ReaderTransport
from archipelago.ops.run_source import RUNS, address_of
from archipelago.ops.settings import say, table_console
from archipelago.ops.watch import report as run_report
from archipelago.ops.watch.advice import grouped
from archipelago.ops.watch.formatting import ago, new_table
from archipelago.ops.watch.history import RECENT_ROUNDS
from archipelago.ops.watch.reading import Watcher

if TYPE_CHECKING:
    from rich.table import Table

#: What a run writes into its folder. Their times tell when it was last active; a folder without any of them is no run.
#: Of `redis/` only the data count: to look at a run that has ended starts its Redis, which writes its log again.
_TRACES = ("config.toml", run_report.SUMMARY, "redis/appendonlydir/*", "merger/*", "islands/*/*")


@dataclass(frozen=True)
class RunsOptions:
    """List runs: those of a Redis if you name one, and those that `up` keeps in a folder.

    A run in a folder is read from its own Redis while that runs, and else from its files. The states are: new,
    starting (no round has closed yet), training, paused, no islands (none is live), no merger, stalled (no round
    closes), shard away (it cannot be reached), finished, ended (its own Redis does not run) and unreadable.
    """

    url: Annotated[str | None, tyro.conf.Positional] = None
    """The URL or join file of a Redis. The default is $ARCHIPELAGO_URL; without both, only the folder is listed."""
    folder: Path = RUNS
    """The folder with the folders of runs."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True)
class RunEntry:
    """One run. Numbers are 0 and texts empty where they are not known.

    Attributes:
        where: `redis` for a run at the given Redis, else its folder.
        state: See `RunsOptions`.
        round: The last closed round, or the last one in a checkpoint.
        step, steps: The steps that it has made, and its length, which an operator may have set to less.
        live, known: The islands that are live, and those of the last day.
        is_served: Whether its Redis answers; else its figures are those of files.
        problems: How many problems somebody should look at.
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
    is_served: bool = True
    problems: int = 0


def main(options: RunsOptions) -> int:
    has_redis = bool(options.url or os.environ.get(URL_VARIABLE))
    entries = all_runs(options.url, options.folder)
    if options.json:
        print_json({"runs": [asdict(entry) for entry in entries]})
    elif entries:
        table_console().print(_table(entries))
    else:
        where = "that Redis and " if has_redis else ""
        hint = "" if has_redis else f" Name a Redis (redis://HOST:PORT, or ${URL_VARIABLE}) to list its runs."
        say(f"There are no runs in {where}the folder {options.folder}.{hint}")
    return 0


def all_runs(url: str | None, folder: Path) -> list[RunEntry]:
    """Return the runs of a Redis, if one is named here or by $ARCHIPELAGO_URL, and of a folder, each once.

    A run in the folder that has no Redis of its own, or has this one, is the run of that name at the Redis.
    """
    address = url or os.environ.get(URL_VARIABLE, "")
    at_redis = {entry.run: entry for entry in of_redis(address)} if address else {}
    found = []
    for entry in of_folder(folder):
        path = Path(entry.where)
        has_own = (path / "redis").is_dir()
        with suppress(OSError):
            if entry.run in at_redis and (not has_own or _server(address_of(path)) == _server(address)):
                entry = replace(at_redis.pop(entry.run), where=entry.where)
        found.append(entry)
    return [*at_redis.values(), *found]


def _server(address: str) -> str:
    """Return host, port and database of a URL or a join file; empty for an empty address."""
    invited = invitation_at(address)
    return (invited.url if invited else address).rpartition("@")[2].replace("localhost", "127.0.0.1")


def of_redis(address: str) -> list[RunEntry]:
    """Return the runs that this user may read at a Redis. Raise BrokerError."""
    with closing(connect_to(address, None if is_join_file(address) else "any")) as finder:  # A join file names its run.
        return [_at(address, name, "redis") for name in finder.reader.runs()]


def of_folder(folder: Path) -> Iterator[RunEntry]:
    """Yield the runs in a folder, by name. Those whose own Redis runs are read from it."""
    try:
        paths = sorted(path for path in folder.iterdir() if is_name(path.name) and _traces(path))
    except OSError:
        return
    for path in paths:
        try:
            url = address_of(path)
        except OSError:  # Its Redis is another user's.
            yield RunEntry(path.name, str(path), "unreadable", is_served=False)
        else:
            yield _at(url, path.name, str(path)) if url else _stopped(path)


def _traces(path: Path) -> list[Path]:
    return [trace for pattern in _TRACES for trace in path.glob(pattern)]


def _at(address: str, run: str, where: str) -> RunEntry:
    try:
        with closing(connect_to(address, run)) as transport:
            return entry_of(transport, where)
    except (BrokerError, ConfigError):
        return RunEntry(run, where, "unreadable", is_served=False)


def entry_of(transport: ReaderTransport, where: str) -> RunEntry:
    """Return the run of a connection. Raise BrokerError, and ConfigError for a damaged manifest."""
    reading = Watcher(transport, RECENT_ROUNDS).read()
    view = reading.view
    ages = [island.last_seen_seconds for island in view.islands] + [view.merger.still_seconds] * bool(view.rounds)
    return RunEntry(
        run=view.run, where=where, state=reading.state, model=view.manifest.config.model.size,
        parameters=view.parameters, round=view.rounds, step=view.step, steps=view.steps, live=view.live,
        known=view.known, idle_seconds=max(0.0, min(ages)) if ages else math.nan,
        problems=sum(problem.mood != "info" for problem in grouped(reading.problems)),
    )  # fmt: skip


def _stopped(path: Path) -> RunEntry:
    """Return a run from the files in its folder, as far as they can be read."""
    from archipelago.merger.storage import MergerFolder

    summary, times = run_report.read(path) or {}, []
    figures = {name: found if isinstance(found, int) else 0 for name, found in summary.items()}
    rounds, step, model, steps = figures.get("rounds", 0), figures.get("steps", 0), "", 0
    with suppress(ArchipelagoError):
        rounds = rounds or max(MergerFolder(path / "merger").store.numbers(), default=0)
    with suppress(ArchipelagoError):
        if (path / "config.toml").exists():
            config = run_config.from_toml(path / "config.toml")
            model, steps = config.model.size, config.inner.steps
    for trace in _traces(path):
        with suppress(OSError):
            times.append(trace.stat().st_mtime)
    return RunEntry(
        path.name, str(path), "finished" if figures.get("finished") else "ended", model=model,
        parameters=figures.get("parameters", 0), round=rounds, step=step, steps=max(step, steps),
        known=figures.get("islands", 0), idle_seconds=max(0.0, time.time() - max(times)) if times else math.nan,
        is_served=False,
    )  # fmt: skip


def _table(entries: Iterable[RunEntry]) -> Table:
    numbers = ("parameters", "round", "step", "islands", "active")
    out = new_table("run", "state", "model", *numbers, "where", numbers=numbers)
    for column in out.columns[:-1]:
        column.no_wrap = True
    out.columns[-1].overflow = "fold"
    for entry in entries:
        out.add_row(
            entry.run,
            entry.state,
            printable(entry.model) or "–",
            f"{entry.parameters:,}" if entry.parameters else "–",
            f"{entry.round:,}",
            f"{entry.step:,}/{entry.steps:,}" if entry.steps else "–",
            f"{entry.live}/{entry.known}",
            "–" if math.isnan(entry.idle_seconds) else f"{ago(entry.idle_seconds)} ago",
            printable(entry.where),
        )
    return out
