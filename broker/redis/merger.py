"""A merger's reads and writes in Redis. Each write is one script at the server, fenced by the epoch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Any

from archipelago.broker.commits import (
    Commit,
    Delivery,
    Renewal,
    Rewrite,
    Seen,
    never_gone,
    parse_entry,
    tape_kept,
)
from archipelago.broker.errors import WireError
from archipelago.broker.failpoints import failpoint
from archipelago.broker.full_state import Compaction
from archipelago.broker.messages import KINDS, Call, Event, Marker, Refusal, Resume, TapeEntry, text_fields, to_fields
from archipelago.broker.presence import Presence
from archipelago.broker.redis.connection import checked
from archipelago.broker.redis.keys import Keys
from archipelago.broker.redis.lease import ChangedError, Lease
from archipelago.broker.redis.reader import RedisReader, ahead_of_here
from archipelago.broker.redis.script import Command, Write
from archipelago.broker.redis.stored_run import DIGEST, Compactions, RedisPlaced, hash_of, state_fields
from archipelago.broker.redis.updates import IslandNames, UpdatesConsumer
from archipelago.broker.signing import KnownMembers
from archipelago.broker.transport import STANDBY_SECONDS

EVENTS_KEPT = 20_000
log = logging.getLogger(__name__)
#: A commit compares at most this many digits of digests: those of 64 chunks of 1 MiB. The server hashes these in 0.2 s,
#: and no other client is answered in that time.
DIGITS_MAX = 64 * 40
#: The hash of standbys expires this long after its last change, because standbys that were killed remove nothing.
STANDBYS_SECONDS = 60
#: How long one command waits for entries. Streams of islands that are new since then are read by the next command.
NEW_ISLANDS_SECONDS = 0.25
#: How long fakeredis is not asked again.
POLL_SECONDS = 0.01


class RedisMerger:
    """See `broker.commits.MergerClient`."""

    def __init__(self, reader: RedisReader, members: KnownMembers, names: IslandNames) -> None:
        connection, stored, chunks, updates = reader.connection, reader.stored, reader.chunks, reader.updates
        self._reader, self._members, self._connection, self._names = reader, members, connection, names
        self._redis, self._keys = connection.redis, connection.keys
        self._updates = updates
        self._consumer = UpdatesConsumer(connection, updates)
        #: The merger's state as this process has written it last; None if Redis may hold another one.
        self._written: dict[str, str] | None = None
        self.lease = Lease(connection, stored)
        self.renew, self.release = self.lease.renew, self.lease.release
        self._stamps, self._signing = connection.stamps, connection.signing
        self._clock_ahead = 0.0  # as `ReaderClient.clock_ahead`, when the run was looked at last
        self._compactions = Compactions(connection, chunks)
        self.outer = self._compactions.outer

    def acquire(self, holder: str, seconds: float, is_gone: Callable[[str], bool] = never_gone) -> int | None:
        self._require_key()
        return self.lease.acquire(holder, seconds, is_gone)

    def _require_key(self) -> None:
        """Raise ConfigError if the members of the run sign what they send, and this process cannot sign as a merger."""
        if self._signing.is_on:
            self._signing.signed("state", {})  # a viewer has no key
        else:
            self._members.require_unsigned(afresh=True)

    def stand_by(self, name: str) -> None:
        now_ms, key = self._reader.server_ms(), self._keys.standbys
        silent = [each.name for each in self._reader.known_standbys(now_ms) if each.age_seconds >= STANDBY_SECONDS]
        with self._connection.translated(), self._redis.pipeline(transaction=False) as pipe:
            if silent:
                pipe.hdel(key, *silent)
            pipe.hset(key, name, now_ms)
            pipe.expire(key, STANDBYS_SECONDS)
            pipe.execute()

    def stand_down(self, name: str) -> None:
        with self._connection.translated():
            self._redis.hdel(self._keys.standbys, name)

    def look(
        self, block_seconds: float, count: int = 64, renewal: Renewal | None = None, *, around: bool = False
    ) -> Seen:
        names = self._names.known
        take_presences, is_scanned, control, presences = None, False, None, None
        with self._connection.translated(), self._redis.pipeline(transaction=False) as pipe:
            if renewal:
                self.lease.ask(pipe, renewal)
            if around:
                pipe.time()
                is_scanned = self._names.ask(pipe)
                pipe.hgetall(self._keys.control)
                take_presences = self._reader.ask_presences(pipe, names)
            is_read = self._consumer.ask(pipe, names, count, block_seconds)
            asked_at = self._reader.wall()  # the answer may wait for contributions
            answers = iter(pipe.execute(raise_on_error=False))
            if renewal:
                self.lease.answered(next(answers), renewal)
            if around:
                ((seconds, microseconds),) = checked([next(answers)])
                self._clock_ahead = ahead_of_here(seconds + microseconds / 1e6, asked_at)
            if is_scanned:
                self._names.found(next(answers))
            if take_presences:
                (fields,) = checked([next(answers)])
                control = {} if isinstance(fields, Exception) else text_fields(fields)
                presences = take_presences(answers)
        deliveries = self._consumer.taken(names, next(answers)) if is_read else []
        if around and not is_scanned:
            self._names.all()
        if new := [name for name in self._names.known if name not in names] if around else []:
            presences = [*(presences or []), *self._reader.presences_of(new)]
        if not (deliveries or new or (is_read and self._connection.has_info)):
            # No command waits without a stream, and fakeredis would block its whole pipeline.
            time.sleep(max(0.0, block_seconds if self._connection.has_info else min(block_seconds, POLL_SECONDS)))
        return Seen(deliveries, control, presences)

    def updates(self, block_seconds: float, count: int = 64) -> list[Delivery]:
        deadline = time.monotonic() + block_seconds
        while True:
            self._names.all()
            left = deadline - time.monotonic()
            found = self.look(min(left, NEW_ISLANDS_SECONDS), count).deliveries
            if found or left <= 0:
                return list(found)

    def rewind(self) -> None:
        self._consumer.rewind()
        self._written = None

    def forget(self, epoch: int, presences: Iterable[Presence]) -> None:
        write = Write()
        if self._names.forget(write, presences):
            self.lease.write(epoch, write)

    # -- writes -----------------------------------------------------------------------------------------------------

    def take_up(
        self, epoch: int, resume: Resume, cursors: Mapping[str, tuple[int, int]], counts: Mapping[str, int]
    ) -> None:
        wrong = self._of_other_types()
        deleted: list[Command] = [("DEL", key) for key in (self._keys.data, *wrong)]
        self.lease.write(epoch, Write(*deleted, *self.derived(cursors, counts), self._announced(epoch, resume)))
        self._consumer.read_again(wrong)

    def _of_other_types(self) -> list[str]:
        """Return the keys whose values have another type than the run uses. No command could write to them."""
        kinds = kinds_of(self._keys, self._reader.stored.shape().own_fragments, self._updates.names())
        found = self._connection.tolerant(*(("type", key) for key in kinds))
        wrong = [key for (key, kind), type_ in zip(kinds.items(), found, strict=True)
                 if type_.decode() not in (kind, "none")]  # fmt: skip
        for key in wrong:
            log.warning("%s held another type of value and is deleted", key, extra={"code": "repair.wrong-type"})
        return wrong

    def announce(self, epoch: int, *events: Call | Resume | Marker) -> None:
        failpoint("announce.before")
        self.lease.write(epoch, Write(*(self._announced(epoch, event) for event in events)))
        failpoint("announce.done")

    def refuse(
        self,
        epoch: int,
        refusals: Sequence[tuple[str, Refusal]],
        state: str,
        counts: Mapping[str, int],
        quiet: Container[str] = (),
    ) -> None:
        failpoint("refuse.before")
        write, (_, most) = Write(*self.derived({}, counts)), self._compactions.owned
        for entry, refusal in refusals:
            name, id_ = parse_entry(entry)
            write.commands.append(("remove", self._keys.updates(name), id_, self._keys.chunk_prefix(name), most))
            if entry not in quiet:
                write.commands.append(self._announced(epoch, refusal))
        self._write(epoch, write, state)
        failpoint("refuse.done")

    def place(self, epoch: int, compaction: Compaction) -> RedisPlaced:
        placed = self._compactions.place(epoch, compaction)
        failpoint("compact.placed")
        return placed

    def compact(self, epoch: int, placed: Any, after_round: int, trim: Sequence[str] = ()) -> None:
        write = Write()
        self._compactions.point(write, placed)
        write.commands += self._forgotten(trim)
        self.lease.write(epoch, write, after_round)
        failpoint("compact.done")

    def commit(self, epoch: int, commit: Commit) -> None:
        keys, write = self._keys, Write(*self._compactions.head(epoch, commit.snapshot))
        placed = self.place(epoch, commit.compaction) if commit.compaction else None
        if commit.difference:
            self._compactions.write_difference(write, epoch, commit)
        if placed:
            self._compactions.point(write, placed)
        failpoint("commit.placed")
        tape = replace(commit.tape, unix_seconds=commit.tape.unix_seconds + self._clock_ahead)
        _, most = self._compactions.owned
        digests = {entry: self._updates.digests.pop(entry, "") for entry in dict.fromkeys(commit.entries)}
        is_small = sum(map(len, digests.values())) <= DIGITS_MAX
        for entry, found in digests.items():
            name, id_ = parse_entry(entry)
            own, kept = keys.chunk_prefix(name), keys.kept_prefix(name)
            write.keep(keys.updates(name), id_, keys.kept(entry), own, most, kept, found if is_small else "")
        if commit.entries:
            write.commands.append(("SADD", keys.kept_entries, *commit.entries))
        write.commands += [
            *self._forgotten(commit.trim),
            *self.derived(commit.cursors, commit.counts),
            self.taped(tape, commit.uncovered),
            self._announced(epoch, commit.snapshot),
        ]
        self._write(epoch, write, commit.state, commit.after_round)
        failpoint("commit.done")

    def rewrite(self, epoch: int, rewrite: Rewrite) -> None:
        placed = [self.place(epoch, compaction) for compaction in rewrite.compactions]
        write, self._written = Write(), None
        for each in placed:
            self._compactions.point(write, each)
            write.commands += self._compactions.head(epoch, each.snapshot)
        if rewrite.tape is not None:
            taped = [self.taped(entry, len(rewrite.tape)) for entry in rewrite.tape]
            write.commands += [("DEL", self._keys.tape), *taped]
        self._write(epoch, write, rewrite.state)

    def _write(self, epoch: int, write: Write, state: str, after_round: int | None = None) -> None:
        """Make a write with those fields of the state that have changed. Nobody else writes them meanwhile.

        If someone has damaged the stored state, it is read, so that all of it is written.
        """
        key, fields, others = self._keys.state, state_fields(self._signing, state), write.commands
        written, self._written = self._written, None
        for before in (written, None):
            known = before or text_fields(self._connection.hash_at(key))
            write.expected = [(key, DIGEST, before[DIGEST])] if before else []
            changed = {name: text for name, text in fields.items() if known.get(name) != text}
            gone = [name for name in known if name not in fields]
            # First: a full server refuses it, and with it all that follows.
            write.commands = [hash_of(key, changed)] if changed else []
            write.commands += [("HDEL", key, *gone), *others] if gone else others
            try:
                self.lease.write(epoch, write, after_round)
            except ChangedError:
                continue
            self._written = fields if DIGEST in fields else None
            return

    def taped(self, entry: TapeEntry, needed: int) -> Command:
        """Return the command that appends a round to the tape. `needed` is as in `tape_kept`."""
        signed = self._signing.signed("tape", to_fields(entry))
        kept = tape_kept(sum(map(len, signed.values())), needed)
        return ("XADD", self._keys.tape, "MAXLEN", "=", kept, "*", *chain.from_iterable(signed.items()))

    def derived(self, cursors: Mapping[str, tuple[int, int]], counts: Mapping[str, Any]) -> list[Command]:
        """Return the commands that write parts of the state where others read them."""
        data = {name: f"{of_pass}:{at}" for name, (of_pass, at) in cursors.items()}
        return [
            hash_of(key, fields) for key, fields in ((self._keys.data, data), (self._keys.counters, counts)) if fields
        ]

    def _announced(self, epoch: int, event: Event) -> Command:
        fields = {"kind": KINDS[type(event)], **to_fields(event)}
        signed = self._signing.signed("event", fields, stamp=self._stamps.next(epoch))
        words = chain.from_iterable(signed.items())
        return ("XADD", self._keys.snapshots, "MAXLEN", "~", EVENTS_KEPT, "*", *words)

    # -- contributions ------------------------------------------------------------------------------------------------

    def read(self, entries: Sequence[str]) -> list[Delivery]:
        return [self._updates.read(entry) for entry in entries]

    def kept(self) -> list[str]:
        found = self._connection.answer("smembers", self._keys.kept_entries) or ()
        return sorted(entry.decode("utf-8", "replace") for entry in found)

    def trim(self, epoch: int, entries: Sequence[str], after_round: int | None = None) -> None:
        failpoint("trim.before")
        self.lease.write(epoch, Write(*self._forgotten(entries)), after_round)
        failpoint("trim.done")

    def _forgotten(self, entries: Sequence[str]) -> list[Command]:
        """Return the commands that delete merged contributions, without names of a damaged tape that are none."""
        out: list[Command] = []
        _, most = self._compactions.owned
        for entry in dict.fromkeys(entries):
            with suppress(WireError):
                prefix = self._keys.kept_prefix(parse_entry(entry)[0])
                out.append(("forget", self._keys.kept(entry), prefix, most))
        return [*out, ("SREM", self._keys.kept_entries, *entries)] if entries else []


def kinds_of(keys: Keys, fragments: Iterable[int], islands: Iterable[str]) -> dict[str, str]:
    """Return the type of value that each lasting key of a run holds, as the command TYPE names it.

    The members of the run are not among them: only administrators may change these.
    """
    islands = list(islands)
    kinds = {
        "hash": [
            keys.data, keys.corpora, keys.requests, keys.control, keys.counters, keys.state, keys.standbys,
            *(key(p) for p in fragments for key in (keys.head, keys.fragment, keys.outer)),
            *map(keys.island, islands),
        ],
        "stream": [
            keys.snapshots, keys.tape, keys.notes, keys.evaluations,
            *(key for island in islands for key in (keys.updates(island), *keys.said(island))),
        ],
        "string": [keys.epoch, keys.lease, keys.evaluator, *map(keys.name, islands)],
        "set": [keys.islands, keys.kept_entries],
    }  # fmt: skip
    return {key: kind for kind, of_kind in kinds.items() for key in of_kind}
