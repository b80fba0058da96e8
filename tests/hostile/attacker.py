"""A hostile client of one run. It speaks raw Redis, so that none of our own checks stand between it and the run.

It knows what an island knows: the names of the keys, the manifest, the codecs, and how to make a valid contribution.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from archipelago.broker.address import with_user
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import to_fields
from archipelago.broker.presence import Heartbeat
from archipelago.broker.redis import roles
from archipelago.broker.redis.chunks import CHUNK_BYTES, CHUNKS, INLINE_BYTES, NAME, PAYLOAD
from archipelago.broker.redis.keys import Keys
from archipelago.broker.wire import digest, pack
from tests import samples

#: Entries that are sent before their answers are read.
BATCH = 1000
#: The smallest flood. It has more islands than one that a run may count by mistake.
FLOOD_MIN = 5
Fields = dict[str, str | bytes]


class Attacker:
    """One hostile client.

    Args:
        client: A client of the server, with whatever password the attacker has.
        manifest: The run's manifest.
        name: The island that it claims to be.
        victim: An honest island.
        scale: The share of a full flood that it sends.
    """

    def __init__(
        self, client: Any, manifest: Manifest, name: str = "mallory", victim: str = "ada", scale: float = 1.0
    ) -> None:
        self.redis, self.manifest = client, manifest
        self.name, self.victim, self.scale = name, victim, scale
        self.keys = Keys(manifest.run)
        self.incarnation = secrets.token_hex(4)
        self.sequence = 0

    # -- what it can read ---------------------------------------------------------------------------------------------

    @property
    def closed(self) -> int:
        """The last closed round."""
        found = self.redis.hget(self.keys.counters, "round")
        return int(found) if found and found.isdigit() else 0

    def version(self, fragment: int) -> int:
        """Return the newest version of a fragment."""
        return int(self.redis.hget(self.keys.fragment(fragment), "version") or 0)

    def key(self, suffix: str) -> str:
        """Return a key of the run's hash tag."""
        return f"{self.keys.tag}:{suffix}"

    def count(self, full: int) -> int:
        """Return the size of a flood."""
        return max(FLOOD_MIN, int(full * self.scale))

    def incarnation_of(self, island: str) -> str:
        """Return the incarnation of an island."""
        key = self.keys.island(island)
        return (self.redis.hget(key, "incarnation") or b"x").decode() if self.redis.type(key) == b"hash" else "x"

    def stream(self, island: str = "") -> str:
        """Return the key of an island's updates stream, by default the attacker's own."""
        return self.key(f"updates:{island or self.name}")

    # -- what it can make ---------------------------------------------------------------------------------------------

    def payload(self, fragment: int, scale: float = 0.0, noise: float = 0.0) -> bytes:
        """Return a valid payload: zeros, a constant, or noise of that standard deviation."""
        size = self.manifest.sizes[fragment]
        values_N = np.full(size, scale, np.float32)
        if noise:
            values_N += np.random.default_rng(self.sequence).normal(0.0, noise, size).astype(np.float32)
        wire = self.manifest.config.wire
        return pack(values_N, wire.up, wire.zstd_level)

    def contribution(self, payload: bytes | None = None, ahead: int = 1, **claims: Any) -> tuple[dict[str, str], bytes]:
        """Return a contribution to a round that is open, as fields, and its payload.

        Everything is what an honest island might send, apart from `claims`, which may break every rule of the schema.
        """
        number = self.closed + ahead
        fragment = self.manifest.fragment_of(number)
        payload = self.payload(fragment) if payload is None else payload
        config = self.manifest.config
        honest = samples.contribution(
            payload,
            island=self.name,
            incarnation=self.incarnation,
            sequence=self.sequence,
            round=number,
            fragment=fragment,
            base=self.version(fragment),
            tokens=config.tokens_per_step,
            steps=1,
            global_step=0,
            loss=3.0,
            step_seconds=0.1,
            codec=config.wire.up,
        )
        self.sequence += 1
        return {**to_fields(honest), **{name: str(value) for name, value in claims.items()}}, payload

    def contributions(self, count: int, **claims: Any) -> Iterator[tuple[dict[str, str], bytes]]:
        """Yield contributions that differ in their sequence numbers. A flood cannot look at the run for each."""
        fields, payload = self.contribution(**claims)
        for _ in range(count):
            yield {**fields, "sequence": str(self.sequence)}, payload
            self.sequence += 1

    def heartbeat(self, island: str = "", **claims: Any) -> dict[Any, Any]:
        """Return the fields of a heartbeat."""
        honest: Heartbeat = samples.heartbeat(island or self.name, incarnation=self.incarnation)
        return {**to_fields(honest), **{name: str(value) for name, value in claims.items()}}

    # -- what it can write --------------------------------------------------------------------------------------------

    def push(self, fields: Mapping[Any, Any], payload: bytes | None = None, stream: str = "") -> None:
        """Append one raw entry to the updates stream of the island `stream`, by default to the attacker's own."""
        self.redis.xadd(self.stream(stream), self._placed(fields, payload))

    def push_all(self, entries: Iterable[tuple[Mapping[str, Any], bytes | None]], stream: str = "") -> int:
        """Append many entries, and return their number."""
        count = 0
        pipe = self.redis.pipeline(transaction=False)
        for fields, payload in entries:
            pipe.xadd(
                self.stream(stream),
                self._placed(fields, payload),
            )
            count += 1
            if count % BATCH == 0:
                pipe.execute()
        pipe.execute()
        return count

    def send(self, ahead: int = 1, stream: str = "", payload: bytes | None = None, **claims: Any) -> None:
        """Send a contribution to an open round, with these claims."""
        fields, payload = self.contribution(payload, ahead, **claims)
        self.push(fields, payload, stream)

    def join(self, island: str = "") -> None:
        """Register the island's name, and write a heartbeat."""
        self.redis.sadd(self.keys.islands, island or self.name)
        self.beat(island)

    def beat(self, island: str = "", milliseconds: int = 60_000, **claims: Any) -> None:
        """Write a heartbeat with that time to live, in place of what an earlier attack has left there."""
        key = self.keys.island(island or self.name)
        self.redis.delete(key)
        self.redis.hset(key, mapping=self.heartbeat(island, **claims))
        self.redis.pexpire(key, milliseconds)

    def place(self, payload: bytes, name: str) -> Fields:
        """Upload chunks as an island does, and return the pointer to them."""
        starts = range(0, len(payload), CHUNK_BYTES)
        for index, start in enumerate(starts):
            self.redis.set(self.keys.chunk(name, index, self.name), payload[start : start + CHUNK_BYTES])
        return {CHUNKS: str(len(starts)), NAME: name}

    def _placed(self, fields: Mapping[Any, Any], payload: bytes | None) -> Any:
        if payload is None or CHUNKS in fields:
            return dict(fields)
        if len(payload) <= INLINE_BYTES:
            return {**fields, PAYLOAD: payload}
        return {**fields, **self.place(payload, f"{self.name}.{secrets.token_hex(4)}")}


def header(fields: Mapping[str, str], payload: bytes) -> dict[str, str]:
    """Return fields that announce `payload` truly."""
    return {**fields, "bytes": str(len(payload)), "digest": digest(payload)}


def as_island(url: str, run: str, name: str, administrator: Any) -> str:
    """Return the URL with new credentials that have the rights of an island of the run."""
    user, password = roles.user_of(run, name), secrets.token_hex(16)
    version = tuple(map(int, administrator.info("server")["redis_version"].split(".")))
    administrator.execute_command("ACL", "SETUSER", user, *roles.rules("island", run, name, version), f">{password}")
    return with_user(url, user, password)
