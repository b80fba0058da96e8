"""The keys that a run has at its server, as tests look at them, and payloads that are stored as chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from archipelago.broker.redis.keys import Keys
from archipelago.broker.redis.transport import RedisTransport

Connect = Callable[[], RedisTransport]


def keys(raw: Any, run: str) -> set[str]:
    """Return all keys whose names contain the name of the run."""
    return {key.decode() for key in raw.scan_iter(match=f"*{run}*", count=1000)}


def is_chunk(key: str) -> bool:
    return ":c:" in key or ":m:" in key


def chunk_keys(raw: Any, run: str) -> set[str]:
    return {key for key in keys(raw, run) if is_chunk(key)}


def lasting_chunks(raw: Any, run: str) -> set[str]:
    """Return the chunks that never expire."""
    return {key for key in chunk_keys(raw, run) if raw.ttl(key) == -1}


def wanted_chunks(raw: Any, run: str) -> set[str]:
    """Return the chunks to which the newest snapshots and the merger's states of both fragments point."""
    found = set()
    for key in (Keys(run).fragment(0), Keys(run).fragment(1), Keys(run).outer(0), Keys(run).outer(1)):
        name, count = raw.hmget(key, "chunks_name", "chunks")
        if name:
            found |= {Keys(run).chunk(name.decode(), index) for index in range(int(count))}
    return found
