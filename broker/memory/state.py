"""The state of one run in memory, which all connections to it share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace

from archipelago.broker.commits import Delivery, entry_name
from archipelago.broker.control import is_expelled
from archipelago.broker.errors import UnknownRunError
from archipelago.broker.full_state import Compaction
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Contribution, Counters, Evaluation, Event, Handover, Note, Snapshot, TapeEntry
from archipelago.broker.presence import Heartbeat, NameClaim, Presence


@dataclass(frozen=True)
class MemoryEntry:
    """A contribution in the updates stream of the island `sender`."""

    sender: str
    contribution: Contribution
    payload: bytes


@dataclass
class MemoryRun:
    """The state of one run. Entries and events keep their numbers, even if a test removes some of them.

    Attributes:
        fragments: The newest full snapshot of each fragment, with its payload.
        updates: The entries of all updates streams, by name and by arrival. The numbers in their names are those of
            the run.
        refused_at: The time of each refusal on the broker's clock, by the number of its event.
        outer: The `outer` of each fragment's newest compaction.
        requests: The islands that have requested inner optimiser state, each with the island that promised an answer.
        epoch: The newest epoch and the merger that holds it. A broker that crashes may forget an epoch and give its
            number to two mergers, so the number alone does not identify the merger.
        evaluator: The island that evaluates, and the time at which its lease ends.
    """

    manifest: Manifest
    fragments: dict[int, tuple[Snapshot, bytes]]
    heads: dict[int, Snapshot]
    updates: dict[str, MemoryEntry] = field(default_factory=dict)
    kept: dict[str, MemoryEntry] = field(default_factory=dict)
    next_update: int = 1
    events: list[tuple[int, Event]] = field(default_factory=list)
    next_event: int = 1
    refused_at: dict[int, float] = field(default_factory=dict)
    control: dict[str, str] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    tape: list[TapeEntry] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    differences: dict[tuple[int, int], bytes] = field(default_factory=dict)
    outer: dict[int, bytes] = field(default_factory=dict)
    state: str = ""
    counters: dict[str, int] = field(default_factory=lambda: asdict(Counters()))
    islands: dict[str, tuple[Heartbeat, float]] = field(default_factory=dict)
    cursors: dict[str, tuple[int, int]] = field(default_factory=dict)
    holders: dict[str, str] = field(default_factory=dict)
    corpora: dict[str, str] = field(default_factory=dict)
    requests: dict[str, str] = field(default_factory=dict)
    handovers: dict[str, tuple[Handover, bytes]] = field(default_factory=dict)
    names: dict[str, NameClaim] = field(default_factory=dict)
    epoch: tuple[int, str] = (0, "")
    lease: tuple[str, float] = ("", float("-inf"))
    standbys: dict[str, float] = field(default_factory=dict)
    evaluator: tuple[str, float] = ("", float("-inf"))

    def announce(self, event: Event) -> None:
        """Append an event under the next number."""
        self.events.append((self.next_event, event))
        self.next_event += 1

    def add(self, contribution: Contribution, payload: bytes, sender: str = "") -> str:
        """Append a contribution, by default of the island in its header, and return the name of its entry."""
        sender = sender or contribution.island
        name = entry_name(sender, f"{self.next_update}-0")
        self.updates[name] = MemoryEntry(sender, contribution, payload)
        self.next_update += 1
        return name

    @staticmethod
    def delivery(name: str, entry: MemoryEntry) -> Delivery:
        """Return an entry as a merger gets it."""
        if entry.contribution.island != entry.sender:
            return Delivery(name, None, fault=f"{entry.sender} sent it in the name of {entry.contribution.island}")
        return Delivery(name, entry.contribution, entry.payload)

    def accounts(self) -> Counters:
        """Return the counters, with those that are counted in the streams."""
        tokens = sum(e.contribution.tokens for e in self.updates.values() if e.contribution.island == e.sender)
        counters = Counters(**self.counters)
        return replace(
            counters,
            published=counters.merged + counters.refused + len(self.updates),
            published_tokens=counters.merged_tokens + counters.refused_tokens + tokens,
        )

    def is_served(self, now: float) -> bool:
        holder, until = self.lease
        return bool(holder) and until > now

    def live(self, now: float) -> set[str]:
        """Return the live islands that are not expelled, as island/incarnation."""
        beats = [(Presence(beat, now - seen), beat) for beat, seen in self.islands.values()]
        live = {f"{beat.island}/{beat.incarnation}" for presence, beat in beats if presence.is_live}
        return {who for who in live if not is_expelled(self.control, who)}

    def compact(self, compaction: Compaction) -> None:
        """Replace the full state of a fragment."""
        p = compaction.snapshot.fragment
        self.fragments[p] = (compaction.snapshot, compaction.payload)
        if compaction.outer:
            self.outer[p] = compaction.outer

    def trim(self, entries: Sequence[str]) -> None:
        for entry in entries:
            self.kept.pop(entry, None)


class MemoryState:
    """All runs of a broker in memory.

    Attributes:
        clock: Returns seconds. Leases and ages are measured with it.
        instance: An id. A test that removes data from the broker changes it, as a restart would.
        runs: The state of each run, by name, and that of its further shards (`key_of`).
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


def key_of(run: str, shard: int | None) -> str:
    """Return the name under which a broker keeps one shard of a run. The whole run is where its shard 0 is."""
    return f"{run}:s{shard}" if shard else run
