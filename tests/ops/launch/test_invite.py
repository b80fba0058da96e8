"""Tests of `invite` and `revoke` at a real server."""

from __future__ import annotations

import json
import stat
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from archipelago.broker import invitation as invitations
from archipelago.broker.config import OWN_MODEL, ModelConfig, RunConfig
from archipelago.broker.control import EXPEL
from archipelago.broker.errors import BrokerError, ConfigError
from archipelago.broker.invitation import Invitation, Members, Role
from archipelago.broker.process import connect_to, require_role
from archipelago.broker.redis.administration import delete_shard
from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.islands import main as islands
from archipelago.merger import main as mergers
from archipelago.ops.launch import invite
from archipelago.ops.launch.administration import ADMIN_FILE, MEMBERS_FILE, Administrator, public_text
from archipelago.ops.launch.embedded_redis import RedisServer
from archipelago.ops.launch.invite import InviteOptions, RevokeOptions
from tests import samples
from tests.failing import failing
from tests.sharded import create_sharded

SOME_KEY = public_text(invitations.key_text(bytes(range(32))))
#: Invites someone, and returns the invitation.
Invite = Callable[..., Invitation]


@pytest.fixture
def run(server: RedisServer) -> Iterator[RedisTransport]:
    """Return an administrator's connection to a new run."""
    transport = samples.begin(connect(server.url, f"run-{uuid.uuid4().hex[:8]}"))
    yield transport
    for user in transport.connection.redis.acl_users():
        if user.startswith(f"{transport.run}~"):
            transport.connection.redis.acl_deluser(user)
    transport.close()


def join_file(run: RedisTransport, name: str) -> Path:
    """Return the file that an invitation writes."""
    return Path("runs") / run.run / f"{run.run}.{name}.join"


@pytest.fixture
def join(run: RedisTransport, server: RedisServer) -> Invite:
    """Return a function that invites someone to that run."""

    def invited(name: str, **options: object) -> Invitation:
        made = InviteOptions(name=name, url=server.url, run=run.run, **options)  # type: ignore[arg-type]
        assert invite.main(made) == 0
        return invitations.read(made.out or made.folder / run.run / join_file(run, name).name)

    return invited


def test_an_invitation_is_a_private_file_that_connects(run: RedisTransport, join: Invite) -> None:
    oslo = join("oslo")
    path = join_file(run, "oslo")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "*" in (path.parent / ".gitignore").read_text(encoding="utf-8")
    assert [found.name for found in Path().iterdir()] == ["runs"]
    assert (oslo.name, oslo.run, oslo.role) == ("oslo", run.run, "island")
    transport = connect_to(str(path), None)
    assert transport.reader.manifest().run == run.run
    member = run.membership.all().by_name["oslo"]
    assert member.key == public_text(oslo.private_key)
    assert run.membership.all().merger_key == oslo.merger_key != ""
    transport.close()
    with redis.Redis.from_url(oslo.url) as client:
        assert client.ping(), "the library logs in by user and password"
    far = join("bergen", address="rediss://hub.example:6380")
    assert far.url.startswith(f"rediss://{run.run}~bergen:") and far.url.endswith("@hub.example:6380")
    with failing(ConfigError):
        join("cork", address="http://hub")


def test_the_mergers_share_a_key_that_only_they_and_the_administrator_have(run: RedisTransport, join: Invite) -> None:
    assert [join(role, role=role).merger_key for role in ("viewer", "operator")] == ["", ""]
    assert not run.membership.all().merger_key, "only islands and mergers turn signatures on"
    first, second, island = join("m1", role="merger"), join("m2", role="merger"), join("oslo")
    assert run.membership.all().merger_key
    kept = invitations.read(Path("runs") / run.run / ADMIN_FILE)
    assert first.private_key == second.private_key == kept.private_key
    assert public_text(kept.private_key) == run.membership.all().merger_key
    assert island.private_key not in ("", kept.private_key)
    assert [join(name, role=name, replace=True).private_key for name in ("viewer", "operator")] == ["", ""]


