"""What `archipelago doctor` finds in given facts of servers, links and machines."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest

from archipelago.broker.codecs import codec
from archipelago.broker.config import MergeConfig, RunConfig, SyncConfig, WireConfig
from archipelago.broker.manifest import NO_CORPUS, Corpus, Manifest, Tensor, balanced
from archipelago.broker.redis.checkup import Bandwidth, NodeFacts, ServerFacts
from archipelago.islands.data.corpus import OpenCorpus, data_folder
from archipelago.merger import spectra_trial
from archipelago.ops.watch.doctor import main
from archipelago.ops.watch.doctor import server as checks
from archipelago.ops.watch.doctor.server import Finding

GOOD = ServerFacts(
    info={
        "redis_version": "7.2.4", "role": "master", "cluster_enabled": 0, "aof_enabled": 1, "used_memory": 1000,
        "maxmemory": 0, "total_system_memory": 10**9, "maxmemory_policy": "noeviction",
        "rdb_last_bgsave_status": "ok", "aof_last_write_status": "ok",
    },
    settings={
        "appendonly": "yes", "appendfsync": "everysec", "maxmemory-policy": "noeviction",
    },
    needs_password=True, denied=(),
)  # fmt: skip


def info(**changes: Any) -> ServerFacts:
    return replace(GOOD, info={**GOOD.info, **changes})


def setting(name: str, value: str) -> ServerFacts:
    return replace(GOOD, settings={**GOOD.settings, name: value})


def judged(facts: ServerFacts, host: str = "localhost", *, has_tls: bool = False) -> list[Finding]:
    """Return all findings except those that are fine."""
    found = checks.server_checks(facts, host, has_tls=has_tls)
    return [finding for finding in found if finding.level != "ok"]


FAULTS = [
    (info(role="slave"), "problem", "role.replica"),
    (setting("appendonly", "no"), "warning", "persistence.none"),
    (setting("appendfsync", "no"), "warning", "persistence.no-fsync"),
    (info(aof_last_write_status="err"), "problem", "disk.failed"),
    (info(rdb_last_bgsave_status="err"), "problem", "disk.failed"),
    (info(used_memory=600, maxmemory=1000), "warning", "memory.tight"),
    (info(used_memory=800, maxmemory=1000), "problem", "memory.full"),
    (info(used_memory=700_000_000), "warning", "memory.tight"),
    (setting("maxmemory-policy", "allkeys-lru"), "warning", "eviction.policy"),
    (replace(setting("maxmemory-policy", "volatile-ttl"), info={**GOOD.info, "maxmemory": 10**6}), "problem",
     "eviction.policy"),
    (replace(GOOD, denied=("XADD", "EVAL")), "problem", "rights.denied"),
    (replace(GOOD, unknown=("EVAL",)), "problem", "server.unknown-command"),
    (info(min_slaves_good_slaves=0), "problem", "role.no-replicas"),
    (replace(GOOD, needs_password=False), "warning", "password.none"),
    (replace(GOOD, settings={}), "warning", "server.untold"),
]  # fmt: skip


def test_each_fault_has_a_code_and_a_remedy() -> None:
    for facts, level, code in FAULTS:
        (finding,) = judged(facts)
        assert (finding.level, finding.code, finding.subject) == (level, code, code.partition(".")[0])
        assert finding.remedy


def test_a_server_that_tells_nothing_gives_warnings_only() -> None:
    """Managed servers forbid INFO and CONFIG."""
    found = judged(ServerFacts({}, {}, True, ()))
    assert [(finding.level, finding.code) for finding in found] == [("warning", "server.untold")]
    member = checks.server_checks(ServerFacts({}, {}, True, ()), "localhost", has_tls=True, role="island")
    assert all(finding.level == "ok" for finding in member), "it is not a member's business"


def test_a_remote_server_needs_encryption_and_a_password() -> None:
    for host in ("far.example", "10.0.0.7", "localhost.evil.example"):
        found = {f.code: f.level for f in judged(replace(GOOD, needs_password=False), host)}
        assert found == {"encryption.none": "warning", "password.none": "problem"}, host
    for host in ("localhost", "127.0.0.1", "127.8.8.8", "::1", "[::1]", ""):
        assert checks.is_local(host), host


def test_a_slow_link_gives_a_warning() -> None:
    found = checks.latency([0.2] * 9 + [3.0])
    assert (found.code, re.findall(r"\d+ m?s\b", found.what)) == ("latency.ok", ["200 ms", "3 s"])
    assert checks.latency([0.6]).code == "latency.slow"
    assert "p99 99 s (100 pings)" in checks.latency([float(n) for n in range(100, 0, -1)]).what
    assert "125 kB/s up" in checks.bandwidth(Bandwidth(1.25e5, 1.0)).what
    assert checks.bandwidth(Bandwidth(why_not="full")).code == "bandwidth.unknown"


HOLDER = NodeFacts("one:1", "one", is_holder=True, is_primary=True, replicas=1, policy="noeviction", has_log=True)
COPY = NodeFacts("two:2", "two", primary="one:1", policy="noeviction", has_log=True)


def codes(*nodes: NodeFacts, min_replicas: str = "1") -> list[str]:
    return [found.code for found in checks.topology("cluster", nodes, min_replicas) if found.level != "ok"]


def test_what_a_failover_would_lose_has_a_code() -> None:
    assert codes(HOLDER, COPY) == []
    (found,) = checks.topology("sentinel", [HOLDER, COPY], "1")
    assert "one:1" in found.what and "1 replica" in found.what
    assert len([*checks.topology("server", [replace(HOLDER, replicas=0)], "0")]) == 1
    for nodes, min_replicas, code in (
        ([replace(HOLDER, replicas=0)], "1", "topology.no-replica"),
        ([HOLDER, COPY], "0", "topology.min-replicas"),
        ([HOLDER, COPY], "", "topology.min-replicas"),
        ([HOLDER, NodeFacts("two:2", error="refused")], "1", "topology.refused"),
        ([HOLDER, NodeFacts("two:2", error="silent")], "1", "topology.silent"),
        ([HOLDER, replace(COPY, policy="allkeys-lru")], "1", "topology.settings"),
        ([HOLDER, replace(COPY, has_log=False)], "1", "topology.settings"),
    ):
        assert codes(*nodes, min_replicas=min_replicas) == [code], nodes


SIZE = 1 << 20
SENDING = RunConfig(sync=SyncConfig(interval=24, fragments=2), wire=WireConfig(up="int4", thin="top3", down="int4"))


def sync(link: Bandwidth, step_seconds: float, config: RunConfig = SENDING) -> Finding:
    tensors = tuple(Tensor(name, (SIZE,)) for name in "ab")
    run = Manifest("sample", config, tensors, balanced(tensors, 2), NO_CORPUS, {})
    return checks.sync(link, 0.05, run, step_seconds)


def test_a_sync_is_predicted_from_codecs_link_and_steps() -> None:
    """Two fragments, H = 24 and steps of 0.1 s: one sync every 1.2 s. int4 takes 33 bits for eight elements."""
    size = SIZE * 33 // 64
    assert size == codec("int4").encoded_size(SIZE)
    thin = Bandwidth(up=size / 2.4, down=10.0 * size)
    found = sync(thin, 0.1)
    assert found.code == "sync.ok" and "every 1.2 s" in found.what
    assert "2.45 s up and 150 ms down" in found.what and "top3" in found.what
    slow = sync(thin, 0.1, replace(SENDING, wire=replace(SENDING.wire, thin="")))
    assert (slow.level, slow.code) == ("warning", "sync.slow")
    assert "50%" in slow.what and "2.0 times" in slow.what, "1.2 s of steps hide half of the 2.4 s upload"
    fast = Bandwidth(1e9, 1e9)
    for link, step_seconds in ((Bandwidth(), 0.1), (fast, 0.1), (fast, math.nan), (thin, math.nan)):
        assert sync(link, step_seconds).code == "sync.ok"
    assert "2.4 s apart" in sync(thin, math.nan).what


def test_the_server_needs_room_for_the_tape_and_the_state_of_many_islands() -> None:
    tensors = (Tensor("a", (SIZE,)),)
    run = Manifest("sample", SENDING, tensors, balanced(tensors, 1), NO_CORPUS, {})
    for islands, limit, code in ((4, 0, "memory.ok"), (4, 200 << 20, "memory.ok"), (1000, 200 << 20, "memory.small")):
        found = checks.run_memory(run, 1, islands, {"maxmemory": limit})
        assert found.code == code, islands
        assert f"With {islands} islands" in found.what


def test_this_machine_needs_memory_for_an_island_without_an_accelerator() -> None:
    for need, level in ((8 << 30, "ok"), (9 << 30, "warning")):
        assert main.machine(8 << 30, {"an island": need, "the merger": 0}).level == level
        assert main.machine(8 << 30, {"an island": need, "the merger": 0}, on_device=True).level == "ok"
    assert main.accelerators().level == "ok"


def test_a_merger_here_keeps_up_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of the run would have to take 0.2 s on two threads of 30 GFLOP/s."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(spectra_trial, "trial", lambda: spectra_trial.Trial("numpy", None, 30e9))
    tensors = (Tensor("a", (1024, 2048)), Tensor("b", (1024, 4096)))

    def judged(step_seconds: float, config: RunConfig = SENDING) -> Finding:
        run = Manifest("sample", config, tensors, balanced(tensors, 2), NO_CORPUS, {})
        return main.spectra(run, step_seconds)

    assert judged(0.2).level == "ok"
    assert "30 GFLOP/s" in judged(0.2).what
    assert (slow := judged(0.05)).code == "spectra.slow"
    assert "--threads" in slow.remedy
    assert judged(math.nan).level == "ok"
    assert judged(0.05, RunConfig(merge=MergeConfig(embedding="rda", rest="rda"))).level == "ok"
    assert main.spectra(None, math.nan).level == "ok"


def test_a_corpus_is_the_runs_or_missing_or_different(corpus: OpenCorpus) -> None:
    assert main.corpus(corpus.identity).code == "corpus.ok"
    other = main.corpus(Corpus("small-text", "0" * 32, 7))
    assert (other.code, "00000000" in other.what) == ("corpus.different", True)
    path = data_folder() / "small-text" / "text.bin"
    path.write_bytes(b"?" + path.read_bytes()[1:])
    assert main.corpus(corpus.identity).code == "corpus.damaged"
    missing = main.corpus(Corpus("nowhere", "0" * 32, 7))
    assert (missing.code, "small-text" in missing.what) == ("corpus.missing", True)
    assert main.corpus(Corpus("stdlib", "0" * 32, 7)).code == "corpus.ok"  # `prepare stdlib` makes this corpus.
