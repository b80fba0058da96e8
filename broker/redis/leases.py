"""The leases of corpus shards in Redis. Each island writes its own claims into a hash of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from archipelago.broker.corpus_shards import Claim, Place, choose, claims_that_count, parse_claim
from archipelago.broker.errors import WireError
from archipelago.broker.redis.connection import ATTEMPTS, DisturbedError, RedisConnection
from archipelago.broker.redis.data_hash import parse_cursors
from archipelago.broker.redis.replies import text_fields
from archipelago.broker.redis.updates import UpdatesStreams
from archipelago.broker.signing import Raw

#: The most claims of one island that are read. An honest island has fewer, and another one may have written any number.
CLAIMS_MAX = 256
#: How long the mark of a shard is kept. Its island sets it again.
MARK_SECONDS = 24 * 3600


class ShardLeases:
    """Reads all claims, and writes those of one island.

    A mark for each shard holds the island that leased it last. It lets two leases of one shard disturb each other, and
    no others. An island that finds its own mark on a shard needs to read no claims of other islands. The mark is only a
    hint, which any island can change or Redis can lose: without it the claims are read, and only these count.

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

        If another island leases the shard meanwhile, nothing is written and the choice is made again. The transaction
        that writes the claim also reads the cursor. So no island starts at an outdated cursor, and no two lease one
        shard.

        Args:
            shards: The shards that `me` can read, in its order of preference.
            me: The island and its incarnation, as island/incarnation.
            is_gone: Returns whether a holder has lost its leases.
        """
        for _ in range(ATTEMPTS):
            chosen, ended = self._chosen(shards, me, is_gone)
            if chosen is None:
                return None
            if (place := self._taken(chosen, me, is_gone, ended)) is not None:
                return place
        return None

    def _chosen(
        self, shards: Sequence[str], me: str, is_gone: Callable[[str], bool]
    ) -> tuple[str | None, Sequence[str]]:
        """Return the shard to lease, and the claims of `me` whose pass has ended."""
        island = me.partition("/")[0]
        claims = self._all_claims(self._names_with(island))
        cursors = self._cursors()
        holders = {shard: claim.holder for shard, claim in claims_that_count(claims, cursors).items()}
        chosen = choose(shards, cursors, holders, me, is_gone)
        return chosen, [s for s, c in claims[island].items() if c.pass_number < cursors.get(s, (0, 0))[0]]

    def _taken(self, shard: str, me: str, is_gone: Callable[[str], bool], ended: Sequence[str]) -> Place | None:
        """Write the claim to a shard, and return where to begin; None if another island was faster."""
        island, mark = me.partition("/")[0], self._keys.taken(shard)
        try:
            with self._connection.watching(mark) as pipe:
                cursors, claims = self._of_shards([shard], self._names_with(island))
                old = claims_that_count(claims, cursors).get(shard)
                if old is not None and old.holder != me and not is_gone(old.holder):
                    return None
                pass_number = cursors.get(shard, (0, 0))[0]
                taken_over = old is not None and old.holder.partition("/")[0] != island
                claim = Claim(me, pass_number, old.turn + taken_over if old is not None else 0)
                pipe.multi()
                pipe.hget(self._keys.data, shard)
                pipe.hset(self._keys.leases(island), shard, str(claim))
                pipe.set(mark, me, ex=MARK_SECONDS)
                pipe.sadd(self._keys.islands, island)
                if gone := [each for each in ended if each != shard]:
                    pipe.hdel(self._keys.leases(island), *gone)
                cursor = parse_cursors(self._connection, _present([shard], pipe.execute()[:1])).get(shard, (0, 0))
        except DisturbedError:
            return None
        return Place(shard, *cursor) if cursor[0] == pass_number else None  # else the pass has just ended

    def held(self, shards: Sequence[str], me: str) -> frozenset[str]:
        """Return the shards that `me` still holds."""
        island = me.partition("/")[0]
        marks = [("get", self._keys.taken(shard)) for shard in shards]
        data, own = (("hmget", key, list(shards)) for key in (self._keys.data, self._keys.leases(island)))
        cursor_texts, claim_texts, *found = self._answers([data, own, *marks])
        cursors = parse_cursors(self._connection, _present(shards, cursor_texts))
        claims = claims_that_count({island: self._claims(island, _present(shards, claim_texts))}, cursors)
        mine = {shard for shard, claim in claims.items() if claim.holder == me}
        marked = {shard for shard, mark in zip(shards, found, strict=True) if mark == me.encode()}
        return frozenset(mine & marked) | self._confirmed(sorted(mine - marked), me)

    def _confirmed(self, shards: Sequence[str], me: str) -> frozenset[str]:
        """Return which of these shards `me` still holds by the claims of all islands, and mark them again."""
        if not shards:
            return frozenset()
        held: list[str] = []
        try:
            with self._connection.watching(*map(self._keys.taken, shards)) as pipe:
                cursors, claims = self._of_shards(shards, self._updates.names())
                held = [s for s, claim in claims_that_count(claims, cursors).items() if claim.holder == me]
                pipe.multi()
                for shard in held:
                    pipe.set(self._keys.taken(shard), me, ex=MARK_SECONDS)
                pipe.execute()
        except DisturbedError:
            return frozenset(held)  # the next look finds out
        return frozenset(held)

    def _of_shards(
        self, shards: Sequence[str], names: Sequence[str]
    ) -> tuple[dict[str, tuple[int, int]], dict[str, dict[str, Claim]]]:
        """Return the cursors of some shards, and the claims to them by island."""
        keys = [self._keys.data, *map(self._keys.leases, names)]
        cursor_texts, *rows = self._answers([("hmget", key, list(shards)) for key in keys])
        claims = {name: self._claims(name, _present(shards, row)) for name, row in zip(names, rows, strict=True)}
        return parse_cursors(self._connection, _present(shards, cursor_texts)), claims

    def _cursors(self) -> dict[str, tuple[int, int]]:
        found: Raw = {}
        with self._connection.forgiving(self._keys.data, "a hash"):
            found = self._redis.hgetall(self._keys.data)
        return parse_cursors(self._connection, text_fields(found))

    def _names_with(self, island: str) -> list[str]:
        return sorted({*self._updates.names(), island})

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
