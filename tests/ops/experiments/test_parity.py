"""`bench parity`: the baselines, and the comparison with them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from archipelago.broker.config import RunConfig
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.islands.data.sharding import lease_share
from archipelago.islands.inner import InnerState
from archipelago.islands.tasks.ours import our_work
from archipelago.islands.tasks.workload import Workload
from archipelago.ops.experiments import baselines, parity
from archipelago.ops.experiments.baselines import Point
from archipelago.ops.experiments.parity import Arm
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


@pytest.mark.full
def test_every_method_trains_on_equal_tokens_and_learns(config: RunConfig, corpus: OpenCorpus, tmp_path: Path) -> None:
    said: list[str] = []
    found = parity.parity(config, [2], 1.0, tmp_path / "out", said.append, seeds=(0, 1))
    rows = {row["what"]: row for row in found["rows"]}
    assert list(rows) == ["2 islands", "one process, 2× steps", "data-parallel, 2× batch", "DiLoCo, 2 replicas"]
    full = 2 * 24 * config.tokens_per_step
    for row in rows.values():
        assert 0.9 * full <= row["tokens"] <= full
        assert row["spread"] > 0, "two seeds"
    for name, losses in found["losses"].items():
        assert len(losses) == 2
        assert rows[name]["bits_per_byte"] == pytest.approx(np.mean(losses))
        assert max(losses) < 0.8 * found["curves"][name][0][1], f"{name} learnt nothing"
    ours, parallel = found["losses"]["2 islands"], found["losses"]["data-parallel, 2× batch"]
    by_seed = np.mean([mine / theirs for mine, theirs in zip(ours, parallel, strict=True)])
    assert rows["2 islands"]["to_parallel"] == pytest.approx(by_seed)
    assert Path(found["picture"]).stat().st_size > 1000
    assert len(said) == 4


def test_a_tuned_baseline_is_the_best_of_its_rates(config: RunConfig, corpus: OpenCorpus) -> None:
    losses = {1.5e-3: 3.0, 3e-3: 2.0, 6e-3: math.nan, 1.2e-2: 1.5}
    asked: list[tuple[int, float]] = []

    def train(work: Workload) -> list[Point]:
        inner = work.config.inner
        asked.append((work.config.seed, inner.peak))
        return [Point(0, 8.0), Point(10, losses[inner.peak])]

    inner = replace(config.inner, learning_rate=3e-3)
    works = [our_work(replace(config, seed=seed, inner=inner), corpus) for seed in (0, 1)]
    arm = parity._baseline("baseline", 2, works, train, tune=True)
    assert (arm.rate, arm.losses) == (1.2e-2, [1.5, 1.5])
    assert asked == [(0, 3e-3), (0, 1.5e-3), (0, 6e-3), (0, 1.2e-2), (1, 1.2e-2)]
    assert parity._baseline("baseline", 2, works, train, tune=False).rate == 3e-3


def test_ratios_are_taken_seed_by_seed() -> None:
    ours, theirs = (
        Arm("arm", 2, tuple([Point(0, 8.0), Point(10, loss)] for loss in losses)) for losses in ([1.0, 4.0], [2.0, 2.0])
    )
    assert ours.ratio(theirs) == (0.5 + 2.0) / 2


def test_the_comparison_has_a_row_a_curve_and_a_picture(
    config: RunConfig, corpus: OpenCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is trained: each method has a fixed loss, and the islands are 10 % worse than data-parallel."""

    def ends_at(loss: float) -> list[Point]:
        return [Point(0, 8.0), Point(50, 4.0), Point(100, loss)]

    monkeypatch.setattr(parity, "islands", lambda *_: (ends_at(2.2), None))
    monkeypatch.setattr(parity, "participation", lambda run: (7, 2.0))
    for name, loss in (("one_process", 1.6), ("data_parallel", 2.0), ("diloco", 2.4)):
        monkeypatch.setattr(parity, name, lambda *_, loss=loss: ends_at(loss))
    settings = replace(config, data=replace(config.data, corpus="small-text"))
    options = parity.ParityOptions(output=tmp_path / "out", islands=(2,), seeds=(0, 1), quick=True, settings=settings)
    assert parity.main(options) == 0
    found = json.loads((tmp_path / "out" / "parity.json").read_text(encoding="utf-8"))
    ours = found["rows"][0]
    assert (ours["what"], ours["rounds"], ours["per_round"], ours["spread"]) == ("2 islands", 7, 2.0, 0.0)
    assert ours["to_parallel"] == pytest.approx(1.1)
    assert [point[0] for point in found["curves"]["2 islands"]] == [0, 50, 100]
    assert (tmp_path / "out" / "parity.png").read_bytes().startswith(b"\x89PNG")
