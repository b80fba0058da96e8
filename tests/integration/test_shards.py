"""Runs over several shards: each has its own merger, and the islands train one model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from archipelago.broker.config import RunConfig, SyncConfig, WireConfig
from archipelago.broker.redis.transport import connect
from archipelago.broker.shards.transport import WholeRun
from archipelago.broker.transport import Transport
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.islands.evaluation import published
from archipelago.islands.tasks.ours import our_work
from archipelago.ops.experiments.virtual_time import VirtualRun
from tests.integration.test_exactness import PLAIN, assert_same_bits, plain_training

SHARDS = [2, pytest.param(4, marks=pytest.mark.full)]


def balanced(run: VirtualRun) -> bool:
    """Return whether every published contribution is merged, refused or pending."""
    books, pending = run.transport.reader.books(), run.transport.reader.pending()
    return books.published == books.merged + books.refused + pending.contributions


def closed(run: VirtualRun) -> list[int]:
    """Return the closed rounds of each shard."""
    return [merger.rounds.closed for merger in run.mergers]


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("name", ["memory", "fakeredis"])
def test_one_island_over_shards_equals_plain_training(
    config: RunConfig, corpus: OpenCorpus, shards: int, name: str
) -> None:
    config = replace(config, wire=WireConfig(up="int4", down="float32"), **PLAIN)  # type: ignore[arg-type]
    run_name = f"shards-{shards}"
    connection: Callable[[], Transport] = partial(connect, f"fakeredis://{run_name}", run_name)
    connected = connection if name == "fakeredis" else None
    run = VirtualRun(our_work(config, corpus), [1.0], connect=connected, run=run_name, shards=shards)
    island = run.islands["island-0"]
    run.advance_until(lambda: island.totals.steps >= config.inner.steps)
    assert sum(closed(run)) >= config.inner.steps // 2 - 2 * shards, "the island did not sync"
    assert_same_bits(island.inner.params, plain_training(config, corpus, config.inner.steps))


def test_a_run_over_shards_ends_as_any_other(config: RunConfig, corpus: OpenCorpus) -> None:
    run = VirtualRun(our_work(config, corpus), [1.0, 1.1, 1.7], shards=3)
    assert isinstance(run.transport, WholeRun)
    run.finish()
    reader = run.transport.reader
    assert balanced(run)
    assert reader.pending().contributions == 0
    heads = reader.heads()
    assert all(head is not None and head.version >= 3 for head in heads)
    tape = reader.tape(1 << 20)
    assert len({entry.round for entry in tape}) == len(tape) == sum(closed(run))
    assert all(entry.fragment == run.manifest.fragment_of(entry.round) for entry in tape)
    assert all(merger.state.step >= config.inner.steps for merger in run.mergers)
    params, newest = published(run.transport, run.manifest)[:2]
    assert sum(np.asarray(each).size for each in params.values()) == run.manifest.parameters
    assert newest == max(head.round for head in heads if head is not None)


def test_a_shard_without_a_merger_stops_only_its_fragments(config: RunConfig, corpus: OpenCorpus) -> None:
    config = replace(config, inner=replace(config.inner, steps=480))
    run = VirtualRun(our_work(config, corpus), [1.0, 1.1], shards=2)
    run.advance_until(lambda: min(closed(run)) >= 6)
    alive, dead = run.mergers
    run.mergers = [alive]
    before, stopped_at, steps = alive.rounds.closed, dead.rounds.closed, run.islands["island-0"].totals.steps
    run.advance_until(lambda: alive.rounds.closed >= before + 12)
    taken = run.islands["island-0"].totals.steps - steps
    stride = config.sync.interval / len(run.manifest.shard_layout.fragments[0])
    assert 12 * stride * 0.8 <= taken <= 12 * stride * 1.5, "the strides of the shard were spent on the other one"
    run.mergers = [alive, dead]
    run.new_merger(1)
    run.advance_until(lambda: run.mergers[1].rounds.closed >= stopped_at + 6)
    run.finish()
    assert balanced(run)


def test_a_merger_of_a_shard_is_replaced_to_the_same_bits(config: RunConfig, corpus: OpenCorpus) -> None:
    def digests(replaced_at: int | None) -> list[tuple[int, str]]:
        run = VirtualRun(our_work(config, corpus), [1.0, 1.1], shards=2)
        if replaced_at is not None:
            run.advance_until(lambda: run.mergers[1].rounds.closed >= replaced_at)
            run.new_merger(1)
        run.finish()
        return sorted((entry.round, entry.digest) for entry in run.transport.reader.tape(1 << 20))

    assert digests(5) == digests(None)


def test_a_newcomer_takes_all_shards(config: RunConfig, corpus: OpenCorpus) -> None:
    run = VirtualRun(our_work(config, corpus), [1.0], shards=2)
    run.advance_until(lambda: min(closed(run)) >= 4)
    late = run.add_island("late", 1.0, moments="peer")
    assert [count.version for count in late.ledger.counts] == [
        head.version for head in run.transport.reader.heads() if head is not None
    ]
    run.finish()
    assert balanced(run)


def test_several_shards_of_one_fragment_each_have_a_window_of_one(config: RunConfig, corpus: OpenCorpus) -> None:
    config = replace(config, sync=SyncConfig(interval=12, fragments=3, window=2))
    run = VirtualRun(our_work(config, corpus), [1.0, 1.0], shards=3)
    run.finish()
    assert balanced(run)
    assert min(closed(run)) >= config.inner.steps // config.sync.interval - 1
