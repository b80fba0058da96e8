"""An island's writes to Redis: contributions, heartbeats, leases of text, and inner optimiser state for new islands."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache, partial
from typing import Any

from archipelago.broker.commits import entry_name, parse_entry
from archipelago.broker.control import heard_by, is_expelled
from archipelago.broker.errors import UnreachableError, WireError
from archipelago.broker.failpoints import failpoint
from archipelago.broker.messages import Contribution, Handover, from_raw, text_fields, to_fields
from archipelago.broker.presence import Heartbeat, NameClaim, newest_claim, next_claim, parse_name_claim
from archipelago.broker.ranges import ReadPosition, choose, holder_in
from archipelago.broker.redis.connection import ATTEMPTS, DisturbedError
from archipelago.broker.redis.keys import HANDOVER, is_name
from archipelago.broker.redis.reader import RedisReader
from archipelago.broker.redis.updates import REMEMBER_SECONDS
from archipelago.broker.signing import KnownMembers, Raw
from archipelago.broker.transport import Around

#: How long an answer is kept for the island that requested it.
HANDOVER_SECONDS = 600
#: The longest lease on evaluating the run, in seconds.
EVALUATION_LEASE_MAX = 60
#: About how many requests for optimiser state are read at a time. The next call goes on with others.
REQUESTS_READ = 256
#: The longest text of a lease of a range.
LEASE_MAX = 160


class RedisIsland:
    """See `broker.transport.IslandClient`."""

    def __init__(self, reader: RedisReader, members: KnownMembers) -> None:
        self._reader, self._members, self._connection = reader, members, reader.connection
        self._stored, self._chunks, self._updates = reader.stored, reader.chunks, reader.updates
        connection = reader.connection
        self._redis, self._keys = connection.redis, connection.keys
        self._stamps, self._signing = connection.stamps, connection.signing
        self._cursor = 0  # among the requests for optimiser state

    def publish(self, contribution: Contribution, payload: bytes) -> str:
        chunks = self._chunks.of(contribution.island)
        signed = self._signing.signed("contribution", to_fields(contribution), payload=payload)
        where, doubted = chunks.upload(chunks_name(contribution), payload)
        failpoint("publish.placed")
        try:
            with self._connection.watching(*doubted) as pipe:
                if doubted:
                    chunks.require_whole(doubted, len(payload))
                pipe.multi()
                pipe.xadd(self._keys.updates(contribution.island), {**signed, **where})
                pipe.sadd(self._keys.islands, contribution.island)
                chunks.settle(pipe, where)
                entry: bytes = pipe.execute()[0]
        except DisturbedError:
            what = "the chunks of a contribution have expired, or an earlier attempt has arrived late"
            raise UnreachableError(what, "The island tries again.") from None
        failpoint("publish.done")
        return entry_name(contribution.island, entry.decode())

    def holds(self, entry: str) -> bool:
        sender, id_ = parse_entry(entry)
        with self._connection.translated():
            return bool(self._redis.xrange(self._keys.updates(sender), id_, id_))

    def look_around(self, island: str, claim: NameClaim | None) -> Around:
        keys, requests = self._keys, heard_by(island)
        # Other types of value under these keys must not stop the island.
        signs, stored, uid, *found = self._connection.tolerant(
            ("exists", keys.members),
            ("get", keys.name(island)),
            ("hget", keys.manifest, "uid"),
            *(("hget", keys.control, name) for name in requests),
        )
        if signs and not self._signing.is_on:
            self._members.require_unsigned()
        if claim is not None:
            held = _claim_in(stored)
            is_lost = held is None or newest_claim(claim, held) != held
            claim = (self._write_claim(island, partial(newest_claim, claim)) or claim) if is_lost else held
        return Around(claim, None if uid is None else uid.decode("utf-8", "replace"), _texts(requests, found))

    def heartbeat(self, heartbeat: Heartbeat) -> bool:
        key = self._keys.island(heartbeat.island)
        signed = self._signing.signed("heartbeat", to_fields(heartbeat), stamp=self._stamps.next())
        with self._connection.translated(), self._redis.pipeline(transaction=False) as pipe:
            pipe.hset(key, mapping=signed)
            pipe.pexpire(key, REMEMBER_SECONDS * 1000)
            pipe.sadd(self._keys.islands, heartbeat.island)
            pipe.exists(self._keys.lease)
            return bool(pipe.execute()[-1])

    # -- the name ---------------------------------------------------------------------------------------------------

    def claim_name(self, island: str, incarnation: str) -> NameClaim:
        if not self._signing.is_on:
            self._members.require_unsigned(afresh=True)  # before it takes the name from the member who trains under it
        now_ms = self._reader.server_ms()
        claimed = self._write_claim(island, lambda stored: next_claim(stored, incarnation, now_ms))
        if claimed is None:
            raise UnreachableError(
                f"the name {island!r} could not be claimed, because other processes claim it again and again",
                "Give each island a --name of its own.",
                code="island.name-contested",
            )
        return claimed

    def _write_claim(self, island: str, choose: Callable[[NameClaim | None], NameClaim]) -> NameClaim | None:
        """Write and return the claim chosen by the stored one; None if others claim the name again and again."""
        key = self._keys.name(island)

        def write(pipe: Any) -> NameClaim:
            claim = choose(_claim_in(self._connection.answer("get", key)))
            pipe.multi()
            pipe.set(key, str(claim), ex=REMEMBER_SECONDS)
            return claim

        return self._connection.attempted(key, write)

    # -- leases of text -----------------------------------------------------------------------------------------------

    def lease_range(self, ranges: Sequence[str], me: str, reading: Collection[str] = ()) -> ReadPosition | None:
        if is_expelled(self._reader.control(), me):
            return None
        # Read at most once, and only if a range is leased.
        live, busy = cache(lambda: self._live(self._updates.names())), cache(self._busy)

        def is_gone(holder: str) -> bool:
            return holder not in live() and holder not in busy()

        for _ in range(ATTEMPTS):
            cursors, holders = self._leases(ranges)
            chosen = choose(ranges, cursors, holders, me, is_gone, reading)
            if chosen is None:
                return None
            if (cursor := self._take(chosen, holders.get(chosen, ""), me)) is not None:
                return ReadPosition(chosen, *cursor)
        return None

    def _take(self, name: str, holder: str, me: str) -> tuple[int, int] | None:
        """Take the lease of a range from its holder. Return the cursor; None if another island was faster.

        The cursor is read after the lease is taken. So no island starts at an outdated cursor.
        """

        def take(pipe: Any) -> None:
            cursors, holders = self._leases([name])
            if holders.get(name, "") == holder:
                pipe.multi()
                pipe.set(self._keys.taken(name), f"{me}:{cursors[name][0]}")

        self._connection.attempted(self._keys.taken(name), take)
        cursors, holders = self._leases([name])
        return cursors[name] if holders.get(name) == me else None  # else the pass has just ended, or another was faster

    def _leases(self, ranges: Sequence[str]) -> tuple[dict[str, tuple[int, int]], dict[str, str]]:
        """Return the cursor and the holder of each range. The holder is empty if the range is not leased."""
        if not ranges:
            return {}, {}
        leases = [("getrange", self._keys.taken(name), 0, LEASE_MAX) for name in ranges]
        stored, *found = self._connection.tolerant(("hmget", self._keys.data, list(ranges)), *leases)
        cursors = dict.fromkeys(ranges, (0, 0)) | self._connection.parsed_cursors(_texts(ranges, stored or ()))
        return cursors, {name: holder_in(text, cursors[name][0]) for name, text in _texts(ranges, found).items()}

    def _live(self, names: Sequence[str]) -> frozenset[str]:
        """Return the live islands (island/incarnation) of these names that are not expelled."""
        beats = (presence.heartbeat for presence in self._reader.presences_of(names) if presence.is_live)
        requests = self._reader.control()
        who = (f"{beat.island}/{beat.incarnation}" for beat in beats)
        return frozenset(each for each in who if not is_expelled(requests, each))

    def _busy(self) -> frozenset[str]:
        """Return the islands (island/incarnation) whose contributions wait to be merged."""
        waiting = (contribution for contribution in self._updates.waiting() if contribution is not None)
        return frozenset(f"{c.island}/{c.incarnation}" for c in waiting)

    def leased(self, ranges: Sequence[str], me: str) -> frozenset[str]:
        return frozenset(name for name, holder in self._leases(ranges)[1].items() if holder == me)

    def lease_evaluation(self, me: str, seconds: float) -> bool:
        key = self._keys.evaluator

        def take(pipe: Any) -> bool:
            holder, left_ms = self._connection.tolerant(("get", key), ("pttl", key))
            # A lease without an end was not written by an island of ours.
            is_free = holder is None or not 0 <= left_ms <= EVALUATION_LEASE_MAX * 1000
            if not (is_free or holder == me.encode()) or (seconds <= 0.0 and holder is None):
                return False
            pipe.multi()
            pipe.set(key, me, px=max(1, round(min(seconds, EVALUATION_LEASE_MAX) * 1000)))
            return seconds > 0.0

        return bool(self._connection.attempted(key, take))

    def register_corpus(self, name: str, digest: str) -> str:
        with self._connection.translated():
            self._redis.hsetnx(self._keys.corpora, name, digest)
            return str(self._redis.hget(self._keys.corpora, name).decode("utf-8", "replace"))

    # -- between islands --------------------------------------------------------------------------------------------

    def request_state(self, who: str) -> None:
        with self._connection.transaction() as pipe:
            pipe.hsetnx(self._keys.requests, who, "")
            # Removes the requests of islands that died. A newcomer does not put it off, or these would stay.
            pipe.expire(self._keys.requests, REMEMBER_SECONDS, nx=True)

    def open_requests(self, me: str = "") -> list[str]:
        scan = ("hscan", self._keys.requests, self._cursor, None, REQUESTS_READ)
        self._cursor, found = self._connection.answer(*scan) or (0, {})
        waiting = {who for who, giver in text_fields(found).items() if giver in ("", me)}
        live = self._live(sorted({who.partition("/")[0] for who in waiting})) if waiting else frozenset()
        return sorted(live & waiting)

    def promise_answer(self, who: str, giver: str) -> bool:
        def offer(pipe: Any) -> bool:
            if pipe.hget(self._keys.requests, who) not in (b"", giver.encode()):
                return False
            pipe.multi()
            pipe.hset(self._keys.requests, who, giver)
            return True

        return bool(self._connection.attempted(self._keys.requests, offer))

    def hand_over(self, who: str, handover: Handover, payload: bytes) -> None:
        chunks = self._chunks.of(handover.giver)
        with self._connection.translated():
            if not self._redis.hexists(self._keys.requests, who):
                return
        # Two newcomers may get the same state, and each deletes the chunks of its own answer.
        name = f"{HANDOVER}{handover.incarnation}.{who.replace('/', '.')}.{handover.digest}"
        where, _ = chunks.upload(name, payload)
        signed = self._signing.signed("handover", to_fields(handover), about=who, payload=payload)

        def answer(pipe: Any) -> None:
            if not pipe.hexists(self._keys.requests, who):
                return
            key = self._keys.handover(who)
            pipe.multi()
            pipe.delete(key)
            pipe.hset(key, mapping={**signed, **where})
            for name in (key, *chunks.placed(where)):  # the time starts after the upload, which may be long
                pipe.expire(name, HANDOVER_SECONDS)

        self._connection.attempted(self._keys.requests, answer)

    def handed_over(self, who: str) -> tuple[Handover, bytes] | None:
        raw = self._connection.hash_at(self._keys.handover(who))
        if not raw:
            return None
        giver = raw.get(b"giver", b"").decode("utf-8", "replace")
        self._signing.verify("handover", giver, raw, about=who)
        handover = from_raw(Handover, raw)
        payload = self._chunks.of(handover.giver).fetch(raw, handover.bytes, self._handover_max())
        if len(payload) != handover.bytes:
            raise WireError(
                f"a payload of {len(payload)} bytes where {handover.bytes} were announced", code="wire.payload"
            )
        return handover, payload

    def withdraw_request(self, who: str) -> None:
        key = self._keys.handover(who)
        answer = self._connection.hash_at(key)
        with self._connection.transaction() as pipe:
            pipe.hdel(self._keys.requests, who)
            pipe.unlink(key)
        self._drop(answer)

    def _drop(self, answer: Raw) -> None:
        """Delete the chunks of an answer. A forged one may point to any chunks of the island that it names."""
        giver = answer.get(b"giver", b"").decode("utf-8", "replace")
        found = self._chunks.of(giver).found_keys(answer, self._handover_max()) if is_name(giver) else []
        if chunks := [key for key in found if key.startswith(self._keys.handover_chunks(giver))]:
            with self._connection.translated():
                self._redis.unlink(*chunks)

    def _handover_max(self) -> int:
        return 4 * 3 * sum(self._stored.shape().sizes) + (1 << 20)  # two float32 moments per parameter, with a margin


def _claim_in(stored: bytes | None) -> NameClaim | None:
    return parse_name_claim((stored or b"").decode("utf-8", "replace"))


def _texts(names: Sequence[str], values: Sequence[bytes | None]) -> dict[str, str]:
    found = zip(names, values, strict=False)
    return {name: value.decode("utf-8", "replace") for name, value in found if value is not None}


def chunks_name(contribution: Contribution) -> str:
    return f"{contribution.incarnation}.{contribution.sequence}.{contribution.digest}"
