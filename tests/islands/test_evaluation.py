"""One island of a run evaluates the published parameters: its lease, its result, and its share of the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Literal, NoReturn

import jax
import jax.numpy as jnp
import pytest

from archipelago.broker.config import DataConfig
from archipelago.broker.manifest import NO_CORPUS
from archipelago.broker.observe.losses import loss_unit
from archipelago.islands.data.batches import held_out
from archipelago.islands.data.corpus import OpenCorpus, Splits
from archipelago.islands.evaluation import (
    Evaluate,
    assemble,
    in_slices,
    published,
)
from archipelago.islands.models.interface import Model, Params
from archipelago.islands.sync.connection.downloads import Arrival
from archipelago.islands.sync.evaluator import DEVICE_SHARE, LEASE_SECONDS, Evaluator, Measures
from archipelago.islands.worker import Island
from tests import samples
from tests.conftest import Until
from tests.harness import tiny
from tests.harness.tiny import TEXT, TinyRun
from tests.islands.models import mini

CORPUS = OpenCorpus(
    "text", TEXT.size, "0" * 32, "noise", Splits(TEXT.size, 0, 0), train=TEXT, valid=TEXT[:100], test=TEXT[:0]
)
EVERY_SECONDS = 15.0
DATA = DataConfig(sequence_length=4, batch_size=2, shards=4, held_out_sequences=7)


def _loss(params: Params, tokens_BxT1: jax.Array) -> jax.Array:
    return jnp.mean(params["kernel"]) ** 2 + jnp.mean(tokens_BxT1) / 100.0


def _logits(params: Params, tokens_BxT: jax.Array) -> jax.Array:
    return jnp.zeros((*tokens_BxT.shape, 256)) + params["scale"][0]


MODEL = Model(lambda seed: {}, _loss, tiny.TENSORS, _logits)


@cache
def evaluation() -> Evaluate:
    """Return the evaluation of the model on the held-out text."""
    return in_slices(MODEL, held_out(CORPUS.valid, DATA.held_out_sequences, DATA.sequence_length), DATA.batch_size)


def created(down: Literal["int4", "float32"] = "int4") -> TinyRun:
    """Return a run whose snapshots travel as differences (`int4`), or in full."""
    config = replace(tiny.CONFIG, data=DATA, wire=replace(tiny.CONFIG.wire, down=down))
    return TinyRun(tiny.manifest(config=config))


@pytest.fixture
def run() -> TinyRun:
    return created()


def of(
    run: TinyRun,
    island: Island,
    evaluates: Evaluate | None = None,
    arrivals: Callable[[], Sequence[Arrival]] | None = None,
) -> Evaluator:
    return Evaluator(
        run.transport, run.manifest, island.link.who,
        lambda vectors: (evaluates or evaluation())(assemble(run.manifest, vectors)),
        arrivals or island.link.all_held, EVERY_SECONDS,
        clock=run.clock, wall=lambda: 1.7e9 + run.clock.now,
    )  # fmt: skip


def slowly(meanwhile: Callable[[], object], slices: int = 1) -> Evaluate:
    """Return an evaluation in slices. `meanwhile` is called at each slice."""

    def evaluates(params: Params) -> Iterator[Measures]:
        for _ in range(slices):
            meanwhile()
            yield next(evaluation()(params))

    return evaluates


def expected(run: TinyRun) -> float:
    text = held_out(CORPUS.valid, DATA.held_out_sequences, DATA.sequence_length)
    return mini.measures(MODEL, text, published(run.transport, run.manifest)[0]).bits


@pytest.mark.parametrize("down", ["int4", "float32"])
def test_an_island_evaluates_what_the_merger_has_published(down: Literal["int4", "float32"]) -> None:
    run = created(down)
    island = run.island("a")
    evaluator = of(run, island)
    first = evaluator.turn()
    assert first is not None
    assert (first.round, first.step, first.tokens, first.by) == (0, 0, 0, "a")
    assert first.bits_per_byte == pytest.approx(expected(run), rel=1e-6)
    run.play(island, 10)
    assert evaluator.turn() is None  # not due yet
    run.clock.now += EVERY_SECONDS
    island.link.pump()
    second = evaluator.turn()
    assert second is not None
    assert second.round == run.merger.rounds.closed > 0
    assert second.bits_per_byte == pytest.approx(expected(run), rel=1e-6)
    assert second.bits_per_byte != pytest.approx(first.bits_per_byte, rel=1e-3)
    assert run.transport.reader.evaluations() == [first, second]
    run.clock.now += EVERY_SECONDS
    assert evaluator.turn() is None  # nothing was published since


def test_evaluations_take_a_small_share_of_the_device(run: TinyRun) -> None:
    """The first slice compiles, and does not count. Otherwise an island would pause for fifty times as long."""
    island = run.island("a")
    evaluator = of(run, island, slowly(lambda: time.sleep(0.5 * EVERY_SECONDS * DEVICE_SHARE), 4))
    for wait in (1.4 * EVERY_SECONDS, 1.9 * EVERY_SECONDS):  # three slices count, and then four
        began = run.clock.now
        assert evaluator.turn() is not None
        run.play(island, 10)
        run.clock.now = began + wait
        island.link.pump()
        assert evaluator.turn() is None
        run.clock.now += EVERY_SECONDS


def test_an_evaluation_has_the_tokens_of_its_parameters(run: TinyRun) -> None:
    island = run.island("a")

    def trains_on() -> None:
        run.play(island, 10)
        run.clock.now += EVERY_SECONDS
        island.link.pump()

    def merged() -> int:
        return run.transport.reader.counters().merged_tokens // len(run.manifest.fragments)

    trains_on()
    before = merged()
    run.transport.island.heartbeat(samples.heartbeat("a", tokens=0))  # it was killed, and returns
    found = of(run, island, slowly(trains_on)).turn()
    assert found is not None
    assert 0 < found.tokens == before < merged()


def test_another_island_takes_over_when_the_evaluating_one_has_died_or_ends(run: TinyRun) -> None:
    first, second = of(run, run.island("a")), of(run, run.island("b"))
    assert first.turn() is not None
    assert second.turn() is None
    run.clock.now += LEASE_SECONDS / 2
    first.turn()
    run.clock.now += LEASE_SECONDS / 2
    assert second.turn() is None  # the first island has kept its lease
    run.clock.now += LEASE_SECONDS
    found = second.turn()
    assert found is not None
    assert found.by == "b"
    run.clock.now += EVERY_SECONDS / 2
    assert first.turn() is None
    third = of(run, run.island("c"))
    second.stop()
    assert third.turn() is not None


def test_the_last_slice_counts_although_the_lease_has_ended_meanwhile(run: TinyRun) -> None:
    other = of(run, run.island("b"))
    for slices, counts in ((1, True), (2, False)):

        def meanwhile() -> None:
            run.clock.now += 2 * LEASE_SECONDS
            assert other._holds_lease()

        found = of(run, run.island("a"), slowly(meanwhile, slices)).turn()
        assert (found is not None) is counts
        other.stop()


def test_the_last_island_evaluates_the_final_parameters(run: TinyRun) -> None:
    island, other = run.island("a"), run.island("b")
    evaluator = of(run, island)
    run.play(island, 10)
    assert evaluator.finish(lambda: False) is None  # the other one still trains
    for name in "ab":
        run.transport.island.heartbeat(samples.heartbeat(name, "done"))
    found = evaluator.finish(lambda: False)
    assert found is not None
    assert found.round == run.merger.rounds.closed
    assert found.bits_per_byte == pytest.approx(expected(run), rel=1e-6)
    assert of(run, other).finish(lambda: False) is None  # the same round is not evaluated twice
    assert run.transport.island.lease_evaluation("c/x", 1.0)  # the lease has ended


def test_a_failing_evaluation_stops_no_island_and_frees_the_lease(until: Until) -> None:
    def fail(*_: object) -> NoReturn:
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    for evaluates, arrivals, evaluated in ((fail, None, 0), (None, fail, 1)):
        run = created()
        evaluator = of(run, run.island("a"), evaluates, arrivals)
        evaluator.start()
        until(lambda evaluator=evaluator: evaluator._has_failed, "the failure")
        until(lambda run=run: run.transport.island.lease_evaluation("b/x", 1.0), "the lease")
        run.transport.island.lease_evaluation("b/x", 0.0)
        evaluator.stop()
        run.transport.island.heartbeat(samples.heartbeat("a", "done"))
        evaluator.finish(lambda: False)
        assert len(run.transport.reader.evaluations()) == evaluated


def test_a_small_loss_has_its_digits_in_the_log() -> None:
    unit = loss_unit(NO_CORPUS)
    assert Measures(unit.recorded(1.5e-4), 0.5).describe(unit) == "0.000150 loss units on held-out data, 50.0 % right"
