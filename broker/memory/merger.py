"""The client of a merger for a broker in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from archipelago.broker.commits import (
    DIFFERENCES_KEPT,
    Commit,
    Delivery,
    Renewal,
    Rewrite,
    Seen,
    never_gone,
    sender_of,
)
from archipelago.broker.errors import BrokerError, FencedError, WireError, WithdrawnError
from archipelago.broker.full_state import Compaction
from archipelago.broker.memory.state import MemoryRun, MemoryState
from archipelago.broker.messages import Call, Marker, Refusal, Resume
from archipelago.broker.presence import Presence
from archipelago.broker.transport import ReaderClient


class MemoryMerger:
    """See `broker.commits.MergerClient`."""

    def __init__(self, broker: MemoryState, run: str, reader: ReaderClient) -> None:
        self._reader = reader
        self._broker, self._run = broker, run
        self._holder, self._epoch = "", 0
        self._instance = ""
        self._read: set[str] = set()  # the entries that were returned

    def acquire(self, holder: str, seconds: float, is_gone: Callable[[str], bool] = never_gone) -> int | None:
        now = self._broker.clock()
        with self._broker.opened(self._run) as run:
            owner, until = run.lease
            if owner != holder and until > now and not is_gone(owner):
                return None
            run.lease = (holder, now + seconds)
            self._holder, self._epoch = holder, max(self._epoch, run.epoch[0]) + 1
            self._instance = self._broker.instance
            run.epoch = (self._epoch, holder)
            return self._epoch

    def renew(self, epoch: int, holder: str, seconds: float) -> None:
        with self._fenced(epoch) as run:
            run.lease = (holder, self._broker.clock() + seconds)

    def release(self, epoch: int) -> None:
        with self._fenced(epoch) as run:
            run.lease = ("", float("-inf"))

    def stand_by(self, name: str) -> None:
        now = self._broker.clock()
        with self._broker.opened(self._run) as run:
            run.standbys[name] = now

    def stand_down(self, name: str) -> None:
        with self._broker.opened(self._run) as run:
            run.standbys.pop(name, None)

    def forget(self, epoch: int, presences: Iterable[Presence]) -> None:
        pass  # no run in memory is that long

    def updates(self, block_seconds: float, count: int = 64) -> list[Delivery]:
        with self._broker.opened(self._run) as run:
            if block_seconds > 0:
                self._broker.changed.wait_for(lambda: any(n not in self._read for n in run.updates), block_seconds)
            taken: Counter[str] = Counter()
            out = []
            for name, entry in run.updates.items():
                if name not in self._read and taken[entry.sender] < count:
                    taken[entry.sender] += 1
                    out.append(run.delivery(name, entry))
            self._read.update(delivery.entry for delivery in out)
            return out

    def look(
        self, block_seconds: float, count: int = 64, renewal: Renewal | None = None, *, around: bool = False
    ) -> Seen:
        if renewal:
            self.renew(*renewal)
        if not around:
            return Seen(self.updates(block_seconds, count))
        control, presences = self._reader.control(), self._reader.presences()
        return Seen(self.updates(block_seconds, count), control, presences)

    def rewind(self) -> None:
        self._read.clear()

    def read(self, entries: Sequence[str]) -> list[Delivery]:
        with self._broker.opened(self._run) as run:
            there = run.updates | run.kept
            gone = "the entry is gone"
            return [
                run.delivery(entry, there[entry]) if entry in there else Delivery(entry, None, fault=gone)
                for entry in entries
            ]

    def kept(self) -> list[str]:
        with self._broker.opened(self._run) as run:
            return list(run.kept)

    def outer(self, fragment: int, version: int) -> bytes:
        with self._broker.opened(self._run) as run:
            if fragment not in run.outer:
                raise WireError(f"the outer state of fragment {fragment} is missing")
            return run.outer[fragment]

    def place(self, epoch: int, compaction: Compaction) -> Compaction:
        with self._broker.opened(self._run):
            return compaction

    def compact(self, epoch: int, placed: Any, after_round: int, trim: Sequence[str] = ()) -> None:
        with self._fenced(epoch) as run:
            self._require_round(run, after_round)
            run.compact(placed)
            run.trim(trim)

    def take_up(
        self, epoch: int, resume: Resume, cursors: Mapping[str, tuple[int, int]], counts: Mapping[str, int]
    ) -> None:
        with self._fenced(epoch) as run:
            run.cursors = dict(cursors)
            run.counters |= counts
            run.announce(resume)

    def rewrite(self, epoch: int, rewrite: Rewrite) -> None:
        with self._fenced(epoch) as run:
            for compaction in rewrite.compactions:
                run.compact(compaction)
                run.heads[compaction.snapshot.fragment] = compaction.snapshot
            run.state, run.tape = rewrite.state, run.tape if rewrite.tape is None else list(rewrite.tape)

    def announce(self, epoch: int, *events: Call | Resume | Marker) -> None:
        with self._fenced(epoch) as run:
            for event in events:
                run.announce(event)

    def refuse(
        self,
        epoch: int,
        refusals: Sequence[tuple[str, Refusal]],
        state: str,
        counts: Mapping[str, int],
        quiet: Container[str] = (),
    ) -> None:
        with self._fenced(epoch) as run:
            run.state = state
            run.counters |= counts
            for entry, refusal in refusals:
                run.updates.pop(entry, None)
                if entry not in quiet:
                    run.refused_at[run.next_event] = self._broker.clock()
                    run.announce(refusal)

    def commit(self, epoch: int, commit: Commit) -> None:
        with self._fenced(epoch) as run:
            self._require_round(run, commit.after_round)
            entries = dict.fromkeys(commit.entries)
            for entry in entries:
                if entry not in run.updates:
                    raise WithdrawnError(sender_of(entry))
            run.kept |= {entry: run.updates.pop(entry) for entry in entries}
            run.trim(commit.trim)
            for name, cursor in commit.cursors.items():
                ended = cursor[0] > run.cursors.get(name, (0, 0))[0]
                run.cursors[name] = cursor
                if ended:
                    run.holders.pop(name, None)
            run.heads[commit.snapshot.fragment] = commit.snapshot
            if commit.compaction:
                run.compact(commit.compaction)
            if commit.difference:
                run.differences[commit.snapshot.fragment, commit.snapshot.version] = commit.difference
                run.differences.pop((commit.snapshot.fragment, commit.snapshot.version - DIFFERENCES_KEPT), None)
            run.state = commit.state
            run.tape.append(commit.tape)
            run.announce(commit.snapshot)
            run.counters |= commit.counts

    def trim(self, epoch: int, entries: Sequence[str], after_round: int | None = None) -> None:
        with self._fenced(epoch) as run:
            self._require_round(run, after_round)
            run.trim(entries)

    @contextmanager
    def _fenced(self, epoch: int) -> Iterator[MemoryRun]:
        with self._broker.opened(self._run) as run:
            if run.epoch != (epoch, self._holder):
                raise FencedError(f"this merger's epoch {epoch} was overtaken", "Another merger serves this run.")
            if self._broker.instance != self._instance:  # it may have lost what this merger knows
                raise BrokerError("the broker is another instance than the one of the lease", "Reload the state.")
            yield run

    def _require_round(self, run: MemoryRun, expected: int | None) -> None:
        """Raise BrokerError if that is not the last round."""
        last = max((snapshot.round for snapshot in run.heads.values()), default=0)
        if expected not in (None, last):
            raise BrokerError(f"the last closed round is {last}, not {expected}", "Reload the state.")
