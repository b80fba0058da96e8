"""`archipelago status`: show a run once, or live with `--watch`, in a block of lines and a table of its islands.

A separate thread reads Redis for the live screen, which goes on while Redis does not answer.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from archipelago.broker.errors import ArchipelagoError, ConfigError, few_of
from archipelago.broker.observe.logs import printable
from archipelago.broker.observe.losses import shortened
from archipelago.broker.observe.progress import progress
from archipelago.broker.process import print_json, stop_on_signals
from archipelago.ops.dashboard.page_data import plain
from archipelago.ops.run_source import FoundRun, RunSource
from archipelago.ops.watch.advice import Problem, grouped
from archipelago.ops.watch.formatting import ago, clock, new_table, number, size
from archipelago.ops.watch.history import RECENT_ROUNDS, Event
from archipelago.ops.watch.reading import LOOK_SECONDS, RunReading, Watcher, repeated
from archipelago.ops.watch.run_view import (
    IslandView,
    RunView,
    describe_control,
    evaluated,
    merger_in_words,
    size_in_words,
)
from archipelago.ops.watch.state_line import StateLine, state_line

#: How many islands and problems are shown. `--json` has all.
ROWS = 40
FRAMES_A_SECOND = 1.0  # each takes 30 ms
#: Lines of the live screen without islands and events, about.
_OTHER_LINES = 14
_ISLANDS_LEAST, _EVENTS_SHOWN = 3, 8
#: Older events are not shown.
_EVENT_SECONDS = 15 * 60.0
_KIND_STYLES = {"refused": "yellow", "diverged": "bold red", "expelled": "red", "paused": "yellow", "left": "dim",
                "joined": "green", "resumed": "green"}  # fmt: skip
_MOOD_STYLES = {"good": "green", "busy": "cyan", "warn": "yellow", "bad": "bold red", "idle": "dim"}


@dataclass(frozen=True)
class StatusOptions(RunSource):
    """Show a run: its islands, rounds, accounts, merger and controls. Reads only.

    The exit status is 1 while the run suffers: no island is live, no merger serves it, nothing was merged for more than
    a minute (for the time of three rounds, if that is longer), its checkpoints fail, its Redis is full, or a shard
    cannot be reached. It is 0 if the run is fine, has ended or is paused.

    With --watch it shows the run live on a terminal until Ctrl-C, and survives restarts of Redis.
    """

    strict: bool = False
    """Exit with 1 if anything at all is wrong, also what the run does not suffer from."""
    watch: bool = False
    """Keep showing the run, with its events."""
    json: bool = False
    """Print one JSON object."""


def main(options: StatusOptions) -> int:
    """Show the run. Return 1 if an operator should look at it."""
    if options.watch and (options.json or not sys.stdout.isatty()):
        what, remedy = "--watch shows the run on a terminal only", "Repeat `archipelago status` without --watch."
        raise ConfigError(what, remedy, code="config.value")
    with options.open() as found:
        if options.watch:
            _watch(found)
            return 0
        with progress("waiting for Redis"):
            reading = Watcher(found.transport, RECENT_ROUNDS, found.address, folder=found.folder).read()
    if options.json:
        print_json(plain(reading) | {"state": state_line(reading)})
    else:
        Console(highlight=False).print(render(reading))
    grave = ("bad", "warn") if options.strict else ("bad",)
    return 1 if reading.problems and reading.problems[0].mood in grave else 0


# -- live -------------------------------------------------------------------------------------------------------------


def _watch(found: FoundRun) -> None:
    """Show the run until a signal."""
    from rich.live import Live

    console, stopped = Console(highlight=False), stop_on_signals()
    watcher = Watcher(found.transport, RECENT_ROUNDS, found.address, folder=found.folder)
    with repeated(watcher.update, LOOK_SECONDS), Live(console=console, screen=True, auto_refresh=False) as live:
        while not stopped():
            screen = live_screen(watcher.latest, watcher.outage(), watcher.now(), console.height)
            live.update(screen, refresh=True)
            time.sleep(1.0 / FRAMES_A_SECOND)


# -- what is shown -----------------------------------------------------------------------------------------------------


def render(reading: RunReading) -> RenderableType:
    """Return the run's state, lines, islands and problems; of the last two at most ROWS, with a count of the rest."""
    view, lines = reading.view, problem_lines(reading.view, reading.problems)
    if len(lines) > ROWS:
        lines = [*lines[: ROWS - 1], Text(f"… and {len(lines) - ROWS + 1:,} more problems", style="dim")]
    state = state_line(reading)
    first = state_text(state, with_remedy=state.urgency == "idle")  # The lines of the problems have theirs.
    return Group(first, run_lines(view, reading.unix_seconds), Islands(view, ROWS), *lines)


