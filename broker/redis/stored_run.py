"""What a run keeps in Redis: its manifest, the full states of fragments, and the differences between their versions.

`fragment:P` and `outer:P` are a fragment's newest compaction, and `head:P` is the header of its newest version. Each
version between the two has an entry on the tape and, in runs that send them, a difference.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from archipelago.broker.commits import DIFFERENCES_KEPT, Commit
from archipelago.broker.errors import BrokerError, ConfigError, UnknownRunError, WireError, few_of
from archipelago.broker.full_state import Compaction
from archipelago.broker.manifest import FORMAT, OTHER_FORMAT, Manifest
from archipelago.broker.messages import COUNT_MAX, REFUSED, Counters, Note, Snapshot, from_raw, text_fields, to_fields
from archipelago.broker.redis.chunks import CHUNKS, PREVIOUS_SECONDS, ChunkStore
from archipelago.broker.redis.connection import RedisConnection
from archipelago.broker.redis.keys import REGISTRY, Keys, names_in
from archipelago.broker.redis.script import Command, Value, Write
from archipelago.broker.signing import MERGER, SIGNATURE, Raw, SignatureError, Signing
from archipelago.broker.wire import is_digest, payload_bytes_max

#: The field of the merger's state that tells it from all others.
DIGEST = "digest"
_FORMAT = re.compile(r"[0-9]{1,3}\.[0-9]{1,3}")


class StoredRun:
    """The run of one connection. It need not exist yet."""

    def __init__(self, connection: RedisConnection) -> None:
        self._connection = connection
        self._shape: Manifest | None = None

    def names(self) -> list[str]:
        """Return the names of all runs that this user may read. A name is registered before its run is created."""
        names = names_in(self._connection.answer("smembers", REGISTRY, client=self._connection.registry) or ())
        asked: dict[Any, list[str]] = {}  # by client: in a cluster, runs lie on several nodes
        for name in names:
            asked.setdefault(self._connection.servers.client(Keys(name).manifest), []).append(name)
        found: set[str] = set()
        for client, some in asked.items():
            with self._connection.translated(), client.pipeline(transaction=False) as pipe:
                for name in some:
                    pipe.exists(Keys(name).manifest)
                exist = pipe.execute(raise_on_error=False)  # a member of one run may not look at others
            found.update(name for name, exists in zip(some, exist, strict=True) if isinstance(exists, int) and exists)
        return [name for name in names if name in found]

    def manifest(self) -> Manifest:
        """Return the manifest of the run, or of the shard.

        Raises:
            UnknownRunError: There is none.
            ConfigError: It is damaged (`config.manifest`), of another version (`config.format`), or not signed by the
                run's mergers (`signature.manifest`).
        """
        raw = self._connection.answer("hgetall", self._connection.keys.manifest)
        if raw is None:
            raw = {b"run": b""}  # refused below, as any other damaged manifest
        if not raw:
            raise self.unknown()
        try:
            self._connection.signing.verify("manifest", MERGER, raw)
        except SignatureError as error:
            raise ConfigError(
                f"the manifest of the run {self._connection.run!r} is not the one of your join file ({error.reason})",
                "Someone has changed it, or created the run again without its key. Ask for a new join file; an "
                "administrator signs a new run with `archipelago invite`.",
                code="signature.manifest",
            ) from None
        self._require_format(text_fields(raw))
        manifest, shard = Manifest.from_fields(text_fields(raw)), self._connection.shard
        if shard is not None and shard >= manifest.shards:
            raise ConfigError(
                f"the run {self._connection.run!r} has {manifest.shards} shards, and none of number {shard}",
                "It was created again with fewer shards. Start this process again.",
                code="config.manifest",
            )
        return manifest.of_shard(shard)

    def _require_format(self, fields: Mapping[str, str]) -> None:
        """Raise ConfigError if another version of archipelago has made the run."""
        run, found = self._connection.run, fields.get("format", "0.2")
        if found != FORMAT and "tensors" in fields and _FORMAT.fullmatch(found):  # else the manifest is damaged
            raise ConfigError(
                f"version {found} of archipelago has made the run {run!r}; this one has the format {FORMAT}",
                f"Finish it with archipelago-train {found}. Or stop its processes, delete it (`archipelago rm {run}`), "
                f"and go on from its last checkpoint: `archipelago merger --run {run} --resume`.",
                code=OTHER_FORMAT,
            )

    def uid(self) -> str | None:
        """See `ReaderClient.uid`."""
        found = self._connection.answer("hget", self._connection.keys.manifest, "uid")
        return None if found is None else str(found.decode("utf-8", "replace"))

    def require(self) -> None:
        """Raise UnknownRunError unless the run exists. A run that has lost only its manifest exists."""
        keys = self._connection.keys
        with self._connection.translated():
            known = self._connection.redis.exists(keys.manifest, keys.state, keys.epoch)
        if not known:
            raise self.unknown()

    def unknown(self) -> UnknownRunError:
        """Return the error for a run that does not exist."""
        here = few_of(self.names())
        remedy = (
            "Make it with `archipelago init` or a training script (a trainer creates it if you give `steps`), or name "
            "another with --run."
        )
        if self._has_islands():
            remedy = self._said_by_merger() or (
                f"This Redis has lost it: its islands still write heartbeats here. {self.others_first()}Start its "
                "merger again with --resume: it continues from the newest checkpoint."
            )
        return UnknownRunError(
            f"there is no run {self._connection.run!r} at {self._connection.where} (runs there: {here})", remedy
        )

    def others_first(self) -> str:
        """Return what to do with the other shards of a run that has lost one; empty if none of the first two is left.

        All shards go back together.
        """
        connection = self._connection
        keys = [Keys(connection.run, shard).manifest for shard in (0, 1)]
        with suppress(BrokerError), connection.translated():
            if any(connection.servers.client(key).exists(key) for key in keys):
                return f"Stop its mergers, and delete its other shards: `archipelago rm {connection.run} --force`. "
        return ""

    def _has_islands(self) -> bool:
        """Return whether there are islands of a run of this name, as far as this user may know."""
        try:
            with self._connection.translated():
                return bool(self._connection.redis.exists(self._connection.keys.islands))
        except BrokerError:
            return False

    def _said_by_merger(self) -> str:
        """Return what the last merger has said about a run that is lost, such as the command that continues it."""
        try:
            newest = self._connection.newest(self._connection.keys.notes, 1)
            notes = [from_raw(Note, raw) for _, raw in newest]
        except (BrokerError, WireError):
            return ""
        return f"Its merger says: {notes[0].text}" if notes and notes[0].kind == REFUSED else ""

    def shape(self) -> Manifest:
        """Return the manifest as it was read first. Its fragments never change."""
        self._shape = self._shape or self.manifest()
        return self._shape

    def payload_max(self) -> int:
        """Return the largest payload in bytes that the merger or an honest island stores."""
        return 4 * payload_bytes_max(max(self.shape().sizes))  # the merger's own state contains parameters and momentum


#: How long the chunks of a merger wait for a pointer. One that died, or was overtaken, leaves them.
PLACED_SECONDS = 3600
Where = dict[str, str | bytes]


@dataclass(frozen=True)
class RedisPlaced:
    """A compaction whose chunks are in Redis, with the hashes that will point to them: `outer` is empty without one."""

    snapshot: Snapshot
    fragment: Where
    outer: Where


class Compactions:
    """Reads and writes the full states of one run's fragments."""

    def __init__(self, connection: RedisConnection, chunks: ChunkStore) -> None:
        self._connection, self._chunks = connection, chunks
        self._redis, self._keys = connection.redis, connection.keys

    def outer(self, fragment: int, version: int) -> bytes:
        """See `MergerClient.outer`."""
        raw = self._connection.hash_at(self._keys.outer(fragment))
        if not raw:
            raise WireError(f"the outer state of fragment {fragment} is missing")
        self._connection.signing.verify("outer", MERGER, raw, about=str(fragment))
        try:
            found, size = int(raw[b"version"]), int(raw[b"bytes"])
        except (KeyError, ValueError):
            raise WireError(f"the stored outer state of fragment {fragment} is damaged") from None
        if found != version:
            raise WireError(f"the stored outer state of fragment {fragment} is not of version {version}")
        payload = self._chunks.fetch(raw, size)
        if not is_digest(raw.get(b"digest", b"").decode("ascii", "replace"), payload):
            raise WireError(f"the stored outer state of fragment {fragment} is not the announced one")
        return payload

    # -- writes -----------------------------------------------------------------------------------------------------

    def place(self, epoch: int, compaction: Compaction, seconds: int = PLACED_SECONDS) -> RedisPlaced:
        """Upload a compaction as chunks that expire after that time unless `point` keeps them."""
        snapshot, payload, outer = compaction.snapshot, compaction.payload, compaction.outer
        signing, about, stamp = self._connection.signing, str(snapshot.fragment), self._connection.stamps.next(epoch)
        name = f"{snapshot.fragment}.{snapshot.version}.e{epoch}"
        payload_at = self._chunks.place(f"f{name}", payload, seconds)
        outer_at = self._chunks.place(f"o{name}", outer, seconds) if outer else {}
        signed = signing.signed("fragment", to_fields(snapshot), about=about, payload=payload, stamp=stamp)
        of_outer = {"version": str(snapshot.version), "bytes": str(len(outer))}
        signed_outer = signing.signed("outer", of_outer, about=about, payload=outer) if outer else {}
        return RedisPlaced(snapshot, {**signed, **payload_at}, {**signed_outer, **outer_at})

    def first(self, epoch: int, placed: RedisPlaced) -> list[Command]:
        """Return the commands that point to a placed compaction, and write its header, in a run that is created."""
        p = placed.snapshot.fragment
        hashes = [(self._keys.fragment(p), placed.fragment), (self._keys.outer(p), placed.outer)]
        kept = [("PERSIST", chunk) for _, where in hashes for chunk in self._chunks.placed(where)]
        return [*(hash_of(*each) for each in hashes if each[1]), *kept, *self.head(epoch, placed.snapshot)]

    def point(self, write: Write, placed: RedisPlaced) -> None:
        """Point to a placed compaction.

        The payload before it stays for a while, for its readers. No other process reads the outer state.
        """
        p = placed.snapshot.fragment
        words = chain.from_iterable(placed.fragment.items())
        replace = ("replace", self._keys.fragment(p), *self.owned, PREVIOUS_SECONDS, *words)
        self._write(write, placed.fragment, replace)
        if placed.outer:
            key = self._keys.outer(p)
            self._write(write, placed.outer, ("forget", key, *self.owned), hash_of(key, placed.outer))

    def write_difference(self, write: Write, epoch: int, commit: Commit) -> None:
        """Upload the difference of a commit, point to it, and delete the one that is too old."""
        p, version, keys = commit.snapshot.fragment, commit.snapshot.version, self._keys
        where = self._chunks.place(f"d{p}.{version}.e{epoch}", commit.difference, PLACED_SECONDS)
        key, size = keys.difference(p, version), {"bytes": str(len(commit.difference))}
        signing = self._connection.signing
        signed = signing.signed("difference", size, about=f"{p}/{version}", payload=commit.difference)
        # Whatever lies there goes, as after a return to a checkpoint.
        self._write(write, where, ("forget", key, *self.owned), hash_of(key, {**signed, **where}))
        if version > DIFFERENCES_KEPT:
            write.commands.append(("forget", keys.difference(p, version - DIFFERENCES_KEPT), *self.owned))

    def head(self, epoch: int, snapshot: Snapshot) -> list[Command]:
        """Return the commands that write the header of a fragment's newest version, whatever lies there."""
        key, about, signing = self._keys.head(snapshot.fragment), str(snapshot.fragment), self._connection.signing
        fields = to_fields(snapshot)
        signed = signing.signed("head", fields, about=about, stamp=self._connection.stamps.next(epoch))
        return [("DEL", key), hash_of(key, signed)]

    def _write(self, write: Write, where: Where, *commands: Command) -> None:
        """Write a hash by these commands, and keep the placed payload to which it points. Its chunks must be there."""
        chunks = self._chunks.placed(where) if CHUNKS in where else []
        write.needed += chunks
        write.commands += [*commands, *(("PERSIST", chunk) for chunk in chunks)]

    @cached_property
    def owned(self) -> tuple[str, int]:
        """What the keys of the mergers' chunks begin with, and the most chunks of one payload."""
        return self._chunks.prefix, self._chunks.most()


