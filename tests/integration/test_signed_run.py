"""A signed run on fakeredis: honest islands train, and a client with access to Redis but no key changes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archipelago.broker import invitation
from archipelago.broker.errors import ConfigError, FencedError, WireError, WithdrawnError
from archipelago.broker.invitation import Invitation, Member, key_text
from archipelago.broker.messages import Call, Resume, Snapshot, to_fields
from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.broker.signing import EPOCHS_SKIPPED, MERGER, SignatureError, Signing, generate
from archipelago.broker.transport import Transport
from archipelago.broker.wire import digest, digest_of, full_snapshot, newest, pack, signed_digest
from archipelago.merger.round_merge import RoundMerge
from archipelago.merger.service import Merger
from archipelago.ops.experiments.virtual_time import VirtualRun
from archipelago.ops.launch.administration import Administrator
from archipelago.ops.launch.embedded_redis import RedisServer
from tests.failing import failing
from tests.harness.merger_run import compact_now
from tests.integration.virtual import bits, work
from tests.samples import begin, commit, contribution, first_snapshots, handover, heartbeat, image, manifest

ISLANDS = ("island-0", "island-1", "island-2")
SPEEDS = [1.0, 1.2, 1.5]
NAMES = (f"signed-{n}" for n in itertools.count())


class Keys:
    """The keys of a run's mergers and islands, and connections with them."""

    def __init__(self, run: str, islands: tuple[str, ...] = ISLANDS, server: str = "", url: str = "") -> None:
        self.run, self.url = run, url or f"fakeredis://{server or run}"
        self.private, self.public = {}, {}
        for name in (MERGER, *islands):
            self.private[name], self.public[name] = generate()
        self.register()

    def register(self) -> None:
        plain = self.plain()
        plain.membership.offer_merger_key(key_text(self.public[MERGER]))
        for name in self.public:
            if name != MERGER:
                plain.membership.put({name: Member("island", key_text(self.public[name]))})

    def plain(self) -> RedisTransport:
        """Connect without a key."""
        return connect(self.url, self.run)

    def invitation(self, who: str, role: Any, private: bytes | None = None) -> Invitation:
        key = self.private[who if role == "island" else MERGER] if private is None else private
        return Invitation(
            "redis://localhost",
            self.run,
            who,
            role,
            key_text(key),
            key_text(self.public[MERGER]),
        )

    def connect(self, who: str, private: bytes | None = None) -> RedisTransport:
        role = who if who in ("merger", "admin") else "island"
        return connect(self.url, self.run, self.invitation(who, role, private))

    def viewer(self) -> RedisTransport:
        return connect(self.url, self.run, replace(self.invitation("viewer", "viewer"), private_key=""))


class SignedRun(VirtualRun):
    """A run in virtual time whose members all have keys."""

    def __init__(self) -> None:
        self.keys = Keys(next(NAMES))
        super().__init__(work(), SPEEDS, run=self.keys.run)
        #: A client with access to Redis, without a key.
        self.raw: Any = self.keys.plain().connection.redis
        self.redis_keys = self.keys.plain().connection.keys

    def connect_as(self, who: str) -> Transport:
        return self.keys.connect(who)

    def close_until(self, rounds: int) -> None:
        self.advance_until(lambda: self.merger.state.closed >= rounds)


@pytest.fixture
def run() -> SignedRun:
    return SignedRun()


@cache
def honest() -> list[tuple[Any, ...]]:
    """Return the rounds of the run that nobody disturbs."""
    undisturbed = SignedRun()
    undisturbed.finish()
    return bits(undisturbed)


def plain_run(name: str) -> VirtualRun:
    """Return a run without keys."""
    return VirtualRun(work(), SPEEDS, connect=lambda: connect(f"fakeredis://{name}", name), run=name)


@pytest.mark.full
def test_signing_and_a_takeover_change_no_bit(run: SignedRun) -> None:
    plain = plain_run(next(NAMES))
    plain.finish()
    assert bits(plain) == honest()
    assert len(honest()) > 6
    run.close_until(5)
    run.mergers[0] = run.merger_of(0)
    run.finish()
    assert bits(run) == honest()


# -- attacks -------------------------------------------------------------------------------------------------------


