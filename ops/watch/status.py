"""`archipelago status`: show a run once, or live with `--watch`."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass

from rich.console import Console

from archipelago.broker.errors import ConfigError
from archipelago.broker.process import RunAddress, print_json
from archipelago.broker.shards.transport import opened
from archipelago.ops.watch.advice import problems
from archipelago.ops.watch.formatting import LEGEND, render
from archipelago.ops.watch.health import as_json, read_health, trouble
from archipelago.ops.watch.run_view import RECENT_ROUNDS, observe

#: How many islands and problems are shown.
ROWS = 40


@dataclass(frozen=True)
class StatusOptions(RunAddress):
    """Show a run: its islands, rounds, accounts, merger and controls. Reads only.

    The exit status is 0 if the run is fine, has ended or is paused. It is 1 if no island is live, if nothing was merged
    for more than a minute (for three strides, if the islands are slower than that), or if a shard cannot be reached.

    With --watch it shows the run live until q is pressed, and survives restarts of Redis. If standard output is not
    a terminal, --watch prints a line for each reading until the run has ended.
    """

    watch: bool = False
    """Keep showing the run, with its history and events."""
    every: float | None = None
    """With --watch: seconds between two readings. The default is 1, and 10 if standard output is not a terminal."""
    all: bool = False
    """Show every island and problem. Without it, a run of many islands shows 40 of each, live islands first."""
    legend: bool = False
    """Explain the columns of the table of islands, and end. It needs no Redis."""
    json: bool = False
    """Print one JSON object. With --watch, one on a line for each reading."""


def main(options: StatusOptions) -> int:
    """Show the run. Return 1 if an operator should look at it."""
    if options.every is not None and not 0.05 <= options.every <= 3600.0:
        raise ConfigError(f"--every cannot be {options.every}", "Choose 0.05 to 3600 seconds.", code="config.value")
    if options.legend:
        return _print_legend(as_json=options.json)
    transport = options.connect()
    if options.watch:
        from archipelago.ops.watch import live

        live.watch(transport, options.every, as_json=options.json)
        return 0
    manifest, run = opened(transport, for_display=True)
    view, health, reader = observe(run, manifest), read_health(run), run.reader
    problem = trouble(view, health, manifest.config.sync.interval)
    found = problems(view, health, manifest.config, reader.tape(RECENT_ROUNDS), reader.evaluations(), time.time())
    if options.json:
        print_json(as_json(view, health, problem) | {"problems": [asdict(each) for each in found]})
    else:
        Console(highlight=False).print(render(view, health, problem, found, None if options.all else ROWS))
    return 1 if problem else 0


def _print_legend(*, as_json: bool) -> int:
    if as_json:
        print_json(LEGEND)
        return 0
    for column, meaning in LEGEND.items():
        sys.stdout.write(f"{column:<10}{meaning}\n")
    return 0
