"""The baselines of islands: their arithmetic, the data that they read, and the process that `up` starts to compare."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from archipelago.broker.config import RunConfig
from archipelago.broker.errors import ConfigError
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.islands.data.sharding import lease_share
from archipelago.islands.inner import InnerState
from archipelago.islands.tasks.ours import our_work
from archipelago.islands.tasks.shards import TaskRun
from archipelago.ops.experiments import baselines
from archipelago.ops.experiments.baselines import AllShards, Point, Reader
from archipelago.ops.experiments.single_process import SingleProcessOptions, run
from tests.failing import failing
from tests.islands.tasks.task_runs import BATCHES, EXAMPLES, SHARDS
from tests.ops.experiments.trials import task_work
from tests.small import SMALL


@pytest.fixture
def config() -> RunConfig:
    return replace(
        SMALL, data=replace(SMALL.data, corpus="small-text"), inner=replace(SMALL.inner, steps=24, warmup_steps=4)
    )


def quiet(_: Point) -> None:
    pass


@pytest.mark.full
def test_diloco_with_one_replica_and_plain_averaging_is_one_process(config: RunConfig, corpus: OpenCorpus) -> None:
    """With rate 1 and no momentum, the parameters become the replica's own for every H."""
    # With this interval, both ways run the same compiled program.
    config = replace(config, sync=replace(config.sync, interval=baselines.CHUNK_STEPS))
    alone = baselines.one_process(our_work(config, corpus), 24 * config.tokens_per_step, quiet)
    found = baselines.diloco(our_work(config, corpus), 1, quiet, rate=1.0, momentum=0.0)
    assert found[-1].tokens == alone[-1].tokens
    assert found[-1].bits_per_byte == pytest.approx(alone[-1].bits_per_byte, rel=1e-3)
    assert found[-1].bits_per_byte < 0.8 * found[0].bits_per_byte
    assert found[-1].test_bits_per_byte == pytest.approx(alone[-1].test_bits_per_byte, rel=1e-3)
    assert found[-1].test_bits_per_byte != found[-1].bits_per_byte, "it is another text"


def test_replicas_read_separate_shards(config: RunConfig) -> None:
    leases = [lease_share(config.data.shards, config.seed, worker, 3) for worker in range(3)]
    shards = config.data.shards
    passes = [[lease() for _ in range(len(range(worker, shards, 3)))] for worker, lease in enumerate(leases)]
    names = [place.shard for places in passes for place in places]
    assert sorted(map(int, names)) == list(range(shards))
    assert leases[0]().pass_number == 1, "then all over again"


def test_diloco_takes_one_nesterov_step_on_the_mean_of_the_replicas(
    config: RunConfig, corpus: OpenCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare with the recursion by hand, for inner steps that add known numbers."""
    moved = iter([1.0, 3.0, 2.0, 2.0])

    def inner(state: InnerState, batch: jax.Array, step: jax.Array) -> tuple[InnerState, jax.Array]:
        by = next(moved)
        return state._replace(params=jax.tree.map(lambda x: x - by, state.params)), jnp.zeros(12)

    seen: list[float] = []

    def scored(tokens: int, params: dict[str, jax.Array]) -> Point:
        seen.append(float(params["embedding"][0, 0]))
        return Point(tokens, 0.0)

    monkeypatch.setattr(baselines, "scoring", lambda work: scored)
    outer = optax.sgd(0.5, momentum=0.5, nesterov=True)
    list(baselines._diloco(replace(our_work(config, corpus), steps=inner), 2, outer, quiet))
    # First round: Δ = 2, b = 2, so −½(2 + 1) = −1.5. Second round: Δ = 2, b = 3, so −½(2 + 1.5) = −1.75.
    np.testing.assert_allclose(np.diff(seen), [-1.5, -1.75], rtol=1e-4)


def test_data_parallel_takes_the_mean_of_the_gradients() -> None:
    """Two workers with the halves of a batch make the steps of one with the whole batch."""

    def wholes(run: TaskRun) -> Iterator[dict[str, Any]]:
        for shard in run.shards(SHARDS):
            for number in range(0, BATCHES, 2):
                yield {"x": EXAMPLES[shard.number, number : number + 2].reshape(4, 3)}

    two = baselines.data_parallel(task_work(), 2, quiet, 8)
    one = baselines.data_parallel(task_work(batches=wholes, tokens=20), 1, quiet, 8)
    assert two[-1].tokens == one[-1].tokens
    assert two[-1].bits_per_byte < two[0].bits_per_byte
    assert two[-1].bits_per_byte == pytest.approx(one[-1].bits_per_byte, rel=1e-5)


def test_readers_without_a_run_share_all_shards() -> None:
    """They go on with the next pass, and never read one without a lease."""
    readers = [TaskRun(f"r{number}", number, 0, AllShards(number, 3)).shards(SHARDS) for number in range(3)]
    once = [next(readers[number % 3]) for number in range(SHARDS)]
    assert sorted(shard.number for shard in once) == list(range(SHARDS))
    assert {shard.pass_number for shard in once} == {0}
    reader = Reader(task_work())
    reader.next(3 * SHARDS * BATCHES)
    assert reader.tokens == 3 * SHARDS * BATCHES * 10


# -- the process that `up` starts -------------------------------------------------------------------------------------


def test_the_curve_is_written(config: RunConfig, corpus: OpenCorpus, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(work: Any, tokens: int, progress: Any, params: Any) -> list[Point]:
        points = [Point(0, 8.0), Point(tokens, 2.0)]
        for point in points:
            progress(point)
        return points

    monkeypatch.setattr(baselines, "one_process", trained)
    assert run(SingleProcessOptions(tokens=640, output=Path("curve.json"), settings=config)) == 0
    assert json.loads(Path("curve.json").read_text(encoding="utf-8")) == {
        "tokens": 640,
        "curve": [[0, 8.0], [640, 2.0]],
    }


def test_tokens_must_be_positive(config: RunConfig) -> None:
    with failing(ConfigError, "config.tokens"):
        run(SingleProcessOptions(tokens=0, output=Path("curve.json"), settings=config))
