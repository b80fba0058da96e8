"""`archipelago status`: show a run once, or live with `--watch`.

A separate thread reads Redis for the live screen, which goes on while Redis does not answer.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console

from archipelago.broker.observe.logs import printable
from archipelago.broker.observe.progress import progress
from archipelago.broker.process import print_json, stop_on_signals
from archipelago.broker.shards.transport import opened
from archipelago.ops.run_source import FoundRun, RunSource
from archipelago.ops.watch.advice import problems
from archipelago.ops.watch.reading import RECENT_ROUNDS, observe
from archipelago.ops.watch.state_line import state_line
from archipelago.ops.watch.terminal import line, live_screen, render
from archipelago.ops.watch.watcher import LOOK_SECONDS, RunReading, Watcher, repeated

#: How many islands and problems are shown. `--json` has all.
ROWS = 40
#: Seconds between two lines in a pipe.
LINE_SECONDS = 10.0
FRAMES_A_SECOND = 4.0


@dataclass(frozen=True)
class StatusOptions(RunSource):
    """Show a run: its islands, rounds, accounts, merger and controls. Reads only.

    The exit status is 1 while the run suffers: no island is live, no merger serves it, nothing was merged for more than
    a minute (for three strides, if the islands are slower than that), its checkpoints fail, its Redis is full, or a
    shard cannot be reached. It is 0 if the run is fine, has ended or is paused.

    With --watch it shows the run live until Ctrl-C, and survives restarts of Redis. If standard output is not
    a terminal, --watch prints a line every ten seconds until the run has ended.
    """

    strict: bool = False
    """Exit with 1 if anything at all is wrong, also what the run does not suffer from."""
    watch: bool = False
    """Keep showing the run, with its events."""
    json: bool = False
    """Print one JSON object. With --watch, one on a line for each reading."""


def main(options: StatusOptions) -> int:
    """Show the run. Return 1 if an operator should look at it."""
    with options.open() as found:
        if options.watch:
            _watch(found, as_json=options.json)
            return 0
        return _show(options, found)


def _show(options: StatusOptions, found: FoundRun) -> int:
    with progress("waiting for Redis"):
        manifest, run = opened(found.transport, for_display=True)
        view, now = replace(observe(run, manifest), address=found.address), time.time()
    reading = RunReading(view, now, problems(view, now))
    if options.json:
        print_json(_as_json(reading))
    else:
        Console(highlight=False).print(render(reading, ROWS))
    grave = ("bad", "warn") if options.strict else ("bad",)
    return 1 if reading.problems and reading.problems[0].mood in grave else 0


def _as_json(reading: RunReading) -> dict[str, Any]:
    state = asdict(state_line(reading))
    return reading.view.as_json() | {"state": state, "problems": [asdict(each) for each in reading.problems]}


# -- live -------------------------------------------------------------------------------------------------------------


def _watch(found: FoundRun, *, as_json: bool) -> None:
    """Show the run until a signal. Without a terminal, print lines until the run has ended."""
    console = Console(highlight=False)
    stopped = stop_on_signals()
    watcher = Watcher(found.transport, RECENT_ROUNDS, found.address)
    if console.is_terminal and not as_json:
        with repeated(watcher.update, LOOK_SECONDS):
            _draw(console, watcher, stopped)
    else:
        print_lines(watcher, LINE_SECONDS, stopped, as_json=as_json)


def _draw(console: Console, watcher: Watcher, stopped: Callable[[], bool]) -> None:
    """Draw the live screen until a signal."""
    from rich.live import Live

    with Live(console=console, screen=True, auto_refresh=False) as live:
        while not stopped():
            screen = live_screen(watcher.latest, watcher.outage(), time.time(), console.height)
            live.update(screen, refresh=True)
            time.sleep(1.0 / FRAMES_A_SECOND)


def print_lines(watcher: Watcher, every_seconds: float, stopped: Callable[[], bool], *, as_json: bool) -> None:
    """Print each reading, or why there is none, until the run has ended or `stopped` is true."""
    due = 0.0
    while not stopped():
        if time.monotonic() < due:
            time.sleep(0.1)
            continue
        due = time.monotonic() + every_seconds
        watcher.update()
        outage, reading = watcher.outage(), watcher.latest
        if not as_json:
            sys.stdout.write(printable(line(reading, outage)) + "\n")
            sys.stdout.flush()
        elif outage or not reading:
            print_json({"error": outage.what if outage else ""})
        else:
            print_json(_as_json(reading))
        if reading and reading.view.state == "finished":
            return
