"""What `archipelago top` shows of a reading, fitted to any terminal. Pure."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from archipelago.ops.watch import formatting
from archipelago.ops.watch.health import Happening, Situation
from archipelago.ops.watch.run_view import RunView

TICKS = "▁▂▃▄▅▆▇█"
BUCKET_SECONDS = 10.0
"""of closed rounds, for one tick"""
EVENTS_SHOWN = 8
ROOMY_COLUMNS, ROOMY_LINES = 80, 30
"""smaller screens do without what only accounts for tokens"""
NAME_CELLS = 16
HISTORY_LABEL_CELLS = 28
CUT_SHARE = 10
"""a tenth of the evaluations: those before it are drawn no higher than the one after"""
ISLANDS_LEAST = 3
"""islands that are shown before events take any room"""
KIND_STYLES = {"refused": "yellow", "diverged": "bold red", "expelled": "red", "paused": "yellow", "left": "dim",
               "joined": "green", "resumed": "green"}  # fmt: skip


@dataclass(frozen=True)
class TopReading:
    """A run at one moment, with what came before."""

    view: RunView
    found: Situation
    wrong: str
    closes: Sequence[float]
    """unix seconds at which the last rounds closed"""
    bits_per_byte: Sequence[float]
    """of all evaluations, oldest first"""
    events: Sequence[Happening]
    """oldest first"""
    unix_seconds: float


@dataclass(frozen=True)
class Screen:
    """The whole screen. `reading` is the last that succeeded, `silent_since` 0 while the Redis answers."""

    reading: TopReading | None
    silent_since: float
    said: str
    now: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts: list[RenderableType] = [self._title()]
        if self.silent_since:
            since = time.strftime("%H:%M:%S", time.localtime(self.silent_since))
            parts.append(Text(f"no answer since {since}: {self.said}", "bold red"))
        if self.reading is None:
            yield Group(*parts, Text("" if self.silent_since else "reading …", "dim"))
            return
        view = self.reading.view
        width, height = options.max_width, options.height or console.height
        is_small = width < ROOMY_COLUMNS or height < ROOMY_LINES
        parts.append(progress(view, width))
        parts.append(formatting.run_lines(view, self.reading.found, self.reading.wrong, briefly=is_small))
        parts += [histories(self.reading, width)] if is_small else [Text(), histories(self.reading, width), Text()]
        taken = sum(len(console.render_lines(part, options.update(height=None))) for part in parts)
        islands, events = rooms(height - taken, len(view.islands), self._events_wanted())
        if islands:
            parts.append(formatting.Islands(view, rows=islands, bars=True))
        if events:
            parts.append(self._events(events))
        yield Group(*parts)

    def _title(self) -> Text:
        clock = time.strftime("%H:%M:%S", time.localtime(self.now))
        return Text.assemble(("archipelago top", "bold"), (f"  {clock}  q ends it", "dim"))

    def _events_wanted(self) -> int:
        return len(self.reading.events) if self.reading else 0

    def _events(self, count: int) -> Group:
        """The newest, the last at the bottom, each in one line that is cut where it is too long."""
        shown = (self.reading.events if self.reading else ())[-count:]
        who_cells = min(NAME_CELLS, max((len(event.who) for event in shown), default=0))
        lines = []
        for event in shown:
            age = f"{formatting.ago(self.now - event.unix_seconds)} ago"
            style = KIND_STYLES.get(event.kind, "cyan")
            line = Text(no_wrap=True, overflow="ellipsis")
            line.append(f"{age:>10} ", "dim").append(f"{event.kind:<10} ", style)
            line.append(f"{formatting.plain(event.who)[:who_cells]:<{who_cells}} ")
            line.append(formatting.plain(" ".join(event.text.split())))
            lines.append(line)
        return Group(*lines)


def rooms(lines: int, islands: int, events: int) -> tuple[int, int]:
    """Rows for islands and for events in so many lines; the table's head takes one more."""
    if lines < 2:
        return 0, 0
    body = lines - 1
    kept = min(events, EVENTS_SHOWN, max(0, body - min(islands, ISLANDS_LEAST)))
    wanted = min(islands, max(1, body - kept))
    return wanted, min(events, EVENTS_SHOWN, body - wanted)


def progress(view: RunView, width: int) -> Text:
    """How far the run is, as a bar."""
    share = min(1.0, view.step / view.steps) if view.steps else 0.0
    label = f" {share:.1%} of {view.steps:,} steps"
    cells = max(4, width - len(label))
    done = round(share * cells)
    return Text.assemble(("━" * done, "bold cyan"), ("─" * (cells - done), "dim"), label)


def histories(reading: TopReading, width: int) -> Table:
    """Rounds a minute and held-out bits per byte over time, as ticks."""
    room = max(8, width - HISTORY_LABEL_CELLS)
    rates = rates_a_minute(reading.closes, reading.unix_seconds, room)
    bits = [value for value in reading.bits_per_byte if not math.isnan(value)][-room:]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column(no_wrap=True)
    table.add_row("rounds a minute", f"{rates[-1]:.0f}" if rates else "–", Text(sparkline(rates, low=0.0), "green"))
    early = bits[len(bits) // CUT_SHARE] if bits else math.nan  # the first fall would make all that follows flat
    last = formatting.number(bits[-1] if bits else math.nan)
    table.add_row("bits per byte", last, Text(sparkline([min(value, early) for value in bits]), "magenta"))
    return table


def rates_a_minute(closes: Sequence[float], now: float, count: int, seconds: float = BUCKET_SECONDS) -> list[float]:
    """Closed rounds a minute in each of the last whole spans of so many seconds, at most `count`, oldest first.

    Spans are cut at whole multiples of `seconds`, so that a tick stays as it is while it moves on; those before the
    first round that is known are left out.
    """
    if not closes:
        return []
    end = math.floor(now / seconds)
    first = max(end - count, math.floor(closes[0] / seconds) + 1)  # the span of the first one is known in part only
    buckets = [0] * max(0, end - first)
    for at in closes:
        index = math.floor(at / seconds) - first
        if 0 <= index < len(buckets):
            buckets[index] += 1
    return [60.0 / seconds * bucket for bucket in buckets]


def sparkline(values: Sequence[float], low: float | None = None) -> str:
    """A tick for each value, from `low` (default the least) to the largest."""
    if not values:
        return ""
    bottom, top = min(values) if low is None else low, max(values)
    scale = (len(TICKS) - 1) / (top - bottom) if top > bottom else 0.0
    return "".join(TICKS[round(scale * (max(value, bottom) - bottom))] for value in values)
