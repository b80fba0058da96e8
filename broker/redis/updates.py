"""The updates streams, which hold contributions until they are merged or refused.

Each island has a stream of its own, so an entry's stream says who sent it, and a flood stays in its sender's stream.
A commit moves what it merges into hashes (`kept:NAME:ID`), where it stays until compactions and a checkpoint cover it.
So the lengths of the streams say how much waits. `IslandNames` knows which islands have streams.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import redis

from archipelago.broker.commits import (
    NUMBER_MAX,
    START,
    Delivery,
    arrival,
    entry_id,
    entry_name,
    is_last,
    parse_entry,
)
from archipelago.broker.errors import BrokerError, WireError
from archipelago.broker.messages import Contribution, from_raw
from archipelago.broker.presence import LIVE_SECONDS, Presence
from archipelago.broker.redis.chunks import PAYLOAD, ChunkStore, digests_of
from archipelago.broker.redis.connection import RedisConnection, block_ms
from archipelago.broker.redis.keys import names_in
from archipelago.broker.redis.script import Write
from archipelago.broker.signing import Raw

#: A stream with more entries is read only by the merger, which refuses them. Honest islands have a few entries for each
#: round of the window.
FLOOD_ENTRIES = 1 << 13
#: Of how many downloaded contributions the digests are kept until they are merged.
DIGESTS_MAX = 1 << 12


class UpdatesStreams:
    """Reads the updates streams of one run, or of one of its shards. `names` returns the names of the islands."""

    def __init__(self, connection: RedisConnection, chunks: ChunkStore, names: Callable[[], list[str]]) -> None:
        self._connection = connection
        self._redis, self._keys = connection.redis, connection.keys
        self._chunks, self.names = chunks, names
        #: The SHA-1 digests of the chunks of large contributions that were downloaded to be merged, by entry, where
        #: members sign. A download later, such as for a checkpoint, may find something else.
        self.digests: dict[str, str] = {}

    # -- what waits -------------------------------------------------------------------------------------------------

    def waiting(self, lengths: Mapping[str, int] | None = None) -> Iterator[Contribution | None]:
        """Yield the contributions that wait, island by island; None for an unreadable one.

        Those of flooded streams are left out. `lengths` is what `lengths()` returned just now, if it was asked for.
        """
        for name, count in (self.lengths() if lengths is None else lengths).items():
            if 0 < count <= FLOOD_ENTRIES:
                for id_, raw in self._connection.pages(self._keys.updates(name)):
                    yield self.delivery(name, id_, raw, verify=False).contribution

    def lengths(self) -> dict[str, int]:
        """Return how many contributions of each island wait. Those that were merged or refused left its stream."""
        return {name: int(count) for name, count in self._each("xlen", self.names()).items()}

    def backlog(self) -> int:
        return sum(self.lengths().values())

    def pending(self) -> tuple[int, int]:
        """Return the number of the contributions that wait, and the tokens of those that can be read."""
        lengths = self.lengths()
        found = list(self.waiting(lengths))
        flooded = sum(count for count in lengths.values() if count > FLOOD_ENTRIES)
        return len(found) + flooded, sum(each.tokens for each in found if each is not None)

    def first_arrival(self) -> int | None:
        """Return when the oldest entry of all streams arrived, in milliseconds of the server's clock."""
        oldest = self._each("xrange", self.names(), "-", "+", 1).values()
        return min((entry_id(found[0][0].decode())[0] for found in oldest if found), default=None)

    def _each(self, command: str, names: Sequence[str], *arguments: Any) -> dict[str, Any]:
        """Return the answer of a reading command for each stream that exists."""
        commands = [(command, self._keys.updates(name), *arguments) for name in names]
        answers = self._connection.tolerant(*commands)
        return {name: answer for name, answer in zip(names, answers, strict=True) if answer is not None}

    # -- single entries ---------------------------------------------------------------------------------------------

    def read(self, entry: str) -> Delivery:
        """Return a contribution with its payload, whether it waits or was merged, or a delivery with a fault.

        Its signature is not checked again: its island may have left the run or have a new key since it was merged.
        """
        gone = Delivery(entry, None, fault="the entry is gone")
        try:
            name, id_ = parse_entry(entry)
        except WireError:
            return gone
        found, raw = self._connection.tolerant(
            ("xrange", self._keys.updates(name), id_, id_), ("hgetall", self._keys.kept(entry))
        )
        kept = bool(raw)  # what was merged is the mergers', whatever its island adds
        raw = raw or (found[0][1] if found else {})
        if not raw:
            return gone
        delivery = self.delivery(name, id_, raw, verify=False, kept=kept).with_payload()
        if delivery.fault and not kept:  # it may have been merged meanwhile
            with self._connection.translated():
                if self._redis.exists(self._keys.kept(entry)):
                    return self.read(entry)
        return delivery

    def delivery(
        self,
        sender: str,
        id_: str,
        raw: Raw,
        *,
        verify: bool = True,
        kept: bool = False,
    ) -> Delivery:
        """Return an entry as a delivery. Its payload is downloaded later, unless it is stored in the entry.

        With `verify`, an entry that its sender has not signed has a fault and no header. `kept`: it was merged.
        """
        entry = entry_name(sender, id_)
        if not raw:
            return Delivery(entry, None, fault="the entry was deleted before it was merged")
        try:
            if verify:
                self._connection.signing.verify("contribution", sender, raw)
            contribution = from_raw(Contribution, raw)
        except WireError as error:
            return Delivery(entry, None, fault=error.reason)
        if contribution.island != sender:
            return Delivery(entry, None, fault=f"{sender} sent it in the name of {contribution.island}")
        chunks = self._chunks.kept_of(sender) if kept else self._chunks.of(sender)
        download = partial(self._download, entry if verify else "", chunks, raw, contribution.bytes)
        delivery = Delivery(entry, contribution, download=download)
        return delivery.with_payload() if PAYLOAD.encode() in raw else delivery

    def _download(self, entry: str, chunks: ChunkStore, raw: Raw, size: int) -> bytes:
        payload = chunks.fetch(raw, size)
        if entry and self._connection.signing.is_on and PAYLOAD.encode() not in raw:
            self.digests[entry] = digests_of(payload)
            for old in list(self.digests)[:-DIGESTS_MAX]:  # of what was refused
                self.digests.pop(old, None)
        return payload


