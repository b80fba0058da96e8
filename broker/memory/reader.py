"""The client of readers and operators for a broker in memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

from archipelago.broker.errors import WireError
from archipelago.broker.manifest import Manifest
from archipelago.broker.memory.state import MemoryState, key_of
from archipelago.broker.messages import (
    Books,
    Evaluation,
    Event,
    Note,
    Pending,
    Presence,
    Refusal,
    Snapshot,
    TapeEntry,
    from_fields,
    to_fields,
)
from archipelago.broker.redis.keys import is_name
from archipelago.broker.transport import (
    NOTES_KEPT,
    REFUSALS_AMONG,
    STANDBY_SECONDS,
    START,
    Arrived,
    Memory,
    Standby,
    unwatched,
)


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
            return run.manifest.whole or run.manifest if self._shard is None else run.manifest

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

    def fragment(self, fragment: int, arrived: Arrived = unwatched) -> tuple[Snapshot, bytes]:
        with self._broker.opened(self._run) as run:
            if fragment not in run.fragments:
                raise WireError(f"fragment {fragment} is missing", code="wire.fragment")
            snapshot, payload = run.fragments[fragment]
            return snapshot, payload

    def heads(self) -> list[Snapshot | None]:
        with self._broker.opened(self._run) as run:
            return [run.heads.get(p) for p in range(len(run.manifest.fragments))]

    def difference(self, fragment: int, version: int, arrived: Arrived = unwatched) -> bytes | None:
        with self._broker.opened(self._run) as run:
            return run.differences.get((fragment, version))

    def presences(self) -> list[Presence]:
        now = self._broker.clock()
        with self._broker.opened(self._run) as run:
            return [Presence(beat, now - seen) for _, (beat, seen) in sorted(run.islands.items())]

    def unreadable(self) -> dict[str, str]:
        return {}

    def books(self) -> Books:
        with self._broker.opened(self._run) as run:
            return run.accounts()

    def backlog(self) -> int:
        with self._broker.opened(self._run) as run:
            return len(run.updates) - len(run.kept)

    def pending(self) -> Pending:
        with self._broker.opened(self._run) as run:
            books = run.accounts()
            tokens = books.published_tokens - books.merged_tokens - books.refused_tokens
            return Pending(len(run.waiting()), tokens)

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
            run.notes = [*run.notes, from_fields(Note, to_fields(note))][-NOTES_KEPT:]

    def notes(self, count: int) -> list[Note]:
        with self._broker.opened(self._run) as run:
            return run.notes[-count:] if count else []

    def memory(self) -> Memory:
        with self._broker.opened(self._run) as run:
            return Memory(sum(len(entry.payload) for entry in run.updates.values()), 0)

    def merger_state(self) -> str:
        with self._broker.opened(self._run) as run:
            return run.state

    def is_served(self) -> bool:
        with self._broker.opened(self._run) as run:
            holder, until = run.lease
            return bool(holder) and until > self._broker.clock()

    def merger_status(self) -> None:
        return None

    def standbys(self) -> list[Standby]:
        now = self._broker.clock()
        with self._broker.opened(self._run) as run:
            ages = [Standby(name, now - at) for name, at in sorted(run.standbys.items())]
        return [standby for standby in ages if standby.age_seconds < STANDBY_SECONDS]
