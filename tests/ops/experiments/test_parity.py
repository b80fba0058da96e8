"""`bench parity`: islands are compared with their baselines, and with other numbers and intervals of islands."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archipelago.broker.config import RunConfig
from archipelago.broker.errors import ConfigError
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.islands.tasks.ours import our_work
from archipelago.islands.tasks.workload import Workload
from archipelago.ops.experiments import baselines, parity, sync_cost
from archipelago.ops.experiments.baselines import Point
from archipelago.ops.experiments.parity import Arm
from tests.failing import failing
from tests.ops.experiments.trials import task_work
from tests.small import SMALL


@pytest.fixture
def config() -> RunConfig:
    return replace(
        SMALL, data=replace(SMALL.data, corpus="small-text"), inner=replace(SMALL.inner, steps=24, warmup_steps=4)
    )


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


# -- numbers of islands, and intervals --------------------------------------------------------------------------------


def test_islands_of_a_task_are_compared_at_equal_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "EVALUATIONS", 3)
    said: list[str] = []
    found = sync_cost.sync_cost(task_work(), (1, 2), (4, 12), 1.0, tmp_path, said.append)
    assert [(row["islands"], row["interval"]) for row in found["rows"]] == [(1, 4), (1, 12), (2, 4), (2, 12)]
    for row in found["rows"]:
        assert row["tokens"] == pytest.approx(row["islands"] * 48 * 10, rel=0.1)
        assert 0.5 < row["loss"] < 1.0, "the untrained kernel is 1"
        assert 0.5 < row["data_parallel"] < 1.0
        assert row["to_parallel"] == pytest.approx(row["loss"] / row["data_parallel"])
    often, rarely = (row["rounds"] for row in found["rows"][2:])
    assert often > 2 * rarely > 2
    assert found["unit"] == "loss units"
    assert len(found["curves"]["2 islands, H = 4"]) == len(found["curves"]["data-parallel, 2× batch"]) == 4
    assert Path(found["picture"]).read_bytes().startswith(b"\x89PNG")
    assert len(said) == 6


def test_a_negative_loss_has_no_ratios_and_the_interval_is_that_of_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends_at(loss: float) -> list[Point]:
        return [Point(0, 0.0), Point(100, loss / 2), Point(200, loss)]

    monkeypatch.setattr(sync_cost, "islands", lambda *_: (ends_at(-1.0), None))
    monkeypatch.setattr(sync_cost, "participation", lambda run: (7, 2.0))
    monkeypatch.setattr(sync_cost, "data_parallel", lambda *_: ends_at(-2.0))
    (row,) = sync_cost.sync_cost(task_work(), (2,), (), 1.0, tmp_path, lambda _: None)["rows"]
    assert (row["interval"], row["rounds"]) == (4, 7)
    assert row["to_parallel"] != row["to_parallel"], "it is not a number"
    assert row["loss"] > row["data_parallel"]


def test_intervals_of_our_models_are_compared_with_the_flags_of_the_verb(
    config: RunConfig, corpus: OpenCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def compared(*args: Any) -> dict[str, Any]:
        asked.append(args)
        return {"rows": [{"islands": 3}]}

    monkeypatch.setattr(sync_cost, "sync_cost", compared)
    options = parity.ParityOptions(output=tmp_path, intervals=(12, 24), quick=True, settings=config)
    assert parity.main(options) == 0
    ((work, counts, intervals, *_),) = asked
    assert (counts, intervals, work.config.inner.steps) == ((3,), (12, 24), 400)


def test_what_cannot_be_compared_is_refused(config: RunConfig, tmp_path: Path) -> None:
    with failing(ConfigError, "task.evaluate"):
        sync_cost.sync_cost(task_work(evaluate=None), (2,), (), 1.0, tmp_path, lambda _: None)
    with failing(ConfigError, "parity.tune"):
        parity.main(parity.ParityOptions(intervals=(12, 24), tune=True, settings=config))
