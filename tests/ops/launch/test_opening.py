"""A run that other machines join: its certificates, its server with TLS, and the options of `up --open`."""

from __future__ import annotations

import datetime
import hashlib
import stat
import uuid
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from archipelago.broker import invitation as invitations
from archipelago.broker import signing
from archipelago.broker.control import EXPEL, island_field
from archipelago.broker.errors import BrokerError, ConfigError
from archipelago.broker.invitation import Invitation, key_text
from archipelago.broker.machine import is_free
from archipelago.broker.redis.checkup import BURST_BYTES_MAX
from archipelago.broker.redis.chunks import CHUNK_BYTES
from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.islands.sync.script import island_name
from archipelago.ops.launch import up
from archipelago.ops.launch.administration import Administrator, administrator_at, invite_ours, public_text
from archipelago.ops.launch.embedded_redis import (
    CONFIG,
    PUBLIC_PORT,
    Program,
    RedisServer,
    ServerAddress,
    last_start,
    start_server,
    write_config,
)
from archipelago.ops.launch.opening import (
    ADMINISTRATOR,
    AUTHORITY,
    AUTHORITY_KEY,
    SERVER,
    SERVER_KEY,
    USERS,
    public_host,
    renew_certificates,
)
from archipelago.ops.launch.up import UpOptions
from tests import samples
from tests.conftest import Until
from tests.failing import failing
from tests.servers import redis_program

NOW = datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC)
HOST = "hub.example"
#: `localhost` is also in every certificate, and leads to this machine.
OPENED = "localhost"


# -- certificates -----------------------------------------------------------------------------------------------------


def test_the_authority_stays_and_the_server_certificate_is_renewed(tmp_path: Path) -> None:
    folder = tmp_path / "certificates"
    renew_certificates(folder, [HOST, "10.0.0.1", "::1", HOST], NOW)
    authority, first = (folder / AUTHORITY).read_bytes(), (folder / SERVER).read_bytes()
    for key in (AUTHORITY_KEY, SERVER_KEY):
        assert stat.S_IMODE((folder / key).stat().st_mode) == 0o600
    renew_certificates(folder, ["elsewhere"], NOW)
    assert (folder / AUTHORITY).read_bytes() == authority
    assert (folder / SERVER).read_bytes() != first
    renew_certificates(
        folder, [HOST], NOW + datetime.timedelta(days=3000)
    )  # the authority would end before the server's certificate
    assert (folder / AUTHORITY).read_bytes() != authority


def test_a_damaged_authority_is_an_error(tmp_path: Path) -> None:
    renew_certificates(tmp_path, [HOST], NOW)
    (tmp_path / AUTHORITY_KEY).write_text("nonsense")
    with failing(ConfigError, "certificates.damaged"):
        renew_certificates(tmp_path, [HOST], NOW)
    other = tmp_path / "other"
    renew_certificates(other, [HOST], NOW)
    (tmp_path / AUTHORITY_KEY).write_bytes((other / AUTHORITY_KEY).read_bytes())
    with failing(ConfigError, "certificates.damaged"):
        renew_certificates(tmp_path, [HOST], NOW)


# -- the server's files and the members -------------------------------------------------------------------------------


def test_the_files_of_an_open_server_allow_tls_and_known_users_only(tmp_path: Path) -> None:
    opened, closed = (
        ServerAddress(7000, "secret", authority) for authority in (tmp_path / "certificates" / AUTHORITY, None)
    )
    for invited in ([], ["user demo~oslo on"]):  # An invited member stays when the server is started again.
        write_config(tmp_path, "redis-server", opened, append_only=True, host=OPENED)
        settings = (tmp_path / CONFIG).read_text().splitlines()
        assert {"port 0", "tls-port 7000", "bind * -::*", f"aclfile {USERS}"} <= set(settings)
        default, administrator, *members = (tmp_path / USERS).read_text().splitlines()
        assert default == "user default off resetpass ~* &* +@all", "Redis 7.0 replays transactions as this user"
        digest = hashlib.sha256(b"secret").hexdigest()
        assert administrator == f"user {ADMINISTRATOR} on #{digest} ~* &* +@all"
        assert members == invited
        (tmp_path / USERS).write_text("\n".join([default, administrator, "user demo~oslo on"]))
    values = dict(line.split(maxsplit=1) for line in (tmp_path / CONFIG).read_text().splitlines())
    bounds = [int(values[name]) for name in ("timeout", "maxclients", "maxmemory", "proto-max-bulk-len")]
    assert bounds[0] <= 300 and bounds[1] > 10_000 and bounds[2] < psutil.virtual_memory().total
    assert max(CHUNK_BYTES, BURST_BYTES_MAX) < bounds[3] < 100 << 20
    for file in (CONFIG, USERS):
        assert stat.S_IMODE((tmp_path / file).stat().st_mode) == 0o600
    assert last_start(tmp_path) == ("redis-server", opened)
    write_config(tmp_path, "redis-server", closed, append_only=True, host=None)
    assert last_start(tmp_path) == ("redis-server", closed)


