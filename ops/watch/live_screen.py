"""The live screen of `archipelago status --watch`, fitted to any terminal. Pure."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from archipelago.broker.observe.logs import printable
from archipelago.ops.watch.advice import worst
from archipelago.ops.watch.events import Event
from archipelago.ops.watch.formatting import ago
from archipelago.ops.watch.run_view import RunView
from archipelago.ops.watch.terminal import Islands, problem_line, run_lines
from archipelago.ops.watch.watcher import Outage, RunReading

TICKS = "▁▂▃▄▅▆▇█"
EVENTS_SHOWN = 8
#: Older events are not shown.
EVENT_SECONDS = 15 * 60.0
#: Smaller screens leave out the accounts of tokens.
ROOMY_COLUMNS, ROOMY_LINES = 80, 30
NAME_CELLS = 16
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
        clock = time.strftime("%H:%M:%S", time.localtime(self.now))
        parts: list[RenderableType] = [
            Text.assemble(("archipelago status", "bold"), (f"  {clock}  Ctrl-C to quit", "dim")),
        ]
        if self.outage:
            since = time.strftime("%H:%M:%S", time.localtime(self.outage.since_unix_seconds))
            parts.append(Text(f"no answer since {since}: {printable(self.outage.why)}", "bold red"))
        if self.reading is None:
            yield Group(*parts, Text("" if self.outage else "reading …", "dim"))
            return
        view = self.reading.view
        width, height = options.max_width, options.height or console.height
        parts.append(progress(view, width))
        parts.append(run_lines(view, briefly=width < ROOMY_COLUMNS or height < ROOMY_LINES))
        if trend := sparkline(self.reading.held_out, width // 2):
            parts.append(Text.assemble((f"held-out {view.unit}  ", "dim"), (trend, "magenta"), no_wrap=True))
        if (first := worst(self.reading.problems)) and (first.mood == "bad" or height >= ROOMY_LINES):
            line = problem_line(first)
            if height < ROOMY_LINES:
                line.truncate(width, overflow="ellipsis")
            parts.append(line)
        taken = sum(len(console.render_lines(part, options.update(height=None))) for part in parts)
        recent = [each for each in self.reading.events if self.now - each.unix_seconds < EVENT_SECONDS]
        islands, events = rooms(height - taken, len(view.islands), len(recent))
        if islands:
            parts.append(Islands(view, rows=islands))
        parts += [self._event(event) for event in recent[len(recent) - events :]]
        yield Group(*parts)

    def _event(self, event: Event) -> Text:
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append(f"{f'{ago(self.now - event.unix_seconds)} ago':>10} ", "dim")
        line.append(f"{event.kind:<10} ", KIND_STYLES.get(event.kind, "cyan"))
        line.append(f"{printable(event.who)[:NAME_CELLS]:<{NAME_CELLS}} ")
        return line.append(printable(" ".join(event.text.split())))


def rooms(lines: int, islands: int, events: int) -> tuple[int, int]:
    """Return how many islands and how many events fit into `lines` lines, next to the table's head of one line."""
    if lines < 2:
        return 0, 0
    body, events = lines - 1, min(events, EVENTS_SHOWN)
    wanted = min(islands, max(1, body - events, min(body, ISLANDS_LEAST)))
    return wanted, min(events, body - wanted)


def progress(view: RunView, width: int) -> Text:
    """Return the share of steps that the run has made, as a bar."""
    share = min(1.0, view.step / view.steps) if view.steps else 0.0
    label = f" {share:.1%} of {view.steps:,} steps"
    cells = max(4, width - len(label))
    done = round(share * cells)
    return Text.assemble(("━" * done, "bold cyan"), ("─" * (cells - done), "dim"), label)


def sparkline(losses: Sequence[float], cells: int) -> str:
    """Return one tick for each of the newest losses, from the smallest to the largest, without those that are NaN."""
    known = [loss for loss in losses if not math.isnan(loss)][-cells:]
    if not known:
        return ""
    early = known[len(known) // CUT_SHARE]  # The first fall would flatten the rest.
    values = [min(loss, early) for loss in known]
    low, high = min(values), max(values)
    scale = (len(TICKS) - 1) / (high - low) if high > low else 0.0
    return "".join(TICKS[round(scale * (value - low))] for value in values)
