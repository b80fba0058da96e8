"""Whole runs on fakeredis in virtual time: participation, waiting, and islands that join and leave."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from archipelago.broker.config import AdoptConfig, OuterConfig, RunConfig
from archipelago.broker.messages import Snapshot, TapeEntry
from archipelago.broker.redis.transport import connect
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.islands.data.sharding import held_out
from archipelago.islands.evaluation import compile_evaluation, published
from archipelago.islands.models.registry import build
from archipelago.islands.sync.connection.snapshots import Arrival
from archipelago.islands.tasks.ours import our_work
from archipelago.islands.worker import Island
from archipelago.merger.outer import OUTER
from archipelago.ops.experiments.virtual_time import VirtualRun

Start = Callable[..., VirtualRun]


@pytest.fixture
def start(request: pytest.FixtureRequest, corpus: OpenCorpus) -> Start:
    """Return a function that starts a run on its own fakeredis, from a config and the islands' step durations."""
    names = (f"{request.node.name.translate({91: 45, 93: None})[:50]}-{n}" for n in itertools.count())

    def start(config: RunConfig, speeds: list[float]) -> VirtualRun:
        name = next(names)
        connection = partial(connect, f"fakeredis://{name}", name)
        return VirtualRun(our_work(config, corpus), speeds, connect=connection, run=name)

    return start


def members(entry: TapeEntry) -> set[str]:
    return {member.island for member in entry.members}


def books_balance(run: VirtualRun) -> None:
    books, pending = run.transport.reader.books(), run.transport.reader.backlog()
    assert books.published == books.merged + books.refused + pending
    if not pending:
        assert books.published_tokens == books.merged_tokens + books.refused_tokens


@pytest.mark.full
def test_a_run_learns(start: Start, config: RunConfig, corpus: OpenCorpus) -> None:
    config = replace(config, inner=replace(config.inner, steps=120, warmup_steps=10))
    run = start(config, [1.0, 1.0, 1.3])
    measure = compile_evaluation(build("tiny"), held_out(corpus.valid, 32, 32))
    before = measure(published(run.transport, run.manifest)[0])
    run.finish()
    after = measure(published(run.transport, run.manifest)[0])
    assert before == pytest.approx(8.0, abs=0.6), "a fresh model should be as good as chance"
    assert after < 0.75 * before
    books_balance(run)
    assert run.transport.reader.backlog() == 0


def test_all_islands_answer_the_calls_of_the_fastest(start: Start, config: RunConfig) -> None:
    """With step durations from 1 to 1.5, all three are in nearly every round, and nothing is stale."""
    run = start(config, [1.0, 1.2, 1.5])
    run.finish()
    tape = run.transport.reader.tape(1000)[6:-6]
    assert statistics.fmean(len(members(entry)) for entry in tape) > 2.7
    assert max(member.staleness for entry in tape for member in entry.members) <= 1
    assert [entry.round for entry in run.transport.reader.tape(1000)] == list(range(1, run.merger.rounds.closed + 1))


def test_a_slow_island_neither_delays_others_nor_is_excluded(start: Start, config: RunConfig) -> None:
    run = start(config, [1.0, 1.0, 6.0])
    fastest = run.islands["island-0"]
    run.advance_until(lambda: fastest.finished)
    assert run.clock.now == config.inner.steps - 1, "the fast islands waited"
    tape = run.transport.reader.tape(1000)  # After this, the fast islands leave with partial contributions.
    mine = [m for entry in tape for m in entry.members if m.island == "island-2"]
    assert len(mine) >= 4, "the slow island's work was lost"
    others = [m for entry in tape for m in entry.members if m.island != "island-2"]
    shared = [m.weight for entry in tape if len(members(entry)) > 1 for m in entry.members if m.island == "island-2"]
    assert max(shared) < 0.3, "a sixth of the work may not weigh as much as the rest"
    assert max(m.staleness for m in others) <= 1


def test_no_progress_is_sent_twice(start: Start, config: RunConfig) -> None:
    """The merged tokens of a fragment never exceed the trained tokens."""
    run = start(config, [1.0, 1.7])
    islands = dict(run.islands)
    run.finish()
    for p in range(len(run.manifest.fragments)):
        merged = sum(m.tokens for e in run.transport.reader.tape(1000) if e.fragment == p for m in e.members)
        trained = sum(island.totals.tokens for island in islands.values())
        assert merged <= trained
        assert merged > 0.7 * trained


def test_a_quorum_larger_than_the_live_islands_is_reduced(start: Start, config: RunConfig) -> None:
    run = start(replace(config, sync=replace(config.sync, quorum=8)), [1.0, 1.4])
    run.finish()
    assert run.merger.rounds.closed >= 12
    assert all(len(members(entry)) == 2 for entry in run.transport.reader.tape(1000)[:-8])