def test_a_start_renews_our_passwords_and_keeps_the_keys_of_islands(server: RedisServer, tmp_path: Path) -> None:
    run = f"demo-{uuid.uuid4().hex[:8]}"
    transport = opened(server, tmp_path, run)
    ours = Administrator(transport, server.url, tmp_path)
    first = {name: invitations.read(Path(file)) for name, file in invite_ours(ours, server.url, ["island-0"]).items()}
    roles = {"merger": "merger", "standby": "viewer", "island-0": "island"}
    assert {name: invitation.role for name, invitation in first.items()} == roles
    assert first["merger"].private_key == administrator_at(server, run, tmp_path).private_key, "it is kept"
    island = first["island-0"]
    with closing(connect(island.url, run, island)) as joined:
        joined.island.publish(samples.contribution(b"x", island="island-0"), b"x")
    transport.reader.steer({island_field("island-0"): EXPEL})
    file = Path(invite_ours(ours, server.url, ["island-0"])["island-0"])
    assert transport.reader.control() == {island_field("island-0"): EXPEL}, "only an operator lifts it"
    renewed = invitations.read(file)
    assert renewed.url != island.url
    with failing(BrokerError, "broker.access"):
        connect(island.url, run, island)
    merger = invitations.read(file.with_name("merger.join"))
    with closing(connect(merger.url, run, merger)) as joined:
        assert joined.merger.acquire("m", 60.0)
        (delivery,) = joined.merger.updates(0.0)
        assert delivery.contribution is not None, delivery.fault
    ours.revoke("island-0")
    invite_ours(ours, server.url, ["island-0"])
    assert invitations.read(file).private_key != renewed.private_key, "who was revoked may know the old one"
    assert transport.reader.control() == {island_field("island-0"): EXPEL}, "a revoked island is not let in again"
    transport.close()


def opened(server: RedisServer, folder: Path, run: str = "demo") -> RedisTransport:
    """Return the administrator's connection to a run, which is created unless it is there."""
    transport = connect(server.url, run, administrator_at(server, run, folder))
    Administrator(transport, server.url, folder).open()
    if run not in transport.reader.runs():
        samples.begin(transport)
    return transport


# -- a server with TLS ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return redis_program(tmp_path_factory.mktemp("program"))


@pytest.fixture(scope="module")
def hub(program: Program, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """An open server. It has the port that firewalls know, if that is free."""
    free = is_free(PUBLIC_PORT)
    with start_server(tmp_path_factory.mktemp("hub") / "redis", program, host=OPENED) as server:
        assert server.port == PUBLIC_PORT or not free
        yield server


def pinned(server: RedisServer, **changes: str) -> Invitation:
    return replace(administrator_at(server, "demo", Path("nowhere")), **changes)  # type: ignore[arg-type]


@pytest.mark.full
def test_an_open_server_needs_tls_and_a_user(hub: RedisServer, tmp_path: Path) -> None:
    transport = connect(hub.url, "demo", pinned(hub))
    assert transport.membership.users() is not None
    assert transport.membership.needs_password()
    assert transport.membership.keep() == "aclfile"
    transport.close()
    renew_certificates(tmp_path, ["localhost", "127.0.0.1"], datetime.datetime.now(datetime.UTC))
    other = (tmp_path / AUTHORITY).read_text()
    for invited in (pinned(hub, ca_certificate=other), None):  # None: that of the system, which has not signed it
        with failing(BrokerError, "broker.tls"):
            connect(hub.url, "demo", invited)
    once = Retry(NoBackoff(), 0)
    with redis.Redis(port=hub.port, password="x", retry=once) as plain, pytest.raises(redis.ConnectionError):
        plain.ping()
    options: dict[str, Any] = {"port": hub.port, "ssl": True, "ssl_ca_data": hub.address.certificate, "retry": once}
    for password in (None, hub.url.split(":")[2].split("@")[0]):  # that of the administrator is not the default user's
        with redis.Redis(password=password, **options) as default, pytest.raises(redis.AuthenticationError):
            default.ping()


@pytest.mark.full
def test_users_survive_a_kill_and_the_address_stays(program: Program, tmp_path: Path, until: Until) -> None:
    folder = tmp_path / "redis"
    with start_server(folder, program, host=OPENED) as server:
        first, authority, transport = server.url, server.address.certificate, opened(server, tmp_path)
        joins = invite_ours(Administrator(transport, server.url, tmp_path), server.url, ["island-0"])
        island = invitations.read(Path(joins["island-0"]))
        transport.close()
        psutil.Process(server.pid).kill()
        until(lambda: not server.alive(), "the server to end")
    with start_server(folder, program, host=OPENED) as again:
        assert (again.url, again.address.certificate) == (first, authority)
        with closing(connect(island.url, "demo", island)) as kept:
            assert kept.reader.manifest().run == "demo"
            assert None not in kept.reader.heads(), "what was written in transactions is there"
    with start_server(folder, program) as closed:  # the same data without --open
        connect(closed.url, "demo").close()
        assert closed.address.certificate == ""


# -- addresses and options --------------------------------------------------------------------------------------------


def test_the_host_is_an_address_or_a_name() -> None:
    for host in ("hub.example.org", "192.0.2.7", "::1"):
        assert public_host(host) == host
    assert public_host(None)
    for host in ("", "a b", "hub:6379", "rediss://hub", "ä.example", "a..b", "x" * 300, "fe80::1%eth0"):
        with failing(ConfigError, "config.value"):
            public_host(host)


def test_the_file_of_a_run_that_was_open_continues_no_closed_one_and_admits_no_island(tmp_path: Path) -> None:
    file, key = tmp_path / "demo" / "admin.join", key_text(signing.generate()[0])
    file.parent.mkdir()
    invitations.write(file, Invitation("redis://h", "demo", "admin", "admin"))
    assert island_name(str(file), "lima") == "lima"
    assert island_name(str(file), None) not in (island_name(str(file), None), "admin")
    invitations.write(file, Invitation("redis://h", "demo", "admin", "admin", key, public_text(key)))
    with failing(ConfigError, "up.was-open"):
        up.main(UpOptions(folder=tmp_path))
    with failing(ConfigError, "invitation.other"):
        island_name(str(file), "lima")