def forge_contributions(run: SignedRun) -> None:
    """Contributions in the name of an island, unsigned, signed with a stranger's key, and a replayed one."""
    sequences = itertools.count(900)
    forged = [
        run.keys.plain(),
        run.keys.connect("island-0", private=generate()[0]),
        run.keys.connect("island-0", private=run.keys.private["island-1"]),
    ]
    for transport in forged:
        payload = pack(np.full(run.manifest.sizes[0], 9.0, np.float32), run.manifest.config.wire.up, 1)
        transport.island.publish(
            contribution(payload, island="island-0", sequence=next(sequences), codec=run.manifest.config.wire.up),
            payload,
        )
    names = [key for key in run.raw.scan_iter(f"{{{run.keys.run}:s0}}:updates*") if run.raw.type(key) == b"stream"]
    for name in names:
        for _, fields in run.raw.xrange(name, count=2):
            run.raw.xadd(name, fields)


def forge_heartbeats(run: SignedRun) -> None:
    """Heartbeats in the name of an island and of one that does not exist, and a replayed one that never ends."""
    plain, key = run.keys.plain(), run.redis_keys
    run.raw.sadd(key.islands, "ghost")
    run.raw.hset(key.island("ghost"), mapping=to_fields(heartbeat("ghost", step_seconds=1e-300)))
    run.raw.hset(key.island("island-1"), mapping=to_fields(heartbeat("island-1", state="left")))
    with failing(ConfigError, "signature.no-key"):
        plain.island.look_around("island-1", None)
    stranger = run.keys.connect("island-2", private=generate()[0])
    stranger.island.heartbeat(heartbeat("island-2", step_seconds=1e-300))
    run.raw.persist(key.island("island-0"))
    run.raw.pexpire(key.island("island-0"), 10**12)


def forge_events(run: SignedRun) -> None:
    """Events of a merger without the key, and all events so far once more."""
    key = run.redis_keys.snapshots
    old = run.raw.xrange(key)
    payload = pack(np.zeros(run.manifest.sizes[0], np.float32), "float32", 1)
    snapshot = Snapshot(1 << 40, 0, 1 << 40, 1 << 40, "float32", len(payload), digest(payload), "")
    for kind, event in [("snapshot", snapshot), ("resume", Resume(0, 1 << 40)), ("call", Call(1 << 40, 0))]:
        run.raw.xadd(key, {"kind": kind, **to_fields(event)})
        stranger = Signing(run.keys.run, MERGER, generate()[0], run.keys.public[MERGER], lambda _: None)
        run.raw.xadd(key, stranger.signed("event", {"kind": kind, **to_fields(event)}, stamp=f"{1 << 40}-1"))
    for _, fields in old:
        run.raw.xadd(key, fields)


def forge_tape(run: SignedRun) -> None:
    """A round that no merger has closed, at the end of the tape."""
    key = run.redis_keys.tape
    (_, fields), *_ = run.raw.xrevrange(key, count=1)
    run.raw.xadd(key, {**fields, b"round": b"999"})


ATTACKS = [forge_contributions, forge_heartbeats, forge_events, forge_tape]


def test_a_client_without_a_key_changes_nothing(run: SignedRun) -> None:
    """It attacks in all ways, twice."""
    for goal in (4, 9):
        run.close_until(goal)
        for attack in ATTACKS:
            attack(run)
    run.finish()
    assert bits(run) == honest()
    reader = run.transport.reader
    counters = reader.counters()
    assert counters.published == counters.merged + counters.refused
    assert {presence.heartbeat.island for presence in reader.presences()} == set(ISLANDS)


def test_a_forged_snapshot_is_not_adopted_and_is_replaced_once_an_island_cannot_read_it(run: SignedRun) -> None:
    run.close_until(4)
    for island in run.islands.values():
        island.link.pump()
    payload = pack(np.full(run.manifest.sizes[0], 9.0, np.float32), "float32", 1)
    fields = to_fields(Snapshot(1 << 40, 0, 1 << 40, 0, "float32", len(payload), digest(payload), ""))
    run.raw.hset(run.redis_keys.fragment(0), mapping={**fields, "payload": payload})
    with failing(SignatureError, "signature.wrong"):
        run.keys.viewer().reader.fragment(0)
    run.islands["island-0"].link.channels[0].inbox.unreadable.add(0)
    run.close_until(run.merger.state.closed + 2 * len(run.manifest.fragments))
    run.keys.viewer().reader.fragment(0)
    run.finish()
    assert [entry[0] for entry in bits(run)] == [entry[0] for entry in honest()]


