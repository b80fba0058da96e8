"""`archipelago doctor`: its findings for given facts, and its measurements on a real server, which it leaves clean."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from archipelago.broker import invitation
from archipelago.broker.codecs import codec
from archipelago.broker.config import MergeConfig, RunConfig, SyncConfig, WireConfig
from archipelago.broker.errors import BrokerError, ConfigError
from archipelago.broker.footprint import memory_text
from archipelago.broker.invitation import ROLES, Role
from archipelago.broker.manifest import Corpus, Tensor
from archipelago.broker.process import connect_to
from archipelago.broker.redis import roles
from archipelago.broker.redis.checkup import Bandwidth, RedisCheckup, ServerFacts, needed_commands
from archipelago.broker.redis.keys import Keys
from archipelago.broker.redis.transport import connect
from archipelago.islands.data.corpus import OpenCorpus, data_folder
from archipelago.ops.launch.administration import Administrator, Guest
from archipelago.ops.launch.embedded_redis import Server, start_server
from archipelago.ops.simulation.cycle import cycle
from archipelago.ops.simulation.spectra_load import SpectraLoad
from archipelago.ops.watch.doctor import checks, estimate, main
from archipelago.ops.watch.doctor import site as doctor_site
from archipelago.ops.watch.doctor.checks import Finding
from tests import samples
from tests.conftest import Until
from tests.failing import failing
from tests.sharded import create_sharded

ROOT = Path(__file__).parents[3]
GOOD = ServerFacts(
    info={
        "redis_version": "7.2.4", "role": "master", "cluster_enabled": 0, "aof_enabled": 1, "used_memory": 1000,
        "maxmemory": 0, "total_system_memory": 10**9, "maxmemory_policy": "noeviction", "evicted_keys": 0,
        "connected_clients": 10, "maxclients": 1000, "rdb_last_bgsave_status": "ok", "aof_last_write_status": "ok",
    },
    settings={
        "appendonly": "yes", "appendfsync": "everysec", "maxmemory-policy": "noeviction",
        "client-output-buffer-limit": "normal 0 0 0 slave 268435456 67108864 60 pubsub 33554432 8388608 60",
    },
    clock_ahead_seconds=0.0, needs_password=True, denied=(),
)  # fmt: skip


def info(**changes: Any) -> ServerFacts:
    return replace(GOOD, info={**GOOD.info, **changes})


def setting(name: str, value: str) -> ServerFacts:
    return replace(GOOD, settings={**GOOD.settings, name: value})


def judged(facts: ServerFacts, host: str = "localhost", *, has_tls: bool = False) -> list[Finding]:
    """Return all findings except those that are fine."""
    found = checks.server_checks(facts, host, has_tls=has_tls)
    return [finding for finding in found if finding.level != "ok"]


def test_a_good_server_is_fine() -> None:
    assert judged(GOOD) == []
    assert judged(GOOD, "far.example", has_tls=True) == []


@pytest.mark.parametrize(
    ("facts", "level", "code"),
    [
        (info(redis_version="6.0.9"), "problem", "version.too-old"),
        (info(role="slave"), "problem", "role.replica"),
        (setting("appendonly", "no"), "warning", "persistence.none"),
        (replace(GOOD, settings={"appendonly": "no", "save": "60 1", "maxmemory-policy": "noeviction"}), "warning",
         "persistence.snapshots"),
        (setting("appendfsync", "no"), "warning", "persistence.no-fsync"),
        (info(aof_last_write_status="err"), "problem", "disk.append-failed"),
        (info(rdb_last_bgsave_status="err"), "problem", "disk.snapshot-failed"),
        (info(used_memory=600, maxmemory=1000), "warning", "memory.tight"),
        (info(used_memory=800, maxmemory=1000), "problem", "memory.full"),
        (info(used_memory=700_000_000), "warning", "memory.tight"),
        (setting("maxmemory-policy", "allkeys-lru"), "warning", "eviction.policy"),
        (replace(setting("maxmemory-policy", "volatile-ttl"), info={**GOOD.info, "maxmemory": 10**6}), "problem",
         "eviction.policy"),
        (info(evicted_keys=3), "warning", "eviction.happened"),
        (info(connected_clients=900), "warning", "clients.many"),
        (setting("client-output-buffer-limit", "normal 1048576 0 0"), "problem", "buffers.small"),
        (replace(GOOD, denied=("XADD", "EVAL")), "problem", "rights.denied"),
        (replace(GOOD, needs_password=False), "warning", "password.none-local"),
        (replace(GOOD, needs_password=None), "warning", "password.unknown"),
        (replace(GOOD, clock_ahead_seconds=-7.25), "warning", "clock.skewed"),
    ],
)  # fmt: skip
def test_each_fault_has_a_code_and_a_remedy(facts: ServerFacts, level: str, code: str) -> None:
    (finding,) = judged(facts)
    assert (finding.level, finding.code, finding.subject) == (level, code, code.partition(".")[0])
    assert finding.remedy


@pytest.mark.parametrize(
    "facts", [info(redis_version="6.2.0", maxclients=0), info(used_memory=500, maxmemory=1000)], ids=["old", "half"]
)
def test_a_server_within_the_limits_is_fine(facts: ServerFacts) -> None:
    assert judged(facts) == []


def test_a_server_that_tells_nothing_gives_warnings_only() -> None:
    """Managed servers forbid INFO and CONFIG."""
    found = judged(ServerFacts({}, {}, 0.0, True, ()))
    assert {finding.level for finding in found} == {"warning"}
    subjects = ("version", "persistence", "memory", "eviction", "clients")
    assert {finding.code for finding in found} == {f"{subject}.unknown" for subject in subjects}


@pytest.mark.parametrize("host", ["far.example", "10.0.0.7", "localhost.evil.example"])
def test_a_remote_server_needs_encryption_and_a_password(host: str) -> None:
    found = {f.code: f.level for f in judged(replace(GOOD, needs_password=False), host)}
    assert found == {"encryption.none": "warning", "password.none": "problem"}


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.8.8", "::1", "[::1]", ""])
def test_local_hosts(host: str) -> None:
    assert checks.is_local(host)


@pytest.mark.parametrize(("share", "value"), [(0.5, 50.0), (0.99, 99.0), (1.0, 100.0), (0.001, 1.0)])
def test_quantiles(share: float, value: float) -> None:
    assert checks.quantile([float(n) for n in range(100, 0, -1)], share) == value
    assert checks.quantile([7.0], share) == 7.0


def test_rates_are_shown_in_megabits() -> None:
    what = checks.bandwidth(Bandwidth(1.25e5, 1.25e9)).what
    assert re.findall(r"[\d,]+ Mbit/s", what) == ["1 Mbit/s", "10,000 Mbit/s"]
    assert checks.bandwidth(Bandwidth(why_not="full")).code == "bandwidth.unknown"


def test_a_slow_link_gives_a_warning() -> None:
    found = checks.latency([0.2] * 9 + [3.0])
    assert (found.code, re.findall(r"\d+ m?s\b", found.what)) == ("latency.ok", ["200 ms", "3 s"])
    assert checks.latency([0.6]).code == "latency.slow"


# -- the estimate -----------------------------------------------------------------------------------------------------

CONFIG = RunConfig(sync=SyncConfig(interval=24, fragments=2), wire=WireConfig(up="int4", thin="top3", down="int4"))
SIZES = (1 << 20, 1 << 19)


def test_the_estimate_matches_a_calculation_by_hand() -> None:
    """Two fragments, H = 24 and steps of 0.1 s: one sync every 1.2 s. int4 takes 33 bits for eight elements."""
    size = codec("int4").encoded_size(SIZES[0])
    assert size == SIZES[0] * 33 // 64
    found = estimate.estimate(CONFIG, SIZES, 0.1, Bandwidth(up=size / 2.4, down=10.0 * size), 0.05)
    int4, top3 = found.codecs
    assert found.stride_seconds == pytest.approx(1.2)
    assert (int4.name, int4.sync_bytes) == ("int4", 2 * size)
    assert int4.up_seconds == pytest.approx(2.45)
    assert int4.down_seconds == pytest.approx(0.15)
    assert int4.hidden == pytest.approx(0.5)  # 1.2 s of steps hide half of the 2.4 s upload.
    assert not int4.fits
    assert (top3.name, top3.hidden, top3.fits) == ("top3", 1.0, True)
    text = dict(estimate.lines(found, "a test"))
    assert list(text) == ["step", "sync", "hidden", "thin"]
    assert ("1.2 s" in text["sync"], "50%" in text["hidden"], "2.0 times" in text["hidden"]) == (True, True, True)


def test_an_unmeasured_link_is_not_judged() -> None:
    found = estimate.estimate(CONFIG, SIZES, 0.1, Bandwidth(why_not="full"), 0.05)
    assert [label for label, _ in estimate.lines(found, "a test")] == ["step", "sync"]


def test_without_a_codec_for_thin_links_there_is_one_line_fewer() -> None:
    config = replace(CONFIG, wire=replace(CONFIG.wire, thin=""))
    found = estimate.estimate(config, SIZES, 0.1, Bandwidth(1e9, 1e9), 0.0)
    assert [label for label, _ in estimate.lines(found, "")] == ["step", "sync", "hidden"]


# -- this machine -----------------------------------------------------------------------------------------------------


def test_a_merger_that_would_be_too_slow_gives_a_warning() -> None:
    fitting = SpectraLoad(operations=1e12, threads=2, seconds=5.0, interval_seconds=10.0, side_max=1024, coarser="")
    assert estimate.spectra_finding(fitting).code == "spectra.ok"
    assert estimate.spectra_finding(replace(fitting, interval_seconds=math.nan)).code == "spectra.ok"
    slow = replace(fitting, interval_seconds=6.0)
    found = estimate.spectra_finding(slow)
    assert (found.level, found.code, found.remedy) == ("warning", "spectra.slow", slow.remedy)


def test_a_merger_that_would_not_fit_or_keep_up_gives_a_warning() -> None:
    need = cycle(RunConfig(), 10**9, 24, 2)
    fitting = estimate.merger_finding(need, need.merger_bytes, math.nan)
    assert (fitting.level, fitting.code) == ("ok", "merger.ok")
    assert memory_text(need.merger_bytes) in fitting.what
    found = estimate.merger_finding(need, need.merger_bytes - 1, math.nan)
    assert (found.level, found.code) == ("warning", "merger.memory")
    assert "--shards 2" in found.remedy
    found = estimate.merger_finding(need, need.merger_bytes, need.merge_seconds)
    assert (found.level, found.code) == ("warning", "merger.slow")


def test_spectra_are_measured_where_the_run_changes_any() -> None:
    tensors = (Tensor("a", (8, 8)),)
    by_rda = RunConfig(merge=MergeConfig(embedding="average", rest="rda"))
    assert estimate.spectra(tensors, by_rda, 1.0) is None
    found = estimate.spectra(tensors, replace(by_rda, merge=replace(by_rda.merge, rest="isotropic")), 1.0)
    assert found is not None
    assert found.code == "spectra.ok"


def test_room_for_checkpoints() -> None:
    site = doctor_site.Site(2, 16 << 30, 8 << 30, 10_000_000_000)
    levels = [doctor_site.disk(site, Path("runs"), parameters).level for parameters in (0, 100_000_000, 120_000_000)]
    assert levels == ["ok", "ok", "warning"]
    assert doctor_site.disk(site, Path("runs"), 200_000_000).level == "problem"
    assert doctor_site.machine(site, 1_000_000).level == "ok"
    assert doctor_site.machine(site, 1_000_000_000).level == "warning"


def test_measuring_this_machine(tmp_path: Path) -> None:
    site = doctor_site.measure(tmp_path / "not" / "there" / "yet")
    assert site.cores >= 1
    assert 0 <= site.available_bytes <= site.memory_bytes
    assert site.disk_free_bytes > 0


def test_the_data_of_scripts_and_of_a_task_is_their_own() -> None:
    scripts, task = doctor_site.own_data(""), doctor_site.own_data("digits")
    assert scripts.code == task.code == "corpus.ok"
    assert "'digits'" in task.what
    assert "script" in scripts.what
    assert "script" not in task.what


def test_a_corpus_is_the_runs_or_missing_or_different(corpus: OpenCorpus) -> None:
    assert doctor_site.corpus("small-text", corpus.identity).code == "corpus.ok"
    assert doctor_site.corpus("small-text", None).code == "corpus.ok"
    other = doctor_site.corpus("small-text", Corpus("small-text", "0" * 32, 7))
    assert (other.code, "00000000" in other.what) == ("corpus.different", True)
    path = data_folder() / "small-text" / "text.bin"
    whole = path.read_bytes()
    path.write_bytes(b"?" + whole[1:])
    assert doctor_site.corpus("small-text", corpus.identity).code == "corpus.altered"
    path.write_bytes(whole)
    missing = doctor_site.corpus("nowhere", None)
    assert (missing.code, "small-text" in missing.what) == ("corpus.missing", True)
    assert doctor_site.corpus("digits", None).code == "corpus.ok"  # `prepare digits` makes this corpus.


@pytest.mark.parametrize(
    ("in_run", "level"),
    [({"jax": "0.10.9", "optax": "9"}, "ok"), ({"jax": "0.11.0"}, "warning"), ({"flax": "1.12"}, "warning")],
)
def test_versions_are_compared_with_the_run(in_run: dict[str, str], level: str) -> None:
    here = {"archipelago-train": "0.1.0", "jax": "0.10.2", "flax": "0.12.0", "optax": "0.2.8"}
    assert doctor_site.versions(here, in_run).level == level
    assert doctor_site.versions({**here, "jax": "not installed"}, in_run).level == "problem"


def test_jax_finds_a_device() -> None:
    assert doctor_site.accelerators().level == "ok"


# -- a real server ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a server whose settings these tests may change."""
    with start_server(tmp_path_factory.mktemp("doctor") / "redis") as running:
        yield running


