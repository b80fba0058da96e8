"""The pages of runs: their files, their data from one reading of a run, and who reads again and again."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import distribution
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archipelago.broker.config import RunConfig, differing, flat
from archipelago.broker.control import STEPS, island_field
from archipelago.broker.errors import ArchipelagoError, UnknownRunError
from archipelago.broker.machine import require_extra
from archipelago.broker.manifest import Manifest
from archipelago.broker.observe.losses import loss_unit
from archipelago.broker.process import finite
from archipelago.ops.settings import setting_text
from archipelago.ops.watch.advice import grouped, verdict
from archipelago.ops.watch.history import ROWS_KEPT, History, thinned
from archipelago.ops.watch.reading import LOOK_SECONDS, RunReading, Watcher, repeated
from archipelago.ops.watch.run_view import evaluated, merger_in_words, size_in_words
from archipelago.ops.watch.state_line import mood_of

if TYPE_CHECKING:
    from archipelago.ops.watch.run_list import RunEntry

PAGE = Path(__file__).parent / "page"
FILES = {"/page.css": "page.css", "/page.js": "page.js", "/charts.js": "charts.js"}
EVENTS_SHOWN = 120


def chart_library() -> Path:
    """Return plotly.min.js of the installed package, without importing it. Raises ConfigError without the extra."""
    require_extra("dash", "The page")
    return Path(str(distribution("plotly").locate_file("plotly/package_data/plotly.min.js")))


#: What a view was made of, and what plain data have in another form.
_NOT_PLAIN = ("manifest", "tape", "evaluations", "control", "refusals")


def plain(reading: RunReading) -> dict[str, Any]:
    """Return a reading as plain data without its state: what `status --json` prints, and the page and the report show.

    The values may be dataclasses and NaN (see `broker.process.finite`).
    """
    view, control = reading.view, reading.view.control
    config, strips = view.manifest.config, [{m.island: m.staleness for m in entry.members} for entry in view.tape]
    return {
        **{name: value for name, value in vars(view).items() if name not in _NOT_PLAIN},
        "unix_seconds": reading.unix_seconds,
        "size": size_in_words(view.manifest),
        "syncs": view.syncs,
        "round_seconds": view.round_seconds,
        "tokens_per_second": sum(i.tokens_per_second for i in view.islands if i.live and i.state == "training"),
        "problems": grouped(reading.problems),
        "verdict": verdict(view),
        "evaluated": evaluated(view, reading.unix_seconds),
        "serving": merger_in_words(view),
        "events": reading.events[: -EVENTS_SHOWN - 1 : -1],  # the newest first
        "islands": [
            {
                **vars(island),
                "shown": "silent" if island.is_silent else island.state,
                "strip": [here.get(island.name, -1) for here in strips],
                "asked": control.fields.get(island_field(island.name), ""),
            }
            for island in view.islands
        ],
        "settings": settings(view.manifest),
        "changed": list(differing(config, RunConfig())),
        "steered": dict(control.fields),
    }


def settings(manifest: Manifest) -> dict[str, str]:
    """Return the run's settings as words, by name: its config, its corpus and the versions that created it."""
    words = {name: setting_text(value) for name, value in flat(manifest.config).items()}
    words["config digest"] = manifest.config.digest()
    corpus = manifest.corpus
    if manifest.config.has_user_loops:  # only the length of the run says anything about its users' scripts
        unknown = ("model.", "data.", "inner.")
        words = {name: text for name, text in words.items() if name == STEPS or not name.startswith(unknown)}
        words["model"] = f"that of the task {manifest.task!r}" if manifest.task else "that of its users' scripts"
        return words | {f"version.{name}": version for name, version in manifest.versions.items()}
    words["corpus"] = f"{corpus.name}, {corpus.bytes:,} bytes, digest {corpus.digest}"
    words["tokenizer"] = f"digest {corpus.tokenizer}, {corpus.tokens:,} tokens" if corpus.tokenizer else "bytes"
    return words | {f"version.{name}": version for name, version in manifest.versions.items()}