def test_a_snapshot_with_another_payload_and_an_older_snapshot_are_refused(
    run: SignedRun, caplog: pytest.LogCaptureFixture
) -> None:
    island = run.keys.connect("island-0")
    island.reader.last_event()
    keys = run.redis_keys
    old, old_head = run.raw.hgetall(keys.fragment(0)), run.raw.hgetall(keys.head(0))
    run.close_until(1)
    compact_now(run.merger, 0)
    new, new_head = run.raw.hgetall(keys.fragment(0)), run.raw.hgetall(keys.head(0))
    island.reader.fragment(0)
    assert island.reader.heads()[0] is not None

    def put(key: str, fields: dict[bytes, bytes]) -> None:
        run.raw.delete(key)
        run.raw.hset(key, mapping=fields)

    put(keys.fragment(0), old)
    put(keys.head(0), old_head)
    with failing(SignatureError, "signature.replayed"):
        island.reader.fragment(0)
    assert island.reader.heads()[0] is None, "the older header is refused"
    assert "is older than before (signature.replayed). Redis has probably been restored from an older" in caplog.text
    put(keys.head(0), new)
    assert island.reader.heads()[0] is None, "a full snapshot is no header"
    put(keys.head(0), new_head)
    assert island.reader.heads()[0] is not None
    put(keys.fragment(0), {**new, b"payload": old[b"payload"]})
    with failing(WireError, "wire.snapshot"):
        full_snapshot(run.keys.viewer().reader, run.manifest, 0)


