"""Read a run once a second, and keep the newest reading as JSON for the pages."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from archipelago.broker.control import Control
from archipelago.broker.errors import ArchipelagoError, UnreachableError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Evaluation, Refusal
from archipelago.broker.shards.transport import shards_away, whole
from archipelago.broker.transport import MergerStatus, ReaderTransport
from archipelago.ops.dashboard.history import History, QueueRow, joined_queues
from archipelago.ops.dashboard.page_data import Rate, Reading, TokenBooks, charts_of, measured, page_of
from archipelago.ops.dashboard.trails import Trail
from archipelago.ops.watch.advice import problems
from archipelago.ops.watch.health import Health, covered_round
from archipelago.ops.watch.problem_log import ProblemLog
from archipelago.ops.watch.run_view import BALANCE_TRIES, RECENT_ROUNDS, RunView, glance

LOOK_SECONDS = 1.0
CHARTS_SECONDS = 2.0
SELDOM_SECONDS = 5.0
#: The largest share of time that is spent on readings that grow with the run.
SELDOM_SHARE = 0.05
#: A reading that takes longer counts as an outage. The connection itself waits longer.
PATIENCE_SECONDS = 4.0
SILENT = "Redis does not answer"
TAPE_MOST = 1 << 16
NOTES_READ, REFUSALS_READ = 200, 100

T = TypeVar("T")


@dataclass(frozen=True)
class Fault:
    """The reason why the page is not updated, and the time at which this began."""

    since_unix_seconds: float
    what: str
    more: str = ""


class Board:
    """The newest page and charts as JSON, with one writer and any number of readers.

    Attributes:
        round_seconds: Seconds since the newest round closed; NaN before the first.
    """

    def __init__(self) -> None:
        self.page, self.charts = "", ""
        self.page_number = self.charts_number = 0
        self.view: RunView | None = None
        self.round_seconds = math.nan
        self.closed = False
        self._fault: Fault | None = None
        self._turn: tuple[float, float] | None = None

    def begin_reading(self, monotonic: float, unix_seconds: float) -> None:
        """Note that a reading begins."""
        self._turn = (monotonic, unix_seconds)

    def end_reading(self, fault: Fault | None) -> None:
        """Note that the reading has ended. A fault that continues keeps its first time."""
        if fault and self._fault:
            fault = replace(fault, since_unix_seconds=self._fault.since_unix_seconds)
        self._fault, self._turn = fault, None

    def fault(self, monotonic: float) -> Fault | None:
        """Return the present fault, if any. A reading that hangs is one."""
        turn = self._turn
        if self._fault is None and turn and monotonic - turn[0] > PATIENCE_SECONDS:
            return Fault(turn[1], SILENT, "The page continues automatically.")
        return self._fault

    def show(self, page: dict[str, Any], reading: Reading) -> None:
        """Publish the page's data, which changes with each reading."""
        self.page, self.view = to_json(page), reading.view
        self.round_seconds = reading.round_seconds if reading.view.rounds else math.nan
        self.page_number += 1

    def draw(self, charts: dict[str, Any]) -> None:
        """Publish the charts' data, which changes with each round."""
        self.charts = to_json(charts)
        self.charts_number += 1


class RareReading(Generic[T]):
    """A reading whose cost grows with the run. It is repeated rarely, so that it takes a small share of the time."""

    def __init__(self, read: Callable[[], T], clock: Callable[[], float]) -> None:
        self._read, self._clock = read, clock
        self._due = -math.inf
        self._value: T | None = None

    def newest(self) -> T:
        """Return the value, read again if that is due."""
        began = self._clock()
        if self._value is None or began >= self._due:
            self._value = self._read()
            self._due = began + max(SELDOM_SECONDS, (self._clock() - began) / SELDOM_SHARE)
        return self._value

    def forget(self) -> None:
        """Make the next call read again."""
        self._due = -math.inf


