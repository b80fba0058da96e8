"""Real merger processes share the shards of a run, and a shard whose merger or Redis dies stops its fragments only."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from redis.crc import key_slot

from archipelago.broker.errors import BrokerError
from archipelago.broker.redis.keys import Keys
from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.broker.shards.reader import PATIENCE_SECONDS
from archipelago.broker.shards.transport import WholeRun, whole
from tests.clusters import PATIENT_MS, Cluster
from tests.conftest import Until
from tests.harness.processes import SETTINGS, Processes

pytestmark = [pytest.mark.full, pytest.mark.processes]

MERGER = ["--checkpoint-every=0", "--lease-seconds=2"]
#: Why a shard that hangs is away, unless the reading has waited for its socket.
HANGS = f"its server has not answered for {PATIENCE_SECONDS:g} s"


class Watcher:
    """What the tests read of a run with two shards."""

    def __init__(self, url: str, run: str) -> None:
        self.home: RedisTransport = connect(url, run)
        found = whole(self.home, self.home.reader.manifest())
        assert isinstance(found, WholeRun)
        self.run = found

    def holders(self) -> list[str]:
        """Return the merger of each shard; empty for a shard without one."""
        statuses = [shard.reader.merger_status() for shard in self.run.shards]
        return [status.holder if status else "" for status in statuses]

    def is_served_by(self, processes: int) -> bool:
        """Return whether all shards are served, by that number of processes.

        A lease may lapse for a moment on a loaded machine.
        """
        holders = self.holders()
        return all(holders) and len(set(holders)) == processes

    def closed(self, shard: int) -> int:
        """Return the last closed round of a shard, as its own merger counts; 0 while its Redis is away."""
        try:
            heads = self.run.shards[shard].reader.heads()
        except BrokerError:
            return 0
        return max((head.round for head in heads if head is not None), default=0)

    def end(self, island: subprocess.Popen[str], processes: Processes, until: Until) -> None:
        """Let the island leave. Assert that what was published is merged or refused, each contribution once."""
        island.terminate()
        processes.ended(island)
        until(lambda: self.run.reader.backlog() == 0, "everything to be merged")
        books, tape = self.run.reader.books(), self.run.reader.tape(1 << 20)
        assert books.published == books.merged + books.refused
        assert books.merged == sum(len(entry.members) for entry in tape)
        for shard in self.run.shards:  # sequence numbers count by shard
            merged = [(m.island, m.incarnation, m.sequence) for e in shard.reader.tape(1 << 20) for m in e.members]
            assert len(set(merged)) == len(merged) > 0
        self.home.close()


def test_mergers_share_the_shards_and_a_killed_primary_stops_only_its_own_which_can_move(
    processes: Processes, tmp_path: Path, until: Until
) -> None:
    """One merger process replaces another. `status` names a shard whose node hangs, and does not wait for it."""
    cluster = Cluster(tmp_path / "cluster", until, replicas=1, silent_ms=PATIENT_MS)  # the test elects by itself
    try:
        for node in cluster.nodes:
            node.client.config_set("cluster-require-full-coverage", "no")
        url, run = cluster.url, _apart(cluster)
        processes.run("init", url, "--run", run, "--shards=2", "--inner.steps=100000", *SETTINGS)
        seen = Watcher(url, run)
        first = processes.start("merger", url, "--run", run, *MERGER)
        until(lambda: seen.is_served_by(1), "one process to serve both shards")
        island = processes.start("island", url, "--run", run, "--name", "one", "--scan-steps=1")
        until(lambda: min(seen.closed(0), seen.closed(1)) >= 4, "rounds of both shards")

        processes.start("merger", url, "--run", run, *MERGER)
        until(lambda: seen.is_served_by(2), "two processes to share the shards")
        shared_at = [seen.closed(0), seen.closed(1)]
        until(lambda: all(seen.closed(k) > shared_at[k] + 4 for k in (0, 1)), "rounds by both processes")
        first.kill()
        died_at = [seen.closed(0), seen.closed(1)]
        until(lambda: seen.is_served_by(1), "the other process to serve both shards")
        until(lambda: all(seen.closed(k) > died_at[k] + 4 for k in (0, 1)), "rounds by the other process")
        assert island.poll() is None

        old, new = cluster.pair(run, shard=1)
        old.kill()
        before = seen.closed(0)
        until(lambda: seen.closed(0) > before + 4, "rounds of the shard on the other primary")
        cluster.promote(new)
        after = max(seen.closed(1), 1)
        until(lambda: seen.closed(1) > after + 4, "rounds of the shard whose primary was replaced")
        _move(cluster, run, shard=1)
        moved_at = [seen.closed(0), max(seen.closed(1), 1)]
        until(lambda: all(seen.closed(k) > moved_at[k] + 4 for k in (0, 1)), "rounds of both shards after the move")
        _check_status(processes, cluster, run)
        seen.end(island, processes, until)
    finally:
        cluster.end()


def _check_status(processes: Processes, cluster: Cluster, run: str) -> None:
    """Assert that `status` goes on without shard 1 while its node hangs."""
    show = ["status", cluster.url, "--run", run, "--json"]
    watch = processes.start(*show, "--watch", "--every=0.5")
    assert watch.stdout is not None
    readings = map(json.loads, watch.stdout)
    assert next(readings)["unreachable"] == {}
    with cluster.owner(run, 1).stopped():
        first = next(each for each in readings if each.get("unreachable"))
        assert first["unreachable"] == {"1": HANGS}, "the reading waited for the shard"
        later = next(each for each in readings if each.get("rounds", 0) > first["rounds"] + 4)
        assert later["unreachable"], "the run goes on without the shard"
        found = json.loads(processes.ended(processes.start(*show), status=1))
        assert (found["known"], found["unreachable"]) == (1, {"1": HANGS})
        assert found["problems"][0]["code"] == "shard.unreachable"
    next(each for each in readings if each.get("unreachable") == {} and each["balanced"])
    watch.kill()


def _move(cluster: Cluster, run: str, shard: int) -> None:
    """Move the slot of a shard to the primary that holds no shard of the run, key by key."""
    old, other = cluster.owner(run, shard), cluster.owner(run, 1 - shard)
    new = next(
        node for node in cluster.nodes if node.is_running and node.role() == "master" and node not in (old, other)
    )
    cluster.move_slot(key_slot(Keys(run, shard).manifest.encode()), old, new)
    assert cluster.owner(run, shard) is new


def _apart(cluster: Cluster) -> str:
    """Return a name whose two shards are on different primaries."""
    names = (f"apart-{number}" for number in range(100))
    return next(name for name in names if cluster.owner(name) is not cluster.owner(name, 1))
