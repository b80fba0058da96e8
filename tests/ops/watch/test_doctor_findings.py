"""What `archipelago doctor` finds in given facts of servers, links and machines."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from archipelago.broker.codecs import codec
from archipelago.broker.config import MergeConfig, RunConfig, SyncConfig, WireConfig
from archipelago.broker.footprint import memory_text
from archipelago.broker.manifest import Corpus, Tensor
from archipelago.broker.redis.checkup import Bandwidth, NodeFacts, ServerFacts
from archipelago.islands.data.corpus import OpenCorpus, data_folder
from archipelago.ops.simulation.cycle import SpectraLoad, cycle
from archipelago.ops.watch.doctor import checks, estimate
from archipelago.ops.watch.doctor import site as doctor_site
from archipelago.ops.watch.doctor.checks import Finding
from archipelago.ops.watch.doctor.topology import topology

AVERAGING = RunConfig(merge=MergeConfig(embedding="average", rest="average"))
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


def test_a_server_within_the_limits_is_fine() -> None:
    for facts in (GOOD, info(redis_version="6.2.0", maxclients=0), info(used_memory=500, maxmemory=1000)):
        assert judged(facts) == []
    assert judged(GOOD, "far.example", has_tls=True) == []


FAULTS = [
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
]  # fmt: skip


def test_each_fault_has_a_code_and_a_remedy() -> None:
    for facts, level, code in FAULTS:
        (finding,) = judged(facts)
        assert (finding.level, finding.code, finding.subject) == (level, code, code.partition(".")[0])
        assert finding.remedy


def test_a_server_that_tells_nothing_gives_warnings_only() -> None:
    """Managed servers forbid INFO and CONFIG."""
    found = judged(ServerFacts({}, {}, 0.0, True, ()))
    assert {finding.level for finding in found} == {"warning"}
    subjects = ("version", "persistence", "memory", "eviction", "clients")
    assert {finding.code for finding in found} == {f"{subject}.unknown" for subject in subjects}


def test_a_remote_server_needs_encryption_and_a_password() -> None:
    for host in ("far.example", "10.0.0.7", "localhost.evil.example"):
        found = {f.code: f.level for f in judged(replace(GOOD, needs_password=False), host)}
        assert found == {"encryption.none": "warning", "password.none": "problem"}, host
    for host in ("localhost", "127.0.0.1", "127.8.8.8", "::1", "[::1]", ""):
        assert checks.is_local(host), host


def test_each_further_shard_takes_connections_of_every_island() -> None:
    facts = info(connected_clients=100, maxclients=900)
    assert "about 133 islands" in checks.clients(facts).what
    assert "about 100 islands" in checks.clients(facts, shards=2).what


def test_a_slow_link_gives_a_warning() -> None:
    found = checks.latency([0.2] * 9 + [3.0])
    assert (found.code, re.findall(r"\d+ m?s\b", found.what)) == ("latency.ok", ["200 ms", "3 s"])
    assert checks.latency([0.6]).code == "latency.slow"
    for share, value in ((0.5, 50.0), (0.99, 99.0), (1.0, 100.0), (0.001, 1.0)):
        assert checks.quantile([float(n) for n in range(100, 0, -1)], share) == value
    assert checks.quantile([7.0], share) == 7.0
    what = checks.bandwidth(Bandwidth(1.25e5, 1.25e9)).what
    assert re.findall(r"[\d,]+ Mbit/s", what) == ["1 Mbit/s", "10,000 Mbit/s"]
    assert checks.bandwidth(Bandwidth(why_not="full")).code == "bandwidth.unknown"


HOLDER = NodeFacts("one:1", "one", is_holder=True, is_primary=True, replicas=1, policy="noeviction", has_log=True)
COPY = NodeFacts("two:2", "two", primary="one:1", policy="noeviction", has_log=True)


def codes(*nodes: NodeFacts, min_replicas: str = "1") -> list[str]:
    return [found.code for found in topology("cluster", nodes, min_replicas) if found.level != "ok"]


def test_what_a_failover_would_lose_has_a_code() -> None:
    assert codes(HOLDER, COPY) == []
    (found,) = topology("sentinel", [HOLDER, COPY], "1")
    assert "one:1" in found.what and "1 replica" in found.what
    assert len(topology("server", [replace(HOLDER, replicas=0)], "0")) == 1
    for nodes, min_replicas, code in (
        ([replace(HOLDER, replicas=0)], "1", "topology.no-replica"),
        ([HOLDER, COPY], "0", "topology.min-replicas"),
        ([HOLDER, COPY], "", "topology.min-replicas"),
        ([HOLDER, NodeFacts("two:2", error="refused")], "1", "topology.refused"),
        ([HOLDER, NodeFacts("two:2", error="silent")], "1", "topology.silent"),
        ([HOLDER, replace(COPY, policy="allkeys-lru")], "1", "topology.evicts"),
        ([HOLDER, replace(COPY, has_log=False)], "1", "topology.no-log"),
    ):
        assert codes(*nodes, min_replicas=min_replicas) == [code], nodes


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


def test_the_estimate_says_only_what_is_known() -> None:
    found = estimate.estimate(CONFIG, SIZES, 0.1, Bandwidth(why_not="full"), 0.05)
    assert [label for label, _ in estimate.lines(found, "a test")] == ["step", "sync"]
    config = replace(CONFIG, wire=replace(CONFIG.wire, thin=""))
    found = estimate.estimate(config, SIZES, 0.1, Bandwidth(1e9, 1e9), 0.0)
    assert [label for label, _ in estimate.lines(found, "")] == ["step", "sync", "hidden"]
    assert math.isnan(estimate.step_seconds_here(CONFIG, 10**15, 1)), "to measure a step would take too long"


# -- this machine -----------------------------------------------------------------------------------------------------


def test_a_merger_that_would_not_fit_or_keep_up_gives_a_warning() -> None:
    need = cycle(RunConfig(), 10**9, 24, 2)
    fitting = estimate.merger_finding(need, need.merger_bytes, math.nan)
    assert (fitting.level, fitting.code) == ("ok", "merger.ok")
    assert memory_text(need.merger_bytes) in fitting.what
    large = estimate.merger_finding(need, need.merger_bytes - 1, math.nan)
    assert (large.level, large.code, "--shards 2" in large.remedy) == ("warning", "merger.memory", True)
    late = estimate.merger_finding(need, need.merger_bytes, need.merge_seconds)
    assert (late.level, late.code) == ("warning", "merger.slow")
    load = SpectraLoad(operations=1e12, threads=2, seconds=5.0, interval_seconds=10.0, side_max=1024, coarser="")
    slow = replace(load, interval_seconds=6.0)
    for given, code in ((load, "spectra.ok"), (replace(load, interval_seconds=math.nan), "spectra.ok"),
                        (slow, "spectra.slow")):  # fmt: skip
        assert estimate.spectra_finding(given).code == code
    assert estimate.spectra_finding(slow).remedy == slow.remedy


@pytest.mark.full
def test_spectra_are_measured_where_the_run_changes_any() -> None:
    tensors = (Tensor("a", (8, 8)),)
    assert estimate.spectra(tensors, AVERAGING, 1.0) is None
    found = estimate.spectra(tensors, replace(AVERAGING, merge=MergeConfig(rest="isotropic")), 1.0)
    assert found is not None
    assert found.code == "spectra.ok"


def test_this_machine_needs_room_for_checkpoints(tmp_path: Path) -> None:
    site = doctor_site.Site(2, 16 << 30, 8 << 30, 10_000_000_000)
    for parameters, level in ((0, "ok"), (100_000_000, "ok"), (120_000_000, "warning"), (200_000_000, "problem")):
        assert doctor_site.disk(site, Path("runs"), parameters).level == level
    assert [doctor_site.machine(site, size).level for size in (1_000_000, 1_000_000_000)] == ["ok", "warning"]
    here = doctor_site.measure(tmp_path / "not" / "there" / "yet")
    assert here.cores >= 1
    assert 0 <= here.available_bytes <= here.memory_bytes
    assert here.disk_free_bytes > 0
    assert doctor_site.accelerators().level == "ok"


def test_a_corpus_is_the_runs_or_missing_or_different(corpus: OpenCorpus) -> None:
    assert doctor_site.corpus("small-text", corpus.identity).code == "corpus.ok"
    assert doctor_site.corpus("small-text", None).code == "corpus.ok"
    other = doctor_site.corpus("small-text", Corpus("small-text", "0" * 32, 7))
    assert (other.code, "00000000" in other.what) == ("corpus.different", True)
    path = data_folder() / "small-text" / "text.bin"
    path.write_bytes(b"?" + path.read_bytes()[1:])
    assert doctor_site.corpus("small-text", corpus.identity).code == "corpus.damaged"
    missing = doctor_site.corpus("nowhere", None)
    assert (missing.code, "small-text" in missing.what) == ("corpus.missing", True)
    assert doctor_site.corpus("enwik8", None).code == "corpus.ok"  # `prepare enwik8` makes this corpus.
    scripts, task = doctor_site.own_data(""), doctor_site.own_data("digits")
    assert scripts.code == task.code == "corpus.ok"
    assert ("script" in scripts.what, "script" in task.what, "'digits'" in task.what) == (True, False, True)


def test_versions_are_compared_with_the_run() -> None:
    here = {"archipelago-train": "0.1.0", "jax": "0.10.2", "flax": "0.12.0", "optax": "0.2.8"}
    runs = [
        ({"jax": "0.10.9", "optax": "9"}, "ok"),
        ({"jax": "0.11.0"}, "warning"),
        ({"flax": "1.12"}, "warning"),
    ]
    for in_run, level in runs:
        assert doctor_site.versions(here, in_run).level == level, in_run
        assert doctor_site.versions({**here, "jax": "not installed"}, in_run).level == "problem"
