"""Servers that cannot hold a run are refused before any key is written."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis

from archipelago.broker.errors import BrokerError, ServerTooOldError
from archipelago.broker.redis.server_kind import eviction_warning, mode_of, require_kind, require_lasting
from archipelago.broker.redis.transport import connect
from archipelago.ops.launch.redis_probe import free_port
from archipelago.ops.launch.redis_program import find_program
from archipelago.ops.watch.doctor.main import check_server
from tests import samples
from tests.conftest import Until
from tests.failing import failing

Start = Callable[..., int]


@pytest.fixture
def start(tmp_path: Path, until: Until) -> Iterator[Start]:
    """Start a server with these words of its configuration, and return its port."""
    program = find_program().path
    assert program is not None

    with ExitStack() as stack:

        def begin(*lines: str, flags: tuple[str, ...] = ()) -> int:
            port = free_port()
            config = tmp_path / f"{port}.conf"
            config.write_text("\n".join([f"port {port}", f"dir {tmp_path}", "bind 127.0.0.1", *lines]))
            process = stack.enter_context(
                subprocess.Popen([program, config, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            )
            stack.callback(process.kill)
            until(lambda: _answers(port) or process.poll() is not None, "the server answers")
            assert process.poll() is None, "the server refuses its configuration"
            return port

        yield begin


def _answers(port: int) -> bool:
    try:
        with redis.Redis(port=port) as client:
            client.ping()
    except redis.ConnectionError:
        return False
    except redis.RedisError:
        pass  # it asks for a password
    return True


def create(url: str) -> None:
    """Create a run, as `init` does after it has built the model."""
    transport = connect(url, "mine")
    try:
        manifest = samples.manifest("mine")
        transport.create(manifest, samples.first_snapshots(manifest))
    finally:
        transport.close()


def keys_at(port: int) -> Any:
    with redis.Redis(port=port) as client:
        return client.keys()


def test_a_node_of_a_cluster_is_refused(start: Start) -> None:
    port = start('save ""', "cluster-enabled yes", f"cluster-port {free_port()}")
    with failing(BrokerError, "broker.cluster"):
        create(f"redis://127.0.0.1:{port}")
    assert keys_at(port) == []
    assert [f.code for f in check_server(f"redis://127.0.0.1:{port}", None, 0.0).findings] == ["role.cluster"]


def test_a_sentinel_is_refused_with_the_name_of_the_primary(start: Start) -> None:
    primary = start('save ""')
    port = start(f"sentinel monitor mine 127.0.0.1 {primary} 1", flags=("--sentinel",))
    with failing(BrokerError, "broker.sentinel") as raised:
        create(f"redis://127.0.0.1:{port}")
    assert "(mine)" in raised.value.remedy


def test_an_address_names_the_kind_of_its_servers(start: Start) -> None:
    port = start('save ""')
    for kind, path in (("cluster", ""), ("sentinel", "/mine")):
        with failing(BrokerError, f"broker.refused-no-{kind}"):
            create(f"redis+{kind}://127.0.0.1:{port}{path}")


def test_a_replica_takes_no_run(start: Start) -> None:
    primary = start('save ""')
    port = start('save ""', f"replicaof 127.0.0.1 {primary}")
    with failing(BrokerError, "broker.refused-replica") as raised:
        create(f"redis://127.0.0.1:{port}")
    assert f"redis://127.0.0.1:{primary}" in raised.value.remedy
    assert keys_at(primary) == []


def test_a_server_that_deletes_keys_at_its_limit_takes_no_run(start: Start) -> None:
    port = start('save ""', "maxmemory 100mb", "maxmemory-policy allkeys-lru")
    with failing(BrokerError, "broker.evicts"):
        create(f"redis://127.0.0.1:{port}")
    assert keys_at(port) == []
    with redis.Redis(port=port) as client:
        client.config_set("maxmemory-policy", "noeviction")
    create(f"redis://127.0.0.1:{port}")


def test_a_user_without_info_is_not_told_that_its_password_is_wrong(start: Start) -> None:
    port = start('save ""', "user default on nopass ~* &* +@all", "user mine on >right ~* &* +@all -info")
    with failing(BrokerError, "broker.no-info") as raised:
        create(f"redis://mine:right@127.0.0.1:{port}")
    assert "ACL SETUSER mine +info" in raised.value.remedy
    with failing(BrokerError, "broker.access"):
        create(f"redis://mine:wrong@127.0.0.1:{port}")
    assert keys_at(port) == []


def test_answers_of_a_cluster_are_translated_where_info_does_not_tell(start: Start) -> None:
    port = start('save ""', "cluster-enabled yes", f"cluster-port {free_port()}")
    transport = connect_blind(f"redis://127.0.0.1:{port}")
    with failing(BrokerError, "broker.cluster"):
        transport.reader.manifest()
    transport.close()


def connect_blind(url: str) -> Any:
    """Connect without asking for INFO, as at a proxy that hides it."""
    from archipelago.broker.redis.client import client_at
    from archipelago.broker.redis.transport import RedisTransport

    return RedisTransport(client_at(url), "mine")


@pytest.mark.parametrize("name", ["redis_mode", "server_mode"])
def test_redis_and_valkey_name_the_mode_differently(name: str) -> None:
    assert mode_of({name: "cluster"}) == "cluster"
    with failing(BrokerError, "broker.cluster"):
        require_kind("here", {"redis_version": "7.2.4", name: "cluster"}, {})


def test_old_servers_are_refused_and_silent_ones_are_not() -> None:
    with failing(ServerTooOldError):
        require_kind("here", {"redis_version": "6.0.16"}, {})
    require_kind("here", {"redis_version": "6.2.0", "redis_mode": "standalone"}, {})
    require_lasting("here", {}, {})


def test_a_policy_matters_only_with_a_limit() -> None:
    memory = {"maxmemory": 0, "maxmemory_policy": "volatile-lru"}
    require_lasting("here", {"role": "master"}, memory)
    assert eviction_warning("here", memory)
    assert not eviction_warning("here", {"maxmemory": 5, "maxmemory_policy": "noeviction"})
    with failing(BrokerError, "broker.evicts"):
        require_lasting("here", {"role": "master"}, memory | {"maxmemory": 5})
