"""`archipelago doctor` on real servers and clusters, which it leaves clean."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import redis

from archipelago.broker import invitation
from archipelago.broker.config import MergeConfig, RunConfig
from archipelago.broker.errors import BrokerError
from archipelago.broker.invitation import ROLES, Role
from archipelago.broker.redis import roles
from archipelago.broker.redis.checkup import RedisCheckup, ServerFacts
from archipelago.broker.redis.keys import REGISTRY, Keys
from archipelago.broker.redis.transport import connect
from archipelago.ops.commands import run as command
from archipelago.ops.launch.administration import Administrator
from archipelago.ops.launch.embedded_redis import RedisServer, start_server
from archipelago.ops.watch.doctor import main
from tests import samples
from tests.clusters import PASSWORD, Cluster
from tests.conftest import Until
from tests.failing import failing
from tests.ops.watch.test_doctor_findings import judged
from tests.sharded import create_sharded

ROOT = Path(__file__).parents[3]
#: A run whose merge rules need no spectra, so that the verb does not measure how long these would take.
PLAIN = RunConfig(merge=MergeConfig(embedding="average", rest="average"))
MANIFEST = samples.manifest("sample", PLAIN)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Start a server whose settings these tests may change."""
    with start_server(tmp_path_factory.mktemp("doctor") / "redis") as running:
        yield running


@pytest.fixture
def raw(own: RedisServer) -> Iterator[Any]:
    """Return a plain client of an empty database, and restore the settings at the end."""
    with redis.Redis.from_url(own.url, decode_responses=True) as client:
        client.flushdb()
        before = client.config_get("maxmemory*")
        yield client
        for name, value in before.items():
            if name in ("maxmemory", "maxmemory-policy"):
                client.config_set(name, value)


@pytest.fixture
def checkup(own: RedisServer, raw: Any) -> Iterator[RedisCheckup]:
    """Return a checkup of the run `sample` on that server. Its island says how long a step takes."""
    transport = connect(own.url, "sample")
    transport.create(MANIFEST, samples.first_snapshots(MANIFEST))
    transport.island.heartbeat(samples.heartbeat("oslo", step_seconds=0.25))
    yield RedisCheckup(transport.connection)
    transport.close()


def dumped(raw: Any) -> dict[str, bytes]:
    return {key: raw.object("encoding", key) + str(raw.memory_usage(key)) for key in raw.scan_iter()}


def test_measuring_leaves_nothing_behind(checkup: RedisCheckup, raw: Any, until: Until) -> None:
    before = dumped(raw)
    samples_of_pings = checkup.round_trips(0.05, 20)
    assert 1 <= len(samples_of_pings) <= 20
    assert min(samples_of_pings) > 0

    def is_fast() -> bool:
        found = checkup.bandwidth(0.3, min(samples_of_pings))
        return min(found.up, found.down) > 1e5

    until(is_fast, "a measurement in which the machine does not stand still")
    assert checkup.facts().denied == ()
    assert dumped(raw) == before


def test_the_facts_of_a_real_server(checkup: RedisCheckup, own: RedisServer, raw: Any) -> None:
    facts = checkup.facts()
    assert facts.needs_password is True
    assert judged(facts) == []
    raw.config_set("maxmemory", 12 << 20)
    raw.config_resetstat()
    assert "too full" in checkup.bandwidth(1.0, 0.0).why_not
    assert "cmdstat_set" not in raw.info("commandstats"), "a full server is not written to"
    raw.config_set("maxmemory", 1 << 30)
    raw.config_set("maxmemory-policy", "allkeys-lru")
    assert [finding.subject for finding in judged(checkup.facts())] == ["eviction"]
    secret = raw.config_get("requirepass")["requirepass"]
    raw.config_set("requirepass", "")
    try:
        transport = connect(re.sub(":[^:@]*@", "", own.url), "sample")
        assert RedisCheckup(transport.connection).facts().needs_password is False
        transport.close()
    finally:
        raw.config_set("requirepass", secret)


def restricted(own: RedisServer, raw: Any, *rules: str) -> RedisCheckup:
    raw.execute_command("ACL", "SETUSER", "guest", "reset", "on", ">secret", *rules)
    transport = connect(re.sub(":[^:@]*@", "guest:secret@", own.url), "sample")
    return RedisCheckup(transport.connection)


