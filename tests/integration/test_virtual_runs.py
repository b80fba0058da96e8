"""Whole runs in virtual time: participation, waiting, islands that join and leave, and shards without a merger."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from archipelago.broker.config import AdoptConfig, OuterConfig, RunConfig
from archipelago.broker.messages import TapeEntry
from archipelago.broker.shards.transport import WholeRun
from archipelago.islands.evaluation import published
from archipelago.islands.sync.evaluator import mean_of
from archipelago.islands.tasks.task import load_task
from archipelago.islands.tasks.workload import Workload, task_config
from archipelago.merger.outer import OUTER
from archipelago.ops.experiments.virtual_time import VirtualRun
from tests import pytorch
from tests.integration.virtual import CONFIG, require_balanced, work
from tests.sharded import closed


def members(entry: TapeEntry) -> set[str]:
    return {member.island for member in entry.members}


def test_all_islands_answer_the_calls_of_the_fastest() -> None:
    """With step durations from 1 to 1.5, all three are in nearly every round, and nothing is stale."""
    run = VirtualRun(work(), [1.0, 1.2, 1.5])
    run.finish()
    tape = run.transport.reader.tape(1000)
    assert [entry.round for entry in tape] == list(range(1, run.merger.rounds.closed + 1))
    assert statistics.fmean(len(members(entry)) for entry in tape[6:-6]) > 2.7
    assert max(member.staleness for entry in tape[6:-6] for member in entry.members) <= 1


def test_a_slow_island_neither_delays_others_nor_is_excluded() -> None:
    run = VirtualRun(work(), [1.0, 1.0, 6.0])
    fastest = run.islands["island-0"]
    run.advance_until(lambda: fastest.finished)
    assert run.clock.now == CONFIG.inner.steps - 1, "the fast islands waited"
    tape = run.transport.reader.tape(1000)  # After this, the fast islands leave with partial contributions.
    mine = [m for entry in tape for m in entry.members if m.island == "island-2"]
    assert len(mine) >= 4, "the slow island's work was lost"
    others = [m for entry in tape for m in entry.members if m.island != "island-2"]
    shared = [m.weight for entry in tape if len(members(entry)) > 1 for m in entry.members if m.island == "island-2"]
    assert max(shared) < 0.3, "a sixth of the work may not weigh as much as the rest"
    assert max(m.staleness for m in others) <= 1


def test_two_islands_fill_rounds_whose_quorum_is_larger_and_send_no_progress_twice() -> None:
    """The merged tokens of a fragment never exceed the trained tokens."""
    run = VirtualRun(work(replace(CONFIG, sync=replace(CONFIG.sync, quorum=8))), [1.0, 1.4])
    trained = list(run.islands.values())
    run.finish()
    tape, tokens = run.transport.reader.tape(1000), sum(island.totals.tokens for island in trained)
    assert len(tape) >= 12
    assert all(len(members(entry)) == 2 for entry in tape[:-8])
    for p in range(len(run.manifest.fragments)):
        assert 0.7 * tokens < sum(m.tokens for e in tape if e.fragment == p for m in e.members) <= tokens, p


def test_an_island_joins_a_running_run_and_another_one_sends_its_progress_and_leaves() -> None:
    run = VirtualRun(work(), [1.0, 1.0])
    run.advance_until(lambda: run.merger.rounds.closed >= 8)
    newcomer = run.add_island("newcomer", 1.0)
    assert newcomer.ledger.global_step > 0, "its learning rate would start over"
    run.advance_until(lambda: run.merger.rounds.closed >= 16)
    assert all("newcomer" in members(entry) for entry in run.transport.reader.tape(6))
    require_balanced(run)
    run.remove_island("island-1")
    run.finish()
    tape = run.transport.reader.tape(1000)
    farewells = [m for entry in tape for m in entry.members if m.island == "island-1"]
    assert len({m.sequence for m in farewells}) == len(farewells)
    assert members(tape[-1]) == {"island-0", "newcomer"}
    require_balanced(run, pending=0)


def test_every_outer_and_adopt_rule_learns() -> None:
    for rule, adopt in (("nesterov", "overwrite"), *((rule, "carry") for rule in OUTER)):
        outer = OuterConfig(rule=rule, learning_rate=0.7, momentum=0.5)  # type: ignore[arg-type]
        run = VirtualRun(work(replace(CONFIG, outer=outer, adopt=AdoptConfig(adopt))), [1.0, 1.5])  # type: ignore[arg-type]
        run.finish()
        losses = [entry.loss for entry in run.transport.reader.tape(1000)]
        assert statistics.fmean(losses[-6:]) < losses[0], (rule, adopt)
        require_balanced(run)


@pytest.mark.full
def test_neither_short_nor_long_intervals_diverge() -> None:
    """The run has the default rules, and one island is five times slower than the others."""
    inner = replace(CONFIG.inner, steps=90)
    for interval in (2, 60):
        run = VirtualRun(
            work(replace(CONFIG, sync=replace(CONFIG.sync, interval=interval), inner=inner)), [1.0, 1.0, 1.0, 5.0]
        )
        run.finish()
        losses = [entry.loss for entry in run.transport.reader.tape(100_000) if not math.isnan(entry.loss)]
        assert statistics.fmean(losses[-12:-6]) < 0.85 * statistics.fmean(losses[:6]), interval
        assert max(losses[len(losses) // 2 :]) < losses[0], interval
        require_balanced(run)


@pytest.mark.full
def test_the_example_with_images_learns() -> None:
    pytorch.required("sklearn")
    file = load_task(str(Path(__file__).parents[2] / "docs" / "examples" / "task_digits.py"))
    inner, sync = replace(CONFIG.inner, steps=120, learning_rate=0.003), replace(CONFIG.sync, fragments=1)
    made = Workload.of(file, task_config(RunConfig(inner=inner, sync=sync), file))
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):  # as for users
        run = VirtualRun(made, [1.0, 1.3])
        run.finish()
        params = published(run.transport, run.manifest)[0]
        right = mean_of(made.require_evaluation()(params)).accuracy
    assert right > 0.7, "one in ten is right before training"


# -- several shards ---------------------------------------------------------------------------------------------------


def test_a_run_over_shards_ends_as_any_other() -> None:
    run = VirtualRun(work(), [1.0, 1.1, 1.7], shards=3)
    assert isinstance(run.transport, WholeRun)
    run.advance_until(lambda: min(closed(run)) >= 4)
    late, reader = run.add_island("late", 1.0, origin="peer"), run.transport.reader
    assert [count.version for count in late.ledger.counts] == [head.version for head in reader.heads() if head]
    run.finish()
    require_balanced(run, pending=0)
    heads, tape = [head for head in reader.heads() if head is not None], reader.tape(1 << 20)
    assert [head.version >= 3 for head in heads] == [True] * 6
    assert len({entry.round for entry in tape}) == len(tape) == sum(closed(run))
    assert all(entry.fragment == run.manifest.fragment_of(entry.round) for entry in tape)
    assert all(merger.state.step >= CONFIG.inner.steps for merger in run.mergers)
    params, newest = published(run.transport, run.manifest)[:2]
    assert sum(np.asarray(each).size for each in params.values()) == run.manifest.parameters
    assert newest == max(head.round for head in heads)


def test_a_shard_without_a_merger_stops_only_its_fragments() -> None:
    config = replace(CONFIG, inner=replace(CONFIG.inner, steps=240))
    run = VirtualRun(work(config), [1.0, 1.1], shards=2)
    run.advance_until(lambda: min(closed(run)) >= 6)
    (before, stopped_at), steps = closed(run), run.islands["island-0"].totals.steps
    alive, dead = run.mergers
    run.mergers = [alive]
    run.advance_until(lambda: closed(run)[0] >= before + 12)
    taken = run.islands["island-0"].totals.steps - steps
    stride = config.sync.interval / len(run.manifest.shard_layout.fragments[0])
    assert 12 * stride * 0.8 <= taken <= 12 * stride * 1.5, "the strides of the shard were spent on the other one"
    run.mergers = [alive, dead]
    run.mergers[1] = run.merger_of(1)
    run.advance_until(lambda: closed(run)[1] >= stopped_at + 6)
    run.finish()
    require_balanced(run)
