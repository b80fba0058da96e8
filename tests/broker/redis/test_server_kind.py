"""Servers that cannot hold a run are refused before any key is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from archipelago.broker.errors import BrokerError
from archipelago.broker.machine import LOOPBACK, free_port
from archipelago.broker.redis.client import client_at
from archipelago.broker.redis.failures import eviction, mode_of, refused_writes, require_kind, require_lasting
from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.ops.watch.doctor.main import check_server
from tests import samples
from tests.clusters import PASSWORD, Node, data_options
from tests.conftest import Until
from tests.failing import failing

Start = Callable[..., Node]


@pytest.fixture
def start(tmp_path: Path, until: Until) -> Iterator[Start]:
    """A function that starts a server with these options."""
    with ExitStack() as stack:

        def begin(*options: str) -> Node:
            node = Node(tmp_path / f"server-{free_port()}", options)
            stack.callback(node.end)
            until(node.answers, "the server to answer")
            return node

        yield begin


def url_of(node: Node, kind: str = "", user: str = f":{PASSWORD}") -> str:
    return f"redis{kind}://{user}@{LOOPBACK}:{node.port}"


def create(url: str) -> None:
    """Create a run, as `init` does after it has built the model."""
    with closing(connect(url, "mine")) as transport:
        samples.begin(transport)


def test_a_node_of_a_cluster_is_refused(start: Start) -> None:
    node = start(*data_options("--cluster-enabled", "yes", "--cluster-port", str(free_port())))
    with failing(BrokerError, "broker.address"):
        create(url_of(node))
    assert node.client.keys() == []
    assert [f.code for f in check_server(url_of(node), None, 0.0).findings] == ["reach.failed"]
    # A proxy may hide INFO. Then the answers to other commands tell.
    blind = RedisTransport(client_at(url_of(node)), "mine")
    with closing(blind), failing(BrokerError, "broker.address"):
        blind.reader.manifest()


def test_sentinels_and_replicas_are_refused_with_the_name_of_the_primary(start: Start, tmp_path: Path) -> None:
    primary = start(*data_options())
    replica = start(*data_options("--replicaof", f"{LOOPBACK} {primary.port}"))
    with failing(BrokerError, "broker.refused-replica") as raised:
        create(url_of(replica))
    assert f"redis://{LOOPBACK}:{primary.port}" in raised.value.remedy
    config = tmp_path / "sentinel.conf"
    config.write_text(f"sentinel monitor mine {LOOPBACK} {primary.port} 1\nrequirepass {PASSWORD}\n")
    with failing(BrokerError, "broker.address") as raised:
        create(url_of(start(str(config), "--sentinel")))
    assert "(mine)" in raised.value.remedy
    # An address names the kind of its servers.
    for kind, path in (("cluster", ""), ("sentinel", f"/mine?sentinel_password={PASSWORD}")):
        with failing(BrokerError, f"broker.refused-no-{kind}"):
            create(url_of(primary, f"+{kind}") + path)
    assert primary.client.keys() == []


def test_a_server_that_deletes_keys_at_its_limit_takes_no_run(start: Start) -> None:
    node = start(*data_options("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"))
    node.client.execute_command("ACL", "SETUSER", "mine", "on", ">right", "~*", "&*", "+@all", "-info")
    for url, code in (
        (url_of(node), "broker.evicts"),
        (url_of(node, user="mine:right"), "broker.permission"),  # The password is right.
        (url_of(node, user="mine:wrong"), "broker.access"),
    ):
        with failing(BrokerError, code):
            create(url)
    assert node.client.keys() == []
    node.client.config_set("maxmemory-policy", "noeviction")
    create(url_of(node))


def test_redis_and_valkey_name_the_mode_differently() -> None:
    for name in ("redis_mode", "server_mode"):
        assert mode_of({name: "cluster"}) == "cluster"
        with failing(BrokerError, "broker.address"):
            require_kind("here", {"redis_version": "7.2.4", name: "cluster"}, {})


def test_info_says_why_writes_are_refused() -> None:
    for info, why in (
        ({"maxmemory": 5, "used_memory": 5}, "memory"), ({"role": "slave"}, "replica"),
        ({"rdb_last_bgsave_status": "err"}, "disk"),
        ({"rdb_last_bgsave_status": "err", "aof_last_write_status": "err", "aof_enabled": 1}, "append-only file"),
        ({"min_slaves_good_slaves": 0}, "too few replicas"),
    ):  # fmt: skip
        _, what, remedy = refused_writes(info)
        assert why in what and what.endswith("so it refuses writes") and remedy, info
    fine = {"role": "master", "used_memory": 5, "rdb_last_bgsave_status": "ok", "min_slaves_good_slaves": 1}
    stale = {"aof_last_write_status": "err", "aof_enabled": 0}
    assert refused_writes({}) == refused_writes(fine) == refused_writes(stale) == ()


def test_a_policy_matters_only_with_a_limit() -> None:
    memory = {"maxmemory": 0, "maxmemory_policy": "volatile-lru"}
    require_lasting("here", {"role": "master"}, memory)
    assert eviction("here", memory)
    assert not eviction("here", {"maxmemory": 5, "maxmemory_policy": "noeviction"})
    with failing(BrokerError, "broker.evicts"):
        require_lasting("here", {"role": "master"}, memory | {"maxmemory": 5})