class UpdatesConsumer:
    """Reads all updates streams, each from where it stopped. A stream holds only what is neither merged nor refused."""

    def __init__(self, connection: RedisConnection, updates: UpdatesStreams) -> None:
        self._connection = connection
        self._keys, self._updates = connection.keys, updates
        self._read_to: dict[str, str] = {}

    def rewind(self) -> None:
        """Read everything that waits again from now on."""
        self._read_to.clear()

    def read_again(self, keys: Iterable[str]) -> None:
        """Read these streams from their beginning, because they were deleted and may begin anew."""
        for key in keys:
            self._read_to.pop(key, None)

    def ask(self, pipe: Any, names: Sequence[str], count: int, block_seconds: float) -> bool:
        """Queue the reading of these islands' streams, if there are any. The answer is for `taken`."""
        if ends := self._ends(names):
            # fakeredis blocks its whole pipeline.
            pipe.xread(ends, count=count, block=block_ms(block_seconds) if self._connection.has_info else None)
        return bool(ends)

    def taken(self, names: Sequence[str], answer: Any) -> list[Delivery]:
        """Take the answer to what `ask` has queued."""
        if isinstance(answer, redis.ResponseError):
            self._skip_other_keys(list(self._ends(names)))
            return []
        senders, out = {self._keys.updates(name): name for name in names}, []
        for key, entries in answer or ():
            for id_, raw in entries:
                self._read_to[key.decode()] = id_.decode()
                out.append(self._updates.delivery(senders[key.decode()], id_.decode(), raw or {}))
        return sorted(out, key=lambda delivery: arrival(delivery.entry))

    def _ends(self, names: Sequence[str]) -> dict[str, str]:
        """Return the streams that can be read, each with the last id that was read."""
        ends = {key: self._read_to.get(key, START) for key in map(self._keys.updates, names)}
        return {key: id_ for key, id_ in ends.items() if not is_last(id_)}  # from there, Redis would begin anew

    def _skip_other_keys(self, keys: Sequence[str]) -> None:
        """Stop reading the keys that are not streams, until `rewind` or `read_again`."""
        found = self._connection.tolerant(*(("type", key) for key in keys))
        for key, kind in zip(keys, found, strict=True):
            if kind not in (b"stream", b"none"):
                self._connection.warn_once(key, WireError("it is not a stream"))
                self._read_to[key] = f"{NUMBER_MAX}-{NUMBER_MAX}"


