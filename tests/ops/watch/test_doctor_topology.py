"""What `archipelago doctor` says about the servers behind an address."""

from __future__ import annotations

import uuid
from dataclasses import replace
from itertools import islice

import pytest

from archipelago.broker.redis.keys import REGISTRY, Keys
from archipelago.broker.redis.node_facts import NodeFacts
from archipelago.broker.redis.transport import connect
from archipelago.ops.commands import run as command
from archipelago.ops.watch.doctor.main import check_server
from archipelago.ops.watch.doctor.topology import topology
from tests import samples
from tests.clusters import PASSWORD, Cluster
from tests.sharded import create_sharded

HOLDER = NodeFacts("one:1", "one", is_holder=True, is_primary=True, replicas=1, policy="noeviction", has_log=True)
COPY = NodeFacts("two:2", "two", primary="one:1", policy="noeviction", has_log=True)


def codes(*nodes: NodeFacts, min_replicas: str = "1") -> list[str]:
    return [found.code for found in topology("cluster", nodes, min_replicas) if found.level != "ok"]


def test_a_primary_with_a_replica_is_fine() -> None:
    assert codes(HOLDER, COPY) == []
    (found,) = topology("sentinel", [HOLDER, COPY], "1")
    assert "one:1" in found.what and "1 replica" in found.what
    assert len(topology("server", [replace(HOLDER, replicas=0)], "0")) == 1


@pytest.mark.parametrize(
    ("nodes", "min_replicas", "code"),
    [
        ([replace(HOLDER, replicas=0)], "1", "topology.no-replica"),
        ([HOLDER, COPY], "0", "topology.min-replicas"),
        ([HOLDER, COPY], "", "topology.min-replicas"),
        ([HOLDER, NodeFacts("two:2", error="refused")], "1", "topology.refused"),
        ([HOLDER, NodeFacts("two:2", error="silent")], "1", "topology.silent"),
        ([HOLDER, replace(COPY, policy="allkeys-lru")], "1", "topology.evicts"),
        ([HOLDER, replace(COPY, has_log=False)], "1", "topology.no-log"),
    ],
)
def test_what_a_failover_would_lose_has_a_code(nodes: list[NodeFacts], min_replicas: str, code: str) -> None:
    assert codes(*nodes, min_replicas=min_replicas) == [code]


def test_doctor_looks_at_each_node_of_a_cluster(cluster: Cluster) -> None:
    registry = cluster.holder(REGISTRY)
    runs = (f"run-{uuid.uuid4().hex[:8]}" for _ in range(1000))
    run = next(each for each in runs if cluster.owner(each) is not registry)
    transport = connect(cluster.url, run)
    transport.create(samples.manifest(run), samples.first_snapshots(samples.manifest(run)))
    transport.close()
    owner = cluster.owner(run)
    other = next(node for node in cluster.nodes if node not in (owner, registry))
    other.client.config_set("maxmemory-policy", "allkeys-lru")
    other.client.config_set("requirepass", "another")
    registry.client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        found = {each.code: each.what for each in check_server(cluster.url, run, 0.0).findings}
    finally:
        other.client.config_set("requirepass", PASSWORD)
        for node in (other, registry):
            node.client.config_set("maxmemory-policy", "noeviction")
    assert "topology.ok" in found, found
    assert f"127.0.0.1:{owner.port}" in found["topology.ok"] and "2 primaries" in found["topology.ok"]
    assert f"127.0.0.1:{other.port}" in found["topology.refused"]
    assert f"127.0.0.1:{registry.port}" in found["topology.evicts"]
    assert "topology.no-replica" in found and "rights.ok" in found


def test_doctor_checks_every_server_that_holds_a_shard(cluster: Cluster) -> None:
    runs = (f"run-{uuid.uuid4().hex[:8]}" for _ in range(1000))
    nodes = {run: [cluster.holder(Keys(run, shard).manifest) for shard in range(2)] for run in islice(runs, 100)}
    run, other = next((run, there) for run, (here, there) in nodes.items() if here is not there)
    transport = connect(cluster.url, run)
    create_sharded(transport)
    other.client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        found = {each.code: each.what for each in check_server(cluster.url, run, 0.0).findings}
    finally:
        other.client.config_set("maxmemory-policy", "noeviction")
    assert f":{other.port} holds shard 1 of the run." in found["shards.ok"]
    assert found["eviction.policy"].startswith("The server of shard 1: ")
    assert command(["rm", run, cluster.url, "--yes"]) == 0
    assert not any(run.encode() in key for node in cluster.nodes for key in node.client.keys("*"))
    transport.close()
