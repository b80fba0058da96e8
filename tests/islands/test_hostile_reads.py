"""Whatever arrives where an island reads, it trains on: nothing but an outage or a bug may stop a pump."""

from __future__ import annotations

import uuid
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from archipelago.broker.errors import BrokerError, WireError
from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.islands.computation import Computation
from archipelago.islands.data.batches import Batches, range_order
from archipelago.islands.sync.connection.link import Link
from archipelago.islands.sync.recovery import Newcomer
from archipelago.islands.worker import Island
from tests import samples
from tests.harness import tiny
from tests.tiers import examples

MANIFEST = tiny.manifest()
NUMBERS = st.one_of(st.integers(-2, 9), st.sampled_from([2**31, 2**53, 2**62, 2**63, 10**30])).map(str)
TEXTS = st.one_of(
    NUMBERS,
    st.sampled_from(["", "nan", "inf", "1e400", "a", "a/x", "a/x/0", "training", "float32", "drain ", "0:1:end"]),
    st.text(max_size=8),
    st.binary(max_size=8),
)
KINDS = st.sampled_from(["call", "snapshot", "refused", "resume", "marker", "new"])
NAMES = """round fragment version step codec bytes digest merged held difference_bytes epoch number island incarnation
    sequence tokens reason repeat decided payload chunks chunks_name giver index global_step state 0 0.by 1 1.by b/y a/x
    corpus.a island.b"""
FIELDS = st.dictionaries(st.sampled_from(NAMES.split()), TEXTS, min_size=1, max_size=8)


def keys_of(transport: RedisTransport) -> list[str]:
    keys = transport.connection.keys
    return [
        keys.fragment(0), keys.fragment(1), keys.difference(0, 1), keys.data, keys.control, keys.requests, keys.islands,
        keys.island("a"), keys.island("b"), keys.name("a"), keys.handover("a/x"), keys.notes, keys.tape, keys.state,
        keys.corpora, keys.taken("0"), keys.taken("1"),
    ]  # fmt: skip


ATTACKS = st.one_of(
    st.tuples(st.just("event"), KINDS, FIELDS),
    st.tuples(st.just("hash"), st.integers(0, 16), FIELDS),
    st.tuples(st.just("string"), st.integers(0, 16), TEXTS),
    st.tuples(st.just("stream"), st.integers(0, 16), FIELDS),
    st.tuples(st.just("set"), st.integers(0, 16), TEXTS),
)


def attack(transport: RedisTransport, kind: str, where: Any, what: Any) -> None:
    """Write what anyone who reaches the Redis could write. A part of a key keeps its type, and a string replaces it."""
    raw = transport.connection.redis
    key = transport.connection.keys.snapshots if kind == "event" else keys_of(transport)[where]
    if raw.type(key).decode() != ("stream" if kind == "event" else kind):
        raw.delete(key)
    if kind == "event":
        raw.xadd(key, {"kind": where, **what})
    elif kind == "hash":
        raw.hset(key, mapping=what)
    elif kind == "stream":
        raw.xadd(key, what)
    elif kind == "set":
        raw.sadd(key, what)
    else:
        raw.set(key, what)


def begin() -> RedisTransport:
    transport = connect(f"fakeredis://{uuid.uuid4().hex}", MANIFEST.run)
    transport.create(MANIFEST, samples.first_snapshots(MANIFEST, 1.0))
    transport.island.heartbeat(samples.heartbeat("b", incarnation="y"))
    return transport


def island_of(transport: RedisTransport) -> Island:
    config = MANIFEST.config
    link = Link(transport, MANIFEST, "a/x", range_order(config.data.shards, config.seed))
    arrivals = link.join()
    batches = Batches(tiny.TEXT, config, link.lease)
    island = Island("a", MANIFEST, Computation(MANIFEST, tiny.STEPS), batches, link, arrivals, incarnation="x")
    island.beat("training")
    return island


@settings(max_examples=examples(100))
@given(st.lists(ATTACKS, min_size=1, max_size=6))
def test_an_island_trains_on_whatever_it_reads(attacks: list[Any]) -> None:
    transport = begin()
    island = island_of(transport)
    for each in attacks:
        attack(transport, *each)
        for _ in range(2):
            island.link.pump()
            assert island.link.pumps.failure is None
            if island.reason:
                return  # the operator, or a claim to its name, asked for it
            island.boundary()
            island.advance()
    assert island.totals.steps == 2 * len(attacks)
    assert not island.finished


@settings(max_examples=examples(50))
@given(st.lists(ATTACKS, min_size=1, max_size=4))
def test_a_starting_island_ends_at_most_with_a_sentence(attacks: list[Any]) -> None:
    transport = begin()
    for each in attacks:
        attack(transport, *each)
    try:
        transport.island.register_corpus("a", "0" * 32)
        transport.reader.manifest()
        island = island_of(transport)
    except (BrokerError, WireError):
        return
    rejoin = Newcomer(transport, island, seconds=0.0, pause=lambda seconds: None)
    island.ledger.global_step = 5
    rejoin.ask()
    rejoin.complete()
    island.link.pump()
    assert island.link.pumps.failure is None
    if not island.reason:
        island.boundary()
        island.advance()
