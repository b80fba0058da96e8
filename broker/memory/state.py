"""The state of one run in memory, which all connections to it share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

from archipelago.broker.control import is_expelled
from archipelago.broker.errors import UnknownRunError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import (
    Actions,
    Books,
    Contribution,
    Evaluation,
    Event,
    Handover,
    Heartbeat,
    Note,
    Presence,
    Snapshot,
    TapeEntry,
)


@dataclass
class MemoryRun:
    """Entries and events are numbered for good, also where a test takes some back."""

    manifest: Manifest
    fragments: dict[int, tuple[Snapshot, bytes]]
    updates: dict[int, tuple[Contribution, bytes]] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)
    """entries that are merged, and lie there until they are trimmed"""
    next_update: int = 1
    last_read: int = 0
    events: list[tuple[int, Event]] = field(default_factory=list)
    next_event: int = 1
    refused_at: dict[int, float] = field(default_factory=dict)
    """seconds of the broker's clock, by the event's number"""
    control: dict[str, str] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    tape: list[TapeEntry] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    differences: dict[tuple[int, int], bytes] = field(default_factory=dict)
    outer: dict[int, bytes] = field(default_factory=dict)
    state: str = ""
    books: dict[str, int] = field(default_factory=lambda: asdict(Books()))
    islands: dict[str, tuple[Heartbeat, float]] = field(default_factory=dict)
    cursors: dict[str, tuple[int, int]] = field(default_factory=dict)
    holders: dict[str, str] = field(default_factory=dict)
    corpora: dict[str, str] = field(default_factory=dict)
    requests: dict[str, str] = field(default_factory=dict)
    handovers: dict[str, tuple[Handover, bytes]] = field(default_factory=dict)
    actions: list[tuple[int, Actions]] = field(default_factory=list)
    next_actions: int = 1
    restored: tuple[int, int] | None = None
    returned: set[str] = field(default_factory=set)
    epoch: tuple[int, str] = (0, "")
    """the number alone is not enough: a broker that dies may forget the newest, and would give it to two"""
    lease: tuple[str, float] = ("", float("-inf"))

    def tell(self, event: Event) -> None:
        """Appends an event under the next number."""
        self.events.append((self.next_event, event))
        self.next_event += 1

    def add(self, contribution: Contribution, payload: bytes) -> int:
        """Appends a contribution under the next number."""
        self.updates[self.next_update] = (contribution, payload)
        self.next_update += 1
        self.books["published"] += 1
        self.books["published_tokens"] += contribution.tokens
        return self.next_update - 1

    def waiting(self) -> dict[int, tuple[Contribution, bytes]]:
        """What is neither merged nor refused."""
        return {number: kept for number, kept in self.updates.items() if number not in self.kept}

    def live(self, now: float) -> set[str]:
        """Return the live islands that are not expelled, as island/incarnation."""
        beats = [(Presence(beat, now - seen), beat) for beat, seen in self.islands.values()]
        live = {f"{beat.island}/{beat.incarnation}" for presence, beat in beats if presence.is_live}
        return {who for who in live if not is_expelled(self.control, who)}

    def let_go(self, entries: Sequence[str]) -> None:
        """Deletes merged entries."""
        for number in map(entry_number, entries):
            if number in self.kept:
                self.kept.remove(number)
                del self.updates[number]
        self.books["kept"] = len(self.kept)


class MemoryState:
    """All runs of a broker in memory.

    Attributes:
        clock: Returns seconds. Leases and ages are measured with it.
        instance: A test that lets the broker forget something changes this too.
        runs: The state of each run, by name.
        changed: Notified after every change.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.instance = ""
        self.runs: dict[str, MemoryRun] = {}
        self.changed = threading.Condition()

    @contextmanager
    def opened(self, name: str) -> Iterator[MemoryRun]:
        """Yield a run, locked. Raises UnknownRunError."""
        with self.changed:
            try:
                run = self.runs[name]
            except KeyError:
                raise UnknownRunError(f"there is no run {name!r} here", "Make it with `archipelago init`.") from None
            yield run
            self.changed.notify_all()


def entry_number(entry: str) -> int:
    """Return the number in the id of an entry or event."""
    return int(entry.split("-")[0])
