"""A reader of a whole run, from the readers of its shards."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Protocol, TypeVar, cast

from archipelago.broker.errors import UnreachableError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import (
    COUNT_MAX,
    Counters,
    Event,
    Note,
    Refusal,
    Snapshot,
    TapeEntry,
)
from archipelago.broker.transport import Memory, MergerStatus, ReaderClient, Standby

#: Of more things than this, messages say only how many there are.
NUMBERS_MAX = 12
#: How long a display waits for further shards. A server that is alive may be slow for a second or two.
PATIENCE_SECONDS = 3.0
#: How long a merger waits for another server, or for a bucket. It renews its lease only after that.
ANSWER_SECONDS = 1.0
REMEDY = "It is asked again."

T = TypeVar("T")


class Spawn(Protocol):
    """Runs a job beside its caller. The result of the job, or its error, is in the future."""

    def __call__(self, job: Callable[[], T], /) -> Future[T]: ...


def on_a_thread(job: Callable[[], T], /, name: str | None = None) -> Future[T]:
    """Run a job on a thread of its own, of that name, which may hang for as long as a socket waits."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(job())
        except Exception as error:  # noqa: BLE001 - the thread that takes the result raises it
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class Bounded:
    """Calls what may hang, such as a server, and waits at most ANSWER_SECONDS for the answer.

    If the answer takes longer, further calls raise UnreachableError at once until it has come. Only a call that asks
    `about` the same waits for it, and returns it. Threads call one after the other.
    """

    def __init__(self, spawn: Spawn = on_a_thread, seconds: float = ANSWER_SECONDS) -> None:
        self._spawn, self._seconds, self._lock = spawn, seconds, threading.Lock()
        self._last: tuple[object, Future[Any]] | None = None

    def __call__(self, read: Callable[[], T], about: object = None) -> T:
        """Return what `read` returns, or raise its error. Raises UnreachableError if that takes longer."""
        with self._lock:
            before, answer = self._last or (None, None)
            if answer is None or about is None or about != before:
                if answer is not None and not answer.done():
                    raise UnreachableError("its server has not answered yet", REMEDY)
                answer = self._spawn(read)
                self._last = about, answer
            if wait([answer], self._seconds).not_done:
                raise UnreachableError(f"its server has not answered for {self._seconds:g} s", REMEDY)
            self._last = None
        found: T = answer.result()
        return found


class BoundedReader:
    """A reader of one shard, of which each call is `Bounded`."""

    def __init__(self, reader: ReaderClient, spawn: Spawn = on_a_thread, seconds: float = ANSWER_SECONDS) -> None:
        self._reader, self._bounded = reader, Bounded(spawn, seconds)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._reader, name)
        return lambda *args: self._bounded(lambda: method(*args))