def test_denied_commands_are_found_by_trying_them_without_effect(own: RedisServer, raw: Any) -> None:
    kept = {"{sample:s0}:lease": "holder", "{sample:s0}:counters": "7"}
    raw.mset(kept)
    found = restricted(own, raw, "~*", "+@all", "-xadd", "-eval", "-watch").facts()
    assert set(found.denied) == {"XADD", "EVAL", "WATCH"}
    found = restricted(own, raw, "~*", "+@all", "-multi", "-config", "-acl").facts()
    assert found.denied == ("MULTI",)  # Without MULTI the other commands are not tried, because they would take effect.
    assert found.settings == {}
    found = restricted(own, raw, "~other:*", "+@all").facts()
    assert {"GET", "SET", "XADD", "XREAD"} <= set(found.denied)
    found = restricted(own, raw, "~sample:*", "~{sample:*", "~archipelago:*", "+@all").facts()
    assert found.denied == ()  # The key patterns in the remedy are sufficient.
    assert {key: raw.get(key) for key in raw.scan_iter()} == kept
    raw.execute_command("ACL", "DELUSER", "guest")


def test_a_command_that_was_renamed_is_missing(checkup: RedisCheckup, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checkup.facts().unknown == ()
    monkeypatch.setattr(roles, "needed_commands", lambda *_: [("PING",), ("RENAMED", "x")])
    assert checkup.facts().unknown == ("RENAMED",)


def test_a_server_that_refuses_writes_is_a_problem_with_the_remedy_of_its_cause(
    checkup: RedisCheckup, raw: Any
) -> None:
    raw.config_set("min-replicas-to-write", 1)
    try:
        checked = main.CheckedServer([])
        main._check_link(checkup, 0.01, checked)
        assert [each.code for each in checked.findings if each.level == "problem"] == ["broker.refused-replicas"]
        assert [each.code for each in judged(checkup.facts())] == ["role.no-replicas"], "without a measurement, too"
        assert checkup._connection.refuses_writes()[0] == "broker.refused-replicas"
    finally:
        raw.config_set("min-replicas-to-write", 0)


def test_the_doctor_checks_what_a_role_needs(own: RedisServer, raw: Any, checkup: RedisCheckup) -> None:
    for role in ROLES:
        rules = roles.rules(role, "sample", "oslo", (7, 2))
        found = member(own, raw, role, rules)
        assert found.denied == (), role
        missing = [rule.replace("+time", "-time").replace("+hset ", "") for rule in rules]
        assert "TIME" in member(own, raw, role, missing).denied
    raw.execute_command("ACL", "DELUSER", "guest")


def test_the_doctor_checks_the_rights_in_every_shard(own: RedisServer, raw: Any) -> None:
    only_first, everywhere = (roles.rules("island", "sample", "oslo", (7, 2), shards) for shards in (1, 2))
    assert "XADD" in member(own, raw, "island", only_first, (0, 1)).denied
    assert member(own, raw, "island", everywhere, (0, 1)).denied == ()
    raw.execute_command("ACL", "DELUSER", "guest")
    transport = connect(own.url, "sample")
    run = create_sharded(transport)
    for island, state in (("oslo", "training"), ("rome", "training"), ("bern", "left")):
        run.island.heartbeat(samples.heartbeat(island, state))
    found = main.check_server(own.url, None, 0.0).findings
    assert any("With 2 islands the run takes" in finding.what for finding in found)
    assert any("in 2 fragments and 2 shards" in finding.what for finding in found)
    assert {finding.code for finding in found} >= {"rights.ok", "memory.ok"}
    transport.close()


def member(own: RedisServer, raw: Any, role: Role, rules: Sequence[str], shards: Sequence[int] = (0,)) -> ServerFacts:
    """Return the facts that a member finds out whose user has these rules."""
    raw.execute_command("ACL", "SETUSER", "guest", rules[0], ">secret", *rules[1:])
    transport = connect(re.sub(":[^:@]*@", "guest:secret@", own.url), "sample")
    try:
        return RedisCheckup(transport.connection, role=role, name="oslo", shards=shards).facts()
    finally:
        transport.close()


def test_the_doctor_knows_whose_credentials_it_has(
    call: Call, own: RedisServer, checkup: RedisCheckup, tmp_path: Path
) -> None:
    transport = connect(own.url, "sample")
    administrator = Administrator(transport, own.url, tmp_path)
    invited = administrator.invite("oslo", "island")
    codes = {finding.code for finding in main.check_server(invited.url, "sample", 0.2, invited).findings}
    assert {"credentials.ok", "rights.ok", "bandwidth.ok"} <= codes
    assert "server.untold" not in codes
    invitation.write(tmp_path / "oslo.join", invited)
    assert call(url=str(tmp_path / "oslo.join"), seconds=0.0)[1]["run"] == "sample"
    administrator.revoke("oslo")
    with failing(BrokerError, "broker.access"):
        connect(invited.url, "sample", invited)
    transport.close()


def test_standing_names_the_merger_and_the_time_since_its_last_merge(checkup: RedisCheckup, own: RedisServer) -> None:
    transport = connect(own.url, "sample")
    before = transport.reader.merger_status()
    assert (before.holder, before.still_seconds) == ("", 0.0)
    transport.island.publish(samples.contribution(), b"payload")
    waiting = transport.reader.merger_status()
    assert transport.merger.acquire("00b81fc22d7c", 30.0) == 1
    transport.merger.updates(0.0)
    transport.connection.redis.xadd("{sample:s0}:tape", {"round": 1}, id="1000-0")
    status = transport.reader.merger_status()
    assert (status.holder, status.epoch) == ("00b81fc22d7c", 1)
    assert 0 < status.lease_seconds <= 30.0
    assert 0 <= waiting.still_seconds < 60.0
    assert status.still_seconds > 1e9  # The last round has a time stamp of 1970.
    transport.close()


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
        found = {each.code: each.what for each in main.check_server(cluster.url, run, 0.0).findings}
    finally:
        other.client.config_set("requirepass", PASSWORD)
        for node in (other, registry):
            node.client.config_set("maxmemory-policy", "noeviction")
    assert "topology.ok" in found, found
    assert f"127.0.0.1:{owner.port}" in found["topology.ok"] and "2 primaries" in found["topology.ok"]
    assert f"127.0.0.1:{other.port}" in found["topology.refused"]
    assert f"127.0.0.1:{registry.port}" in found["topology.settings"]
    assert "topology.no-replica" in found and "rights.ok" in found


def test_doctor_checks_every_server_that_holds_a_shard(cluster: Cluster) -> None:
    runs = (f"run-{uuid.uuid4().hex[:8]}" for _ in range(1000))
    nodes = {run: [cluster.holder(Keys(run, shard).manifest) for shard in range(2)] for run in islice(runs, 100)}
    run, (first, other) = next((run, (here, there)) for run, (here, there) in nodes.items() if here is not there)
    transport = connect(cluster.url, run)
    create_sharded(transport)
    other.client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        findings = main.check_server(cluster.url, run, 0.0).findings
    finally:
        other.client.config_set("maxmemory-policy", "noeviction")
    found = {each.code: each.what for each in findings}
    assert f"keys of shard 0 lie on 127.0.0.1:{first.port}, 0 replicas" in found["topology.ok"]
    assert f"keys of shard 1 lie on 127.0.0.1:{other.port}, 0 replicas" in found["shards.ok"]
    assert [each.code for each in findings].count("topology.no-replica") == 2
    assert found["topology.no-replica"].startswith("The server of shard 1: No replica follows ")
    assert found["eviction.policy"].startswith("The server of shard 1: ")
    assert command(["rm", run, cluster.url, "--yes"]) == 0
    assert not any(run.encode() in key for node in cluster.nodes for key in node.client.keys("*"))
    transport.close()


# -- the verb ---------------------------------------------------------------------------------------------------------

Call = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Run the verb. Return the exit status and the JSON object."""

    def made(**options: Any) -> tuple[int, dict[str, Any]]:
        status = main.main(main.DoctorOptions(json=True, **options))
        return status, json.loads(capsys.readouterr().out)

    return made


def test_a_healthy_site(
    call: Call, own: RedisServer, checkup: RedisCheckup, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = call(url=own.url, run="sample", seconds=0.4)
    wrong = {finding["code"] for finding in found["findings"] if finding["level"] != "ok"}
    assert wrong == {"corpus.missing"}
    assert (status, found["run"], found["problems"], found["warnings"]) == (1, "sample", 1, 0)
    (sync,) = (finding["what"] for finding in found["findings"] if finding["subject"] == "sync")
    assert "every 3 s" in sync, "12 steps of the time that the island's heartbeat reports"
    assert own.url.split(":")[2].split("@")[0] not in json.dumps(found)
    assert main.main(main.DoctorOptions(url=own.url, run="sample", seconds=0.2)) == 1
    text = capsys.readouterr().out
    assert "PROBLEM" in text and "→" in text
    assert re.findall(r"\[([a-z]+\.[a-z-]+)\]", text) == ["corpus.missing"]
    assert text.rstrip().splitlines()[-1].startswith("1 problem")


def test_without_a_server_or_a_run_the_rest_is_still_checked(call: Call, own: RedisServer, raw: Any) -> None:
    status, found = call()
    assert (status, found["redis"]) == (0, None)
    here = {"machine", "devices", "spectra"}
    assert {finding["subject"] for finding in found["findings"]} == here
    status, found = call(url="redis://127.0.0.1:1")
    first, *rest = found["findings"]
    assert (status, first["level"], first["code"]) == (1, "problem", "reach.failed")
    assert {finding["subject"] for finding in rest} == here
    status, found = call(url=own.url, run="nowhere", seconds=0.0)
    problems = [finding for finding in found["findings"] if finding["level"] == "problem"]
    assert (status, [problem["code"] for problem in problems]) == (1, ["run.missing"])
    assert raw.keys() == []
