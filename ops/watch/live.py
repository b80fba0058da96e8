"""Show a run live in the terminal (`archipelago status --watch`).

A separate thread reads Redis, so that keys work even while Redis does not answer.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.live import Live

from archipelago.broker.errors import ArchipelagoError
from archipelago.broker.manifest import loss_unit
from archipelago.broker.messages import Evaluation
from archipelago.broker.observe.logs import printable
from archipelago.broker.process import print_json, stop_on_signals
from archipelago.broker.shards.transport import opened
from archipelago.broker.transport import ReaderTransport
from archipelago.ops.watch import formatting, health
from archipelago.ops.watch.advice import problems, worst
from archipelago.ops.watch.health import Event, events_of, read_health, trouble
from archipelago.ops.watch.live_screen import LiveReading, Screen
from archipelago.ops.watch.problem_log import ProblemLog
from archipelago.ops.watch.run_view import RECENT_ROUNDS, RunView, glance
from archipelago.ops.watch.tape_position import TapePosition

READ_SECONDS = 1.0
LINE_SECONDS = 10.0
#: Readings between two reads of evaluations and events, which grow with the run or change rarely.
SLOW_EVERY = 10
CLOSES_KEPT = 4096
EVENTS_READ = 50
#: Older events are not shown.
EVENT_SECONDS = 15 * 60.0
FRAMES_A_SECOND = 4.0
QUIT_KEYS = ("q", "Q", "\x03", "\x1b")


def watch(transport: ReaderTransport, every_seconds: float | None, *, as_json: bool) -> None:
    """Show the run until a quit key or a signal. Without a terminal, print lines until the run has ended."""
    console = Console(highlight=False)
    stopped = stop_on_signals()
    watcher = Watcher(transport)
    if console.is_terminal and sys.stdin.isatty() and not as_json:
        with watcher.reading(every_seconds or READ_SECONDS):
            _show(console, watcher, stopped)
    else:
        print_lines(watcher, every_seconds or LINE_SECONDS, stopped, print_object if as_json else print_text)


class Watcher:
    """A reader that reads a run repeatedly. Only the reading thread uses the transport.

    Attributes:
        latest: The last successful reading, or None before the first.
        silent_since: Unix seconds of the first failed reading, or 0 while Redis answers.
        error: The error of the last reading; empty if it succeeded.
    """

    def __init__(self, transport: ReaderTransport, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._manifest, self._transport = opened(transport, for_display=True)
        self._closes: deque[float] = deque(maxlen=CLOSES_KEPT)
        self._position = TapePosition(self._manifest.shard_layout)
        self._count = 0
        self._evaluations: Sequence[Evaluation] = ()
        self._events: Sequence[Event] = ()
        self._problem_log = ProblemLog()
        self.latest: LiveReading | None = None
        self.silent_since = 0.0
        self.error = ""
        self._done = threading.Event()

    @contextlib.contextmanager
    def reading(self, every_seconds: float) -> Iterator[None]:
        """Read on a daemon thread while the block runs. A reading that hangs does not delay the end."""

        def read() -> None:
            while not self._done.wait(0.0 if self._count == 0 else every_seconds):
                self.read()

        threading.Thread(target=read, daemon=True).start()
        try:
            yield
        finally:
            self._done.set()

    def read(self) -> bool:
        """Read the run once. Return False if the broker did not answer, or sent what cannot be decoded."""
        try:
            self.latest = self._read()
        except ArchipelagoError as error:
            self.silent_since = self.silent_since or self._wall()
            self.error = error.what
            return False
        finally:
            self._count += 1
        self.silent_since, self.error = 0.0, ""
        return True

    def _read(self) -> LiveReading:
        transport = self._transport
        # After an outage everything is read again.
        read_all = self.latest is None or self._count % SLOW_EVERY == 0 or bool(self.error)
        tape = transport.reader.tape(RECENT_ROUNDS if self._closes else CLOSES_KEPT // 4)
        if read_all:
            self._evaluations = transport.reader.evaluations()
        view = glance(transport, self._manifest, tape, self._evaluations)
        found = read_health(transport)
        if read_all:
            self._events = events_of(transport.reader.notes(EVENTS_READ), transport.reader.refusals(EVENTS_READ))
        now, unit = self._wall(), loss_unit(self._manifest.corpus)
        if self._position.has_gone_back(tape):  # The run returned to an earlier checkpoint.
            self._closes.clear()
            self._position = TapePosition(self._manifest.shard_layout)
        for entry in self._position.new(tape):
            self._closes.append(entry.unix_seconds or now)
            self._position.add(entry)
        config = self._manifest.config
        present = problems(view, found, config, tape[-RECENT_ROUNDS:], self._evaluations, now)
        self._problem_log.update(present, now, view.live_names)
        events = sorted([*self._events, *self._problem_log.events], key=lambda event: event.unix_seconds)
        return LiveReading(
            view=view,
            health=found,
            problem=trouble(view, found, config.sync.interval),
            closes=tuple(self._closes),
            held_out=tuple(unit.from_evaluation(evaluation.bits_per_byte) for evaluation in self._evaluations),
            events=tuple(event for event in events if now - event.unix_seconds < EVENT_SECONDS),
            unix_seconds=now,
            advice=worst(present),
        )


def _show(console: Console, watcher: Watcher, stopped: Callable[[], bool]) -> None:
    """Draw the live screen until a quit key or a signal."""
    with _keys() as key, Live(console=console, screen=True, auto_refresh=False) as live:
        while not stopped() and key(1.0 / FRAMES_A_SECOND) not in QUIT_KEYS:
            live.update(Screen(watcher.latest, watcher.silent_since, watcher.error, time.time()), refresh=True)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits at most that many seconds for a key. The terminal's mode is restored afterwards."""
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)

    def key(seconds: float) -> str:
        try:
            ready, _, _ = select.select([sys.stdin], [], [], seconds)
        except InterruptedError:
            return ""
        return os.read(sys.stdin.fileno(), 1).decode(errors="replace") if ready else ""

    try:
        yield key
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def print_lines(
    watcher: Watcher,
    every_seconds: float,
    stopped: Callable[[], bool],
    show: Callable[[LiveReading | None, str], None],
) -> None:
    """Show each reading with `show(reading, error)` until the run has ended or `stopped` is true."""
    due = 0.0
    while not stopped():
        if time.monotonic() < due:
            time.sleep(0.1)
            continue
        due = time.monotonic() + every_seconds
        answered = watcher.read()
        show(watcher.latest if answered else None, watcher.error)
        if watcher.latest and _has_ended(watcher.latest.view):
            return


def print_text(reading: LiveReading | None, error: str) -> None:
    """Print a reading as one line, or the error if there is no reading."""
    if reading is not None:
        error = formatting.line(reading.view) + (f"  TROUBLE: {reading.problem}" if reading.problem else "")
    sys.stdout.write(printable(error) + "\n")
    sys.stdout.flush()


def print_object(reading: LiveReading | None, error: str) -> None:
    """Print a reading as one JSON object, or `{"error": ...}` if there is no reading."""
    print_json({"error": error} if reading is None else health.as_json(reading.view, reading.health, reading.problem))


def _has_ended(view: RunView) -> bool:
    return view.step >= view.steps and not view.live