class Watcher:
    """A reader that publishes one run on a board."""

    def __init__(
        self,
        transport: ReaderTransport,
        manifest: Manifest,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._home, self.manifest = transport, manifest
        self.transport = whole(transport, manifest, for_display=True)
        self.clock, self.wall = clock, wall
        self.board = Board()
        self._rates: dict[str, Rate] = {}
        self._queues: Trail[QueueRow] = Trail(joined_queues)
        self._history = History(manifest.shard_layout)
        self._history_lacks: frozenset[int] = frozenset()
        self._token_books = RareReading(self._read_token_books, clock)
        self._evaluations: RareReading[list[Evaluation]] = RareReading(
            lambda: self.transport.reader.evaluations(), clock
        )
        self._refusals: RareReading[list[tuple[float, Refusal]]] = RareReading(
            lambda: self.transport.reader.refusals(REFUSALS_READ), clock
        )
        self._covered = RareReading(lambda: covered_round(self.transport.reader.merger_state()), clock)
        self._problem_log = ProblemLog()
        self._round_at = wall()
        self._charts_due = -math.inf

    def update(self) -> None:
        """Read once and publish it. If the broker is away or empty, publish a fault."""
        self.board.begin_reading(self.clock(), self.wall())
        try:
            reading = self.read()
        except UnreachableError as error:
            self.board.end_reading(Fault(self.wall(), SILENT, f"{error.what}. The page continues automatically."))
        except ArchipelagoError as error:
            self.board.end_reading(Fault(self.wall(), error.what, error.remedy))
        else:
            self.board.end_reading(None)
            self.board.show(page_of(reading, self._history, self.manifest), reading)
            if self.clock() >= self._charts_due:
                self._charts_due = self.clock() + CHARTS_SECONDS
                self.board.draw(charts_of(reading, self._history, self._queues.rows, self.manifest))

    def update_until(self, stopped: threading.Event) -> None:
        """Update once a second until `stopped` is set."""
        while not stopped.is_set():
            self.update()
            stopped.wait(LOOK_SECONDS)

    def read(self) -> Reading:
        """Return everything that the page shows, as Redis has it now. Raise BrokerError and WireError."""
        transport = self.transport
        tape = self._follow()
        evaluations = self._evaluations.newest()
        view = glance(transport, self.manifest, tape, evaluations)
        now = self.wall()
        self._rates = measured(self._rates, view.islands, now)
        self._queues.add(QueueRow(now, view.pending, view.memory_bytes))
        newest = self._history.newest
        status, control = transport.reader.merger_status(), transport.reader.control()
        refusals = self._refusals.newest()
        health = Health(
            status or MergerStatus(), Control.of(control),
            tuple((at, refusal) for at, refusal in refusals if not refusal.repeat), covered=self._covered.newest(),
        )  # fmt: skip
        found = problems(view, health, self.manifest.config, tape[-RECENT_ROUNDS:], evaluations, now)
        self._problem_log.update(found, now, view.live_names)
        return Reading(
            view=view,
            unix_seconds=now,
            round_seconds=max(0.0, now - self._round_at),
            epoch=newest.epoch if newest else 0,
            merger_status=status,
            standbys=[standby.name for standby in transport.reader.standbys()],
            control=control,
            notes=transport.reader.notes(NOTES_READ),
            refusals=refusals,
            problems=found,
            problem_events=self._problem_log.events,
            evaluations=evaluations,
            token_books=self._token_books.newest(),
            rates=self._rates,
        )

    def charts(self, reading: Reading) -> dict[str, Any]:
        """Return the charts' data."""
        return charts_of(reading, self._history, self._queues.rows, self.manifest)

    def page(self, reading: Reading) -> dict[str, Any]:
        """Return the page's data."""
        return page_of(reading, self._history, self.manifest)

    def _follow(self) -> list[Any]:
        """Add the recent tape to the history and return it. If they do not connect, read the whole tape again.

        The history begins anew when a shard answers that could not be reached when it began.
        """
        tape = self.transport.reader.tape(RECENT_ROUNDS)
        if self._history_lacks - shards_away(self.transport).keys():
            tape = self._begin_again()
        elif not self._history.follows(tape):
            tape = self.transport.reader.tape(TAPE_MOST)
            if not self._history.follows(tape):
                tape = self._begin_again()
        if self._history.extend(tape):
            self._round_at = self.wall()
        return tape

    def _begin_again(self) -> list[Any]:
        """Restart the history: at first, after a return to a checkpoint, or for a new run of the same name.

        Returns:
            The whole tape.
        """
        found = self._home.reader.manifest()
        if found != self.manifest:
            self.manifest, self.transport = found, whole(self._home, found, for_display=True)
        tape = self.transport.reader.tape(TAPE_MOST)
        self._history = History(self.manifest.shard_layout)
        self._history.begin(self.transport.reader.books().merged_tokens, tape)
        self._history_lacks = frozenset(shards_away(self.transport))
        for rare in (self._token_books, self._evaluations, self._refusals, self._covered):
            rare.forget()
        self._charts_due = -math.inf
        closed = tape[-1].unix_seconds if tape else 0.0
        self._round_at = min(self.wall(), closed) if closed else self.wall()
        return tape

    def _read_token_books(self) -> TokenBooks:
        found = self._token_books_now()
        for _ in range(BALANCE_TRIES - 1):  # A round that closes during a reading makes it inconsistent.
            if found.balanced:
                break
            found = self._token_books_now()
        return found

    def _token_books_now(self) -> TokenBooks:
        books, pending = self.transport.reader.books(), self.transport.reader.pending()
        balanced = books.published_tokens == books.merged_tokens + books.refused_tokens + pending.tokens
        return TokenBooks(
            self.wall(), books.published_tokens, books.merged_tokens, books.refused_tokens, pending.tokens, balanced
        )


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