def live_screen(reading: RunReading | None, outage: ArchipelagoError | None, now: float, height: int) -> RenderableType:
    """Return the screen of `status --watch`. What does not fit into its height is cut off at its end.

    Args:
        outage: Why there is no new reading, or None.
        now: Unix seconds.
    """
    title = Text.assemble(("archipelago status", "bold"), (f"  {clock(now)}  Ctrl-C to quit", "dim"))
    parts: list[RenderableType] = [title, state_text(state_line(reading, outage), with_remedy=True)]
    if reading is None:
        return Group(*parts)
    view = reading.view
    parts.append(run_lines(view, now, briefly=True))
    recent = [each for each in reading.events if now - each.unix_seconds < _EVENT_SECONDS][-_EVENTS_SHOWN:]
    rows = max(_ISLANDS_LEAST, height - _OTHER_LINES - len(recent))
    return Group(*parts, Islands(view, rows), *(_event_line(each, now) for each in recent))


def _event_line(event: Event, now: float) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"{f'{ago(now - event.unix_seconds)} ago':>10} ", "dim")
    kind = f"{event.kind} ×{event.times}" if event.times > 1 else event.kind
    line.append(f"{kind:<10} ", _KIND_STYLES.get(event.kind, "cyan"))
    return line.append(printable(f"{event.who:<16} {' '.join(event.text.split())}"))


def state_text(state: StateLine, *, with_remedy: bool = False) -> Text:
    """Return the state line in colours."""
    style = _MOOD_STYLES[state.urgency if state.sentence else state.mood]
    text = Text(printable(state.text), style="" if style == "dim" else style)
    text.stylize(f"bold {_MOOD_STYLES[state.mood]}", 0, len(state.word))
    return text.append(printable(f" {state.remedy}"), style) if with_remedy and state.remedy else text


def line(reading: RunReading | None, outage: ArchipelagoError | None = None, known: str = "") -> str:
    """Return the run in one line, for logs and pipes: its state, and the last known figures.

    A problem that the line before was about (`known`) is left out.
    """
    found = state_line(reading, outage)
    state = (replace(found, sentence="") if found.about and found.about == known else found).text
    if reading is None or outage:
        return state
    view = reading.view
    held_out = ""
    if view.evaluations:  # the newest may be of long ago: they take little of the device's time
        held_out = f"held-out {number(view.held_out_last)} of round {view.evaluations[-1].round:,}, "
    joining = sum(island.live and island.state == "joining" for island in view.islands)
    loading = f", {joining} loading and compiling" if joining else ""
    return (
        f"{state} · round {view.rounds:,}, step {view.step:,} of {view.steps:,} · {held_out}training "
        f"{number(view.loss)} {shortened(view.unit)} · {view.live} of {view.known} islands live{loading}"
    )


def run_lines(view: RunView, now: float, *, briefly: bool = False) -> RenderableType:
    """Return the run in a few lines. `briefly` leaves out the accounts of tokens."""
    counters = view.counters
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column()
    grid.add_row(
        "run",
        f"[bold]{escape(printable(view.run))}[/]  {size_in_words(view.manifest)}, round {view.rounds:,} "
        f"({view.syncs:,.1f} syncs of each fragment), step {view.step:,} of {view.steps:,} "
        f"({view.step / max(1, view.steps):.0%})",
    )
    held_out = f"held-out loss [bold]{number(view.held_out_last)}[/] (first {number(view.held_out_first)}), "
    held_out = "" if math.isnan(view.held_out_last) else held_out
    grid.add_row("quality", f"{held_out}training loss {number(view.loss)}, in {view.unit}")
    grid.add_row("", Text(printable(evaluated(view, now)), style="dim"))
    grid.add_row(
        "islands",
        f"{view.known} known, [bold]{view.live}[/] live, [bold]{view.participating}[/] participating; "
        f"{view.contributions_per_round:.2f} contributions per round, open {view.open_seconds * 1e3:.0f} ms "
        f"(grace {view.grace_seconds * 1e3:.0f} ms)",
    )
    grid.add_row(
        "accounts",
        f"published {counters.published:,} = merged {counters.merged:,} + refused {counters.refused:,} + "
        f"pending {view.pending:,}",
    )
    if not briefly:
        grid.add_row(
            "tokens",
            f"trained {view.tokens_trained:,} = merged {view.tokens_merged:,} + refused {view.tokens_refused:,} + "
            f"pending {view.tokens_pending:,} + unsent {view.tokens_unsent:,} + lost {view.tokens_lost:,}",
        )
    limit = view.memory_limit_bytes
    of = f" of {size(limit)} ({view.memory_bytes / limit:.0%})" if limit else ""
    down = sum(island.bytes_down for island in view.islands)
    traffic = f"up {size(counters.bytes_up)}, down {size(down)}, Redis holds {size(view.memory_bytes)}{of}"
    grid.add_row("bytes", traffic)
    is_served = view.merger.holder or not view.unfinished
    grid.add_row("merger", Text(printable(merger_in_words(view)), style="" if is_served else "yellow"))
    if changes := describe_control(view.control):
        grid.add_row("steered", Text(printable(changes), style="yellow"))
    return grid


