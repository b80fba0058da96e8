"""The updates streams, which hold contributions until they are merged and a checkpoint covers them.

Each island has a stream of its own, so an entry's stream says who sent it, and a flood stays in its sender's stream.
Mergers read them through a consumer group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import redis

from archipelago.broker.commits import START, Delivery, arrival, entry_name, parse_entry, position, sender_of
from archipelago.broker.errors import BrokerError, WireError
from archipelago.broker.messages import Contribution, from_fields
from archipelago.broker.redis.chunks import PAYLOAD, ChunkStore
from archipelago.broker.redis.connection import PAGE, RedisConnection, block_ms
from archipelago.broker.redis.failures import is_gone, is_wrong_kind
from archipelago.broker.redis.replies import (
    GROUP,
    entries_by_stream,
    entry_id,
    group_of,
    is_last,
    last_delivered,
    names_in,
    next_id,
    text_fields,
)
from archipelago.broker.redis.stored_run import StoredRun
from archipelago.broker.signing import Raw

#: The most islands whose streams are read. Other programs may have added any number of names to the set of islands.
ISLANDS_MAX = 2048
#: A stream in which more entries wait is not read entry by entry, only by the merger that refuses them. Honest islands
#: have a few entries for each round of the window.
FLOOD_ENTRIES = 1 << 13
#: How many pages of the set of islands are read at a time, with two lookups for each name.
NAME_PAGES_MAX = 4
#: How long one command waits for entries. Streams of islands that are new since then are read by the next command.
NEW_ISLANDS_SECONDS = 0.25
#: How often a run without any contribution is looked at.
EMPTY_POLL_SECONDS = 0.02
FAKE_POLL_SECONDS = 0.005


@dataclass(frozen=True)
class FoundEntry:
    """The present state of one entry of an updates stream.

    Attributes:
        raw: The fields; None if the entry is deleted.
        waiting: The entry is neither merged nor refused. An entry that someone deleted by hand before it was merged
            waits, too.
    """

    raw: Raw | None
    waiting: bool

    @property
    def kept(self) -> bool:
        """Whether the entry is merged and not yet trimmed."""
        return self.raw is not None and not self.waiting


@dataclass(frozen=True)
class Tally:
    """The number of entries of all streams.

    Attributes:
        waiting: Entries that are neither merged nor refused.
        waiting_tokens: The tokens of those that can be read.
        kept: Entries that are merged and not yet trimmed.
    """

    waiting: int
    waiting_tokens: int
    kept: int


class UpdatesStreams:
    """Reads the updates streams of one run.

    Args:
        connection: The connection to the run, or to one of its shards.
        chunks: The payloads.
        invited: Returns the names of the invited islands; None if anyone may join.
    """

    def __init__(
        self, connection: RedisConnection, chunks: ChunkStore, invited: Callable[[], Iterable[str] | None]
    ) -> None:
        self._connection, self._invited = connection, invited
        self._redis, self._keys = connection.redis, connection.keys
        self._chunks = chunks
        self._names: set[str] = set()
        self._cursor = 0

    def names(self) -> list[str]:
        """Return the names of the islands that have a key of their own, sorted; ISLANDS_MAX at most.

        Every island can add any number of names to the set, so a name alone counts for nothing, and the names that
        were found stay. If the set is very long, the next call goes on where this one has stopped. In a run with
        invitations, only the names of invited islands are looked for, and the set is not read.
        """
        if (invited := self._invited()) is not None:
            with self._connection.translated():
                self._names.update(self._existing([name for name in invited if name not in self._names]))
            return sorted(self._names)
        with self._connection.forgiving(self._keys.islands, "a set"):
            for _ in range(NAME_PAGES_MAX):
                self._cursor, some = self._redis.sscan(self._keys.islands, self._cursor, count=PAGE)
                new = [name for name in names_in(some) if name not in self._names]
                self._names.update(self._existing(new)[: ISLANDS_MAX - len(self._names)])
                if not int(self._cursor):
                    break
        return sorted(self._names)

    def _existing(self, names: Sequence[str]) -> list[str]:
        """Return those of the islands that have a heartbeat, a stream or leases."""
        if not names:
            return []
        with self._redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.exists(self._keys.updates(name), self._keys.leases(name))
                pipe.exists(self._keys.island(name))
            answers = pipe.execute()
        return [name for name, *found in zip(names, answers[::2], answers[1::2], strict=True) if any(found)]

    # -- what waits -------------------------------------------------------------------------------------------------

    def waiting(self) -> Iterator[Contribution | None]:
        """Yield the contributions that are neither merged nor refused, island by island; None for an unreadable one.

        Those of flooded streams are left out.
        """
        for name, id_, raw in self._waiting(self.names()):
            yield self.delivery(name, id_, raw or {}, verify=False).contribution

    def settled(self) -> list[Delivery]:
        """Return the entries that were acknowledged and are still in their streams, without their payloads."""
        out = []
        for name, groups in self._each("xinfo_groups", self.names()).items():
            waiting = {id_ for page in self._unacknowledged(name) for id_ in page}
            for id_, raw in self._connection.pages(self._keys.updates(name)):
                if entry_id(id_) > last_delivered(groups):
                    break
                if id_ not in waiting:
                    out.append(self.delivery(name, id_, raw))
        return out

    def tally(self) -> Tally:
        """Count the entries of all streams. Those that wait are read, except in flooded streams."""
        names = self.names()
        floods = [_flood(groups) for groups in self._each("xinfo_groups", names).values()]
        count = there = sum(floods)
        tokens = 0
        for name, id_, raw in self._waiting(names):
            contribution = self.delivery(name, id_, raw or {}, verify=False).contribution
            count += 1
            there += raw is not None
            tokens += contribution.tokens if contribution else 0
        return Tally(count, tokens, max(0, sum(self._each("xlen", names).values()) - there))

    def backlog(self) -> int:
        """Return how many entries are neither merged nor refused, without reading them where the server knows it."""
        names = self.names()
        groups = self._each("xinfo_groups", names)
        count = 0
        for name in groups:
            found = group_of(groups[name])
            behind = found.get("lag")  # no server knows it after some deletions
            if not isinstance(behind, int):
                key, last = self._keys.updates(name), _text(last_delivered(groups[name]))
                behind = sum(1 for _ in self._connection.pages(key, last))
            count += behind + int(found.get("pending", 0))
        return count

    def first_arrival(self) -> int | None:
        """Return when the oldest entry of all streams arrived, in milliseconds of the server's clock."""
        oldest = self._each("xrange", self.names(), "-", "+", 1).values()
        return min((entry_id(found[0][0].decode())[0] for found in oldest if found), default=None)

    def _waiting(self, names: Sequence[str]) -> Iterator[tuple[str, str, Raw | None]]:
        # The groups' positions are read first, so that an entry that a merger takes meanwhile still counts as waiting.
        for name, groups in self._each("xinfo_groups", names).items():
            if _flood(groups):
                continue
            group = group_of(groups)
            if group.get("pending") == 0 and group.get("lag") == 0:
                continue  # nothing waits in most streams, and each would take two round trips
            key, last = self._keys.updates(name), last_delivered(groups)
            for page in self._unacknowledged(name):
                ids = [id_ for id_ in page if entry_id(id_) <= last]
                with self._connection.translated():
                    answers = self._connection.tolerant(*(("xrange", key, id_, id_) for id_ in ids))
                for id_, found in zip(ids, answers, strict=True):
                    yield name, id_, found[0][1] if found else None
            for id_, raw in self._connection.pages(key, _text(last)):
                yield name, id_, raw

    def _unacknowledged(self, name: str) -> Iterator[list[str]]:
        """Yield pages of the entries that a merger has read, but neither merged nor refused."""
        first, key = "-", self._keys.updates(name)
        while True:
            with self._connection.translated():
                found = self._connection.tolerant(("xpending_range", key, GROUP, first, "+", PAGE))[0]
            ids = [row["message_id"].decode() for row in found or ()]
            yield ids
            if len(ids) < PAGE or is_last(ids[-1]):
                return
            first = next_id(ids[-1])

    def _each(self, command: str, names: Sequence[str], *arguments: Any) -> dict[str, Any]:
        """Return the answer of a reading command for each stream that exists."""
        commands = [(command, self._keys.updates(name), *arguments) for name in names]
        with self._connection.translated():
            answers = self._connection.tolerant(*commands) if commands else []
        return {name: answer for name, answer in zip(names, answers, strict=True) if answer is not None}

    # -- single entries ---------------------------------------------------------------------------------------------

    def look(self, entries: Iterable[str]) -> dict[str, FoundEntry]:
        """Return the present state of these entries. Only the merger that holds the lease changes it."""
        out, wanted = {}, {}
        for entry in entries:
            try:
                wanted[entry] = parse_entry(entry)
            except WireError as error:
                self._connection.warn_once(f"entry {entry:.40}", error)
                out[entry] = FoundEntry(None, waiting=False)
        if not wanted:
            return out
        names = sorted({name for name, _ in wanted.values()})
        groups = [("xinfo_groups", self._keys.updates(name)) for name in names]  # first, as in `_waiting`
        there = [("xrange", self._keys.updates(name), id_, id_) for name, id_ in wanted.values()]
        pending = [("xpending_range", self._keys.updates(name), GROUP, id_, id_, 1) for name, id_ in wanted.values()]
        with self._connection.translated():
            answers = iter(self._connection.tolerant(*groups, *there, *pending))
        group_of_name = dict(zip(names, answers, strict=False))
        entries_found = list(islice(answers, len(wanted)))
        for (entry, (name, id_)), found, unacknowledged in zip(wanted.items(), entries_found, answers, strict=True):
            given = entry_id(id_) <= last_delivered(group_of_name[name])
            waiting = bool(unacknowledged) or (bool(found) and not given)
            out[entry] = FoundEntry(found[0][1] if found else None, waiting)
        return out

    def read(self, entry: str) -> Delivery:
        """Return an entry with its payload, or a delivery with a fault.

        Its signature is not checked again: its island may have left the run or have a new key since it was merged.
        """
        gone = Delivery(entry, None, fault="the entry is gone")
        try:
            name, id_ = parse_entry(entry)
        except WireError:
            return gone
        with self._connection.translated():
            found = self._redis.xrange(self._keys.updates(name), id_, id_)
        return self.delivery(name, id_, found[0][1], verify=False).with_payload() if found else gone

    def delivery(self, sender: str, id_: str, raw: Raw, *, verify: bool = True) -> Delivery:
        """Return an entry as a delivery. Its payload is downloaded later, unless it is stored in the entry.

        With `verify`, an entry that its sender has not signed has a fault and no header.
        """
        entry = entry_name(sender, id_)
        if not raw:
            return Delivery(entry, None, fault="the entry was deleted before it was merged")
        try:
            if verify:
                self._connection.signing.verify("contribution", sender, raw)
            contribution = from_fields(Contribution, text_fields(raw))
        except WireError as error:
            return Delivery(entry, None, fault=error.reason)
        if contribution.island != sender:
            return Delivery(entry, None, fault=f"{sender} sent it in the name of {contribution.island}")
        download = partial(self._download, sender, raw, contribution.bytes, verify=verify)
        delivery = Delivery(entry, contribution, download=download)
        return delivery.with_payload() if PAYLOAD.encode() in raw else delivery

    def _download(self, sender: str, raw: Raw, size: int, *, verify: bool) -> bytes:
        with self._connection.translated():
            payload = self._chunks.of(sender).fetch(raw, size)
        if verify:
            self._connection.signing.verify_payload(raw, payload)
        return payload

    def chunks_of(self, entry: str, raw: Raw | None) -> list[str]:
        """Return the chunks that an entry points to; nothing if the pointer cannot be read."""
        return self._chunks.of(sender_of(entry)).found_keys(raw or {})


