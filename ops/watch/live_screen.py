"""The live screen of `archipelago status --watch`, fitted to any terminal. Pure."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from archipelago.broker.observe.logs import printable
from archipelago.ops.watch.advice import worst
from archipelago.ops.watch.events import Event
from archipelago.ops.watch.formatting import ago, number
from archipelago.ops.watch.run_view import RunView
from archipelago.ops.watch.terminal import Islands, problem_line, run_lines
from archipelago.ops.watch.watcher import Outage, RunReading

TICKS = "▁▂▃▄▅▆▇█"
#: Seconds that one tick of the history covers.
BUCKET_SECONDS = 10.0
EVENTS_SHOWN = 8
#: Older events are not shown.
EVENT_SECONDS = 15 * 60.0
#: Smaller screens leave out the accounts of tokens.
ROOMY_COLUMNS, ROOMY_LINES = 80, 30
NAME_CELLS = 16
HISTORY_LABEL_CELLS = 28
#: The first tenth of the evaluations is drawn no higher than the evaluation after it.
CUT_SHARE = 10
#: Islands that are shown before events take any room.
ISLANDS_LEAST = 3
KIND_STYLES = {"refused": "yellow", "diverged": "bold red", "expelled": "red", "paused": "yellow", "left": "dim",
               "joined": "green", "came back": "green", "resumed": "green"}  # fmt: skip


@dataclass(frozen=True)
class Screen:
    """The whole screen.

    Attributes:
        reading: The last successful reading, or None.
        outage: Why there is no new reading, or None.
        now: Unix seconds.
    """

    reading: RunReading | None
    outage: Outage | None
    now: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts: list[RenderableType] = [self._title()]
        if self.outage:
            since = time.strftime("%H:%M:%S", time.localtime(self.outage.since_unix_seconds))
            parts.append(Text(f"no answer since {since}: {printable(self.outage.why)}", "bold red"))
        if self.reading is None:
            yield Group(*parts, Text("" if self.outage else "reading …", "dim"))
            return
        view = self.reading.view
        width, height = options.max_width, options.height or console.height
        is_small = width < ROOMY_COLUMNS or height < ROOMY_LINES
        parts.append(progress(view, width))
        parts.append(run_lines(view, briefly=is_small))
        if (first := worst(self.reading.problems)) and (first.mood == "bad" or height >= ROOMY_LINES):
            line = problem_line(first)
            if height < ROOMY_LINES:
                line.truncate(width, overflow="ellipsis")
            parts.append(line)
        parts += [histories(self.reading, width)] if is_small else [Text(), histories(self.reading, width), Text()]
        taken = sum(len(console.render_lines(part, options.update(height=None))) for part in parts)
        recent = [each for each in self.reading.events if self.now - each.unix_seconds < EVENT_SECONDS]
        islands, events = rooms(height - taken, len(view.islands), len(recent))
        if islands:
            parts.append(Islands(view, rows=islands, bars=True))
        if events:
            parts.append(self._events(recent[-events:]))
        yield Group(*parts)

    def _title(self) -> Text:
        clock = time.strftime("%H:%M:%S", time.localtime(self.now))
        return Text.assemble(("archipelago status", "bold"), (f"  {clock}  q to quit", "dim"))

    def _events(self, shown: Sequence[Event]) -> Group:
        """Return events, the latest at the bottom, each on its own line."""
        who_cells = min(NAME_CELLS, max((len(event.who) for event in shown), default=0))
        lines = []
        for event in shown:
            age = f"{ago(self.now - event.unix_seconds)} ago"
            style = KIND_STYLES.get(event.kind, "cyan")
            line = Text(no_wrap=True, overflow="ellipsis")
            line.append(f"{age:>10} ", "dim").append(f"{event.kind:<10} ", style)
            line.append(f"{printable(event.who)[:who_cells]:<{who_cells}} ")
            line.append(printable(" ".join(event.text.split())))
            lines.append(line)
        return Group(*lines)


def rooms(lines: int, islands: int, events: int) -> tuple[int, int]:
    """Return how many islands and how many events fit into `lines` lines, next to the table's head of one line."""
    if lines < 2:
        return 0, 0
    body = lines - 1
    kept = min(events, EVENTS_SHOWN, max(0, body - min(islands, ISLANDS_LEAST)))
    wanted = min(islands, max(1, body - kept))
    return wanted, min(events, EVENTS_SHOWN, body - wanted)


def progress(view: RunView, width: int) -> Text:
    """Return the share of steps that the run has made, as a bar."""
    share = min(1.0, view.step / view.steps) if view.steps else 0.0
    label = f" {share:.1%} of {view.steps:,} steps"
    cells = max(4, width - len(label))
    done = round(share * cells)
    return Text.assemble(("━" * done, "bold cyan"), ("─" * (cells - done), "dim"), label)


def histories(reading: RunReading, width: int) -> Table:
    """Return rounds per minute and held-out loss over time, as sparklines."""
    room = max(8, width - HISTORY_LABEL_CELLS)
    rates = rates_a_minute(reading.closes, reading.unix_seconds, room)
    losses = [value for value in reading.held_out if not math.isnan(value)][-room:]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column(no_wrap=True)
    table.add_row("rounds per minute", f"{rates[-1]:.0f}" if rates else "–", Text(sparkline(rates, low=0.0), "green"))
    if not losses and reading.view.has_scripts:  # only the scripts can evaluate their model
        return table
    early = losses[len(losses) // CUT_SHARE] if losses else math.nan  # The first fall would flatten the rest.
    last = number(losses[-1] if losses else math.nan)
    table.add_row(reading.view.unit, last, Text(sparkline([min(value, early) for value in losses]), "magenta"))
    return table


def rates_a_minute(closes: Sequence[float], now: float, count: int) -> list[float]:
    """Return the rounds closed per minute in each of the last `count` spans of BUCKET_SECONDS, oldest first.

    Spans begin at whole multiples of that time, so a tick keeps its height while it moves to the left. Spans before
    the first known round are left out.
    """
    if not closes:
        return []
    end = math.floor(now / BUCKET_SECONDS)
    first = max(end - count, math.floor(closes[0] / BUCKET_SECONDS) + 1)  # The first known round's span is incomplete.
    buckets = [0] * max(0, end - first)
    for at in closes:
        index = math.floor(at / BUCKET_SECONDS) - first
        if 0 <= index < len(buckets):
            buckets[index] += 1
    return [60.0 / BUCKET_SECONDS * bucket for bucket in buckets]


def sparkline(values: Sequence[float], low: float | None = None) -> str:
    """Return one tick for each value, scaled from `low` (default: the smallest value) to the largest."""
    if not values:
        return ""
    bottom, top = min(values) if low is None else low, max(values)
    scale = (len(TICKS) - 1) / (top - bottom) if top > bottom else 0.0
    return "".join(TICKS[round(scale * (max(value, bottom) - bottom))] for value in values)
