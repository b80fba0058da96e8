"""The pages of runs: their files, their data from one reading of a run, and who reads again and again."""

from __future__ import annotations

import importlib.util
import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archipelago.broker.config import RunConfig, differing, flat
from archipelago.broker.control import SETTINGS, STEPS, island_field, own
from archipelago.broker.errors import ConfigError, UnknownRunError
from archipelago.broker.machine import install_hint, is_installed
from archipelago.broker.manifest import Manifest, loss_unit
from archipelago.ops.settings import setting_text
from archipelago.ops.watch.advice import grouped, verdict
from archipelago.ops.watch.events import Event, remedy_of
from archipelago.ops.watch.history import POINTS_DRAWN, History, newest, thinned
from archipelago.ops.watch.run_view import RunView, evaluated, merger_in_words
from archipelago.ops.watch.state_line import MOODS
from archipelago.ops.watch.watcher import LOOK_SECONDS, RunReading, Watcher, repeated

if TYPE_CHECKING:
    from archipelago.ops.watch.run_list import RunEntry

PAGE = Path(__file__).parent / "page"
FILES = {"/page.css": "page.css", "/page.js": "page.js", "/charts.js": "charts.js"}
EVENTS_SHOWN = 120


def chart_library() -> Path:
    """Return plotly.min.js of the installed package, without importing it.

    Raises:
        ConfigError: plotly is not installed.
    """
    if is_installed("plotly"):
        found = importlib.util.find_spec("plotly")
        path = Path(found.origin).parent / "package_data" / "plotly.min.js" if found and found.origin else None
        if path is not None and path.is_file():
            return path
    raise ConfigError("charts need plotly, which this Python does not have", install_hint("dash"), code="config.extra")


def page_of(reading: RunReading, manifest: Manifest) -> dict[str, Any]:
    """Return the data that changes with each reading: everything except the charts. The JSON writer replaces NaN."""
    view, config = reading.view, manifest.config
    run = replace(view, islands=(), refusals=()).figures()
    control, served = dict(view.control.fields), merger_in_words(view)
    if not view.merger.holder:  # It begins with a word, not with a name.
        served = served[0].upper() + served[1:]
    strips = [{member.island: member.staleness for member in entry.members} for entry in view.tape]
    return {
        "run": {name: value for name, value in run.items() if name not in _ELSEWHERE},
        "problems": [asdict(problem) for problem in grouped(reading.problems)],
        "verdict": verdict(view),
        "evaluated": evaluated(view, reading.unix_seconds),
        "settings": settings(manifest),
        "changed": list(differing(config, RunConfig())),
        "unix_seconds": reading.unix_seconds,
        "round_seconds": view.round_seconds,
        "tokens_per_second": sum(i.tokens_per_second for i in view.islands if i.live and i.state == "training"),
        "islands": [
            {
                **asdict(island),
                "shown": "silent" if island.is_silent else island.state,
                "strip": [here.get(island.name, -1) for here in strips],
                "asked": control.get(island_field(island.name), ""),
            }
            for island in view.islands
        ],
        "counters": _counters(view),
        "events": events(reading.events),
        "serving": f"{served}.",
        "control": {
            "set": control,
            "own": {name: float(own(config, name)) for name in SETTINGS},
        },
    }


#: Fields of a view that the page gets in another form.
_ELSEWHERE = ("islands", "counters", "control", "refusals", "refused_by_code", "merger", "standbys")


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


def charts_of(reading: RunReading, history: History, manifest: Manifest) -> dict[str, Any]:
    """Return the charts' data, thinned to a few hundred points for each line. All losses have the run's unit."""
    evaluations, unit = thinned(reading.view.evaluations, POINTS_DRAWN, newest), loss_unit(manifest.corpus)
    lines = history.lines()
    islands = history.losses()
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


def _counters(view: RunView) -> dict[str, Any]:
    counters = view.counters
    return {
        "published": [counters.published, counters.published_tokens],
        "merged": [counters.merged, counters.merged_tokens],
        "refused": [counters.refused, counters.refused_tokens],
        "pending": [view.pending, view.pending_tokens],
        "balanced": view.balanced,
    }


def events(found: Sequence[Event]) -> list[dict[str, Any]]:
    """Return the events with their remedies, newest first.

    Repeated refusals of an island for one reason become one line with a count.
    """
    out: list[dict[str, Any]] = []
    for event in (asdict(event) | {"remedy": remedy_of(event)} for event in reversed(found)):
        if out and event["kind"] == "refused" and _alike(out[-1]) == _alike(event):
            out[-1]["times"] += 1
        else:
            out.append(event | {"times": 1})
    return out[:EVENTS_SHOWN]


def _alike(event: Mapping[str, Any]) -> tuple[str, str, str]:
    return event["who"], event["kind"], event["text"].partition(": ")[2]  # Compare the text without its round.


def to_json(value: Any) -> str:
    """Return compact JSON with five significant digits, which is more than a screen shows. NaN becomes null."""
    return json.dumps(_short(value), separators=(",", ":"))


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _short(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_short(part) for part in value]
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    if value.is_integer() or abs(value) >= 1e5:
        return round(value)
    return float(f"{value:.5g}")


# -- the newest page and charts of each run ----------------------------------------------------------------------------

#: A page reads at most this many runs at once.
BOARDS_MAX = 32
CHARTS_SECONDS = 2.0
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
        self.entries, self._open, self._stack, self._lock = entries, opened, ExitStack(), threading.Lock()
        self._boards = {self.first.watch.manifest.run: self.first} if self.first else {}

    def __enter__(self) -> Boards:
        for board in self._boards.values():
            self._begin(board)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _begin(self, board: Board) -> Board:
        self._stack.enter_context(repeated(board.update, LOOK_SECONDS))
        return board

    def of(self, run: str) -> Board:
        """Return the board of a run. Raise ArchipelagoError if it cannot be read."""
        with self._lock:
            if run in self._boards:
                return self._boards[run]
            if self._open is None or len(self._boards) >= BOARDS_MAX:
                raise UnknownRunError(f"this page does not show the run {run!r}", f"Use `archipelago dash {run}`.")
            return self._boards.setdefault(run, self._begin(Board(self._open(run))))

    def listed(self) -> list[dict[str, Any]]:
        """Return the run that was named, or all runs, as plain data."""
        if self.first:
            return [{"run": self.first.watch.manifest.run, "is_served": True}]
        return [asdict(entry) | {"mood": MOODS.get(entry.state, "idle")} for entry in self.entries()]


class Board:
    """The newest page and charts of a run as JSON, with one writer and any number of readers."""

    def __init__(self, watch: Watcher) -> None:
        self.watch = watch
        self.page, self.charts = "", ""
        self.charts_number = 0
        self._charts_due = -math.inf

    def update(self) -> None:
        """Read the run once, and publish its page and, less often, its charts."""
        watch, before = self.watch, self.watch.history
        if not watch.update() or watch.latest is None:
            return
        self.page = to_json(page_of(watch.latest, watch.manifest))
        if watch.clock() >= self._charts_due or watch.history is not before:
            self._charts_due = watch.clock() + CHARTS_SECONDS
            self.charts = to_json(charts_of(watch.latest, watch.history, watch.manifest))
            self.charts_number += 1
