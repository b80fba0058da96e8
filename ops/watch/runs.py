"""`archipelago runs`: list the runs of a Redis and of the folder of runs."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.table import Table

from archipelago.broker.process import URL_VARIABLE, print_json
from archipelago.ops.settings import say, table_console
from archipelago.ops.watch.formatting import ago, plain
from archipelago.ops.watch.run_list import RunEntry, of_folder, of_redis


@dataclass(frozen=True)
class RunsOptions:
    """List runs: those of a Redis if you name one, and those that `up` keeps in a folder.

    A run in a folder is read from its own Redis while that runs, and else from its files. The states are: new,
    training, paused, no islands (none is live), no merger, finished, ended (its own Redis does not run) and
    unreadable.
    """

    url: Annotated[str | None, tyro.conf.Positional] = None
    """The URL or join file of a Redis. The default is $ARCHIPELAGO_URL; without both, only the folder is listed."""
    folder: Path = Path("runs")
    """The folder with the folders of runs."""
    json: bool = False
    """Print one JSON object."""


def main(options: RunsOptions) -> int:
    """List the runs."""
    has_redis = bool(options.url or os.environ.get(URL_VARIABLE))
    entries = [*(of_redis(options.url) if has_redis else ()), *of_folder(options.folder)]
    if options.json:
        print_json({"runs": [asdict(entry) for entry in entries]})
    elif entries:
        table_console().print(table(entries))
    else:
        where = "that Redis and " if has_redis else ""
        hint = "" if has_redis else f" Name a Redis (redis://HOST:PORT, or ${URL_VARIABLE}) to list its runs."
        say(f"There are no runs in {where}the folder {options.folder}.{hint}")
    return 0


def table(entries: Sequence[RunEntry]) -> Table:
    """Return the runs as a table."""
    out = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("run", "state", "model"):
        out.add_column(name, no_wrap=True)
    for name in ("parameters", "round", "step", "islands", "active"):
        out.add_column(name, justify="right", no_wrap=True)
    out.add_column("where", overflow="fold")
    for entry in entries:
        active = "–" if math.isnan(entry.idle_seconds) else f"{ago(entry.idle_seconds)} ago"
        out.add_row(
            entry.run,
            entry.state,
            plain(entry.model) or "–",
            f"{entry.parameters:,}" if entry.parameters else "–",
            f"{entry.round:,}",
            f"{entry.step:,}/{entry.steps:,}" if entry.steps else "–",
            f"{entry.live}/{entry.known}",
            active,
            plain(entry.where),
        )
    return out