def test_the_key_of_another_administrator_is_not_replaced(run: RedisTransport, join: Invite, tmp_path: Path) -> None:
    join("oslo", folder=tmp_path / "first")
    join("bergen", folder=tmp_path / "second")  # an island needs only the public key
    with failing(ConfigError, "invitation.merger-key"):
        join("merger", role="merger", folder=tmp_path / "second")
    other = replace(invitations.read(tmp_path / "first" / run.run / ADMIN_FILE), private_key=SOME_KEY)
    invitations.write(tmp_path / "second" / run.run / ADMIN_FILE, other)
    with failing(ConfigError, "invitation.merger-key"):
        join("merger", role="merger", folder=tmp_path / "second")


def test_an_invitation_is_not_repeated_but_replaced(run: RedisTransport, join: Invite) -> None:
    old = join("oslo")
    transport = connect_to(str(join_file(run, "oslo")), None)
    with failing(ConfigError, "invitation.exists"):
        join("oslo")
    with failing(ConfigError, "invitation.exists"):
        join("oslo", out=Path("other.join"))
    new = join("oslo", replace=True)
    assert new.private_key != old.private_key
    with failing(BrokerError, "broker.access"):
        transport.reader.manifest()  # its connection was closed, and its password is gone
    connect_to(str(join_file(run, "oslo")), None).close()
    transport.close()


