"""One island with average merge and outer SGD at rate 1 equals plain training, and runs repeat, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from archipelago.broker.codecs import CODECS
from archipelago.broker.config import AdoptConfig, MergeConfig, OuterConfig, RunConfig, WireConfig
from archipelago.broker.redis.transport import connect
from archipelago.islands.data.batches import Batches
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.islands.data.sharding import lease_all
from archipelago.islands.inner import begin
from archipelago.islands.models.registry import Params, build
from archipelago.islands.tasks.ours import our_work
from archipelago.ops.experiments.virtual_time import VirtualRun
from tests.small import compiled
from tests.tiers import examples

PLAIN = {
    "merge": MergeConfig(embedding="average", rest="average", clip=0.0),
    "outer": OuterConfig(rule="sgd", learning_rate=1.0),
    "adopt": AdoptConfig(rule="carry"),
}


#: The codecs of the quick tier: an exact one and a lossy one.
QUICK = ("float32", "int4")


def plain_training(config: RunConfig, corpus: OpenCorpus, steps: int) -> Params:
    """Train with the inner steps alone, without an island or a merger."""
    compiled_steps = compiled(config)
    state = begin(config.inner, build("tiny").init(config.seed))
    batches = Batches(corpus.train, config, lease_all(config.data.shards, config.seed))
    for step in range(steps):
        state, _ = compiled_steps(state, jnp.asarray(batches.next(1)), jnp.asarray(step, jnp.int32))
    return state.params


def assert_same_bits(one: Params, other: Params) -> None:
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(np.asarray(one[name]), np.asarray(other[name]), err_msg=name)


@pytest.mark.parametrize(
    "codec", [codec if codec in QUICK else pytest.param(codec, marks=pytest.mark.full) for codec in sorted(CODECS)]
)
def test_one_island_equals_plain_training(config: RunConfig, corpus: OpenCorpus, codec: str) -> None:
    """This holds for lossy codecs, too: the island keeps the rounding error and sends it later."""
    wire = WireConfig(up=codec, down="float32")  # type: ignore[arg-type]
    config = replace(config, wire=wire, **PLAIN)  # type: ignore[arg-type]
    run = VirtualRun(our_work(config, corpus), [1.0])
    island = run.islands["island-0"]
    run.advance_until(lambda: island.totals.steps >= config.inner.steps)
    assert run.merger.rounds.closed >= config.inner.steps // 2 - 2, "the island did not sync"
    assert_same_bits(island.inner.params, plain_training(config, corpus, config.inner.steps))


@settings(max_examples=examples(5), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(delays=st.lists(st.integers(0, 3), min_size=4, max_size=8))
def test_late_snapshots_do_not_change_the_result(config: RunConfig, corpus: OpenCorpus, delays: list[int]) -> None:
    config = replace(config, wire=WireConfig(up="float32", down="float32"), **PLAIN)  # type: ignore[arg-type]
    run = VirtualRun(our_work(config, corpus), [1.0])
    island = run.islands["island-0"]
    receive, turn = island.link.pump_receive, iter(delays * 100)

    def sometimes(block_seconds: float = 0.0) -> None:
        if next(turn) == 0:
            receive(block_seconds)

    island.link.pump_receive = sometimes  # type: ignore[method-assign]
    steps = 24
    run.advance_until(lambda: island.totals.steps >= steps)
    assert_same_bits(island.inner.params, plain_training(config, corpus, steps))


def test_the_merger_holds_the_same_parameters(config: RunConfig, corpus: OpenCorpus) -> None:
    """This holds after the last contributions, up to the rounding of one subtraction."""
    config = replace(config, wire=WireConfig(up="float32", down="float32"), **PLAIN)  # type: ignore[arg-type]
    run = VirtualRun(our_work(config, corpus), [1.0])
    run.finish()
    expected = plain_training(config, corpus, config.inner.steps)
    for rows, fragment in zip(run.manifest.layout, run.merger.fragments, strict=True):
        for tensor, offset in rows:
            found = np.asarray(fragment.params_N[offset : offset + tensor.size]).reshape(tensor.shape)
            np.testing.assert_allclose(found, np.asarray(expected[tensor.name]), rtol=0, atol=1e-6)


def test_the_same_run_gives_the_same_bits(config: RunConfig, corpus: OpenCorpus) -> None:
    digests = []
    for attempt in range(2):
        name = f"again-{attempt}"
        run = VirtualRun(our_work(config, corpus), [1.0, 1.1, 2.5], run=name)
        run.finish()
        digests.append([entry.digest for entry in run.transport.reader.tape(1000)])
    assert digests[0] == digests[1]
    assert len(digests[0]) > 6


def test_fakeredis_changes_no_bit(config: RunConfig, corpus: OpenCorpus) -> None:
    """Redis carries the same bits that the broker in memory passes by reference."""
    tapes = []
    for connection in (None, partial(connect, "fakeredis://bits", "bits")):
        run = VirtualRun(our_work(config, corpus), [1.0, 1.3], connect=connection, run="bits")
        run.finish()
        entries = run.transport.reader.tape(1000)
        tapes.append([(e.round, e.digest, [replace(m, entry="") for m in e.members]) for e in entries])
    assert tapes[0] == tapes[1]