@pytest.fixture
def raw(own: Server) -> Iterator[Any]:
    """Return a plain client of an empty database, and restore the settings at the end."""
    with redis.Redis.from_url(own.url, decode_responses=True) as client:
        client.flushdb()
        before = client.config_get("maxmemory*")
        yield client
        for name, value in before.items():
            if name in ("maxmemory", "maxmemory-policy"):
                client.config_set(name, value)


@pytest.fixture
def checkup(own: Server, raw: Any) -> Iterator[RedisCheckup]:
    """Return a checkup of the run `sample` on that server."""
    transport = connect(own.url, "sample")
    manifest = samples.manifest("sample")
    transport.create(manifest, samples.first_snapshots(manifest))
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


def test_a_full_server_is_not_written_to(checkup: RedisCheckup, raw: Any) -> None:
    raw.config_set("maxmemory", 12 << 20)
    raw.config_resetstat()
    assert "too full" in checkup.bandwidth(1.0, 0.0).why_not
    assert "cmdstat_set" not in raw.info("commandstats")


def test_the_facts_of_a_real_server(checkup: RedisCheckup, raw: Any) -> None:
    facts = checkup.facts()
    assert facts.needs_password is True
    assert abs(facts.clock_ahead_seconds) < 5.0
    assert judged(facts) == []
    raw.config_set("maxmemory", 1 << 30)
    raw.config_set("maxmemory-policy", "allkeys-lru")
    assert [finding.subject for finding in judged(checkup.facts())] == ["eviction"]


