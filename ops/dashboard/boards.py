"""The newest page and charts of each run that the dashboard shows, as JSON."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from archipelago.broker.errors import UnknownRunError
from archipelago.ops.dashboard.page_data import charts_of, page_of, to_json
from archipelago.ops.watch.run_list import RunEntry
from archipelago.ops.watch.state_line import MOODS
from archipelago.ops.watch.watcher import LOOK_SECONDS, Watcher, repeated

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