class ShardedReader:
    """See `broker.transport.ReaderClient`.

    Values that belong to the run (islands, cursors, evaluations) are read from shard 0. Requests and settings are
    written to every shard, because each merger reads its own, and one that a single shard has counts. Notes and the
    tape are put in the order of their times.
    """

    def __init__(self, readers: Sequence[ReaderClient], manifest: Manifest) -> None:
        first = readers[0]
        self._readers, self._primary, self._layout = readers, first, manifest.shard_layout
        self.runs, self.uid, self.presences, self.cursors = first.runs, first.uid, first.presences, first.cursors
        self.evaluations, self.record_evaluation = first.evaluations, first.record_evaluation
        self.note, self.clock_ahead = first.note, first.clock_ahead
        #: The shards that cannot be reached and are left out, each with the reason. Only `DisplayReader` has any.
        self.away: dict[int, str] = {}

    def _each(self, read: Callable[[ReaderClient], T]) -> dict[int, T]:
        """Return what is read from each shard, by its number. `DisplayReader` leaves out those that are away."""
        return {shard: read(reader) for shard, reader in enumerate(self._readers)}

    def _of(self, fragment: int) -> ReaderClient:
        """Return the reader of the shard that has the fragment."""
        return self._readers[self._layout.shard_of(fragment + 1)]

    def manifest(self) -> Manifest:
        return self._primary.manifest().of_shard(None)

    def instance(self) -> str:
        return " ".join(reader.instance() for reader in self._readers)

    def last_event(self) -> str:
        raise NotImplementedError("islands read the announcements of each shard")

    def events(self, after: str, block_seconds: float, count: int = 256) -> list[tuple[str, Event]]:
        raise NotImplementedError("islands read the announcements of each shard")

    def fragment(self, fragment: int) -> tuple[Snapshot, bytes]:
        return self._of(fragment).fragment(fragment)

    def heads(self) -> list[Snapshot | None]:
        of_shards = [reader.heads() for reader in self._readers]
        return [next((head for head in heads if head), None) for heads in zip(*of_shards, strict=True)]

    def difference(self, fragment: int, version: int) -> bytes | None:
        return self._of(fragment).difference(fragment, version)

    def unreadable(self) -> dict[str, str]:
        return {
            f"{what} of shard {shard}": why
            for shard, found in self._each(lambda reader: reader.unreadable()).items()
            for what, why in found.items()
        }

    def counters(self) -> Counters:
        found = [asdict(each) for each in self._each(lambda reader: reader.counters()).values()]
        return Counters(**{name: min(COUNT_MAX, sum(each[name] for each in found)) for name in found[0]})

    def backlog(self) -> int:
        return sum(self._each(lambda reader: reader.backlog()).values())

    def tape(self, count: int) -> list[TapeEntry]:
        found: list[tuple[float, TapeEntry]] = []
        for entries in self._each(lambda reader: reader.tape(count)).values():
            at = 0.0
            for entry in entries:
                at = max(at, entry.unix_seconds)  # the clock of a Redis that took over may be behind
                found.append((at, entry))
        found.sort(key=lambda each: (each[0], each[1].round))
        return [entry for _, entry in found][-count:] if count else []

    def refusals(self, count: int) -> list[tuple[float, Refusal]]:
        found = [each for refusals in self._each(lambda reader: reader.refusals(count)).values() for each in refusals]
        return sorted(found, key=lambda each: each[0])[-count:] if count else []

    def control(self) -> dict[str, str]:
        every = self._each(lambda reader: reader.control())
        return {name: value for shard in sorted(every, reverse=True) for name, value in every[shard].items()}

    def steer(self, changes: Mapping[str, str]) -> None:
        for reader in self._readers:  # one that is away keeps its settings, so nothing is changed then
            reader.control()
        for reader in self._readers:
            reader.steer(changes)

    def notes(self, count: int) -> list[Note]:
        found = [note for notes in self._each(lambda reader: reader.notes(count)).values() for note in notes]
        return sorted(found, key=lambda note: note.unix_seconds)[-count:] if count else []

    def memory(self) -> Memory:
        answers = self._each(lambda reader: (reader.instance(), reader.memory())).values()
        found = dict(answers)  # shards may share a server
        limits = [memory.limit for memory in found.values()]
        return Memory(
            sum(memory.used for memory in found.values()),
            sum(limits) if all(limits) else 0,
            sum(memory.machine for memory in found.values()),
        )

    def refuses_writes(self) -> tuple[str, ...]:
        return next(filter(None, self._each(lambda reader: reader.refuses_writes()).values()), ())

    def merger_state(self) -> str:
        return combined_state(self._each(lambda reader: reader.merger_state()))

    def is_served(self) -> bool:
        """Return whether a merger serves any shard. An island trains on as long as one does.

        For islands, a further shard that cannot be reached is not served. An error would keep them from the others.
        While shard 0 is served, the others are not asked, because one that hangs would keep the island's heartbeat.
        """
        if self._primary.is_served():
            return True
        for reader in self._readers[1:]:
            with suppress(UnreachableError):
                if reader.is_served():
                    return True
        return False

    def merger_status(self) -> MergerStatus:
        found = self._each(lambda reader: reader.merger_status())
        away = MergerStatus(is_away=True)
        return combined_status([found.get(shard, away) for shard in range(len(self._readers))])

    def standbys(self) -> list[Standby]:
        """Return the mergers that serve no shard and wait for one."""
        found = self._each(lambda reader: (reader.merger_status(), reader.standbys())).values()
        serving = {status.holder for status, _ in found}
        waiting = {standby.name: standby for _, standbys in found for standby in standbys}
        return [waiting[name] for name in sorted(waiting) if name not in serving]


