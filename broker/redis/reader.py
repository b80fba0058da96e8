"""What anyone reads of a run: its manifest, events, fragments, islands, books and what waits to be merged."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from archipelago.broker.corpus_shards import parse_cursor
from archipelago.broker.errors import BrokerError, UnknownRunError, WireError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import (
    KINDS,
    Books,
    Contribution,
    Evaluation,
    Event,
    Heartbeat,
    Note,
    Pending,
    Presence,
    Refusal,
    Snapshot,
    TapeEntry,
    from_fields,
)
from archipelago.broker.redis.chunks import ChunkStore, Raw
from archipelago.broker.redis.connection import PAGE, Client, RedisConnection, block_ms, is_wrong_kind
from archipelago.broker.redis.keys import REGISTRY
from archipelago.broker.redis.replies import (
    GROUP,
    entry_id,
    event_of,
    last_delivered,
    names_in,
    next_id,
    stream_entries,
    text_fields,
)
from archipelago.broker.transport import REFUSALS_AMONG, START
from archipelago.broker.wire import payload_bytes_max

REMEMBER_SECONDS = 24 * 3600  # islands that went silent
EVALUATIONS_KEPT = 20_000
HOLDER = ".by"
"""after a shard: the field of `RUN:data` that says who holds it"""
CORPUS = "corpus."
"""before a text's name: the field of `RUN:data` with its digest"""

REFUSED = KINDS[Refusal].encode()

log = logging.getLogger(__name__)