def hash_of(key: str, fields: Mapping[str, Value]) -> Command:
    """Return the command that writes these fields of a hash."""
    return ("HSET", key, *chain.from_iterable(fields.items()))


# -- counters and the merger's state -----------------------------------------------------------------------------------


def counts_in(fields: Mapping[str, str]) -> tuple[dict[str, int], list[str]]:
    """Return the counters, and the names of those that are no numbers, which count as 0.

    A counter that is too large counts as the largest one.
    """
    counts, faults = {}, []
    for name in (f.name for f in dataclasses.fields(Counters) if f.name in fields):
        count = _count(fields[name])
        if count is None:
            faults.append(name)
        else:
            counts[name] = count
    return counts, faults


def count_in(value: bytes | None) -> int:
    """Return a counter, at most COUNT_MAX; 0 for a value that is missing or no number."""
    return _count((value or b"").decode("utf-8", "replace")) or 0


def _count(text: str) -> int | None:
    return min(int(text), COUNT_MAX) if re.fullmatch(r"[0-9]{1,30}", text, re.ASCII) else None


def state_fields(signing: Signing, state: str) -> dict[str, str]:
    """Return a state (sorted JSON without empty mappings) in the fields of a hash, signed if signing is on.

    Each entry of a mapping in it has a field of its own, so that a commit writes only those that have changed.
    """
    values: dict[str, Any] = {}
    for key, value in json.loads(state or "{}").items():
        values |= {f"{key}/{name}": each for name, each in value.items()} if isinstance(value, dict) else {key: value}
    if signing.is_on:
        values[SIGNATURE] = signing.signed("state", {"state": state})[SIGNATURE]
    return {name: json.dumps(value) for name, value in values.items()}


def state_in(signing: Signing, stored: Raw) -> str:
    """Return the merger's state, which `state_fields` has divided; empty without any. Raises WireError."""
    values: dict[str, Any] = {}
    try:
        for name, text in stored.items():
            key, is_entry, entry = name.decode().partition("/")
            of = values.setdefault(key, {}) if is_entry else values
            of[entry if is_entry else key] = json.loads(text)
        signature = {SIGNATURE.encode(): str(values.pop(SIGNATURE)).encode()} if SIGNATURE in values else {}
        state = json.dumps(values, sort_keys=True) if values else ""
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise WireError(f"a part of the merger's state cannot be read ({error})", code="wire.message") from None
    if stored:
        signing.verify("state", MERGER, {b"state": state.encode(), **signature})
    return state