def test_a_server_without_a_password_is_detected(own: Server, raw: Any) -> None:
    secret = raw.config_get("requirepass")["requirepass"]
    raw.config_set("requirepass", "")
    try:
        transport = connect(re.sub(":[^:@]*@", "", own.url), "sample")
        assert RedisCheckup(transport.connection).facts().needs_password is False
        transport.close()
    finally:
        raw.config_set("requirepass", secret)


def restricted(own: Server, raw: Any, *rules: str) -> RedisCheckup:
    raw.execute_command("ACL", "SETUSER", "guest", "reset", "on", ">secret", *rules)
    transport = connect(re.sub(":[^:@]*@", "guest:secret@", own.url), "sample")
    return RedisCheckup(transport.connection)


def test_denied_commands_are_found_by_trying_them_without_effect(own: Server, raw: Any) -> None:
    kept = {"{sample:s0}:lease": "holder", "{sample:s0}:books": "7"}
    raw.mset(kept)
    found = restricted(own, raw, "~*", "+@all", "-xadd", "-eval", "-watch").facts()
    assert set(found.denied) == {"XADD", "EVAL", "WATCH"}
    found = restricted(own, raw, "~*", "+@all", "-multi", "-config", "-acl").facts()
    assert found.denied == ("MULTI",)  # Without MULTI the other commands are not tried, because they would take effect.
    assert found.settings == {}
    found = restricted(own, raw, "~other:*", "+@all").facts()
    assert {"GET", "SET", "XADD", "XREADGROUP"} <= set(found.denied)
    found = restricted(own, raw, "~sample:*", "~{sample:*", "~archipelago:*", "+@all").facts()
    assert found.denied == ()  # The key patterns in the remedy are sufficient.
    assert {key: raw.get(key) for key in raw.scan_iter()} == kept
    raw.execute_command("ACL", "DELUSER", "guest")


