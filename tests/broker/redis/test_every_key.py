"""Every key of a run, in a real cluster: in which slot it lies, and how it is deleted.

The cluster refuses every command and transaction whose keys lie in two slots.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import pytest
from redis.crc import key_slot

from archipelago.broker.invitation import Member
from archipelago.broker.manifest import Manifest, Tensor
from archipelago.broker.messages import Call, Evaluation, Note, Refusal
from archipelago.broker.redis.administration import delete_shard, shards_with_keys
from archipelago.broker.redis.islands import EVALUATION_LEASE_MAX
from archipelago.broker.redis.keys import REGISTRY, Keys
from archipelago.broker.redis.transport import RedisTransport, connect
from tests import samples
from tests.clusters import Cluster
from tests.samples import LARGE

#: What a key's name is after the tag, and how it is deleted before its run is. Who writes it is in `test_roles.py`.
KEYS: Final = {
    "manifest": "with the run",
    "members": "with the run",
    "updates:a": "with the run, or once its island is forgotten; its entries when they are merged or refused",
    "c:a:x[.][0-9]+[.].*": "with their entry",
    "c:b:h[.].*": "expires",
    "island:[abc]": "expires",
    "name:a": "expires",
    "taken:0": "with the run",
    "islands": "with the run",
    "corpora": "with the run",
    "asks": "expires",
    "handover:c:z": "expires",
    "notes": "with the run; old entries by newer ones",
    "notes:a": "with the run, or once its island is forgotten; old entries by newer ones",
    "evaluations": "with the run; old entries by newer ones",
    "evaluations:a": "with the run; moved once its island is forgotten",
    "evaluator": "expires",
    "control": "with the run",
    "snapshots": "with the run; old entries by newer ones",
    "tape": "with the run; old entries by newer ones",
    "head:[0-3]": "with the run",
    "fragment:[0-3]": "with the run",
    "outer:[0-3]": "with the run",
    "difference:0:[12]": "with the run, or once 32 newer ones are there",
    "m:[fo][0-3][.].*": "with their pointer",
    "m:d0[.][12][.].*": "with their pointer",
    "data": "with the run",
    "state": "with the run",
    "counters": "with the run",
    "epoch": "with the run",
    "lease": "expires",
    "standbys": "expires",
    "kept": "with the run",
    "m:a:.*": "with the run; once a checkpoint covers them",
    "kept:a:.*": "with the run; once a checkpoint covers them",
}


@pytest.fixture
def transport(cluster: Cluster) -> Iterator[RedisTransport]:
    made = connect(cluster.url, f"run-{uuid.uuid4().hex[:8]}")
    yield made
    made.close()


def manifest_of(run: str, shards: int) -> Manifest:
    """Return the manifest of a run with two large fragments in each shard."""
    tensors = tuple(Tensor(f"layers.{number}", (8, 100_000)) for number in range(2 * shards))
    fragments = tuple((tensor.name,) for tensor in tensors)
    return replace(samples.manifest(run), tensors=tensors, fragments=fragments, shards=shards)


def play(transport: RedisTransport, manifest: Manifest) -> None:
    """Write every kind of key of a shard, each by the call that writes it in a run."""
    transport.restore(samples.image(manifest, [(samples.contribution(LARGE, sequence=7), LARGE)], LARGE))
    island, merger, reader = transport.island, transport.merger, transport.reader
    epoch = merger.acquire("m", 100.0)
    assert epoch is not None
    for name, incarnation in (("a", "x"), ("b", "y"), ("c", "z")):
        island.heartbeat(samples.heartbeat(name, incarnation=incarnation))
    island.claim_name("a", "x")
    entry = island.publish(samples.contribution(LARGE, sequence=1), LARGE)
    island.publish(samples.contribution(LARGE, sequence=2), LARGE)
    refused = island.publish(samples.contribution(LARGE, sequence=3), LARGE)
    assert len(merger.updates(0.0)) == 4
    commit = samples.commit([entry], LARGE[::-1], 2, own=LARGE * 2, difference=LARGE)
    merger.commit(epoch, replace(commit, cursors={"0": (0, 5)}))
    merger.commit(epoch, samples.commit([], b"", 4, difference=LARGE))
    samples.refuse(transport, epoch, [(refused, Refusal("a", "x", 3, 1, 0, 100, "no"))])
    merger.announce(epoch, Call(5, 0))
    merger.renew(epoch, "m", 100.0)
    assert island.lease_range(["0"], "a/x") and island.lease_evaluation("a/x", EVALUATION_LEASE_MAX)
    island.register_corpus("text", "0" * 32)
    island.request_state("c/z")
    assert island.promise_answer("c/z", "b/y")
    island.withdraw_request("nobody/x")
    island.hand_over("c/z", samples.handover(LARGE), LARGE)
    for who in ("a", "merger"):
        reader.note(Note(1.0, who, "left", "it was stopped"))
    for by in ("a", ""):
        reader.record_evaluation(Evaluation(1, 4, 100, 1.7e9, 5.0, by))
    reader.steer({"pause": "1"})
    merger.stand_by("other")
    transport.membership.put({"a": Member("island")})


def test_every_key_has_a_slot_and_a_way_to_be_deleted(cluster: Cluster, transport: RedisTransport) -> None:
    run, shards = transport.run, 2
    connections = [transport, *(transport.of_shard(shard) for shard in range(1, shards))]
    found: dict[str, Any] = {}
    for number, shard in enumerate(connections):
        play(shard, manifest_of(run, shards).of_shard(number))
        keys, client = Keys(run, number), cluster.holder(Keys(run, number).manifest).client
        mine = {key.decode(): client for key in client.keys("*") if key.startswith(keys.tag.encode())}
        assert {key_slot(key.encode()) for key in mine} == {key_slot(keys.manifest.encode())}
        check_keys(mine, keys, set(KEYS) - ({"members"} if number else set()))
        found |= mine
    everywhere = {key.decode() for node in cluster.nodes for key in node.client.keys("*") if run.encode() in key}
    assert everywhere == set(found)
    assert shards_with_keys(transport.connection) == set(range(shards))
    for shard in reversed(connections):
        delete_shard(shard.connection)
    assert not any(run.encode() in key for node in cluster.nodes for key in node.client.keys("*"))
    assert run.encode() not in transport.connection.registry.smembers(REGISTRY)


def check_keys(found: dict[str, Any], keys: Keys, expected: set[str]) -> None:
    """Check the keys of a shard, each with the client of its node, and that all expected ones are among them."""
    missing = set(expected)
    for key, client in found.items():
        fitting = [pattern for pattern in expected if re.fullmatch(pattern, keys.short(key))]
        assert len(fitting) == 1, f"{key} has no way to be deleted, or two: {fitting}"
        missing -= set(fitting)
        deleted = KEYS[fitting[0]]
        expires = client.ttl(key) > 0
        assert expires == (deleted == "expires") or (expires and " their " in f" {deleted} "), key
    assert not missing, f"the run has no such keys: {missing}"
