"""Read a run again and again, for the live screen, the page and the report."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from archipelago.broker.errors import ArchipelagoError, UnreachableError
from archipelago.broker.messages import Evaluation, Refusal, TapeEntry
from archipelago.broker.shards.transport import opened, shards_away, whole
from archipelago.broker.transport import ReaderTransport
from archipelago.ops.watch.advice import Problem, problems
from archipelago.ops.watch.events import Event, events_of, with_comebacks
from archipelago.ops.watch.history import History
from archipelago.ops.watch.reading import RECENT_ROUNDS, observe, refusals_of
from archipelago.ops.watch.run_view import RunView

LOOK_SECONDS = 1.0
#: Evaluations and refusals are read again after this time, and so rarely that it takes at most this share of the time.
SELDOM_SECONDS, SELDOM_SHARE = 5.0, 0.05
#: If the newest reading is older than this, the next one hangs, which is an outage. The connection itself waits longer.
PATIENCE_SECONDS = 5.0
SILENT, CONTINUES = "Redis does not answer", "The display continues by itself."
TAPE_MOST = 1 << 16
NOTES_READ = 200


@dataclass(frozen=True)
class RunReading:
    """A run at one moment: what is wrong now, the worst first, and its notes and refusals, oldest first."""

    view: RunView
    unix_seconds: float
    problems: Sequence[Problem] = ()
    events: Sequence[Event] = ()


@dataclass(frozen=True)
class Outage:
    """The reason why there is no new reading, what is done about it, and the time at which this began."""

    since_unix_seconds: float
    what: str
    more: str = ""


class Watcher:
    """A reader that reads one run repeatedly. Only the thread that calls `update` uses the transport.

    Args:
        transport: A connection to the run.
        rounds: The most rounds that are read for the history, at the beginning and after a gap.
        address: How commands name the run's Redis here.
        clock: Monotonic seconds.
        wall: Unix seconds.

    Attributes:
        history: The rounds of the run, as far as they were read.
        latest: The last successful reading; None before the first.
    """

    def __init__(
        self,
        transport: ReaderTransport,
        rounds: int = TAPE_MOST,
        address: str = "URL",
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.clock, self.wall = clock, wall
        self.latest: RunReading | None = None
        self._primary, self._rounds, self._address = transport, rounds, address
        self._outage: Outage | None = None
        self.manifest, self.transport = opened(transport, for_display=True)
        self.history = History(self.manifest.shard_layout)
        #: The shards that the history lacks.
        self._lacks: frozenset[int] = frozenset()
        self._evaluations: Sequence[Evaluation] = ()
        self._refusals: Sequence[tuple[float, Refusal]] = ()
        self._seldom_due = -math.inf

    def update(self) -> bool:
        """Read the run once. Return False if the broker did not answer, or sent what cannot be decoded."""
        try:
            self.latest = self.read()
        except ArchipelagoError as error:
            since = self._outage.since_unix_seconds if self._outage else self.wall()
            self._seldom_due = -math.inf  # After an outage everything is read again.
            more = CONTINUES if isinstance(error, UnreachableError) else error.remedy
            self._outage = Outage(since, error.what, more)
        else:
            self._outage = None
        return self._outage is None

    def outage(self) -> Outage | None:
        """Return why there is no new reading, if there is none. A reading that hangs is an outage."""
        last = self.latest
        if self._outage is None and last and self.wall() - last.unix_seconds > PATIENCE_SECONDS:
            return Outage(last.unix_seconds, SILENT, CONTINUES)
        return self._outage

    def read(self, *, briefly: bool = True) -> RunReading:
        """Return the run as Redis has it now, or `briefly` (see `observe`). Raise BrokerError and WireError."""
        tape = self._follow()
        self._read_seldom()
        notes = self.transport.reader.notes(NOTES_READ)
        view = observe(self.transport, self.manifest, tape, self._evaluations, self._refusals, notes, briefly=briefly)
        view, now = replace(view, address=self._address), self.wall()
        return RunReading(
            view=view,
            unix_seconds=now,
            problems=problems(view, now),
            events=with_comebacks(events_of(notes, view.refusals)),
        )

    def _read_seldom(self) -> None:
        """Read all evaluations and the recent refusals if they are due. It may take long, so it is done rarely."""
        began = self.clock()
        if began >= self._seldom_due:
            self._evaluations = self.transport.reader.evaluations()
            self._refusals = refusals_of(self.transport.reader)
            self._seldom_due = began + max(SELDOM_SECONDS, (self.clock() - began) / SELDOM_SHARE)

    def _follow(self) -> Sequence[TapeEntry]:
        """Add the recent tape to the history and return it. If they do not connect, read the whole tape again.

        The history begins anew when a shard answers that could not be reached when it began.
        """
        tape = self.transport.reader.tape(RECENT_ROUNDS)
        if self._lacks - shards_away(self.transport).keys():
            return self._begin_again()
        if not self.history.follows(tape):
            tape = self.transport.reader.tape(self._rounds)
            if not self.history.follows(tape):
                return self._begin_again()
        self.history.extend(tape)
        return tape

    def _begin_again(self) -> Sequence[TapeEntry]:
        """Restart the history: at first, after a return to a checkpoint, or for a new run of the same name.

        Returns:
            The whole tape.
        """
        found = self._primary.reader.manifest()
        if found != self.manifest:
            self.manifest, self.transport = found, whole(self._primary, found, for_display=True)
        tape = self.transport.reader.tape(self._rounds)
        self.history = History(self.manifest.shard_layout)
        self.history.begin(self.transport.reader.counters().merged_tokens, tape)
        self._lacks = frozenset(shards_away(self.transport))
        self._seldom_due = -math.inf
        return tape


@contextlib.contextmanager
def repeated(update: Callable[[], object], every_seconds: float) -> Iterator[None]:
    """Call `update` on a daemon thread while the block runs. A reading that hangs does not delay the end."""
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            update()
            ended.wait(every_seconds)

    threading.Thread(target=work, name="watch", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