def charts_of(reading: RunReading, history: History) -> dict[str, Any]:
    """Return the charts' data, thinned to a few hundred points for each line. All losses have the run's unit."""
    unit, lines, islands = loss_unit(reading.view.manifest.corpus), history.lines(), history.losses()
    evaluations = thinned(reading.view.evaluations, ROWS_KEPT, itemgetter(-1))  # a mean would belong to no model
    config = reading.view.manifest.config
    schedule = replace(config.inner, steps=reading.view.steps)  # scripts and tasks have schedules of their own
    lines["rate"] = [] if config.has_user_loops else [schedule.rate_at(step) for step in lines["step"]]
    for columns_of in islands.values():
        columns_of["loss"] = [unit.from_nats(value) for value in columns_of["loss"]]
    return {
        "unit": unit.name,
        "lines": lines | {"loss": [unit.from_nats(value) for value in lines["loss"]]},
        "held_out": {
            "round": [e.round for e in evaluations],
            "tokens": [e.tokens for e in evaluations],
            "unix_seconds": [e.unix_seconds for e in evaluations],
            "loss": [unit.from_evaluation(e.bits_per_byte) for e in evaluations],
        },
        "islands": islands,
        "now": {name: getattr(reading.view, name) for name in ("rounds", "known", "live", "participating")},
        "details": history.details(),
        "marks": history.marks(),
        "staleness": history.staleness(),
    }


def to_json(value: Any) -> str:
    """Return compact JSON with five significant digits, which is more than a screen shows. NaN becomes null."""
    return json.dumps(finite(value, _five_digits), separators=(",", ":"))


def _five_digits(value: float) -> float:
    return round(value) if value.is_integer() or abs(value) >= 1e5 else float(f"{value:.5g}")


# -- the newest page and charts of each run ----------------------------------------------------------------------------

#: The page reads a run for this long after somebody has looked at it. Then it stops when another one is opened.
IDLE_SECONDS = 120.0
CHARTS_SECONDS = 2.0
#: How often a run that cannot be read is looked for at another address. A run that was made again has another one.
REOPEN_SECONDS = 5.0
Open = Callable[[str], Watcher]


class Boards:
    """The boards of several runs. Each begins when somebody first asks for it, and is read until the block ends.

    Args:
        watch: The run that was named; None if there is none.
        entries: Returns all runs, also those that cannot be shown.
        opened: Connects to a run by its name. It raises ArchipelagoError.
    """

    def __init__(self, watch: Watcher | None, entries: Callable[[], Sequence[RunEntry]] = tuple,
                 opened: Open | None = None) -> None:  # fmt: skip
        self.first = Board(watch) if watch else None
        self.entries, self._open, self._lock = entries, opened, threading.Lock()
        self._boards = {self.first.watch.manifest.run: self.first} if self.first else {}

    def __enter__(self) -> Boards:
        if self.first:
            self.first.begin()
        return self

    def __exit__(self, *_: object) -> None:
        for board in self._boards.values():
            board.close()

    def of(self, run: str) -> Board:
        """Return the board of a run. Raise ArchipelagoError if it cannot be read."""
        now = time.monotonic()
        if board := self._boards.get(run):  # without the lock: another run may hang while it is opened
            board.asked_at = now
            return board
        if self._open is None:
            raise UnknownRunError(f"this page does not show the run {run!r}", f"Use `archipelago dash {run}`.")
        with self._lock:
            if run not in self._boards:
                board = Board(self._open(run), partial(self._open, run))
                for idle in [name for name, each in self._boards.items() if now - each.asked_at > IDLE_SECONDS]:
                    self._boards.pop(idle).close()
                self._boards[run] = board
                board.begin()
            return self._boards[run]

    def listed(self) -> list[dict[str, Any]]:
        """Return the run that was named, or all runs, as plain data."""
        if self.first:
            return [{"run": self.first.watch.manifest.run, "is_served": True}]
        return [asdict(entry) | {"mood": mood_of(entry.state, entry.problems > 0)} for entry in self.entries()]


class Board(ExitStack):
    """The newest page and charts of a run as JSON, with one writer and any number of readers.

    `again` looks for the run at another address, when its Redis does not answer; it raises ArchipelagoError.
    """

    def __init__(self, watch: Watcher, again: Callable[[], Watcher] | None = None) -> None:
        super().__init__()
        self.watch, self._again = watch, again
        self._opened_at, self.asked_at = watch.clock(), time.monotonic()
        self.page, self.charts = "", ""
        self.charts_number = 0
        self._charts_due = -math.inf

    def begin(self) -> None:
        """Read the run from now on, until the board is closed."""
        self.enter_context(repeated(self.update, LOOK_SECONDS))

    def update(self) -> None:
        """Read the run once, and publish its page and, less often, its charts."""
        watch, before = self.watch, self.watch.history
        if not watch.update() or watch.latest is None:
            if self._again and watch.clock() - self._opened_at >= REOPEN_SECONDS:
                self._opened_at = watch.clock()
                with suppress(ArchipelagoError):
                    self.watch = self._again()
            return
        self.page = to_json(plain(watch.latest))
        if watch.clock() >= self._charts_due or watch.history is not before:
            self._charts_due = watch.clock() + CHARTS_SECONDS
            self.charts = to_json(charts_of(watch.latest, watch.history))
            self.charts_number += 1