def test_snapshots_may_arrive_late(config: RunConfig, corpus: OpenCorpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are adopted within two steps, and no token is lost."""
    run = VirtualRun(our_work(config, corpus), [1.0, 1.1], late_seconds=3.0)
    islands, said, heard = list(run.islands.values()), dict[tuple[int, int], float](), list[float]()

    def say(_: TapeEntry, snapshot: Snapshot) -> None:
        said[snapshot.fragment, snapshot.version] = run.clock.now

    def hear(island: Island, arrival: Arrival) -> None:
        heard.append(run.clock.now - said[arrival.snapshot.fragment, arrival.snapshot.version])
        adopt(island, arrival)

    adopt = Island.adopt
    monkeypatch.setattr(Island, "adopt", hear)
    run.merger.on_round = say
    run.finish()
    assert len(heard) >= run.merger.rounds.closed
    assert min(heard) >= 3.0
    assert max(heard) <= 3.0 + 1.1 + 1.1, "an island should receive it after one step and adopt it after another"
    assert run.transport.reader.backlog() == 0
    trained = sum(island.totals.tokens for island in islands)
    assert run.transport.reader.books().merged_tokens == trained * len(run.manifest.fragments)


def test_an_island_joins_a_running_run(start: Start, config: RunConfig) -> None:
    run = start(config, [1.0, 1.0])
    run.advance_until(lambda: run.merger.rounds.closed >= 8)
    newcomer = run.add_island("newcomer", 1.0)
    assert newcomer.ledger.global_step > 0, "its learning rate would start over"
    before = run.merger.rounds.closed
    run.advance_until(lambda: run.merger.rounds.closed >= before + 8)
    recent = run.transport.reader.tape(6)
    assert all("newcomer" in members(entry) for entry in recent)
    books_balance(run)


def test_a_leaving_island_sends_its_progress(start: Start, config: RunConfig) -> None:
    run = start(config, [1.0, 1.0, 1.0])
    run.advance_until(lambda: run.merger.rounds.closed >= 8)
    run.remove_island("island-2", farewell=True)
    run.advance_until(lambda: run.merger.rounds.closed >= 16)
    farewells = [m for entry in run.transport.reader.tape(1000) for m in entry.members if m.island == "island-2"]
    assert len({m.sequence for m in farewells}) == len(farewells)
    assert members(run.transport.reader.tape(1)[0]) == {"island-0", "island-1"}
    run.finish()
    books_balance(run)
    assert run.transport.reader.backlog() == 0


def test_a_new_merger_continues_to_the_same_bits(start: Start, config: RunConfig) -> None:
    digests = []
    for replaced_after in ((), (3, 7, 8)):
        run = start(config, [1.0, 1.2])
        epochs = {run.merger.epoch}
        while run.islands:
            run.play_one()
            if run.merger.rounds.closed in replaced_after:
                epochs.add(run.new_merger().epoch)
        run.merger.turn(0.0)
        digests.append([entry.digest for entry in run.transport.reader.tape(1000)])
        assert len(epochs) > len(replaced_after)
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("rule", "adopt"),
    [
        ("nesterov", "overwrite"),
        ("sgd", "carry"),
        *(pytest.param(rule, "carry", marks=pytest.mark.full) for rule in OUTER if rule != "sgd"),
    ],
)
def test_every_outer_and_adopt_rule_runs(start: Start, config: RunConfig, rule: str, adopt: str) -> None:
    config = replace(
        config,
        outer=OuterConfig(rule=rule, learning_rate=0.7, momentum=0.5),  # type: ignore[arg-type]
        adopt=AdoptConfig(rule=adopt),  # type: ignore[arg-type]
    )
    run = start(config, [1.0, 1.5])
    run.finish()
    losses = [entry.loss for entry in run.transport.reader.tape(1000)]
    assert statistics.fmean(losses[-6:]) < losses[0]
    books_balance(run)


@pytest.mark.parametrize("interval", [pytest.param(2, marks=pytest.mark.full), 60])
def test_neither_short_nor_long_intervals_diverge(start: Start, config: RunConfig, interval: int) -> None:
    """The run has the default rules, and one island is five times slower than the others."""
    config = replace(config, sync=replace(config.sync, interval=interval), inner=replace(config.inner, steps=90))
    run = start(config, [1.0, 1.0, 1.0, 5.0])
    run.finish()
    losses = [entry.loss for entry in run.transport.reader.tape(100_000) if not math.isnan(entry.loss)]
    assert statistics.fmean(losses[-12:-6]) < 0.85 * statistics.fmean(losses[:6])
    assert max(losses[len(losses) // 2 :]) < losses[0]
    books_balance(run)