def test_a_payload_that_its_island_changes_after_the_merger_has_read_it_is_not_merged(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A takeover could not merge it again. Nor may the island let what was merged expire."""
    monkeypatch.setattr("archipelago.broker.redis.chunks.INLINE_BYTES", 8)
    keys = Keys(next(NAMES), url=server.url)
    merger = begin(keys.connect("merger")).merger
    epoch = merger.acquire("merger", 60.0) or 0
    payload = b"a contribution"
    header = replace(contribution(island="island-0"), bytes=len(payload), digest=signed_digest(payload))
    entry = keys.connect("island-0").island.publish(header, payload)
    raw, key = keys.plain().connection.redis, keys.plain().connection.keys
    (chunk,) = raw.scan_iter(f"{key.chunk_prefix('island-0')}*")

    def read() -> bytes:
        merger.rewind()
        return next(each for each in merger.updates(0.0) if each.entry == entry).with_payload().payload

    assert read() == payload
    raw.set(chunk, bytes(len(payload)))
    merger.read([entry])  # as a checkpoint does, which does not make it right
    with failing(WithdrawnError):
        merger.commit(epoch, commit([entry, entry]))
    raw.set(chunk, payload, ex=5)
    assert read() == payload
    merger.commit(epoch, commit([entry]))
    (kept,) = raw.scan_iter(f"{key.kept_prefix('island-0')}*")
    assert (raw.get(kept), raw.ttl(kept)) == (payload, -1)


def test_what_was_merged_stays_although_its_island_uses_the_name_of_its_chunks_again(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("archipelago.broker.redis.chunks.INLINE_BYTES", 8)
    keys = Keys(next(NAMES), url=server.url)
    merger, island = begin(keys.connect("merger")).merger, keys.connect("island-0")
    epoch, raw, key = merger.acquire("merger", 60.0) or 0, island.connection.redis, island.connection.keys
    payloads, entries, pointer = (b"a contribution", b"another of them"), list[str](), dict[bytes, bytes]()
    for number, payload in enumerate(payloads):
        header = contribution(island="island-0", sequence=number)
        header = replace(header, bytes=len(payload), digest=signed_digest(payload))
        entry = island.island.publish(header, payload)
        stream, id_ = key.updates("island-0"), entry.partition("/")[2]
        ((_, fields),) = raw.xrange(stream, id_, id_)
        own = {name: fields.pop(name) for name in (b"chunks", b"chunks_name")}
        if pointer:  # the second entry points to chunks of the first one's name
            first, second = (key.chunk(each[b"chunks_name"].decode(), 0, "island-0") for each in (pointer, own))
            raw.set(first, raw.get(second))
            entry = f"island-0/{raw.xadd(stream, {**fields, **pointer}).decode()}"
        pointer = pointer or own
        merger.rewind()
        assert next(each for each in merger.updates(0.0) if each.entry == entry).with_payload().payload == payload
        merger.commit(epoch, commit([entry]))
        entries.append(entry)
    assert [each.with_payload().payload for each in merger.read(entries)] == list(payloads)
    merger.trim(epoch, entries)
    assert not list(keys.plain().connection.redis.scan_iter(f"{key.kept_prefix('island-0')}*"))


def test_two_entries_with_the_same_chunks_are_not_merged_together(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunks move once. A script that fails half-way leaves what it has written."""
    monkeypatch.setattr("archipelago.broker.redis.chunks.INLINE_BYTES", 8)
    keys, payload = Keys(next(NAMES), url=server.url), b"a contribution"
    merger, island = begin(keys.connect("merger")).merger, keys.connect("island-0")
    epoch, raw, key = merger.acquire("merger", 60.0) or 0, island.connection.redis, island.connection.keys
    header = replace(contribution(island="island-0"), bytes=len(payload), digest=signed_digest(payload))
    entry = island.island.publish(header, payload)
    stream, id_ = key.updates("island-0"), entry.partition("/")[2]
    ((_, fields),) = raw.xrange(stream, id_, id_)
    both = [entry, f"island-0/{raw.xadd(stream, fields).decode()}"]
    head = raw.hgetall(key.head(0))
    with failing(WithdrawnError):
        merger.commit(epoch, commit(both))
    assert (raw.hgetall(key.head(0)), raw.xlen(stream)) == (head, 2), "nothing was written"
    merger.commit(epoch, commit(both[:1]))


# -- mergers -------------------------------------------------------------------------------------------------------


def test_neither_a_stranger_serves_a_signed_run_nor_is_a_changed_manifest_used(run: SignedRun) -> None:
    run.merger.transport.merger.release(run.merger.epoch)
    for stranger in (run.keys.plain(), run.keys.viewer()):
        with failing(ConfigError, "signature.no-key"):
            stranger.merger.acquire("stranger", 5.0)
    name = run.redis_keys.name("island-0")
    held = run.raw.get(name)
    with failing(ConfigError, "signature.no-key"):
        run.keys.plain().island.claim_name("island-0", "stranger")
    assert run.raw.get(name) == held, "the member keeps its name"
    run.raw.hset(run.redis_keys.manifest, "versions", "{}")
    run.keys.plain().reader.manifest()
    with failing(ConfigError, "signature.manifest"):
        run.keys.connect("island-0").reader.manifest()


def test_a_revoked_island_is_refused(run: SignedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("archipelago.broker.signing.FRESH_SECONDS", 0.0)
    run.close_until(4)
    run.keys.plain().membership.remove("island-2")
    closed = run.merger.state.closed
    run.finish()
    late = [entry for entry in run.transport.reader.tape(1000) if entry.round > closed + 2]
    assert late
    assert "island-2" not in {member.island for entry in late for member in entry.members}


# -- what Redis held before, and what it gets back -----------------------------------------------------------------


def test_the_first_invitation_signs_the_run_and_stops_the_merger_without_a_key(tmp_path: Path) -> None:
    name = next(NAMES)
    plain = connect(f"fakeredis://{name}", name)
    plain.create(manifest(name), first_snapshots(manifest(name)))
    epoch = plain.merger.acquire("old", 5.0)
    assert epoch is not None
    administrator = Administrator(plain, f"redis://{name}", tmp_path)
    administrator.open()
    with pytest.raises(FencedError):
        plain.merger.announce(epoch, Resume(0, epoch))
    merger_key = plain.membership.all().merger_key
    viewer = connect(f"fakeredis://{name}", name, Invitation("redis://x", name, "viewer", "viewer", "", merger_key))
    assert viewer.reader.manifest() == manifest(name)
    snapshot, payload = first_snapshots(manifest(name))[1]
    assert viewer.reader.fragment(1) == (replace(snapshot, digest=signed_digest(payload)), payload)


def test_the_rounds_of_a_run_that_is_signed_later_are_not_lost(tmp_path: Path) -> None:
    """Redis holds some of them as logs and differences, which no full snapshot covers."""
    name = next(NAMES)
    plain = plain_run(name)
    plain.advance_until(lambda: plain.merger.state.closed >= 6)
    assert max(plain.transport.reader.fragment(p)[0].round for p in range(2)) < plain.merger.state.closed
    administrator = Administrator(plain.transport, f"redis://{name}", tmp_path)  # type: ignore[arg-type]
    administrator.open()
    keyed = connect(f"fakeredis://{name}", name, invitation.read(administrator.file))
    merger = Merger(keyed, plain.clock, "virtual", live_poll_seconds=0.0, wall=plain.clock)
    assert merger.acquire()
    merger.load()
    assert merger.state.closed == plain.merger.state.closed
    pairs = zip(merger.fragments.values(), plain.merger.fragments.values(), strict=True)
    assert all(digest_of(np.asarray(a.params_N)) == digest_of(np.asarray(b.params_N)) for a, b in pairs)
    assert newest(keyed.reader, plain.manifest, 0).snapshot.version == plain.merger.snapshots[0].version


@pytest.fixture
def pair() -> Iterator[tuple[Keys, RedisTransport]]:
    keys = Keys(next(NAMES), ("a", "b"))
    yield keys, keys.connect("merger")


def test_a_restored_run_is_signed_by_the_merger(pair: tuple[Keys, RedisTransport]) -> None:
    keys, merger = pair
    of = manifest(keys.run)
    pending = contribution(b"gradient", island="a", sequence=7)
    merger.restore(image(of, [(pending, b"gradient")]))
    epoch = merger.merger.acquire("merger", 5.0)
    assert epoch is not None
    assert epoch > EPOCHS_SKIPPED
    (delivery,) = merger.merger.updates(0.0)
    assert delivery.with_payload().payload == b"gradient"
    assert delivery.contribution == replace(pending, digest=signed_digest(b"gradient"))
    island = keys.connect("a")
    assert island.reader.manifest() == of
    assert island.reader.fragment(0)[0].version == 1
    assert [entry.round for entry in island.reader.tape(10)] == [1]
    assert island.reader.merger_state()


def test_a_handover_is_believed_only_if_its_giver_signed_it_for_this_newcomer(
    pair: tuple[Keys, RedisTransport],
) -> None:
    keys, merger = pair
    merger.create(manifest(keys.run), first_snapshots(manifest(keys.run)))
    newcomer, giver = keys.connect("a"), keys.connect("b")
    for who in ("a/x", "a/y"):
        newcomer.island.request_state(who)
        giver.island.hand_over(who, handover(), b"moments")
    assert newcomer.island.handed_over("a/x") == (handover(digest=signed_digest(b"moments")), b"moments")
    raw, key = newcomer.connection.redis, newcomer.connection.keys
    copied = raw.hgetall(key.handover("a/x"))
    raw.delete(key.handover("a/y"))
    raw.hset(key.handover("a/y"), mapping=copied)
    with failing(SignatureError, "signature.wrong"):
        newcomer.island.handed_over("a/y")


def test_chunks_that_were_replaced_after_signing_are_noticed(pair: tuple[Keys, RedisTransport]) -> None:
    keys, merger = pair
    of = manifest(keys.run, width=4096)
    merger.create(of, first_snapshots(of))
    payload = bytes(100_000)
    keys.connect("a").island.publish(contribution(payload, island="a"), payload)
    raw = keys.plain().connection.redis
    (chunk,) = list(raw.scan_iter(f"{{{keys.run}:s0}}:c:a*"))
    raw.set(chunk, b"x" + payload[1:])
    (delivery,) = merger.merger.updates(0.0)
    with failing(WireError, "wire.payload"):
        RoundMerge.of(of).opened(delivery.with_payload())


def test_an_outer_state_that_no_merger_has_signed_for_its_fragment_is_not_loaded(
    pair: tuple[Keys, RedisTransport],
) -> None:
    keys, merger = pair
    merger.create(manifest(keys.run), first_snapshots(manifest(keys.run)))
    epoch = merger.merger.acquire("merger", 60.0)
    assert epoch is not None
    merger.merger.commit(epoch, commit([]))
    assert merger.merger.outer(0, 1) == b"outer"
    raw, key = keys.plain().connection.redis, merger.connection.keys.outer
    stored = raw.hgetall(key(0))
    raw.hset(key(1), mapping=stored)
    for fragment, change in ((0, {"digest": "0" * 64}), (0, {"version": "2"}), (0, {"payload": "other"}), (1, {})):
        raw.hset(key(0), mapping=stored | change)
        with failing(WireError, "" if change.get("payload") else "signature.wrong"):
            merger.merger.outer(fragment, 1)
