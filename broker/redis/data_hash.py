"""The hash `{RUN:s0}:data`: the cursor and the holder of each shard, and the digest of each registered corpus."""

from __future__ import annotations

from collections.abc import Mapping

from archipelago.broker.corpus_shards import parse_cursor
from archipelago.broker.errors import WireError
from archipelago.broker.redis.connection import RedisConnection

#: Suffix of the field that names the holder of a shard.
HOLDER = ".by"
#: Prefix of the field that holds the digest of a corpus.
CORPUS = "corpus."


def parse_cursors(connection: RedisConnection, fields: Mapping[str, str]) -> dict[str, tuple[int, int]]:
    """Return the cursors among the fields. A cursor that cannot be read counts as the beginning of the shard."""
    out = {}
    for name, text in fields.items():
        if name.endswith(HOLDER) or (name.startswith(CORPUS) and "/" not in name):
            continue
        try:
            out[name] = parse_cursor(text)
        except WireError as error:
            connection.warn_once(f"the cursor of shard {name}", error)
    return out
