"""Servers that cannot hold a run are refused before any key is written."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import redis

from archipelago.broker.errors import BrokerError, ServerTooOldError
from archipelago.broker.redis.client import client_at
from archipelago.broker.redis.server_kind import eviction_warning, mode_of, require_kind, require_lasting
from archipelago.broker.redis.transport import RedisTransport, connect
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
    with closing(connect(url, "mine")) as transport:
        manifest = samples.manifest("mine")
        transport.create(manifest, samples.first_snapshots(manifest))


def keys_at(port: int) -> Any:
    with redis.Redis(port=port) as client:
        return client.keys()


def test_a_node_of_a_cluster_is_refused(start: Start) -> None:
    port = start('save ""', "cluster-enabled yes", f"cluster-port {free_port()}")
    with failing(BrokerError, "broker.cluster"):
        create(f"redis://127.0.0.1:{port}")
    assert keys_at(port) == []
    assert [f.code for f in check_server(f"redis://127.0.0.1:{port}", None, 0.0).findings] == ["role.cluster"]
    # A proxy may hide INFO. Then the answers to other commands tell.
    blind = RedisTransport(client_at(f"redis://127.0.0.1:{port}"), "mine")
    with closing(blind), failing(BrokerError, "broker.cluster"):
        blind.reader.manifest()


def test_sentinels_and_replicas_are_refused_with_the_name_of_the_primary(start: Start) -> None:
    primary = start('save ""')
    replica = start('save ""', f"replicaof 127.0.0.1 {primary}")
    with failing(BrokerError, "broker.refused-replica") as raised:
        create(f"redis://127.0.0.1:{replica}")
    assert f"redis://127.0.0.1:{primary}" in raised.value.remedy
    sentinel = start(f"sentinel monitor mine 127.0.0.1 {primary} 1", flags=("--sentinel",))
    with failing(BrokerError, "broker.sentinel") as raised:
        create(f"redis://127.0.0.1:{sentinel}")
    assert "(mine)" in raised.value.remedy
    for kind, path in (("cluster", ""), ("sentinel", "/mine")):  # An address names the kind of its servers.
        with failing(BrokerError, f"broker.refused-no-{kind}"):
            create(f"redis+{kind}://127.0.0.1:{primary}{path}")
    assert keys_at(primary) == []


def test_a_server_that_deletes_keys_at_its_limit_takes_no_run(start: Start) -> None:
    acl = ("user default on nopass ~* &* +@all", "user mine on >right ~* &* +@all -info")
    port = start('save ""', "maxmemory 100mb", "maxmemory-policy allkeys-lru", *acl)
    for url, code in (
        (f"redis://127.0.0.1:{port}", "broker.evicts"),
        (f"redis://mine:right@127.0.0.1:{port}", "broker.no-info"),  # It is not told that its password is wrong.
        (f"redis://mine:wrong@127.0.0.1:{port}", "broker.access"),
    ):
        with failing(BrokerError, code):
            create(url)
    assert keys_at(port) == []
    with redis.Redis(port=port) as client:
        client.config_set("maxmemory-policy", "noeviction")
    create(f"redis://127.0.0.1:{port}")


def test_redis_and_valkey_name_the_mode_differently() -> None:
    for name in ("redis_mode", "server_mode"):
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