def test_revoking_ends_everything(
    run: RedisTransport, join: Invite, server: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    join("oslo")
    transport = connect_to(str(join_file(run, "oslo")), None)
    transport.island.heartbeat(samples.heartbeat("oslo"))
    transport.island.publish(samples.contribution(samples.LARGE, island="oslo"), samples.LARGE)
    raw = run.connection.redis
    assert len(raw.keys(f"*{run.run}*:oslo*")) > 3
    options = RevokeOptions(name="oslo", url=server.url, run=run.run)
    assert invite.main(options) == 0
    assert f"{join_file(run, 'oslo')} is of no use any more" in capsys.readouterr().err
    assert raw.keys(f"*{run.run}*:oslo*") == []
    assert (raw.scard(run.connection.keys.islands), run.reader.backlog()) == (0, 0)
    with failing(BrokerError, "broker.access"):
        transport.reader.manifest()
    assert run.reader.control() == {"island.oslo": EXPEL}
    assert "oslo" not in run.membership.all().by_name
    join("oslo", replace=True)  # an island that is invited again is not expelled any more
    assert run.reader.control() == {}
    transport.close()


def test_where_users_are_managed_elsewhere_the_rules_are_told(run: RedisTransport, server: RedisServer) -> None:
    raw = run.connection.redis
    raw.execute_command("ACL", "SETUSER", f"{run.run}~owner", "on", ">secret", "~*", "+@all", "-acl", "-config")
    url = f"redis://{run.run}~owner:secret@127.0.0.1:{server.port}"
    options = InviteOptions(name="oslo", url=url, run=run.run)
    with failing(ConfigError, "invitation.no-admin") as denied:
        invite.main(options)
    assert run.membership.all() == Members()  # not even the key of the mergers is there
    user, rules = f"{run.run}~oslo", denied.value.remedy.partition("Its rules are ")[2].partition(". Or use")[0]
    raw.execute_command("ACL", "SETUSER", user, ">made-there", *_words(rules)[1:])
    Path("password").write_text("made-there\n")
    assert invite.main(replace(options, password_file=Path("password"))) == 0
    transport = connect_to(str(join_file(run, "oslo")), None)
    assert transport.reader.manifest().run == run.run
    assert run.membership.all().by_name["oslo"].user == user
    assert invite.main(RevokeOptions(name="oslo", url=url, run=run.run)) == 1  # the user is still there
    transport.close()


def _words(rules: str) -> list[str]:
    """Split rules at spaces, except within a selector."""
    out: list[str] = []
    for word in rules.split():
        if out and out[-1].startswith("(") and not out[-1].endswith(")"):
            out[-1] += f" {word}"
        else:
            out.append(word)
    return out


def test_members_are_listed_and_results_are_json(
    run: RedisTransport, join: Invite, server: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    join("oslo")
    capsys.readouterr()
    assert invite.main(InviteOptions(name=server.url, run=run.run, json=True)) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed == {"oslo": {"role": "island", "user": f"{run.run}~oslo"}}
    assert invite.main(InviteOptions(name="eve", role="viewer", url=server.url, run=run.run, out=Path("-"))) == 0
    assert Invitation.from_json(capsys.readouterr().out).name == "eve"


def test_the_first_invitation_asks_before_it_shuts_out_who_lives(run: RedisTransport, server: RedisServer) -> None:
    run.island.heartbeat(samples.heartbeat("bergen"))
    options = InviteOptions(name="oslo", url=server.url, run=run.run)
    with failing(ConfigError, "config.unconfirmed") as asked:
        invite.main(options)
    assert "bergen" in asked.value.what and not run.membership.all().by_name
    assert invite.main(replace(options, name="eyes", role="viewer")) == 0, "who only looks closes nothing"
    assert invite.main(replace(options, yes=True)) == 0
    assert invite.main(replace(options, name="quito")) == 0, "later ones close nothing more"


def test_a_join_file_is_for_one_role_run_and_island(run: RedisTransport, join: Invite) -> None:
    join("oslo")
    file = str(join_file(run, "oslo"))
    with failing(ConfigError, "invitation.other"):
        islands.main(islands.IslandOptions(url=file, name="bergen"))
    with failing(ConfigError, "invitation.other"):
        mergers.main(mergers.MergerOptions(url=file))
    with failing(ConfigError, "invitation.other"):
        connect_to(file, "another")
    administrators = invitations.read(Path("runs") / run.run / ADMIN_FILE)
    require_role(administrators, "merger")  # which may have to restore a run whose Redis has lost all members
    with failing(ConfigError, "invitation.other"):
        require_role(administrators, "island")


@pytest.mark.parametrize("role", ["island", "merger"])
def test_the_first_invitation_says_what_else_the_run_needs(
    join: Invite, role: Role, capsys: pytest.CaptureFixture[str]
) -> None:
    join("first", role=role, yes=True)
    result, said = capsys.readouterr()
    assert result.startswith(f"archipelago {role} run-")
    assert "is signed from now on" in said
    assert ("Invite the merger too" in said) == (role == "island")


def test_a_member_of_a_run_of_scripts_is_told_how_to_start_its_script(
    run: RedisTransport, server: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    delete_shard(run.connection)
    samples.begin(run, config=RunConfig(model=ModelConfig(size=OWN_MODEL)))
    assert invite.main(InviteOptions(name="oslo", url=server.url, run=run.run, yes=True)) == 0
    assert capsys.readouterr().out == f"ARCHIPELAGO_URL={join_file(run, 'oslo').name} python SCRIPT.py\n"


def test_without_an_address_the_kept_file_is_used(run: RedisTransport, join: Invite) -> None:
    join("oslo")
    assert invite.main(InviteOptions(name="bergen", run=run.run)) == 0
    assert invite.main(InviteOptions(name="eve")) == 0
    assert {"oslo", "bergen", "eve"} == set(run.membership.all().by_name)


def test_members_have_their_rights_in_all_shards(server: RedisServer, tmp_path: Path) -> None:
    run = f"demo-{uuid.uuid4().hex[:8]}"
    transport = connect(server.url, run)
    whole = create_sharded(transport)
    administrator = Administrator(transport, server.url, tmp_path)
    invited = {role: administrator.invite(role, role) for role in ("island", "merger", "operator", "viewer")}
    joined = {role: connect(each.url, run, each) for role, each in invited.items()}
    for number in range(2):
        island, merger, operator, viewer = (each.of_shard(number) if number else each for each in joined.values())
        assert merger.merger.acquire("m", 60.0)
        island.island.publish(samples.contribution(b"x", island="island"), b"x")
        (delivery,) = merger.merger.updates(0.0)
        assert delivery.contribution is not None, delivery.fault
        operator.reader.steer({"merging": "paused"})
        assert viewer.reader.control() == {"merging": "paused"}
        with failing(BrokerError, "broker.permission"):
            viewer.reader.steer({"merging": "paused"})
        with failing(ConfigError, "signature.no-key"):
            operator.merger.acquire("operator", 1.0)
    raw, keys = transport.connection.redis, transport.connection.keys
    raw.sadd(keys.islands, "stranger")
    raw.hset(keys.island("stranger"), mapping={"island": "stranger"})
    assert "stranger" not in joined["viewer"].updates.names(), "one that is no member is not looked up"
    joined["island"].island.publish(samples.contribution(large := bytes(1 << 15), island="island"), large)
    assert raw.keys(f"*{run}*:c:island:*")
    administrator.revoke("island")
    assert not [*raw.keys(f"*{run}*:island"), *raw.keys(f"*{run}*:c:island:*")] and not raw.sismember(
        keys.islands, "island"
    )
    assert [shard.reader.control()["island.island"] for shard in whole.shards] == [EXPEL] * 2
    administrator.invite("island", "island")
    assert not any("island.island" in shard.reader.control() for shard in whole.shards)
    for each in (*joined.values(), transport):
        each.close()


def test_members_that_a_redis_has_lost_are_put_back(
    run: RedisTransport, join: Invite, server: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, role in (("oslo", "island"), ("lima", "island"), ("hub", "merger")):
        join(name, role=role, yes=True)
    assert invite.main(RevokeOptions(name="lima", url=server.url, run=run.run)) == 0
    before, raw = run.membership.all(), run.connection.redis
    assert before.by_name.keys() == {"oslo", "hub"}
    raw.delete(run.connection.keys.members)
    raw.acl_deluser(before.by_name["hub"].user)
    listed = InviteOptions(url=server.url, run=run.run)
    assert invite.main(listed) == 0
    assert run.membership.all() == before
    said = capsys.readouterr().err
    assert "hub, oslo are put back" in said
    assert "no users for hub:" in said
    kept = Path("runs") / run.run / MEMBERS_FILE
    records = json.loads(kept.read_text())
    assert invite.main(listed) == 0
    assert "no users for hub:" in capsys.readouterr().err, "its record is there"
    raw.delete(run.connection.keys.members)
    damaged: list[object] = [[], {"uid": records["uid"], "members": 3}]
    for changed in damaged:
        kept.write_text(json.dumps(changed))
        with failing(ConfigError, "invitation.lost"):
            invite.main(listed)
    kept.write_text(json.dumps(records | {"uid": "another"}))
    assert invite.main(listed) == 0
    assert not run.membership.all().by_name, "they are of another run"
    kept.write_text(json.dumps(records))
    raw.hset(run.connection.keys.members, invitations.MERGER_KEY, before.merger_key)
    assert run.membership.all().merger_key
    assert invite.main(listed) == 0
    assert not run.membership.all().by_name, "another administrator has revoked them"


def test_an_address_of_this_machine_is_of_no_use_elsewhere(run: RedisTransport, tmp_path: Path) -> None:
    administrator = Administrator(run, "", tmp_path)

    def warnings(url: str) -> int:
        return len([*invite.warnings(administrator, Invitation(url, run.run, "oslo", "island"), created=False)])

    elsewhere = warnings("rediss://u:p@10.0.0.1:6379/0")
    for here in ("rediss://u:p@localhost:6379", "rediss://u:p@[::1]:6379/0", "unix:///run/redis.sock"):
        assert warnings(here) == elsewhere + 1, here
