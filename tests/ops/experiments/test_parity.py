"""`bench parity`: islands of several numbers and intervals are compared with data-parallel training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from archipelago.broker.config import MergeConfig, RunConfig
from archipelago.broker.errors import ConfigError
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.ops.experiments import baselines, island_runs, parity
from archipelago.ops.experiments.parity import Arm
from archipelago.ops.experiments.trial import CurvePoint
from tests.failing import failing
from tests.ops.experiments.trials import task_work
from tests.small import SMALL


@pytest.fixture
def config() -> RunConfig:
    """Return the settings of a run of 24 steps, with few programs to compile."""
    data, inner = replace(SMALL.data, corpus="small-text"), replace(SMALL.inner, steps=24, warmup_steps=4)
    return replace(
        SMALL, data=data, inner=inner, sync=replace(SMALL.sync, fragments=1), merge=MergeConfig("average", "average")
    )


def test_ratios_are_taken_seed_by_seed() -> None:
    ours, theirs = (
        Arm("arm", 2, tuple([CurvePoint(0, 8.0), CurvePoint(10, loss)] for loss in losses))
        for losses in ([1.0, 4.0], [2.0, 2.0])
    )
    assert ours.ratio(theirs) == (0.5 + 2.0) / 2


def test_islands_of_a_task_are_compared_at_equal_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "EVALUATIONS", 3)
    found = parity.parity(task_work(), (2,), (4, 12), 1.0)
    assert [(row["islands"], row["interval"]) for row in found["rows"]] == [(2, 4), (2, 12)]
    for row in found["rows"]:
        assert row["tokens"] == pytest.approx(row["islands"] * 48 * 10, rel=0.1)
        assert 0.5 < row["loss"] < 1.0, "the untrained kernel is 1"
        assert 0.5 < row["data_parallel"] < 1.0
        assert row["to_parallel"] == pytest.approx(row["loss"] / row["data_parallel"])
    often, rarely = (row["rounds"] for row in found["rows"])
    assert often > 2 * rarely > 2
    assert found["unit"] == "loss units"
    assert len(found["curves"]["2 islands, H = 4"]) == len(found["curves"]["data-parallel, 2× batch"]) == 4


def test_a_negative_loss_has_no_ratios_and_the_interval_is_that_of_the_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ends_at(loss: float) -> list[CurvePoint]:
        return [CurvePoint(0, 0.0), CurvePoint(100, loss / 2), CurvePoint(200, loss)]

    monkeypatch.setattr(island_runs, "islands", lambda *_: (ends_at(-1.0), None))
    monkeypatch.setattr(island_runs, "participation", lambda run: (7, 2.0))
    monkeypatch.setattr(baselines, "data_parallel", lambda *_, **__: ends_at(-2.0))
    (row,) = parity.parity(task_work(), (2,), (), 1.0)["rows"]
    assert (row["interval"], row["rounds"]) == (4, 7)
    assert row["to_parallel"] != row["to_parallel"], "it is not a number"
    assert row["loss"] > row["data_parallel"]


def test_a_quick_comparison_makes_few_steps(
    config: RunConfig, corpus: OpenCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def compared(*args: Any) -> dict[str, Any]:
        asked.append(args)
        return {"rows": [{"islands": 3}]}

    monkeypatch.setattr(parity, "parity", compared)
    options = parity.ParityOptions(output=tmp_path, intervals=(12, 24), quick=True, settings=config)
    assert parity.main(options) == 0
    ((work, counts, intervals, *_),) = asked
    assert (counts, intervals, work.config.inner.steps) == ((3,), (12, 24), 400)


def test_what_cannot_be_compared_is_refused() -> None:
    with failing(ConfigError, "task.evaluate"):
        parity.parity(task_work(evaluate=None), (2,), (), 1.0)