def test_every_command_of_the_transport_is_tried() -> None:
    """Read the commands from the sources. The doctor must try each of them, and some role must have it."""
    names = {"delete": "del", "xgroup_create": "xgroup", "xinfo_groups": "xinfo", "xpending_range": "xpending",
             "scan_iter": "scan"}  # fmt: skip
    not_commands = {"execute", "pipeline", "close", "multi", "watch", "connection_pool", "reset"}
    used: set[str] = set()
    for path in (ROOT / "broker" / "redis").glob("*.py"):
        source = path.read_text(encoding="utf-8")
        if path.name not in ("checkup.py", "membership.py"):  # only an administrator uses the latter
            used |= set(re.findall(r"\b(?:pipe|pipeline|_redis|connection\.redis|self\.redis)\.([a-z_]+)\(", source))
            used |= set(re.findall(r"\(\"(x[a-z_]+)\", ", source))
    used |= {"get", "getrange"}
    assert {"xadd", "hset", "persist"} <= used
    needed = {str(command[0]).lower() for command in needed_commands(Keys("sample"))}
    assert {names.get(name, name) for name in used - not_commands} <= needed


@pytest.mark.parametrize("role", ROLES)
def test_the_doctor_checks_what_a_role_needs(own: Server, raw: Any, checkup: RedisCheckup, role: Role) -> None:
    version = (7, 2)
    found = member(own, raw, role, roles.rules(role, "sample", "oslo", version))
    assert (found.denied, found.excess) == ((), ())
    missing = [
        rule.replace("+time", "-time").replace("+hset ", "") for rule in roles.rules(role, "sample", "oslo", version)
    ]
    assert "TIME" in member(own, raw, role, missing).denied
    assert "HSET" in member(own, raw, role, ["reset", "on", "~*", "+@all"]).excess
    early = member(own, raw, role, roles.rules(role, "sample", "oslo", (6, 2)))
    assert bool(early.excess) == (role != "viewer")
    raw.execute_command("ACL", "DELUSER", "guest")


