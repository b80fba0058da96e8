"""The client of a merger for a broker in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from archipelago.broker.commits import DIFFERENCES_KEPT, START, Commit, Compaction, Delivery, Repair, never_gone
from archipelago.broker.errors import BrokerError, FencedError
from archipelago.broker.manifest import Manifest
from archipelago.broker.memory.state import MemoryRun, MemoryState, entry_number
from archipelago.broker.messages import Call, Marker, Refusal, Resume


class MemoryMerger:
    """See `broker.commits.MergerClient`."""

    def __init__(self, broker: MemoryState, run: str) -> None:
        self._broker, self._run = broker, run
        self._holder, self._epoch = "", 0
        self._instance = ""

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

    def updates(self, block_seconds: float, count: int = 64) -> list[Delivery]:
        with self._broker.opened(self._run) as run:
            if block_seconds > 0:
                self._broker.changed.wait_for(lambda: any(self._unread(run)), timeout=block_seconds)
            taken: Counter[str] = Counter()
            out = []
            for number in self._unread(run):
                sender = run.updates[number].sender
                if taken[sender] < count:
                    taken[sender] += 1
                    out.append(number)
            for number in out:
                run.last_read[run.updates[number].sender] = number
            return [run.delivery(number) for number in out]

    def unacknowledged(self, after: str = START, count: int = 1 << 16) -> list[Delivery]:
        with self._broker.opened(self._run) as run:
            first = _number(after)
            read = [n for n, e in run.waiting().items() if first < n <= run.last_read.get(e.sender, 0)]
            return [run.delivery(number) for number in read[:count]]

    def read(self, entries: Sequence[str]) -> list[Delivery]:
        with self._broker.opened(self._run) as run:
            found = [(entry, run.found(entry)) for entry in entries]
            gone = "the entry is gone"
            return [Delivery(e, None, b"", gone) if number is None else run.delivery(number) for e, number in found]

    @staticmethod
    def _unread(run: MemoryRun) -> Iterator[int]:
        return (number for number, entry in run.updates.items() if number > run.last_read.get(entry.sender, 0))

    def outer(self, fragment: int, version: int | None = None) -> bytes:
        with self._broker.opened(self._run) as run:
            return run.outer.get(fragment, b"")

    def log(self, fragment: int, version: int) -> str:
        with self._broker.opened(self._run) as run:
            return run.logs.get((fragment, version), "")

    def place(self, epoch: int, compaction: Compaction) -> Compaction:
        with self._broker.opened(self._run):
            return compaction

    def compact(self, epoch: int, placed: Any, after_round: int, trim: Sequence[str] = ()) -> None:
        with self._fenced(epoch) as run:
            self._require_round(run, after_round)
            run.compact(placed)
            run.trim(trim)

    def settled(self) -> list[Delivery]:
        with self._broker.opened(self._run) as run:
            return [run.delivery(number) for number in sorted(run.kept)]

    def acknowledge(self, epoch: int, entries: Sequence[str]) -> None:
        with self._fenced(epoch) as run:
            run.kept |= {number for entry in entries if (number := run.found(entry)) is not None}

    def redeliver(self, epoch: int, entries: Sequence[str]) -> None:
        with self._fenced(epoch) as run:
            run.kept -= {number for entry in entries if (number := run.found(entry)) is not None}

    def put_aside(self, epoch: int, manifest: Manifest) -> list[str]:
        with self._fenced(epoch):
            return []  # a dictionary holds only the types that its annotations name

    def lost(self, closed: int) -> list[str]:
        with self._broker.opened(self._run) as run:
            fragments = range(len(run.manifest.fragments))
            out = [f"{name}:{p}" for p in fragments for name, of in (("fragment", run.fragments), ("head", run.heads))
                   if p not in of]  # fmt: skip
            for p in fragments:
                if p in run.fragments and p in run.heads:
                    full, newest = run.fragments[p][0].version, run.heads[p].version
                    out += [f"outer:{p}"] * (full > 0 and p not in run.outer)
                    for name, of in (("log", run.logs), ("difference", run.differences)):
                        out += [f"{name}:{p}:{v}" for v in range(full + 1, newest + 1) if (p, v) not in of]
            return out + ["state"] * (closed > 0 and not run.state)

    def write_back(self, epoch: int, repair: Repair) -> None:
        with self._fenced(epoch) as run:
            for compaction in repair.compactions:
                run.compact(compaction)
            run.heads |= {s.fragment: s for s in (*(c.snapshot for c in repair.compactions), *repair.heads)}
            run.state = run.state if repair.state is None else repair.state
            run.cursors = run.cursors if repair.cursors is None else dict(repair.cursors)
            run.books |= repair.books

    def announce(self, epoch: int, *events: Call | Resume | Marker) -> None:
        with self._fenced(epoch) as run:
            for event in events:
                run.announce(event)

    def refuse(self, epoch: int, refusals: Sequence[tuple[str, Refusal]], quiet: Container[str] = ()) -> None:
        with self._fenced(epoch) as run:
            for entry, refusal in refusals:
                number = run.found(entry)
                if number is not None and number not in run.kept:
                    run.books["bytes_up"] += len(run.updates.pop(number).payload)
                    run.books["refused"] += 1
                    run.books["refused_tokens"] += refusal.tokens
                    if entry not in quiet:
                        run.refused_at[run.next_event] = self._broker.clock()
                        run.announce(refusal)

    def commit(self, epoch: int, commit: Commit) -> None:
        with self._fenced(epoch) as run:
            self._require_round(run, commit.after_round)
            merged = {number for number in map(run.found, commit.entries) if number is not None}
            run.books["bytes_up"] += sum(len(run.updates[number].payload) for number in merged - run.kept)
            run.kept |= merged
            run.trim(commit.trim)
            for name, cursor in commit.cursors.items():
                ended = cursor[0] > run.cursors.get(name, (0, 0))[0]
                run.cursors[name] = cursor
                if ended:
                    run.holders.pop(name, None)
            run.heads[commit.snapshot.fragment] = commit.snapshot
            if commit.compaction:
                run.compact(commit.compaction)
            else:
                run.logs[commit.snapshot.fragment, commit.snapshot.version] = commit.log
            if commit.difference:
                run.differences[commit.snapshot.fragment, commit.snapshot.version] = commit.difference
                run.differences.pop((commit.snapshot.fragment, commit.snapshot.version - DIFFERENCES_KEPT), None)
            run.state = commit.state
            run.tape.append(commit.tape)
            run.announce(commit.snapshot)
            run.books["merged"] += len(commit.entries)
            run.books["merged_tokens"] += commit.tokens

    def trim(self, epoch: int, entries: Sequence[str], after_round: int | None = None) -> None:
        with self._fenced(epoch) as run:
            self._require_round(run, after_round)
            run.trim(entries)

    @contextmanager
    def _fenced(self, epoch: int) -> Iterator[MemoryRun]:
        with self._broker.opened(self._run) as run:
            if run.epoch != (epoch, self._holder):
                raise FencedError(f"this merger's epoch {epoch} was overtaken", "Another merger serves this run.")
            yield run

    def _require_round(self, run: MemoryRun, expected: int | None) -> None:
        """Raise BrokerError if that is not the last round, or if the broker may have lost what this merger knows."""
        last = max((snapshot.round for snapshot in run.heads.values()), default=0)
        if expected not in (None, last):
            raise BrokerError(f"the last closed round is {last}, not {expected}", "Reload the state.")
        if expected is not None and self._broker.instance != self._instance:
            raise BrokerError("the broker is another instance than the one of the lease", "Reload the state.")


def _number(entry: str) -> int:
    """Return the number in the name of an entry; 0 for START."""
    return entry_number(entry.rpartition("/")[2])
