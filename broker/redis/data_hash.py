"""The hash `{RUN:s0}:data`: the cursor of each started shard."""

from __future__ import annotations

from collections.abc import Mapping

from archipelago.broker.corpus_shards import parse_cursor
from archipelago.broker.errors import WireError
from archipelago.broker.redis.connection import RedisConnection


def parse_cursors(connection: RedisConnection, fields: Mapping[str, str]) -> dict[str, tuple[int, int]]:
    """Return the cursors in the fields. A cursor that cannot be read counts as the beginning of the shard."""
    out = {}
    for name, text in fields.items():
        try:
            out[name] = parse_cursor(text)
        except WireError as error:
            connection.warn_once(f"the cursor of shard {name}", error)
    return out
