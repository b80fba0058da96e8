"""`archipelago top`: a run live in the terminal. Readings come from a thread, so keys work while Redis is silent."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live

from archipelago.broker.errors import ArchipelagoError, ConfigError
from archipelago.broker.messages import Evaluation
from archipelago.broker.process import RunAddress, print_json, stop_on_signals
from archipelago.broker.transport import Transport
from archipelago.ops.watch import formatting
from archipelago.ops.watch.health import Happening, Situation, as_json, happened, situation
from archipelago.ops.watch.health import trouble as trouble_of
from archipelago.ops.watch.live_screen import Screen, TopReading
from archipelago.ops.watch.run_view import RECENT_ROUNDS, RunView, glance

READ_SECONDS = 1.0
LINE_SECONDS = 10.0
SLOW_EVERY = 10
"""readings from one look at what grows, or changes seldom, to the next"""
CLOSES_KEPT = 4096
EVENTS_READ = 50
EVENT_SECONDS = 15 * 60.0
"""older ones are no news"""
FRAMES_A_SECOND = 4.0
QUIT_KEYS = ("q", "Q", "\x03", "\x1b")


@dataclass(frozen=True)
class TopOptions(RunAddress):
    """Watch a run in the terminal: `status` once a second, with history and events. q ends it.

    Only reads, and outlives restarts of Redis. In a pipe it writes a line every ten seconds, until the run has ended.
    """

    every: float | None = None
    """seconds between two readings; default 1, and 10 in a pipe"""
    json: bool = False
    """print each reading as a JSON object on a line, as `status --json` does, also at a terminal"""


def main(options: TopOptions) -> int:
    """Until q, a signal, or in a pipe the run's end."""
    if options.every is not None and not 0.05 <= options.every <= 3600.0:
        raise ConfigError(f"--every cannot be {options.every}", "Give seconds, 0.05 to 3600.")
    transport = options.connect()
    console = Console(highlight=False)
    stopped = stop_on_signals()
    watch = Watch(transport)
    if console.is_terminal and sys.stdin.isatty() and not options.json:
        with watch.reading(options.every or READ_SECONDS):
            _show(console, watch, stopped)
    else:
        _print_lines(watch, options.every or LINE_SECONDS, stopped, as_object if options.json else as_text)
    return 0


class Watch:
    """Reads a run again and again. Only the thread that reads it touches the transport."""

    def __init__(self, transport: Transport, wall: Callable[[], float] = time.time) -> None:
        self._transport, self._wall = transport, wall
        self._manifest = transport.manifest()
        self._closes: deque[float] = deque(maxlen=CLOSES_KEPT)
        self._last_round = 0
        self._count = 0
        self._evaluations: Sequence[Evaluation] = ()
        self._events: Sequence[Happening] = ()
        self._situation: Situation | None = None
        self.latest: TopReading | None = None
        """None until there is one"""
        self.silent_since = 0.0
        """unix seconds; 0 while the Redis answers"""
        self.said = ""
        """the error of the last reading, empty where there was none"""
        self._done = threading.Event()

    @contextlib.contextmanager
    def reading(self, every_seconds: float) -> Iterator[None]:
        """Reads beside what is done here. A reading that hangs does not hold up the end."""

        def read() -> None:
            while not self._done.wait(0.0 if self._count == 0 else every_seconds):
                self.read()

        threading.Thread(target=read, daemon=True).start()
        try:
            yield
        finally:
            self._done.set()

    def read(self) -> bool:
        """One reading; False where the broker did not answer, or not with what can be read."""
        try:
            self.latest = self._read()
        except ArchipelagoError as error:
            self.silent_since = self.silent_since or self._wall()
            self.said = error.what
            return False
        finally:
            self._count += 1
        self.silent_since, self.said = 0.0, ""
        return True

    def _read(self) -> TopReading:
        transport, seldom = self._transport, self._count % SLOW_EVERY == 0 or bool(self.said)
        tape = transport.tape(RECENT_ROUNDS if self._last_round else CLOSES_KEPT // 4)
        if seldom or self._situation is None:
            self._evaluations = transport.evaluations()
        view = glance(transport, self._manifest, tape, self._evaluations)
        found = situation(transport)
        if seldom or self._situation is None:
            self._events = happened(transport.notes(EVENTS_READ), transport.refusals(EVENTS_READ))
        self._situation = found
        now = self._wall()
        if tape and tape[-1].round < self._last_round:  # the run has gone back to a checkpoint
            self._closes.clear()
            self._last_round = 0
        self._closes.extend(entry.unix_seconds or now for entry in tape if entry.round > self._last_round)
        self._last_round = tape[-1].round if tape else 0
        return TopReading(
            view=view,
            found=found,
            wrong=trouble_of(view, found, self._manifest.config.sync.interval),
            closes=tuple(self._closes),
            bits_per_byte=tuple(evaluation.bits_per_byte for evaluation in self._evaluations),
            events=tuple(event for event in self._events if now - event.unix_seconds < EVENT_SECONDS),
            unix_seconds=now,
        )


def _show(console: Console, watch: Watch, stopped: Callable[[], bool]) -> None:
    """The live screen, until a key or a signal ends it."""
    with _keys() as key, Live(console=console, screen=True, auto_refresh=False) as live:
        while not stopped() and key(1.0 / FRAMES_A_SECOND) not in QUIT_KEYS:
            live.update(Screen(watch.latest, watch.silent_since, watch.said, time.time()), refresh=True)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits so many seconds for a key; the terminal is as it was afterwards."""
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


def _print_lines(
    watch: Watch, every_seconds: float, stopped: Callable[[], bool], shown: Callable[[TopReading | None, str], None]
) -> None:
    """One line a reading, on standard output, until the run has ended."""
    due = 0.0
    while not stopped():
        if time.monotonic() < due:
            time.sleep(0.1)
            continue
        due = time.monotonic() + every_seconds
        answered = watch.read()
        shown(watch.latest if answered else None, watch.said)
        if watch.latest and _has_ended(watch.latest.view):
            return


def as_text(reading: TopReading | None, said: str) -> None:
    """Prints a reading as one line; what went wrong where there is none."""
    if reading is not None:
        said = formatting.line(reading.view) + (f"  TROUBLE: {reading.wrong}" if reading.wrong else "")
    sys.stdout.write(said + "\n")
    sys.stdout.flush()


def as_object(reading: TopReading | None, said: str) -> None:
    """The same as one JSON object."""
    print_json({"error": said} if reading is None else as_json(reading.view, reading.found, reading.wrong))


def _has_ended(view: RunView) -> bool:
    """All steps are made, and all islands have gone."""
    return view.step >= view.steps and not view.live
