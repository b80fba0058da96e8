"""The transport over Redis, Valkey or fakeredis. The only module that imports `redis`.

Fencing is WATCH on the epoch and one MULTI for each of the merger's writes: Redis itself refuses the older epoch. The
client never retries: a retried XADD after a stall makes two entries, so repeats are said by the caller, with
identities. Payloads lie where `broker.chunks` puts them.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from broker.address import redacted, require_address
from broker.chunks import ChunkStore, Raw
from broker.errors import (
    BadUrlError,
    BrokerError,
    FencedError,
    RunExistsError,
    ServerTooOldError,
    UnknownRunError,
    UnreachableError,
    WireError,
)
from broker.keys import REGISTRY, Keys
from broker.manifest import Manifest
from broker.messages import (
    EVENTS,
    KINDS,
    Books,
    Call,
    Contribution,
    Evaluation,
    Event,
    Heartbeat,
    Presence,
    Refusal,
    Resume,
    Snapshot,
    TapeEntry,
    from_fields,
    to_fields,
)
from broker.transport import START, Commit, Delivery
from broker.wire import payload_bytes_max

SOCKET_SECONDS = 20.0
REMEMBER_SECONDS = 24 * 3600  # islands that went silent
FAKE_POLL_SECONDS = 0.005
EVENTS_KEPT = 20_000
TAPE_KEPT = 20_000
EVALUATIONS_KEPT = 20_000
OLDEST = (6, 2)
_GROUP = "merger"

log = logging.getLogger(__name__)


def connect(url: str, run: str) -> RedisTransport:
    """A connection to one run at `redis://`, `rediss://`, `unix://` or, within this process, `fakeredis://NAME`.

    Raises BadUrlError, UnreachableError, ServerTooOldError. The run need not exist yet.
    """
    if url.startswith("fakeredis://"):
        import fakeredis

        client: redis.Redis = fakeredis.FakeRedis(host=url.removeprefix("fakeredis://") or "default", port=1)
        return RedisTransport(client, run)
    tcp: dict[str, Any] = {} if url.startswith("unix:") else {"socket_connect_timeout": 5.0, "socket_keepalive": True}
    try:
        require_address(url)
        client = redis.Redis.from_url(
            url,
            protocol=2,  # the third begins with HELLO, which old servers and some proxies do not know
            socket_timeout=SOCKET_SECONDS,
            retry=Retry(NoBackoff(), 0),
            retry_on_error=[],
            **tcp,
        )
        transport = RedisTransport(client, run, redacted(url))
        try:
            transport.require_version()
        except BrokerError:
            client.close()
            raise
        return transport
    except (ValueError, TypeError) as error:  # also for options that the client lacks and names no host can have
        secret = redacted(url) != url  # the client's words may quote a password that was cut in two
        raise BadUrlError(
            f"{redacted(url)!r} cannot be read as the address of a Redis" + ("" if secret else f" ({error})"),
            "Write redis://HOST:PORT, rediss://:PASSWORD@HOST:PORT or unix:///PATH"
            + (", and in a password %2F for '/', %3F for '?', %23 for '#'." if secret else "."),
        ) from None


def _text(raw: Raw) -> dict[str, str]:
    return {k.decode("utf-8", "replace"): v.decode("utf-8", "replace") for k, v in raw.items() if k != b"payload"}


class RedisTransport:
    """See `broker.transport.Transport`. Threads may share one: each call takes its own connection from a pool."""

    def __init__(self, client: redis.Redis, run: str, where: str = "the Redis") -> None:
        self.run = run
        self._keys = Keys(run)
        self._redis: Any = client  # redis-py's annotations mix its sync and async answers
        self._where = where
        self._password = client.connection_pool.connection_kwargs.get("password")
        self._elements_max: int | None = None
        self._holder = ""
        self._unreadable: set[str] = set()
        self._chunks = ChunkStore(client, self._keys, self._payload_max)

    # -- plumbing ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (redis.AuthenticationError, redis.exceptions.NoPermissionError) as error:
            raise BrokerError(
                f"{self._where} refuses us ({self._said(error)})",
                "Check user and password in the URL: redis://USER:PASSWORD@HOST:PORT.",
            ) from error
        except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
            raise UnreachableError(
                f"{self._where} does not answer ({self._said(error)})", "Is it running, and may this machine reach it?"
            ) from error
        except redis.ResponseError as error:
            raise BrokerError(
                f"{self._where} refused a command ({self._said(error)})", "See its log and `INFO`."
            ) from error
        except redis.InvalidResponse as error:
            raise BrokerError(
                f"{self._where} does not answer as a Redis does ({self._said(error)})", "Check the port."
            ) from error

    def _said(self, error: Exception) -> str:
        """The error on one line; servers quote commands that they do not know, and so the password."""
        text = " ".join(str(error).split())
        return text.replace(self._password, "***") if self._password else text

    def require_version(self) -> None:
        """Raises ServerTooOldError when the server lacks what the streams need."""
        with self._translated():
            try:
                found = str(self._redis.info("server").get("redis_version", "0"))
            except redis.ResponseError as error:
                if not re.match(r"unknown command .?info\b", str(error), re.IGNORECASE):
                    raise
                self._redis.connection_pool.disconnect()  # its TCP server hangs up after an error
                return  # fakeredis, which has no INFO and all that we need
        if tuple(int(part) for part in re.findall(r"\d+", found)[:2]) < OLDEST:
            raise ServerTooOldError(
                f"{self._where} is Redis {found}, and 6.2 is the oldest that works",
                "Upgrade it, or leave the URL out: `archipelago up` then starts one of its own.",
            )

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

    @contextmanager
    def _fenced(self, epoch: int) -> Iterator[Any]:
        """A transaction that Redis refuses when a newer epoch exists."""
        with self._translated(), self._redis.pipeline(transaction=True) as pipe:
            try:
                pipe.watch(self._keys.epoch)
                if pipe.get(self._keys.epoch) != self._mark(epoch):
                    raise redis.WatchError
                pipe.multi()
                yield pipe
                pipe.execute()
            except redis.WatchError:
                raise FencedError(
                    f"this merger's epoch {epoch} was overtaken", "Another merger serves this run; this one leaves."
                ) from None

    def _payload_max(self) -> int:
        if self._elements_max is None:
            self._elements_max = max(self.manifest().sizes)
        return 4 * payload_bytes_max(self._elements_max)  # the merger's own state holds momentum beside parameters

    # -- the run ----------------------------------------------------------------------------------------------------

    def runs(self) -> list[str]:
        with self._translated():
            return sorted(name.decode() for name in self._redis.smembers(REGISTRY))

    def create(self, manifest: Manifest, snapshots: Sequence[tuple[Snapshot, bytes]]) -> None:
        self._elements_max = max(manifest.sizes)
        with self._translated(), self._redis.pipeline(transaction=True) as pipe:
            pipe.watch(self._keys.manifest)
            if pipe.exists(self._keys.manifest):
                raise self._exists()
            placed = [self._chunks.place(f"f{s.fragment}.0", payload) for s, payload in snapshots]
            pipe.multi()
            pipe.delete(*self._keys.of_the_past(len(snapshots)))  # somebody deleted a manifest by hand
            for (snapshot, _), where in zip(snapshots, placed, strict=True):
                self._chunks.keep(pipe, self._keys.fragment(snapshot.fragment), to_fields(snapshot), where)
            pipe.hset(self._keys.manifest, mapping=manifest.to_fields())
            pipe.xgroup_create(self._keys.updates, _GROUP, id="0", mkstream=True)
            pipe.sadd(REGISTRY, self.run)
            try:
                pipe.execute()
            except redis.WatchError:
                raise self._exists() from None

    def _exists(self) -> RunExistsError:
        return RunExistsError(f"a run {self.run!r} is at {self._where} already", "Choose another name with --run.")

    def manifest(self) -> Manifest:
        with self._translated():
            raw = self._redis.hgetall(self._keys.manifest)
        if not raw:
            raise self._unknown()
        return Manifest.from_fields(_text(raw))

    # -- islands ----------------------------------------------------------------------------------------------------

    def publish(self, contribution: Contribution, payload: bytes) -> str:
        name = f"{contribution.island}.{contribution.incarnation}.{contribution.sequence}"
        with self._translated():
            where = self._chunks.place(name, payload)
            with self._redis.pipeline(transaction=True) as pipe:
                pipe.xadd(self._keys.updates, {**to_fields(contribution), **where})
                pipe.hincrby(self._keys.books, "published", 1)
                pipe.hincrby(self._keys.books, "published_tokens", contribution.tokens)
                pipe.hincrby(self._keys.books, "bytes_up", len(payload))
                entry: bytes = pipe.execute()[0]
        return entry.decode()

    def holds(self, entry: str) -> bool:
        with self._translated():
            return bool(self._redis.xrange(self._keys.updates, entry, entry))

    def heartbeat(self, heartbeat: Heartbeat) -> None:
        key = self._keys.island(heartbeat.island)
        with self._translated(), self._redis.pipeline(transaction=False) as pipe:
            pipe.hset(key, mapping=to_fields(heartbeat))
            pipe.pexpire(key, REMEMBER_SECONDS * 1000)
            pipe.sadd(self._keys.islands, heartbeat.island)
            pipe.execute()

    def claim_shard(self) -> int:
        with self._translated():
            return int(self._redis.hincrby(self._keys.data, "claimed", 1)) - 1

    # -- anyone -----------------------------------------------------------------------------------------------------

    def last_event(self) -> str:
        with self._translated():
            newest = self._redis.xrevrange(self._keys.snapshots, count=1)
        return newest[0][0].decode() if newest else START

    def events(self, after: str, block_seconds: float, count: int = 256) -> list[tuple[str, Event]]:
        deadline = time.monotonic() + block_seconds
        while True:
            with self._translated():
                block = _block_ms(deadline - time.monotonic())
                found = list(_entries(self._redis.xread({self._keys.snapshots: after}, count=count, block=block)))
            out = [(entry, event) for entry, raw in found if (event := _event(entry, raw)) is not None]
            if out or not found:
                return out
            after = found[-1][0]  # nothing in there that this version can read

    def fragment(self, fragment: int, *, account: bool = False) -> tuple[Snapshot, bytes]:
        with self._translated():
            for _ in range(8):
                raw = self._redis.hgetall(self._keys.fragment(fragment))
                if not raw:
                    raise self._unknown()
                snapshot = from_fields(Snapshot, _text(raw))
                try:
                    payload = self._chunks.fetch(raw, snapshot.bytes)
                except WireError:
                    continue  # replaced, and its chunks expired, while we read: the newer one is whole
                if account:
                    self._redis.hincrby(self._keys.books, "bytes_down", len(payload))
                return snapshot, payload
        raise WireError(f"fragment {fragment} cannot be read whole")

    def presences(self) -> list[Presence]:
        with self._translated():
            names = sorted(name.decode() for name in self._redis.smembers(self._keys.islands))
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
                    heartbeat = from_fields(Heartbeat, _text(raw))
                except WireError as error:  # one island's nonsense must not blind us to the others
                    if name not in self._unreadable:
                        log.warning("the heartbeat of %s cannot be read: %s", name, error.reason)
                    self._unreadable.add(name)
                    continue
                out.append(Presence(heartbeat, REMEMBER_SECONDS - ttl_ms / 1000))
            if forgotten:
                self._redis.srem(self._keys.islands, *forgotten)
        return out

    def books(self) -> Books:
        with self._translated():
            return from_fields(Books, _text(self._redis.hgetall(self._keys.books)))

    def backlog(self) -> int:
        with self._translated():
            return int(self._redis.xlen(self._keys.updates))

    def tape(self, count: int) -> list[TapeEntry]:
        return self._newest(self._keys.tape, TapeEntry, count)

    def evaluations(self) -> list[Evaluation]:
        return self._newest(self._keys.evaluations, Evaluation, EVALUATIONS_KEPT)

    def _newest(self, key: str, kind: type[Any], count: int) -> list[Any]:
        with self._translated():
            found = self._redis.xrevrange(key, count=count)
        return [from_fields(kind, _text(raw)) for _, raw in reversed(found)]

    def evaluated(self, evaluation: Evaluation) -> None:
        with self._translated():
            self._redis.xadd(self._keys.evaluations, to_fields(evaluation), maxlen=EVALUATIONS_KEPT)

    # -- the merger -------------------------------------------------------------------------------------------------

    def acquire(self, holder: str, seconds: float) -> int | None:
        self._require_run()
        with self._translated(), self._redis.pipeline(transaction=True) as pipe:
            pipe.watch(self._keys.lease, self._keys.epoch)
            owner = pipe.get(self._keys.lease)
            if owner is not None and owner.decode() != holder:
                return None
            epoch = int((pipe.get(self._keys.epoch) or b"0").split()[0]) + 1
            self._holder = holder
            pipe.multi()
            pipe.set(self._keys.epoch, self._mark(epoch))
            pipe.set(self._keys.lease, holder, px=int(seconds * 1000))
            try:
                pipe.execute()
            except redis.WatchError:
                return None
            return epoch

    def _mark(self, epoch: int) -> bytes:
        """What the epoch's key holds while it is ours. The number alone is not enough: a server that dies may forget
        the newest, and would give it to two.
        """
        return f"{epoch} {self._holder}".encode()

    def renew(self, epoch: int, holder: str, seconds: float) -> None:
        with self._translated():
            kept = self._redis.pexpire(self._keys.lease, int(seconds * 1000))  # works at maxmemory, where SET does not
            current = self._redis.get(self._keys.epoch) == self._mark(epoch)
        if not current or not kept:
            with self._fenced(epoch) as pipe:
                pipe.set(self._keys.lease, holder, px=int(seconds * 1000))

    def release(self, epoch: int) -> None:
        with self._fenced(epoch) as pipe:
            pipe.delete(self._keys.lease)

    def updates(self, block_seconds: float, count: int = 64) -> list[Delivery]:
        deadline = time.monotonic() + block_seconds
        while True:
            found = self._read_updates(">", count, deadline - time.monotonic())
            if found or time.monotonic() >= deadline:
                return found
            time.sleep(FAKE_POLL_SECONDS)  # only fakeredis answers a blocking XREADGROUP before its time

    def unacknowledged(self) -> list[Delivery]:
        out: list[Delivery] = []
        after = "0"
        while found := self._read_updates(after, 256, 0):
            out += found
            after = found[-1].entry
        return out

    def _read_updates(self, after: str, count: int, block_seconds: float) -> list[Delivery]:
        block = _block_ms(block_seconds)
        with self._translated():
            try:
                found = self._redis.xreadgroup(_GROUP, _GROUP, {self._keys.updates: after}, count=count, block=block)
            except redis.ResponseError as error:
                if not re.search("NOGROUP|UNBLOCKED", str(error)):
                    raise
                self._require_run()  # the stream was deleted by hand: begin it anew, lose nothing that is left
                self._redis.xgroup_create(self._keys.updates, _GROUP, id="0", mkstream=True)
                return []
            return [self._delivery(entry, raw) for entry, raw in _entries(found)]

    def _delivery(self, entry: str, raw: Raw) -> Delivery:
        if not raw:
            return Delivery(entry, None, b"", "the entry was deleted before it was merged")
        try:
            contribution = from_fields(Contribution, _text(raw))
        except WireError as error:
            return Delivery(entry, None, b"", error.reason)
        try:
            return Delivery(entry, contribution, self._chunks.fetch(raw, contribution.bytes))
        except WireError as error:
            return Delivery(entry, contribution, b"", error.reason)

    def merger_state(self) -> str:
        with self._translated():
            return (self._redis.get(self._keys.state) or b"").decode()

    def outer(self, fragment: int) -> bytes:
        with self._translated():
            raw = self._redis.hgetall(self._keys.outer(fragment))
            return self._chunks.fetch(raw, int(raw[b"bytes"])) if raw else b""

    def announce(self, epoch: int, event: Call | Resume) -> None:
        with self._fenced(epoch) as pipe:
            self._announce(pipe, event)

    def refuse(self, epoch: int, refusals: Sequence[tuple[str, Refusal]]) -> None:
        with self._translated():
            old = [self._entry_chunks(entry) for entry, _ in refusals]
        with self._fenced(epoch) as pipe:
            for (entry, refusal), chunks in zip(refusals, old, strict=True):
                self._end(pipe, entry, chunks)
                pipe.hincrby(self._keys.books, "refused", 1)
                pipe.hincrby(self._keys.books, "refused_tokens", refusal.tokens)
                self._announce(pipe, refusal)

    def commit(self, epoch: int, commit: Commit) -> None:
        p, version = commit.snapshot.fragment, commit.snapshot.version
        with self._translated():
            old_snapshot = self._redis.hgetall(self._keys.fragment(p))
            old_outer = self._chunks.keys_of(self._redis.hgetall(self._keys.outer(p)))
            merged = [self._entry_chunks(entry) for entry in commit.entries]
            snapshot_at = self._chunks.place(f"f{p}.{version}.e{epoch}", commit.payload)
            outer_at = self._chunks.place(f"o{p}.{version}.e{epoch}", commit.outer)
        outer_fields = {"version": str(version), "bytes": str(len(commit.outer))}
        with self._fenced(epoch) as pipe:
            self._chunks.keep(pipe, self._keys.fragment(p), to_fields(commit.snapshot), snapshot_at, old_snapshot)
            self._chunks.keep(pipe, self._keys.outer(p), outer_fields, outer_at)
            if old_outer:  # only mergers read it, and this one just did
                pipe.unlink(*old_outer)
            for entry, chunks in zip(commit.entries, merged, strict=True):
                self._end(pipe, entry, chunks)
            pipe.set(self._keys.state, commit.state)
            pipe.hincrby(self._keys.books, "merged", len(commit.entries))
            pipe.hincrby(self._keys.books, "merged_tokens", commit.tokens)
            pipe.xadd(self._keys.tape, to_fields(commit.tape), maxlen=TAPE_KEPT)
            self._announce(pipe, commit.snapshot)

    def _entry_chunks(self, entry: str) -> list[str]:
        found = self._redis.xrange(self._keys.updates, entry, entry)
        try:
            return self._chunks.keys_of(found[0][1]) if found else []
        except WireError:
            return []

    def _end(self, pipe: Any, entry: str, chunks: list[str]) -> None:
        pipe.xack(self._keys.updates, _GROUP, entry)
        pipe.xdel(self._keys.updates, entry)
        if chunks:
            pipe.unlink(*chunks)

    def _announce(self, pipe: Any, event: Event) -> None:
        fields = {"kind": KINDS[type(event)], **to_fields(event)}
        pipe.xadd(self._keys.snapshots, fields, maxlen=EVENTS_KEPT, approximate=True)

    def close(self) -> None:
        self._redis.close()


def _block_ms(seconds: float) -> int | None:
    """For BLOCK: shorter than the socket's patience, None for not at all."""
    return max(1, int(min(seconds, SOCKET_SECONDS / 2) * 1000)) if seconds > 0 else None


def _event(entry: str, raw: Raw) -> Event | None:
    """None for a kind that a newer merger may add, and for what cannot be read."""
    fields = _text(raw)
    kind = EVENTS.get(fields.get("kind", ""))
    try:
        return from_fields(kind, fields) if kind else None
    except WireError as error:
        log.warning("event %s cannot be read: %s", entry, error.reason)
        return None


def _entries(found: Any) -> Iterator[tuple[str, Raw]]:
    """Entries of one stream, from the list of pairs that RESP2 answers or the map that RESP3 does."""
    if not found:
        return
    streams: Any = found.values() if isinstance(found, dict) else (entries for _, entries in found)
    for entries in streams:
        flat = entries[0] if entries and isinstance(entries[0], list) else entries
        for entry, raw in flat:
            yield entry.decode(), raw or {}