def problem_lines(view: RunView, found: Sequence[Problem] = ()) -> list[Text]:
    """Return a line for each problem, with what to do and its code, and for each island whose work was refused."""
    refused = {each.who for each in found if each.code == "island.refused"}
    lines = [f"{i.name}: last refused: {i.last_refusal}" for i in view.islands
              if i.last_refusal and i.name not in refused]  # fmt: skip
    counts = sorted(view.refused_by_code.items(), key=lambda each: -each[1])
    if counts:
        lines.append(f"contributions refused so far: {', '.join(f'{code} {count:,}' for code, count in counts)}")
    out = []
    for problem in grouped(found):
        names = f" ({few_of(problem.names)})" if problem.names else ""
        text = printable(f"{problem.who}{names}: {problem.text} {problem.remedy} [{problem.code}]")
        out.append(Text(text, style="bold red" if problem.mood == "bad" else "yellow"))
    return [*out, *(Text(printable(line), style="yellow") for line in lines)]


def _state(island: IslandView) -> Text:
    style = "green" if island.live and island.state == "training" else "yellow" if island.live else "dim"
    return Text("silent" if island.is_silent else island.state, style=style)


#: The columns of the table of islands, each with the width of the terminals that show it, and its cells. The names are
#: short so that the table fits into 80 columns; docs/guide/watch.md says what each means.
COLUMNS: Final[Mapping[str, tuple[int, Callable[[IslandView], Text | str]]]] = {
    "island": (0, lambda island: island.name),
    "state": (0, _state),
    "steps": (46, lambda island: f"{island.steps:,}"),
    "tokens/s": (58, lambda island: f"{island.tokens_per_second:,.0f}" if island.live else "–"),
    "loss": (0, lambda island: number(island.loss)),
    "lag": (66, lambda island: f"{island.staleness:.2f}"),
    "part": (46, lambda island: f"{island.participation:.0%}"),
    "score": (88, lambda island: Text(number(island.score, 2), style="yellow" if island.factor < 1.0 else "")),
    "queue": (66, lambda island: str(island.backlog)),
    "up": (80, lambda island: size(island.bytes_up)),
    "down": (80, lambda island: size(island.bytes_down)),
    "seen": (46, lambda island: ago(island.last_seen_seconds)),
}


@dataclass(frozen=True)
class Islands:
    """The table of islands, with as many columns as fit. It has at most `rows` rows; live islands come first."""

    view: RunView
    rows: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        cells = {name: cell for name, (least, cell) in COLUMNS.items() if options.max_width >= least}
        table = new_table(*cells, numbers=[*cells][2:], collapse_padding=True)
        for index, column in enumerate(table.columns):  # If room is short, names go on in the next line.
            column.no_wrap, column.overflow = index > 0, "fold"
        shown, rest = self._chosen()
        for island in shown:
            table.add_row(*(cell(island) for cell in cells.values()))
        yield table
        if rest:
            live = sum(island.live for island in rest)
            yield Text(f"… and {len(rest):,} more, of which {live:,} live", style="dim")

    def _chosen(self) -> tuple[Sequence[IslandView], Sequence[IslandView]]:
        """Return the islands that are shown, and the rest."""
        islands = self.view.islands
        if len(islands) <= self.rows:
            return islands, ()
        ordered = sorted(islands, key=lambda island: (not island.live, island.last_seen_seconds > 60.0))
        kept = max(1, self.rows - 1)  # The last row counts the rest.
        return ordered[:kept], ordered[kept:]
