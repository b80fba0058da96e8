"""A transport in dictionaries: several connections to one `MemoryBroker` behave as several to one Redis."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

from broker.errors import FencedError, RunExistsError, UnknownRunError
from broker.manifest import Manifest
from broker.messages import (
    Books,
    Call,
    Contribution,
    Evaluation,
    Event,
    Heartbeat,
    Presence,
    Refusal,
    Resume,
    Snapshot,
    TapeEntry,
    from_fields,
    to_fields,
)
from broker.transport import START, Commit, Delivery


@dataclass
class _Run:
    """Entries and events are numbered for good, also where a test takes some back."""

    manifest: Manifest
    fragments: dict[int, tuple[Snapshot, bytes]]
    updates: dict[int, tuple[Contribution, bytes]] = field(default_factory=dict)
    next_update: int = 1
    last_read: int = 0
    events: list[tuple[int, Event]] = field(default_factory=list)
    next_event: int = 1
    tape: list[TapeEntry] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    outer: dict[int, bytes] = field(default_factory=dict)
    state: str = ""
    books: dict[str, int] = field(default_factory=lambda: asdict(Books()))
    islands: dict[str, tuple[Heartbeat, float]] = field(default_factory=dict)
    shards: int = 0
    epoch: tuple[int, str] = (0, "")
    """the number alone is not enough: a broker that dies may forget the newest, and would give it to two"""
    lease: tuple[str, float] = ("", float("-inf"))

    def tell(self, event: Event) -> None:
        """Appends an event under the next number."""
        self.events.append((self.next_event, event))
        self.next_event += 1


class MemoryBroker:
    """What the connections share. `clock` gives seconds, and is what leases and ages are measured with."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.runs: dict[str, _Run] = {}
        self.changed = threading.Condition()

    def connect(self, run: str) -> MemoryTransport:
        """A connection to one run."""
        return MemoryTransport(self, run)


