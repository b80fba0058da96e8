"""Runs of several shards with content, for tests of what reads or steers a run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from archipelago.broker.redis.transport import connect
from archipelago.broker.shards.transport import WholeRun, create
from archipelago.broker.transport import Transport
from archipelago.islands.tasks.workload import Workload
from archipelago.ops.experiments.virtual_time import VirtualRun
from tests import samples


def create_sharded(transport: Transport, shards: int = 2) -> WholeRun:
    """Create a run of two fragments in that many shards, and return a connection to all of them."""
    manifest = replace(samples.manifest(transport.run), shards=shards)
    create(transport, manifest, samples.first_snapshots(manifest))
    return WholeRun(transport, manifest)


def train_sharded(work: Workload, url: str = "", run: str = "demo", shards: int = 2, rounds: int = 4) -> VirtualRun:
    """Train two islands until each shard has closed some rounds. All have closed different numbers of rounds.

    Args:
        work: What the run trains.
        url: The Redis; empty for a broker in memory.
        run: The name of the run.
        shards: The number of shards.
        rounds: The rounds of the shard that has closed the fewest.
    """
    out = VirtualRun(work, [1.0, 1.3], connect=partial(connect, url, run) if url else None, run=run, shards=shards)
    out.advance_until(lambda: min(closed(out)) >= rounds)
    dead = out.mergers.pop()  # so the last shard is behind the others
    before = sum(closed(out))
    out.advance_until(lambda: sum(closed(out)) >= before + rounds)
    out.mergers.append(dead)
    return out


def closed(run: VirtualRun) -> list[int]:
    """Return how many rounds each shard has closed."""
    return [merger.manifest.own_rounds.until(merger.rounds.closed) for merger in run.mergers]


def newest_round(run: VirtualRun) -> int:
    """Return the newest round that a shard has closed."""
    return max(merger.rounds.closed for merger in run.mergers)
