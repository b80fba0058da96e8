"""The leases of corpus shards in Redis. Each island writes its own claims into a hash of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from archipelago.broker.corpus_shards import Claim, Place, choose, claims_that_count, parse_claim
from archipelago.broker.errors import WireError
from archipelago.broker.redis.connection import RedisConnection
from archipelago.broker.redis.data_hash import parse_cursors
from archipelago.broker.redis.replies import text_fields
from archipelago.broker.redis.updates import UpdatesStreams
from archipelago.broker.signing import Raw

#: The most claims of one island that are read. An honest island has fewer, and another one may have written any number.
CLAIMS_MAX = 256


class ShardLeases:
    """Reads all claims, and writes those of one island.

    Args:
        connection: The connection to the run.
        updates: Knows the names of the islands.
    """

    def __init__(self, connection: RedisConnection, updates: UpdatesStreams) -> None:
        self._connection = connection
        self._redis, self._keys = connection.redis, connection.keys
        self._updates = updates

    def lease(self, shards: Sequence[str], me: str, is_gone: Callable[[str], bool]) -> Place | None:
        """Lease a shard; see `broker.transport.IslandClient.lease_shard`.

        The transaction watches all cursors and all claims that were read. If one of them changes, nothing is written
        and the choice is made again. So no island starts at an outdated cursor, and no two lease one shard.

        Args:
            shards: The shards that `me` can read, in its order of preference.
            me: The island and its incarnation, as island/incarnation.
            is_gone: Returns whether a holder has lost its leases.
        """
        island = me.partition("/")[0]

        def change(pipe: Any) -> Place | None:
            pipe.watch(self._keys.islands)
            names = sorted({*self._updates.names(), island})
            pipe.watch(*map(self._keys.leases, names))
            claims = self._all_claims(names)
            cursors = parse_cursors(self._connection, text_fields(pipe.hgetall(self._keys.data)))
            held = claims_that_count(claims, cursors)
            holders = {shard: claim.holder for shard, claim in held.items()}
            chosen = choose(shards, cursors, holders, me, is_gone)
            if chosen is None:
                return None
            place = Place(chosen, *cursors.get(chosen, (0, 0)))
            old = held.get(chosen)
            taken_over = old is not None and old.holder.partition("/")[0] != island
            claim = Claim(me, place.pass_number, old.turn + taken_over if old is not None else 0)
            ended = [s for s, c in claims[island].items() if c.pass_number < cursors.get(s, (0, 0))[0] and s != chosen]
            pipe.multi()
            pipe.hset(self._keys.leases(island), chosen, str(claim))
            pipe.sadd(self._keys.islands, island)
            if ended:
                pipe.hdel(self._keys.leases(island), *ended)
            return place

        return self._connection.attempted(self._keys.data, change)

    def held(self, shards: Sequence[str], me: str) -> frozenset[str]:
        """Return the shards that `me` still holds."""
        names = self._updates.names()
        keys = [self._keys.data, *map(self._keys.leases, names)]
        cursor_texts, *rows = self._answers([("hmget", key, list(shards)) for key in keys])
        cursors = parse_cursors(self._connection, _present(shards, cursor_texts))
        claims = {name: self._claims(name, _present(shards, row)) for name, row in zip(names, rows, strict=True)}
        return frozenset(s for s, claim in claims_that_count(claims, cursors).items() if claim.holder == me)

    def _all_claims(self, names: Sequence[str]) -> dict[str, dict[str, Claim]]:
        found = self._answers([("hscan", self._keys.leases(name), 0, None, CLAIMS_MAX) for name in names])
        rows: list[Raw] = [answer[1] if answer else {} for answer in found]
        return {name: self._claims(name, text_fields(raw)) for name, raw in zip(names, rows, strict=True)}

    def _claims(self, island: str, fields: Mapping[str, str]) -> dict[str, Claim]:
        out = {}
        for shard, text in fields.items():
            try:
                out[shard] = parse_claim(island, text)
            except WireError as error:
                self._connection.warn_once(f"the lease of shard {shard:.80} by {island}", error)
        return out

    def _answers(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        with self._connection.translated():
            return self._connection.tolerant(*commands) if commands else []


def _present(shards: Sequence[str], values: Sequence[bytes | None] | None) -> dict[str, str]:
    """Return the values of HMGET that exist, as text, by shard."""
    found = zip(shards, values or [None] * len(shards), strict=True)
    return {shard: value.decode("utf-8", "replace") for shard, value in found if value is not None}