class MemoryTransport:
    """See `broker.transport.Transport`."""

    def __init__(self, broker: MemoryBroker, run: str) -> None:
        self._broker = broker
        self.run = run
        self._holder = ""

    @contextmanager
    def _opened(self) -> Iterator[_Run]:
        with self._broker.changed:
            try:
                run = self._broker.runs[self.run]
            except KeyError:
                raise UnknownRunError(
                    f"there is no run {self.run!r} here", "Make it with `archipelago init`."
                ) from None
            yield run
            self._broker.changed.notify_all()

    @contextmanager
    def _fenced(self, epoch: int) -> Iterator[_Run]:
        with self._opened() as run:
            if run.epoch != (epoch, self._holder):
                raise FencedError(f"this merger's epoch {epoch} was overtaken", "Another merger serves this run.")
            yield run

    def runs(self) -> list[str]:
        with self._broker.changed:
            return sorted(self._broker.runs)

    def create(self, manifest: Manifest, snapshots: Sequence[tuple[Snapshot, bytes]]) -> None:
        with self._broker.changed:
            if self.run in self._broker.runs:
                raise RunExistsError(f"a run {self.run!r} is here already", "Choose another name.")
            self._broker.runs[self.run] = _Run(
                Manifest.from_fields(manifest.to_fields()), {s.fragment: (s, payload) for s, payload in snapshots}
            )

    def manifest(self) -> Manifest:
        with self._opened() as run:
            return run.manifest

    def publish(self, contribution: Contribution, payload: bytes) -> str:
        with self._opened() as run:
            copy = from_fields(Contribution, to_fields(contribution))  # what a wire would do to it
            run.updates[run.next_update] = (copy, payload)
            run.next_update += 1
            run.books["published"] += 1
            run.books["published_tokens"] += contribution.tokens
            run.books["bytes_up"] += len(payload)
            return f"{run.next_update - 1}-0"

    def holds(self, entry: str) -> bool:
        with self._opened() as run:
            return int(entry.split("-")[0]) in run.updates

    def heartbeat(self, heartbeat: Heartbeat) -> None:
        with self._opened() as run:
            run.islands[heartbeat.island] = (heartbeat, self._broker.clock())

    def claim_shard(self) -> int:
        with self._opened() as run:
            run.shards += 1
            return run.shards - 1

    def last_event(self) -> str:
        with self._opened() as run:
            return f"{run.events[-1][0]}-0" if run.events else START

    def events(self, after: str, block_seconds: float, count: int = 256) -> list[tuple[str, Event]]:
        last = int(after.split("-")[0])
        with self._opened() as run:
            if block_seconds > 0:
                self._broker.changed.wait_for(lambda: run.next_event > last + 1, timeout=block_seconds)
            first = bisect_right(run.events, last, key=lambda numbered: numbered[0])
            return [(f"{number}-0", event) for number, event in run.events[first : first + count]]

    def fragment(self, fragment: int, *, account: bool = False) -> tuple[Snapshot, bytes]:
        with self._opened() as run:
            snapshot, payload = run.fragments[fragment]
            if account:
                run.books["bytes_down"] += len(payload)
            return snapshot, payload

    def presences(self) -> list[Presence]:
        now = self._broker.clock()
        with self._opened() as run:
            return [Presence(beat, now - seen) for _, (beat, seen) in sorted(run.islands.items())]

    def books(self) -> Books:
        with self._opened() as run:
            return Books(**run.books)

    def backlog(self) -> int:
        with self._opened() as run:
            return len(run.updates)

    def tape(self, count: int) -> list[TapeEntry]:
        with self._opened() as run:
            return run.tape[-count:] if count else []

    def evaluations(self) -> list[Evaluation]:
        with self._opened() as run:
            return list(run.evaluations)

    def evaluated(self, evaluation: Evaluation) -> None:
        with self._opened() as run:
            run.evaluations.append(evaluation)

    def acquire(self, holder: str, seconds: float) -> int | None:
        now = self._broker.clock()
        with self._opened() as run:
            owner, until = run.lease
            if owner != holder and until > now:
                return None
            run.lease = (holder, now + seconds)
            self._holder = holder
            run.epoch = (run.epoch[0] + 1, holder)
            return run.epoch[0]

    def renew(self, epoch: int, holder: str, seconds: float) -> None:
        with self._fenced(epoch) as run:
            run.lease = (holder, self._broker.clock() + seconds)

    def release(self, epoch: int) -> None:
        with self._fenced(epoch) as run:
            run.lease = ("", float("-inf"))

    def updates(self, block_seconds: float, count: int = 64) -> list[Delivery]:
        with self._opened() as run:
            if block_seconds > 0:
                self._broker.changed.wait_for(lambda: run.next_update > run.last_read + 1, timeout=block_seconds)
            fresh = [entry for entry in run.updates if entry > run.last_read][:count]
            run.last_read = fresh[-1] if fresh else run.last_read
            return [Delivery(f"{entry}-0", *run.updates[entry]) for entry in fresh]

    def unacknowledged(self) -> list[Delivery]:
        with self._opened() as run:
            return [Delivery(f"{entry}-0", *kept) for entry, kept in run.updates.items() if entry <= run.last_read]

    def merger_state(self) -> str:
        with self._opened() as run:
            return run.state

    def outer(self, fragment: int) -> bytes:
        with self._opened() as run:
            return run.outer.get(fragment, b"")

    def announce(self, epoch: int, event: Call | Resume) -> None:
        with self._fenced(epoch) as run:
            run.tell(event)

    def refuse(self, epoch: int, refusals: Sequence[tuple[str, Refusal]]) -> None:
        with self._fenced(epoch) as run:
            for entry, refusal in refusals:
                if run.updates.pop(int(entry.split("-")[0]), None) is not None:
                    run.books["refused"] += 1
                    run.books["refused_tokens"] += refusal.tokens
                    run.tell(refusal)

    def commit(self, epoch: int, commit: Commit) -> None:
        with self._fenced(epoch) as run:
            for entry in commit.entries:
                del run.updates[int(entry.split("-")[0])]
            run.fragments[commit.snapshot.fragment] = (commit.snapshot, commit.payload)
            run.outer[commit.snapshot.fragment] = commit.outer
            run.state = commit.state
            run.tape.append(commit.tape)
            run.tell(commit.snapshot)
            run.books["merged"] += len(commit.entries)
            run.books["merged_tokens"] += commit.tokens

    def close(self) -> None:
        pass