def _flood(groups: Any) -> int:
    """Return how many entries of a stream wait if they are far too many to be read; else 0."""
    found = group_of(groups)
    behind = found.get("lag")  # no server knows it after some deletions
    waiting = int(found.get("pending", 0)) + (behind if isinstance(behind, int) else 0)
    return waiting if waiting > FLOOD_ENTRIES else 0


def _text(id_: tuple[int, int]) -> str:
    return f"{id_[0]}-{id_[1]}" if id_ != (0, 0) else START


class UpdatesConsumer:
    """Reads all updates streams as the consumer group `merger`.

    A missing group is created. A group that someone deleted by hand then delivers all remaining entries of its stream
    again, because the new group does not know which of them were merged. The merger refuses these as repeats.
    """

    def __init__(self, connection: RedisConnection, stored: StoredRun, updates: UpdatesStreams) -> None:
        self._connection = connection
        self._redis, self._keys = connection.redis, connection.keys
        self._stored, self._updates = stored, updates
        self._names: set[str] = set()  # the islands whose streams have a group

    def new(self, block_seconds: float, count: int = 64) -> list[Delivery]:
        """Return entries that no merger has read yet, by arrival: at most `count` of each island.

        Waits at most `block_seconds` for the first one.
        """
        deadline = time.monotonic() + block_seconds
        while True:
            self._find_streams()
            left = deadline - time.monotonic()
            found = self._read(dict.fromkeys(self._names, ">"), count, min(left, NEW_ISLANDS_SECONDS))
            if found or time.monotonic() >= deadline:
                return found
            if not self._names:
                time.sleep(min(max(left, 0.0), EMPTY_POLL_SECONDS))  # no command waits without a stream
            elif not self._connection.has_info:
                time.sleep(FAKE_POLL_SECONDS)  # fakeredis returns too early

    def unacknowledged(self, after: str = START, count: int = 1 << 16) -> list[Delivery]:
        """Return the first `count` entries after `after` that were read, but neither merged nor refused, by arrival."""
        self._find_streams()
        starts = {name: START if after == START else position(name, after) for name in self._names}
        return self._read(starts, count, 0)[:count]

    def _read(self, positions: Mapping[str, str], count: int, block_seconds: float) -> list[Delivery]:
        if not positions:
            return []
        streams = {self._keys.updates(name): position for name, position in positions.items()}
        senders = {self._keys.updates(name): name for name in positions}
        try:
            with self._connection.translated():
                found = self._redis.xreadgroup(GROUP, GROUP, streams, count=count, block=block_ms(block_seconds))
        except BrokerError as error:
            if not is_gone(error) and not is_wrong_kind(error):
                raise
            self._stored.require()
            self._names.clear()  # the next call finds out which streams can be read
            return []
        entries = [self._updates.delivery(senders[key], id_, raw) for key, id_, raw in entries_by_stream(found)]
        return sorted(entries, key=lambda delivery: arrival(delivery.entry))

    def _find_streams(self) -> None:
        """Make sure that the stream of every island has a group. A key that is no stream is skipped.

        Streams that were read before are read again even if someone removed their islands from the set.
        """
        new = [name for name in self._updates.names() if name not in self._names][: ISLANDS_MAX - len(self._names)]
        if not new:
            return
        with self._connection.translated():
            found = self._answers(*(("xinfo_groups", self._keys.updates(name)) for name in new))
            missing = []
            for name, groups in zip(new, found, strict=True):
                if isinstance(groups, Exception) and "WRONGTYPE" in str(groups):
                    self._connection.warn_once(self._keys.updates(name), WireError("it is not a stream"))
                elif isinstance(groups, Exception) or not group_of(groups):
                    missing.append(name)
                else:
                    self._names.add(name)
            if not missing:
                return
            # Without MKSTREAM, because streams of islands that never send would take memory and time.
            create = [("xgroup_create", self._keys.updates(name), GROUP, "0") for name in missing]
            for name, answer in zip(missing, self._answers(*create), strict=True):
                if not isinstance(answer, Exception) or "BUSYGROUP" in str(answer):
                    self._names.add(name)

    def _answers(self, *commands: tuple[Any, ...]) -> list[Any]:
        """Return the answers to commands. Answers of the server that are errors are returned, not raised."""
        with self._redis.pipeline(transaction=False) as pipe:
            for name, *arguments in commands:
                getattr(pipe, name)(*arguments)
            answers: list[Any] = pipe.execute(raise_on_error=False)
        for answer in answers:
            if isinstance(answer, Exception) and not isinstance(answer, redis.ResponseError):
                raise answer
        return answers