def test_the_doctor_checks_the_rights_in_every_shard(call: Call, own: Server, raw: Any) -> None:
    only_first, everywhere = (roles.rules("island", "sample", "oslo", (7, 2), shards) for shards in (1, 2))
    assert "XADD" in member(own, raw, "island", only_first, (0, 1)).denied
    assert member(own, raw, "island", everywhere, (0, 1)).denied == ()
    transport = connect(own.url, "sample")
    create_sharded(transport)
    _, found = call(url=own.url, seconds=0.0)
    assert any("in 2 fragments and 2 shards" in finding["what"] for finding in found["findings"])
    assert {finding["code"] for finding in found["findings"]} >= {"rights.ok", "clients.ok"}
    raw.execute_command("ACL", "DELUSER", "guest")
    transport.close()


def test_each_further_shard_takes_connections_of_every_island() -> None:
    facts = info(connected_clients=100, maxclients=900)
    assert "about 133 islands" in checks.clients(facts).what
    assert "about 100 islands" in checks.clients(facts, shards=2).what


def member(own: Server, raw: Any, role: Role, rules: Sequence[str], shards: Sequence[int] = (0,)) -> ServerFacts:
    """Return the facts that a member finds out whose user has these rules."""
    raw.execute_command("ACL", "SETUSER", "guest", rules[0], ">secret", *rules[1:])
    transport = connect(re.sub(":[^:@]*@", "guest:secret@", own.url), "sample")
    try:
        return RedisCheckup(transport.connection, role=role, name="oslo", shards=shards).facts()
    finally:
        transport.close()


def test_the_doctor_knows_whose_credentials_it_has(
    call: Call, own: Server, checkup: RedisCheckup, tmp_path: Path
) -> None:
    transport = connect(own.url, "sample")
    administrator = Administrator(transport, own.url, tmp_path)
    file = tmp_path / "oslo.join"
    invitation.write(file, administrator.invite(Guest("oslo", "island", time.time() + 3600)))
    _, found = call(url=str(file), seconds=0.2)
    codes = {finding["code"] for finding in found["findings"]}
    assert {"credentials.expire-soon", "rights.ok", "bandwidth.ok"} <= codes
    assert not any(code.endswith(".unknown") for code in codes)
    administrator.revoke("oslo")
    with failing(BrokerError, "broker.access"):
        connect_to(str(file), None)
    transport.close()


