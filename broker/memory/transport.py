"""A broker in dictionaries, for tests and virtual time. Its connections behave like connections to one Redis."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict

from archipelago.broker.commits import START, Image
from archipelago.broker.control import fields_in, heard_by, is_expelled
from archipelago.broker.errors import RunExistsError, WireError
from archipelago.broker.manifest import Manifest
from archipelago.broker.memory.merger import MemoryMerger
from archipelago.broker.memory.state import MemoryRun, MemoryState, key_of
from archipelago.broker.messages import (
    Contribution,
    Counters,
    Evaluation,
    Event,
    Handover,
    Note,
    Refusal,
    Snapshot,
    TapeEntry,
    from_fields,
    to_fields,
)
from archipelago.broker.presence import Heartbeat, NameClaim, Presence, newest_claim, next_claim
from archipelago.broker.ranges import ReadPosition, choose
from archipelago.broker.redis.keys import is_name
from archipelago.broker.transport import (
    NOTES_EACH,
    NOTES_KEPT,
    REFUSALS_AMONG,
    STANDBY_SECONDS,
    Around,
    Memory,
    MergerStatus,
    Standby,
)


class MemoryBroker(MemoryState):
    """A broker in memory, which its connections share."""

    def connect(self, run: str) -> MemoryTransport:
        return MemoryTransport(self, run)


class MemoryTransport:
    """See `broker.transport.Transport`."""

    def __init__(self, broker: MemoryState, run: str, shard: int | None = None) -> None:
        self.run = run
        self._broker = broker
        self._key = key_of(run, shard)
        self.reader = MemoryReader(broker, run, shard)
        self.island = MemoryIsland(broker, self._key)
        self.merger = MemoryMerger(broker, self._key, self.reader)

    def of_shard(self, shard: int) -> MemoryTransport:
        return MemoryTransport(self._broker, self.run, shard)

    def create(self, manifest: Manifest, snapshots: Sequence[tuple[Snapshot, bytes]]) -> None:
        with self._broker.changed:
            if self._key in self._broker.runs:
                raise RunExistsError(f"a run {self.run!r} is here already", "Choose another name.")
            self._broker.runs[self._key] = MemoryRun(
                Manifest.from_fields(manifest.to_fields()),
                {s.fragment: (s, payload) for s, payload in snapshots},
                {s.fragment: s for s, _ in snapshots},
            )

    def restore(self, image: Image) -> None:
        with self._broker.changed:
            packed = [full.packed(image.manifest.config.wire) for full in image.fragments]
            self.create(image.manifest, [(each.snapshot, each.payload) for each in packed])
            run = self._broker.runs[self._key]
            run.outer = {each.snapshot.fragment: each.outer for each in packed if each.outer}
            run.state, run.tape = image.state, list(image.tape)
            run.control = fields_in(image.state)
            run.evaluations, run.cursors = list(image.evaluations), dict(image.cursors)
            for contribution, payload in image.pending:
                run.add(contribution, payload)
            run.counters = asdict(image.counters)

    def close(self) -> None:
        pass


class MemoryReader:
    """See `broker.transport.ReaderClient`."""

    def __init__(self, broker: MemoryState, run: str, shard: int | None = None) -> None:
        self._broker, self._run, self._shard = broker, key_of(run, shard), shard

    def instance(self) -> str:
        return self._broker.instance

    def runs(self) -> list[str]:
        with self._broker.changed:
            return sorted(name for name in self._broker.runs if is_name(name))  # those of shards are no names

    def manifest(self) -> Manifest:
        with self._broker.opened(self._run) as run:
            return run.manifest.of_shard(self._shard)

    def uid(self) -> str | None:
        with self._broker.changed:
            run = self._broker.runs.get(self._run)
            return run.manifest.uid if run else None

    def last_event(self) -> str:
        with self._broker.opened(self._run) as run:
            return f"{run.events[-1][0]}-0" if run.events else START

    def events(self, after: str, block_seconds: float, count: int = 256) -> list[tuple[str, Event]]:
        last = int(after.split("-")[0])
        with self._broker.opened(self._run) as run:
            if block_seconds > 0:
                self._broker.changed.wait_for(lambda: run.next_event > last + 1, timeout=block_seconds)
            first = bisect_right(run.events, last, key=lambda numbered: numbered[0])
            return [(f"{number}-0", event) for number, event in run.events[first : first + count]]

    def fragment(self, fragment: int) -> tuple[Snapshot, bytes]:
        with self._broker.opened(self._run) as run:
            if fragment not in run.fragments:
                raise WireError(f"fragment {fragment} is missing", code="wire.fragment")
            snapshot, payload = run.fragments[fragment]
            return snapshot, payload

    def heads(self) -> list[Snapshot | None]:
        with self._broker.opened(self._run) as run:
            return [run.heads.get(p) for p in range(len(run.manifest.fragments))]

    def difference(self, fragment: int, version: int) -> bytes | None:
        with self._broker.opened(self._run) as run:
            return run.differences.get((fragment, version))

    def presences(self) -> list[Presence]:
        now = self._broker.clock()
        with self._broker.opened(self._run) as run:
            return [Presence(beat, now - seen) for _, (beat, seen) in sorted(run.islands.items())]

    def unreadable(self) -> dict[str, str]:
        return {}

    def counters(self) -> Counters:
        with self._broker.opened(self._run) as run:
            return run.accounts()

    def backlog(self) -> int:
        with self._broker.opened(self._run) as run:
            return len(run.updates)

    def cursors(self) -> dict[str, tuple[int, int]]:
        with self._broker.opened(self._run) as run:
            return dict(run.cursors)

    def tape(self, count: int) -> list[TapeEntry]:
        with self._broker.opened(self._run) as run:
            return run.tape[-count:] if count else []

    def evaluations(self) -> list[Evaluation]:
        with self._broker.opened(self._run) as run:
            return list(run.evaluations)

    def record_evaluation(self, evaluation: Evaluation) -> None:
        with self._broker.opened(self._run) as run:
            run.evaluations.append(evaluation)

    def refusals(self, count: int) -> list[tuple[float, Refusal]]:
        with self._broker.opened(self._run) as run:
            newest = run.events[-REFUSALS_AMONG:]
            found = [(run.refused_at[number], event) for number, event in newest if isinstance(event, Refusal)]
        return found[-count:] if count else []

    def control(self) -> dict[str, str]:
        with self._broker.opened(self._run) as run:
            return dict(run.control)

    def steer(self, changes: Mapping[str, str]) -> None:
        with self._broker.opened(self._run) as run:
            run.control = {name: value for name, value in (run.control | dict(changes)).items() if value}

    def note(self, note: Note) -> None:
        with self._broker.opened(self._run) as run:
            own = [each for each in run.notes if each.who == note.who != "merger"]
            kept = [each for each in run.notes if each not in own[: 1 - NOTES_EACH]]
            run.notes = [*kept, from_fields(Note, to_fields(note))][-NOTES_KEPT:]

    def notes(self, count: int) -> list[Note]:
        with self._broker.opened(self._run) as run:
            return run.notes[-count:] if count else []

    def memory(self) -> Memory:
        with self._broker.opened(self._run) as run:
            return Memory(sum(len(entry.payload) for entry in run.updates.values()), 0)

    def refuses_writes(self) -> tuple[str, ...]:
        return ()

    def merger_state(self) -> str:
        with self._broker.opened(self._run) as run:
            return run.state

    def is_served(self) -> bool:
        with self._broker.opened(self._run) as run:
            return run.is_served(self._broker.clock())

    def clock_ahead(self) -> float:
        return 0.0

    def merger_status(self) -> MergerStatus:
        now = self._broker.clock()
        with self._broker.opened(self._run) as run:
            holder, until = run.lease if run.is_served(now) else ("", now)
            closed_at = (run.tape[-1].unix_seconds if run.tape else 0.0) or now  # 0: it was not recorded
            return MergerStatus(holder, run.epoch[0], until - now, max(0.0, now - closed_at))

    def standbys(self) -> list[Standby]:
        now = self._broker.clock()
        with self._broker.opened(self._run) as run:
            ages = [Standby(name, now - at) for name, at in sorted(run.standbys.items())]
        return [standby for standby in ages if standby.age_seconds < STANDBY_SECONDS]


class MemoryIsland:
    """See `broker.transport.IslandClient`."""

    def __init__(self, broker: MemoryState, run: str) -> None:
        self._broker, self._run = broker, run

    def publish(self, contribution: Contribution, payload: bytes) -> str:
        with self._broker.opened(self._run) as run:
            received = from_fields(Contribution, to_fields(contribution))  # as a server would receive it
            return run.add(received, payload)

    def holds(self, entry: str) -> bool:
        with self._broker.opened(self._run) as run:
            return entry in run.updates

    def look_around(self, island: str, claim: NameClaim | None) -> Around:
        with self._broker.opened(self._run) as run:
            if claim is not None:
                claim = run.names[island] = newest_claim(claim, run.names.get(island))
            requests = {name: run.control[name] for name in heard_by(island) if name in run.control}
            return Around(claim, run.manifest.uid, requests)

    def heartbeat(self, heartbeat: Heartbeat) -> bool:
        with self._broker.opened(self._run) as run:
            run.islands[heartbeat.island] = (heartbeat, self._broker.clock())
            return run.is_served(self._broker.clock())

    def claim_name(self, island: str, incarnation: str) -> NameClaim:
        with self._broker.opened(self._run) as run:
            now_ms = max(0, int(1000 * self._broker.clock()))
            claim = run.names[island] = next_claim(run.names.get(island), incarnation, now_ms)
            return claim

    def lease_range(self, ranges: Sequence[str], me: str, reading: Collection[str] = ()) -> ReadPosition | None:
        with self._broker.opened(self._run) as run:
            if is_expelled(run.control, me):
                return None
            busy = {f"{e.sender}/{e.contribution.incarnation}" for e in run.updates.values()}
            live = run.live(self._broker.clock()) | busy
            chosen = choose(ranges, run.cursors, run.holders, me, lambda holder: holder not in live, reading)
            if chosen is None:
                return None
            run.holders[chosen] = me
            return ReadPosition(chosen, *run.cursors.get(chosen, (0, 0)))

    def leased(self, ranges: Sequence[str], me: str) -> frozenset[str]:
        with self._broker.opened(self._run) as run:
            return frozenset(name for name in ranges if run.holders.get(name) == me)

    def lease_evaluation(self, me: str, seconds: float) -> bool:
        with self._broker.opened(self._run) as run:
            now = self._broker.clock()
            holder, until = run.evaluator
            if holder != me and now < until:
                return False
            run.evaluator = (me, now + seconds)
            return seconds > 0.0

    def register_corpus(self, name: str, digest: str) -> str:
        with self._broker.opened(self._run) as run:
            return run.corpora.setdefault(name, digest)

    def request_state(self, who: str) -> None:
        with self._broker.opened(self._run) as run:
            run.requests.setdefault(who, "")

    def open_requests(self, me: str = "") -> list[str]:
        with self._broker.opened(self._run) as run:
            live = run.live(self._broker.clock())
            return sorted(who for who, giver in run.requests.items() if giver in ("", me) and who in live)

    def promise_answer(self, who: str, giver: str) -> bool:
        with self._broker.opened(self._run) as run:
            if run.requests.get(who) not in ("", giver):
                return False
            run.requests[who] = giver
            return True

    def hand_over(self, who: str, handover: Handover, payload: bytes) -> None:
        with self._broker.opened(self._run) as run:
            if who in run.requests:
                run.handovers[who] = (handover, payload)

    def handed_over(self, who: str) -> tuple[Handover, bytes] | None:
        with self._broker.opened(self._run) as run:
            return run.handovers.get(who)

    def withdraw_request(self, who: str) -> None:
        with self._broker.opened(self._run) as run:
            run.requests.pop(who, None)
            run.handovers.pop(who, None)