class RedisReader(RedisConnection):
    """Reads, and changes nothing but what it counts as sent down and the names of islands long gone."""

    def __init__(self, client: Client, run: str, where: str = "the Redis") -> None:
        super().__init__(client, run, where)
        self._sizes: tuple[int, ...] = ()
        self._unreadable: set[str] = set()
        self._chunks = ChunkStore(client, self._keys, self._payload_max, self._joined)

    def runs(self) -> list[str]:
        with self._translated():
            return names_in(self._redis.smembers(REGISTRY))

    def manifest(self) -> Manifest:
        with self._translated():
            raw = self._redis.hgetall(self._keys.manifest)
        if not raw:
            raise self._unknown()
        return Manifest.from_fields(text_fields(raw))

    def _require_run(self) -> None:
        with self._translated():
            known = self._redis.exists(self._keys.manifest)
        if not known:
            raise self._unknown()

    def _unknown(self) -> UnknownRunError:
        here = ", ".join(self.runs()) or "none"
        return UnknownRunError(
            f"there is no run {self.run!r} at {self._where} (runs there: {here})",
            "Make it with `archipelago init`, or name another with --run.",
        )

    def _elements(self) -> tuple[int, ...]:
        """Of each fragment."""
        self._sizes = self._sizes or self.manifest().sizes
        return self._sizes

    def _payload_max(self) -> int:
        return 4 * payload_bytes_max(max(self._elements()))  # the merger's own state holds momentum beside parameters

    def _chunks_of(self, raw: Raw, limit: int | None = None) -> list[str]:
        try:
            return self._chunks.keys_of(raw, limit=limit)
        except WireError:
            return []

    def _warn_once(self, what: str, error: WireError) -> None:
        if what not in self._unreadable:
            log.warning("%s cannot be read: %s", what, error.reason)
        self._unreadable.add(what)

    @contextmanager
    def _forgiving(self, key: str, kind: str) -> Iterator[None]:
        """Goes on without what lies under a key that nothing depends on where somebody has put another kind there."""
        try:
            with self._translated():
                yield
        except BrokerError as error:
            if not is_wrong_kind(error):
                raise
            self._warn_once(key, WireError(f"it is not {kind}"))

    def last_event(self) -> str:
        with self._translated():
            newest = self._redis.xrevrange(self._keys.snapshots, count=1)
        return newest[0][0].decode() if newest else START

    def events(self, after: str, block_seconds: float, count: int = 256) -> list[tuple[str, Event]]:
        deadline = time.monotonic() + block_seconds
        while True:
            with self._translated():
                block = block_ms(deadline - time.monotonic())
                found = list(stream_entries(self._redis.xread({self._keys.snapshots: after}, count=count, block=block)))
            out = [(entry, event) for entry, raw in found if (event := event_of(entry, raw)) is not None]
            if out or not found:
                return out
            after = found[-1][0]  # nothing in there that this version can read

    def fragment(self, fragment: int, *, account: bool = False) -> tuple[Snapshot, bytes]:
        with self._translated():
            for _ in range(8):
                raw = self._redis.hgetall(self._keys.fragment(fragment))
                if not raw:
                    raise self._unknown()
                snapshot = from_fields(Snapshot, text_fields(raw))
                try:
                    payload = self._chunks.fetch(raw, snapshot.bytes)
                except WireError:
                    continue  # replaced, and its chunks expired, while we read: the newer one is whole
                if account:
                    self._redis.hincrby(self._keys.books, "bytes_down", len(payload))
                return snapshot, payload
        raise WireError(f"fragment {fragment} cannot be read whole")

    def difference(self, fragment: int, version: int) -> bytes | None:
        with self._translated():
            raw = self._redis.hgetall(self._keys.difference(fragment, version))
            try:
                payload = self._chunks.fetch(raw, int(raw[b"bytes"])) if raw else None
            except (WireError, KeyError, ValueError):
                return None  # it goes while we read, or somebody damaged it: there is the full snapshot
            if payload is not None:
                self._redis.hincrby(self._keys.books, "bytes_down", len(payload))
            return payload

    def presences(self) -> list[Presence]:
        with self._translated():
            names = names_in(self._redis.smembers(self._keys.islands))
            with self._redis.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.hgetall(self._keys.island(name))
                    pipe.pttl(self._keys.island(name))
                answers = pipe.execute()
            out, forgotten = [], []
            for index, name in enumerate(names):
                raw, ttl_ms = answers[2 * index], answers[2 * index + 1]
                if not raw:
                    forgotten.append(name)
                    continue
                try:
                    heartbeat = from_fields(Heartbeat, text_fields(raw))
                except WireError as error:  # one island's nonsense must not blind us to the others
                    self._warn_once(f"the heartbeat of {name}", error)
                    continue
                out.append(Presence(heartbeat, REMEMBER_SECONDS - ttl_ms / 1000))
            if forgotten:
                self._redis.srem(self._keys.islands, *forgotten)
        return out

    def books(self) -> Books:
        with self._translated():
            return from_fields(Books, text_fields(self._redis.hgetall(self._keys.books)))

    def backlog(self) -> int:
        with self._translated(), self._redis.pipeline(transaction=False) as pipe:
            pipe.xlen(self._keys.updates)
            pipe.hget(self._keys.books, "kept")
            length, kept = pipe.execute()
        return max(0, int(length) - int(kept or 0))

    def pending(self) -> Pending:
        count = tokens = 0
        for contribution in self._waiting():
            count += 1
            tokens += contribution.tokens if contribution else 0
        return Pending(count, tokens)

    def _waiting(self) -> Iterator[Contribution | None]:
        """Entries that are neither merged nor refused, oldest first, without payloads; None for an unreadable one."""
        # In this order: what a merger is given meanwhile counts as waiting still, and nothing is left out.
        with self._translated():
            last = last_delivered(self._tolerant(("xinfo_groups", self._keys.updates))[0])
            unanswered = self._unanswered()
        for entry, raw in self._pages(self._keys.updates):
            if entry_id(entry) > last or entry in unanswered:
                try:
                    yield from_fields(Contribution, text_fields(raw))
                except WireError:
                    yield None

    def _unanswered(self) -> set[str]:
        """What a merger was given and has neither merged nor refused."""
        out: set[str] = set()
        first = "-"
        while True:
            found = self._tolerant(("xpending_range", self._keys.updates, GROUP, first, "+", PAGE))[0]
            ids = [row["message_id"].decode() for row in found or ()]
            out.update(ids)
            if len(ids) < PAGE:
                return out
            first = next_id(ids[-1])

    def cursors(self) -> dict[str, tuple[int, int]]:
        with self._translated():
            return self._cursors(text_fields(self._redis.hgetall(self._keys.data)))

    def _cursors(self, fields: Mapping[str, str]) -> dict[str, tuple[int, int]]:
        """Those in the fields of `RUN:data`; one that cannot be read counts as never begun."""
        out = {}
        for name, text in fields.items():
            if name.endswith(HOLDER) or (name.startswith(CORPUS) and "/" not in name):
                continue
            try:
                out[name] = parse_cursor(text)
            except WireError as error:
                self._warn_once(f"the cursor of shard {name}", error)
        return out

    def tape(self, count: int) -> list[TapeEntry]:
        return self._newest(self._keys.tape, TapeEntry, count)

    def refusals(self, count: int) -> list[tuple[float, Refusal]]:
        with self._translated():
            newest = self._redis.xrevrange(self._keys.snapshots, count=REFUSALS_AMONG) if count else []
        out: list[tuple[float, Refusal]] = []
        for entry, raw in newest:
            event = event_of(entry.decode(), raw) if raw.get(b"kind") == REFUSED else None
            if isinstance(event, Refusal):
                out.append((entry_id(entry.decode())[0] / 1000, event))
            if len(out) == count:
                break
        return out[::-1]

    def control(self) -> dict[str, str]:
        found: Raw = {}
        with self._forgiving(self._keys.control, "a hash"):
            found = self._redis.hgetall(self._keys.control)
        return text_fields(found)

    def notes(self, count: int) -> list[Note]:
        found: list[tuple[bytes, Raw]] = []
        with self._forgiving(self._keys.notes, "a stream"):
            found = self._redis.xrevrange(self._keys.notes, count=count) if count else []
        out = []
        for entry, raw in reversed(found):
            try:
                out.append(from_fields(Note, text_fields(raw)))
            except WireError as error:
                self._warn_once(f"note {entry.decode()}", error)
        return out

    def evaluations(self) -> list[Evaluation]:
        return self._newest(self._keys.evaluations, Evaluation, EVALUATIONS_KEPT)

    def _newest(self, key: str, kind: type[Any], count: int) -> list[Any]:
        with self._translated():
            found = self._redis.xrevrange(key, count=count)
        return [from_fields(kind, text_fields(raw)) for _, raw in reversed(found)]