def test_standing_names_the_merger_and_the_time_since_its_last_merge(own: Server, raw: Any) -> None:
    transport = connect(own.url, "sample")
    manifest = samples.manifest("sample")
    transport.create(manifest, samples.first_snapshots(manifest))
    assert transport.reader.merger_status().holder == ""
    assert transport.reader.merger_status().still_seconds == 0.0
    entry = transport.island.publish(samples.contribution(), b"payload")
    waiting = transport.reader.merger_status()
    epoch = transport.merger.acquire("00b81fc22d7c", 30.0)
    assert epoch == 1
    transport.merger.updates(0.0)
    raw.xadd("{sample:s0}:tape", {"round": 1}, id="1000-0")
    status = transport.reader.merger_status()
    assert (status.holder, status.epoch) == ("00b81fc22d7c", 1)
    assert 0 < status.lease_seconds <= 30.0
    assert 0 <= waiting.still_seconds < 60.0
    assert status.still_seconds > 1e9  # The last round has a time stamp of 1970.
    assert transport.island.holds(entry)
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


def test_a_healthy_site(call: Call, own: Server, checkup: RedisCheckup, corpus: OpenCorpus) -> None:
    config = replace(RunConfig(), data=replace(RunConfig().data, corpus=corpus.name))
    status, found = call(url=own.url, run="sample", seconds=0.4, settings=config)
    wrong = {finding["code"] for finding in found["findings"] if finding["level"] != "ok"}
    assert wrong == {"corpus.missing", "packages.different"}  # The sample run has JAX version 1.
    assert (status, found["run"], found["problems"], found["warnings"]) == (1, "sample", 1, 1)
    assert found["estimate"]["link"]["up"] > 0
    assert found["estimate"]["step_seconds"] == 0.25  # The island's heartbeat reports it.
    assert own.url.split(":")[2].split("@")[0] not in json.dumps(found)


def test_without_a_server_only_this_machine_is_checked(call: Call, corpus: OpenCorpus) -> None:
    config = replace(RunConfig(), data=replace(RunConfig().data, corpus=corpus.name))
    status, found = call(settings=config)
    assert (status, found["redis"], found["estimate"]) == (0, None, None)
    assert {finding["subject"] for finding in found["findings"]} == {
        "machine", "disk", "corpus", "packages", "devices", "merger", "spectra"
    }  # fmt: skip


def test_without_an_answer_the_rest_is_still_checked(call: Call, corpus: OpenCorpus) -> None:
    config = replace(RunConfig(), data=replace(RunConfig().data, corpus=corpus.name))
    status, found = call(url="redis://127.0.0.1:1", settings=config)
    first, *rest = found["findings"]
    assert (status, first["level"], first["code"]) == (1, "problem", "reach.failed")
    assert len(rest) == 7


def test_a_missing_run_is_a_problem(call: Call, own: Server, raw: Any, corpus: OpenCorpus) -> None:
    config = replace(RunConfig(), data=replace(RunConfig().data, corpus=corpus.name))
    status, found = call(url=own.url, run="nowhere", seconds=0.0, settings=config)
    problems = [finding for finding in found["findings"] if finding["level"] == "problem"]
    assert (status, [problem["code"] for problem in problems], found["estimate"]) == (1, ["run.missing"], None)
    status, found = call(url=own.url, seconds=0.0, settings=config)
    assert (status, found["run"]) == (0, None)
    assert found["estimate"]["step_seconds"] > 0  # It is measured on this machine, because no island trains there.
    assert raw.keys() == []


def test_the_report_on_a_terminal(
    own: Server, checkup: RedisCheckup, corpus: OpenCorpus, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(main.DoctorOptions(url=own.url, run="sample", seconds=0.2)) == 1
    text = capsys.readouterr().out
    assert "PROBLEM" in text
    assert "→" in text
    assert text.rstrip().splitlines()[-1].startswith("1 problem")


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), 1e9])
def test_seconds_out_of_range_are_refused(seconds: float) -> None:
    with failing(ConfigError, "doctor.bad-flag"):
        main.main(main.DoctorOptions(seconds=seconds))
