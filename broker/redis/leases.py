"""The leases of ranges of text in Redis. Each island writes its own claims into a hash of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from archipelago.broker.errors import WireError
from archipelago.broker.ranges import Claim, ReadPosition, choose, claims_that_count, parse_claim
from archipelago.broker.redis.connection import ATTEMPTS, DisturbedError, RedisConnection
from archipelago.broker.redis.replies import text_fields
from archipelago.broker.redis.updates import UpdatesStreams
from archipelago.broker.signing import Raw

#: The most claims of one island that are read. An honest island has fewer, and another one may have written any number.
CLAIMS_MAX = 256
#: How long the mark of a range is kept. Its island sets it again.
MARK_SECONDS = 24 * 3600


class RangeLeases:
    """Reads all claims, and writes those of one island.

    A mark for each range holds the island that leased it last. It lets two leases of one range disturb each other, and
    no others. An island that finds its own mark on a range needs to read no claims of other islands. The mark is only a
    hint, which any island can change or Redis can lose: without it the claims are read, and only these count.

    Args:
        connection: The connection to the run.
        updates: Knows the names of the islands.
    """

    def __init__(self, connection: RedisConnection, updates: UpdatesStreams) -> None:
        self._connection = connection
        self._redis, self._keys = connection.redis, connection.keys
        self._updates = updates

    def lease(self, ranges: Sequence[str], me: str, is_gone: Callable[[str], bool]) -> ReadPosition | None:
        """Lease a range; see `broker.transport.IslandClient.lease_range`.

        If another island leases the range meanwhile, nothing is written and the choice is made again. The transaction
        that writes the claim also reads the cursor. So no island starts at an outdated cursor, and no two lease one
        range.

        Args:
            ranges: The ranges that `me` can read, in its order of preference.
            me: The island and its incarnation, as island/incarnation.
            is_gone: Returns whether a holder has lost its leases.
        """
        for _ in range(ATTEMPTS):
            chosen, ended = self._chosen(ranges, me, is_gone)
            if chosen is None:
                return None
            if (place := self._taken(chosen, me, is_gone, ended)) is not None:
                return place
        return None

    def _chosen(
        self, ranges: Sequence[str], me: str, is_gone: Callable[[str], bool]
    ) -> tuple[str | None, Sequence[str]]:
        """Return the range to lease, and the claims of `me` whose pass has ended."""
        island = me.partition("/")[0]
        claims = self._all_claims(self._names_with(island))
        cursors = self._connection.cursors()
        holders = {range_name: claim.holder for range_name, claim in claims_that_count(claims, cursors).items()}
        chosen = choose(ranges, cursors, holders, me, is_gone)
        return chosen, [s for s, c in claims[island].items() if c.pass_number < cursors.get(s, (0, 0))[0]]

    def _taken(
        self, range_name: str, me: str, is_gone: Callable[[str], bool], ended: Sequence[str]
    ) -> ReadPosition | None:
        """Write the claim to a range, and return where to begin; None if another island was faster."""
        island, mark = me.partition("/")[0], self._keys.taken(range_name)
        try:
            with self._connection.watching(mark) as pipe:
                cursors, claims = self._of_ranges([range_name], self._names_with(island))
                old = claims_that_count(claims, cursors).get(range_name)
                if old is not None and old.holder != me and not is_gone(old.holder):
                    return None
                pass_number = cursors.get(range_name, (0, 0))[0]
                taken_over = old is not None and old.holder.partition("/")[0] != island
                claim = Claim(me, pass_number, old.turn + taken_over if old is not None else 0)
                pipe.multi()
                pipe.hget(self._keys.data, range_name)
                pipe.hset(self._keys.leases(island), range_name, str(claim))
                pipe.set(mark, me, ex=MARK_SECONDS)
                pipe.sadd(self._keys.islands, island)
                if gone := [each for each in ended if each != range_name]:
                    pipe.hdel(self._keys.leases(island), *gone)
                cursor = self._connection.parsed_cursors(_present([range_name], pipe.execute()[:1])).get(
                    range_name, (0, 0)
                )
        except DisturbedError:
            return None
        return ReadPosition(range_name, *cursor) if cursor[0] == pass_number else None  # else the pass has just ended

    def held(self, ranges: Sequence[str], me: str) -> frozenset[str]:
        """Return the ranges that `me` still holds."""
        island = me.partition("/")[0]
        marks = [("get", self._keys.taken(range_name)) for range_name in ranges]
        data, own = (("hmget", key, list(ranges)) for key in (self._keys.data, self._keys.leases(island)))
        cursor_texts, claim_texts, *found = self._answers([data, own, *marks])
        cursors = self._connection.parsed_cursors(_present(ranges, cursor_texts))
        claims = claims_that_count({island: self._claims(island, _present(ranges, claim_texts))}, cursors)
        mine = {range_name for range_name, claim in claims.items() if claim.holder == me}
        marked = {range_name for range_name, mark in zip(ranges, found, strict=True) if mark == me.encode()}
        return frozenset(mine & marked) | self._confirmed(sorted(mine - marked), me)

    def _confirmed(self, ranges: Sequence[str], me: str) -> frozenset[str]:
        """Return which of these ranges `me` still holds by the claims of all islands, and mark them again."""
        if not ranges:
            return frozenset()
        held: list[str] = []
        try:
            with self._connection.watching(*map(self._keys.taken, ranges)) as pipe:
                cursors, claims = self._of_ranges(ranges, self._updates.names())
                held = [s for s, claim in claims_that_count(claims, cursors).items() if claim.holder == me]
                pipe.multi()
                for range_name in held:
                    pipe.set(self._keys.taken(range_name), me, ex=MARK_SECONDS)
                pipe.execute()
        except DisturbedError:
            return frozenset(held)  # the next look finds out
        return frozenset(held)

    def _of_ranges(
        self, ranges: Sequence[str], names: Sequence[str]
    ) -> tuple[dict[str, tuple[int, int]], dict[str, dict[str, Claim]]]:
        """Return the cursors of some ranges, and the claims to them by island."""
        keys = [self._keys.data, *map(self._keys.leases, names)]
        cursor_texts, *rows = self._answers([("hmget", key, list(ranges)) for key in keys])
        claims = {name: self._claims(name, _present(ranges, row)) for name, row in zip(names, rows, strict=True)}
        return self._connection.parsed_cursors(_present(ranges, cursor_texts)), claims

    def _names_with(self, island: str) -> list[str]:
        return sorted({*self._updates.names(), island})

    def _all_claims(self, names: Sequence[str]) -> dict[str, dict[str, Claim]]:
        found = self._answers([("hscan", self._keys.leases(name), 0, None, CLAIMS_MAX) for name in names])
        rows: list[Raw] = [answer[1] if answer else {} for answer in found]
        return {name: self._claims(name, text_fields(raw)) for name, raw in zip(names, rows, strict=True)}

    def _claims(self, island: str, fields: Mapping[str, str]) -> dict[str, Claim]:
        out = {}
        for range_name, text in fields.items():
            try:
                out[range_name] = parse_claim(island, text)
            except WireError as error:
                self._connection.warn_once(f"the lease of range {range_name:.80} by {island}", error)
        return out

    def _answers(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        with self._connection.translated():
            return self._connection.tolerant(*commands) if commands else []


def _present(ranges: Sequence[str], values: Sequence[bytes | None] | None) -> dict[str, str]:
    """Return the values of HMGET that exist, as text, by range."""
    found = zip(ranges, values or [None] * len(ranges), strict=True)
    return {range_name: value.decode("utf-8", "replace") for range_name, value in found if value is not None}