def combined_state(states: Mapping[int, str]) -> str:
    """Return shard 0's state with the counts of all shards, from the states of each as JSON; empty before any round."""
    found = {shard: parsed_state(state) for shard, state in states.items()}
    if not any(found.values()):
        return ""
    return json.dumps(
        found[0]
        | {
            "accounts": {island: [tokens] for island, tokens in merged_tokens(*found.values()).items()},
            "tokens": sum(count_in(state.get("tokens")) for state in found.values()),
            "refused": summed(state.get("refused") for state in found.values()),
            "step": min(count_in(state.get("step")) for state in found.values()),
            "covered": min(count_in(state.get("covered")) for state in found.values()),
        }
    )


def combined_status(statuses: Sequence[MergerStatus]) -> MergerStatus:
    """Return who serves the run: all mergers with their shards. The holder is empty while a shard is not served."""
    answered = [status for status in statuses if not status.is_away]
    combined = MergerStatus(
        "",
        max(status.epoch for status in answered),
        min(status.lease_seconds for status in answered),
        max(status.still_seconds for status in answered),
        tuple(statuses),
    )
    return combined if combined.unserved else replace(combined, holder=holders_in_words(combined))


def holders_in_words(status: MergerStatus) -> str:
    """Return the mergers that serve shards. If there are several, each has its shards in parentheses."""
    holders = status.holders
    if len(holders) == 1 and not status.unserved and not status.unreachable:
        return next(iter(holders))
    return ", ".join(f"{holder} ({numbered('shard', shards)})" for holder, shards in holders.items())


def numbered(noun: str, numbers: Sequence[int]) -> str:
    """Return things with their numbers, such as `shard 1` and `fragments 0, 3 and 4`; of many, only how many."""
    if len(numbers) > NUMBERS_MAX:
        return f"{len(numbers)} {noun}s"
    words = [str(number) for number in numbers]
    if len(words) < 2:
        return f"{noun} {words[0]}" if words else f"no {noun}"
    return f"{noun}s {', '.join(words[:-1])} and {words[-1]}"


def merged_tokens(*states: Mapping[str, Any]) -> dict[str, int]:
    """Return the merged tokens of each island, summed over fragments, from the accounts in the states of all shards."""
    every = (accounts for state in states if isinstance(accounts := state.get("accounts"), dict))
    return summed({name: each[0] for name, each in of.items() if isinstance(each, list) and each} for of in every)


def parsed_state(state: str) -> dict[str, Any]:
    """Return what a merger's state says; nothing if it cannot be read."""
    try:
        found = json.loads(state or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def count_in(value: Any) -> int:
    """Return a count in a merger's state; 0 for what cannot be one."""
    return value if isinstance(value, int) and 0 <= value <= COUNT_MAX else 0


def summed(counts: Iterable[Any]) -> dict[str, int]:
    """Return the sums of counts by name, without what cannot be a count."""
    total: Counter[str] = Counter()
    for each in counts:
        total.update({str(name): count_in(value) for name, value in each.items()} if isinstance(each, dict) else {})
    return dict(total)


class DisplayReader(ShardedReader):
    """A `ShardedReader` that leaves out further shards that cannot be reached. Its values are those of the others.

    It is for showing a run. What islands, mergers and operators decide needs all shards, so writes and parameters still
    raise UnreachableError. So does every call if shard 0 cannot be reached, which has what belongs to the run.

    A call asks all shards at the same time, and waits at most `patience_seconds` for those that hang. Until these have
    answered, the next calls leave them out at once.
    """

    def __init__(
        self, readers: Sequence[ReaderClient], manifest: Manifest, patience_seconds: float = PATIENCE_SECONDS
    ) -> None:
        super().__init__(readers, manifest)
        further = [BoundedReader(reader, seconds=patience_seconds) for reader in readers[1:]]
        self._further = [cast(ReaderClient, reader) for reader in further]

    def _each(self, read: Callable[[ReaderClient], T]) -> dict[int, T]:
        answers = [on_a_thread(partial(read, reader)) for reader in self._further]
        found = {0: read(self._primary)}
        for shard, answer in enumerate(answers, 1):
            try:
                found[shard] = answer.result()
                self.away.pop(shard, None)
            except UnreachableError as error:
                self.away[shard] = error.what
        return found