#: The most islands whose streams are read. Other programs may have added any number of names to the set of islands.
ISLANDS_MAX = 2048
#: About how many names of the set of islands are read at a time, with a lookup for each new one.
NAMES_READ = 1024
#: How long the heartbeat of a silent island is kept.
REMEMBER_SECONDS = 24 * 3600
#: The heartbeats of more silent islands than this are not kept that long. User loops may get a new name at each start.
SILENT_KEPT = 128
#: How often a process looks whether the islands that it knows still have keys, and a merger deletes those of others.
FORGET_SECONDS = 10.0
#: About how many names a merger looks at each time.
FORGET_NAMES = 4096
#: How many evaluations of an island that is gone a merger moves each time, and how many the run keeps.
MOVED_EVALUATIONS, EVALUATIONS_KEPT = 500, 20_000


class IslandNames:
    """Knows the islands with keys of their own in one shard of a run. `invited` returns None if anyone may join."""

    def __init__(self, connection: RedisConnection, invited: Callable[[], Iterable[str] | None]) -> None:
        self._connection, self._invited = connection, invited
        self._redis, self._keys = connection.redis, connection.keys
        self._names: set[str] = set()
        self._cursor = self._forget_cursor = 0
        self._looked_at = self._forgot_at = time.monotonic()

    def all(self) -> list[str]:
        """Return the names of the islands that have a key of their own, sorted; ISLANDS_MAX at most.

        Every island can add any number of names to the set, so a name alone counts for nothing, and the names that
        were found stay until their keys are gone. If the set is very long, the next call goes on where this one has
        stopped. In a run with invitations, only the names of invited islands are looked for, and the set is not read.
        """
        if time.monotonic() - self._looked_at >= FORGET_SECONDS:
            self._looked_at = time.monotonic()
            self._names.intersection_update(self._existing(sorted(self._names)))
        if (invited := self._invited()) is not None:
            self._names.update(self._existing([name for name in invited if name not in self._names]))
            return sorted(self._names)
        self.found(self._connection.answer("sscan", self._keys.islands, self._cursor, None, NAMES_READ))
        return sorted(self._names)

    def ask(self, pipe: Any) -> bool:
        """Queue what `all` reads, if that takes a command. The answer is for `found`."""
        if is_asked := self._invited() is None and time.monotonic() - self._looked_at < FORGET_SECONDS:
            pipe.sscan(self._keys.islands, self._cursor, count=NAMES_READ)
        return is_asked

    def found(self, answer: Any) -> None:
        """Take a part of the set of names. Raises BrokerError if a merger finds none: no island can write to it."""
        if isinstance(answer, Exception):  # another type of value, which `take_up` deletes
            what = f"{self._connection.where} holds another type of value under {self._keys.islands}"
            raise BrokerError(what, "The merger loads the run again, and deletes it.", code="broker.damaged")
        if answer is None:
            return
        self._cursor, some = answer
        new = [name for name in names_in(some) if name not in self._names]
        self._names.update(self._existing(new)[: ISLANDS_MAX - len(self._names)])

    @property
    def known(self) -> list[str]:
        """The names that were found, sorted."""
        return sorted(self._names)

    def _existing(self, names: Sequence[str]) -> list[str]:
        """Return those of the islands that have a key of their own."""
        answers = self._connection.tolerant(*(("exists", *self._keys.of_island(name)) for name in names))
        return [name for name, found in zip(names, answers, strict=True) if found]

    def forget(self, write: Write, presences: Iterable[Presence]) -> bool:
        """Add the deletion of what is left of islands that are gone. Return whether there was any.

        Each time it looks at a part of the names (`MergerClient.forget`).
        """
        if time.monotonic() - self._forgot_at < FORGET_SECONDS:
            return False
        self._forgot_at, self._looked_at = time.monotonic(), float("-inf")
        silent = sorted(p.age_seconds for p in presences if p.age_seconds > 2 * LIVE_SECONDS)
        kept = silent[SILENT_KEPT] if len(silent) > SILENT_KEPT else REMEMBER_SECONDS
        limits = [round(1000 * (REMEMBER_SECONDS - kept)), 1000 * REMEMBER_SECONDS]
        some: Sequence[str | bytes] = sorted(self._names)
        if self._invited() is None:
            scan = ("sscan", self._keys.islands, self._forget_cursor, None, FORGET_NAMES)
            self._forget_cursor, some = self._connection.answer(*scan) or (0, some)
        for name in some:
            own = self._keys.of_island(name.decode("utf-8", "replace") if isinstance(name, bytes) else name)
            keys = [*own, self._keys.islands, self._keys.evaluations]
            write.gone(keys, name, *limits, MOVED_EVALUATIONS, EVALUATIONS_KEPT)
        return bool(some)
