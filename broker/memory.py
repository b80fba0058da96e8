"""A transport in dictionaries: several connections to one `MemoryBroker` behave as several to one Redis."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

from archipelago.broker.control import fields_in, is_expelled, island_field
from archipelago.broker.corpus_shards import Place, choose
from archipelago.broker.errors import BrokerError, FencedError, RunExistsError, UnknownRunError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import (
    Actions,
    Books,
    Call,
    Contribution,
    Evaluation,
    Event,
    Handover,
    Heartbeat,
    Marker,
    Note,
    Pending,
    Presence,
    Refusal,
    Resume,
    Snapshot,
    TapeEntry,
    from_fields,
    to_fields,
)
from archipelago.broker.transport import (
    DIFFERENCES_KEPT,
    NOTES_KEPT,
    REFUSALS_AMONG,
    START,
    Commit,
    Delivery,
    Image,
    Memory,
)


@dataclass
class _Run:
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
    asks: dict[str, str] = field(default_factory=dict)
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

    def let_go(self, entries: Sequence[str]) -> None:
        """Deletes merged entries."""
        for number in map(_number, entries):
            if number in self.kept:
                self.kept.remove(number)
                del self.updates[number]
        self.books["kept"] = len(self.kept)


class MemoryBroker:
    """What the connections share. `clock` gives seconds, and is what leases and ages are measured with."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.instance = ""
        """a test that makes it forget something changes this too"""
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
        self._holder, self._epoch = "", 0

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

    def instance(self) -> str:
        return self._broker.instance

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

    def restore(self, image: Image) -> None:
        with self._broker.changed:
            self.create(image.manifest, image.snapshots)
            run = self._broker.runs[self.run]
            run.outer = {p: data for p, data in enumerate(image.outers) if data}
            run.state, run.tape, run.restored = image.state, list(image.tape), (image.number, image.round)
            run.control = fields_in(image.state)
            run.evaluations, run.cursors = list(image.evaluations), dict(image.cursors)
            for contribution, payload in image.pending:
                run.add(contribution, payload)
            run.books = asdict(image.balanced_books)

    def publish(self, contribution: Contribution, payload: bytes, actions: Actions | None = None) -> str:
        with self._opened() as run:
            number = run.add(from_fields(Contribution, to_fields(contribution)), payload)  # as a wire would do it
            run.books["bytes_up"] += len(payload)
        if actions is not None:
            self.record_actions(actions)
        return f"{number}-0"

    def holds(self, entry: str) -> bool:
        with self._opened() as run:
            return _number(entry) in run.updates

    def record_actions(self, actions: Actions) -> None:
        with self._opened() as run:
            run.actions.append((run.next_actions, actions))
            run.next_actions += 1

    def heartbeat(self, heartbeat: Heartbeat) -> str:
        with self._opened() as run:
            run.islands[heartbeat.island] = (heartbeat, self._broker.clock())
            return run.control.get(island_field(heartbeat.island), "")

    def lease_shard(self, shards: Sequence[str], me: str) -> Place | None:
        with self._opened() as run:
            if is_expelled(run.control, me):
                return None
            busy = {f"{c.island}/{c.incarnation}" for c, _ in run.waiting().values()}
            live = self._live(run) | busy
            chosen = choose(shards, run.cursors, run.holders, me, lambda holder: holder not in live)
            if chosen is None:
                return None
            run.holders[chosen] = me
            return Place(chosen, *run.cursors.get(chosen, (0, 0)))

    def _live(self, run: _Run) -> set[str]:
        now = self._broker.clock()
        beats = [(Presence(beat, now - seen), beat) for beat, seen in run.islands.values()]
        live = {f"{beat.island}/{beat.incarnation}" for presence, beat in beats if presence.is_live}
        return {who for who in live if not is_expelled(run.control, who)}

    def leased(self, shards: Sequence[str], me: str) -> frozenset[str]:
        with self._opened() as run:
            return frozenset(shard for shard in shards if run.holders.get(shard) == me)

    def register_corpus(self, name: str, digest: str) -> str:
        with self._opened() as run:
            return run.corpora.setdefault(name, digest)

    def claim_return(self, island: str) -> tuple[int, int] | None:
        with self._opened() as run:
            if run.restored is None or island in run.returned:
                return None
            run.returned.add(island)
            return run.restored

    def memory(self) -> Memory:
        with self._opened() as run:
            return Memory(sum(len(payload) for _, payload in run.updates.values()), 0)

    def ask(self, who: str) -> None:
        with self._opened() as run:
            run.asks.setdefault(who, "")

    def asks(self) -> list[str]:
        with self._opened() as run:
            live = self._live(run)
            return sorted(who for who, giver in run.asks.items() if not giver and who in live)

    def promise(self, who: str, giver: str) -> bool:
        with self._opened() as run:
            if run.asks.get(who) != "":
                return False
            run.asks[who] = giver
            return True

    def hand_over(self, who: str, handover: Handover, payload: bytes) -> None:
        with self._opened() as run:
            if who in run.asks:
                run.handovers[who] = (handover, payload)

    def handed_over(self, who: str) -> tuple[Handover, bytes] | None:
        with self._opened() as run:
            return run.handovers.get(who)

    def withdraw(self, who: str) -> None:
        with self._opened() as run:
            run.asks.pop(who, None)
            run.handovers.pop(who, None)

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

    def difference(self, fragment: int, version: int) -> bytes | None:
        with self._opened() as run:
            found = run.differences.get((fragment, version))
            run.books["bytes_down"] += len(found or b"")
            return found

    def presences(self) -> list[Presence]:
        now = self._broker.clock()
        with self._opened() as run:
            return [Presence(beat, now - seen) for _, (beat, seen) in sorted(run.islands.items())]

    def books(self) -> Books:
        with self._opened() as run:
            return Books(**run.books)

    def backlog(self) -> int:
        with self._opened() as run:
            return len(run.updates) - len(run.kept)

    def pending(self) -> Pending:
        with self._opened() as run:
            waiting = run.waiting().values()
            return Pending(len(waiting), sum(contribution.tokens for contribution, _ in waiting))

    def cursors(self) -> dict[str, tuple[int, int]]:
        with self._opened() as run:
            return dict(run.cursors)

    def tape(self, count: int) -> list[TapeEntry]:
        with self._opened() as run:
            return run.tape[-count:] if count else []

    def evaluations(self) -> list[Evaluation]:
        with self._opened() as run:
            return list(run.evaluations)

    def evaluated(self, evaluation: Evaluation) -> None:
        with self._opened() as run:
            run.evaluations.append(evaluation)

    def refusals(self, count: int) -> list[tuple[float, Refusal]]:
        with self._opened() as run:
            newest = run.events[-REFUSALS_AMONG:]
            found = [(run.refused_at[number], event) for number, event in newest if isinstance(event, Refusal)]
        return found[-count:] if count else []

    def control(self) -> dict[str, str]:
        with self._opened() as run:
            return dict(run.control)

    def steer(self, changes: Mapping[str, str]) -> None:
        with self._opened() as run:
            run.control = {name: value for name, value in (run.control | dict(changes)).items() if value}

    def note(self, note: Note) -> None:
        with self._opened() as run:
            run.notes = [*run.notes, from_fields(Note, to_fields(note))][-NOTES_KEPT:]

    def notes(self, count: int) -> list[Note]:
        with self._opened() as run:
            return run.notes[-count:] if count else []

    def acquire(self, holder: str, seconds: float) -> int | None:
        now = self._broker.clock()
        with self._opened() as run:
            owner, until = run.lease
            if owner != holder and until > now:
                return None
            run.lease = (holder, now + seconds)
            self._holder, self._epoch = holder, max(self._epoch, run.epoch[0]) + 1
            run.epoch = (self._epoch, holder)
            return self._epoch

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

    def unacknowledged(self, after: str = START, count: int = 1 << 16) -> list[Delivery]:
        with self._opened() as run:
            read = [(n, w) for n, w in run.waiting().items() if _number(after) < n <= run.last_read]
            return [Delivery(f"{n}-0", *waiting) for n, waiting in read[:count]]

    def merger_state(self) -> str:
        with self._opened() as run:
            return run.state

    def outer(self, fragment: int) -> bytes:
        with self._opened() as run:
            return run.outer.get(fragment, b"")

    def announce(self, epoch: int, event: Call | Resume | Marker) -> None:
        with self._fenced(epoch) as run:
            run.tell(event)

    def refuse(self, epoch: int, refusals: Sequence[tuple[str, Refusal]]) -> None:
        with self._fenced(epoch) as run:
            for entry, refusal in refusals:
                if _number(entry) not in run.kept and run.updates.pop(_number(entry), None) is not None:
                    run.books["refused"] += 1
                    run.books["refused_tokens"] += refusal.tokens
                    run.refused_at[run.next_event] = self._broker.clock()
                    run.tell(refusal)

    def commit(self, epoch: int, commit: Commit) -> None:
        with self._fenced(epoch) as run:
            last = max(snapshot.round for snapshot, _ in run.fragments.values())
            if commit.after_round not in (None, last):
                raise BrokerError(f"round {last} was closed last, not {commit.after_round}", "Begin from there.")
            run.kept |= {number for number in map(_number, commit.entries) if number in run.updates}
            run.let_go(commit.trim)
            for shard, cursor in commit.cursors.items():
                ended = cursor[0] > run.cursors.get(shard, (0, 0))[0]
                run.cursors[shard] = cursor
                if ended:
                    run.holders.pop(shard, None)
            run.fragments[commit.snapshot.fragment] = (commit.snapshot, commit.payload)
            run.outer[commit.snapshot.fragment] = commit.outer
            if commit.difference:
                run.differences[commit.snapshot.fragment, commit.snapshot.version] = commit.difference
                run.differences.pop((commit.snapshot.fragment, commit.snapshot.version - DIFFERENCES_KEPT), None)
            run.state = commit.state
            run.tape.append(commit.tape)
            run.tell(commit.snapshot)
            run.books["merged"] += len(commit.entries)
            run.books["merged_tokens"] += commit.tokens

    def read(self, entries: Sequence[str]) -> list[Delivery]:
        gone = "the entry is gone"
        with self._opened() as run:
            found = [(entry, run.updates.get(_number(entry))) for entry in entries]
            return [Delivery(e, *kept) if kept else Delivery(e, None, b"", gone) for e, kept in found]

    def trim(self, epoch: int, entries: Sequence[str], actions_until: str = START) -> None:
        with self._fenced(epoch) as run:
            run.let_go(entries)
            run.actions = [(number, actions) for number, actions in run.actions if number > _number(actions_until)]

    def actions(self, after: str, count: int = 1024) -> list[tuple[str, Actions]]:
        with self._opened() as run:
            return [(f"{number}-0", actions) for number, actions in run.actions if number > _number(after)][:count]

    def close(self) -> None:
        pass


def _number(entry: str) -> int:
    return int(entry.split("-")[0])
