"""`bench time`: the time of each method, and its loss at the end."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from archipelago.broker.config import RunConfig
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.ops.experiments import time_to_loss
from archipelago.ops.experiments.time_to_loss import Mark, global_steps, time_at
from tests.small import SMALL


@pytest.fixture
def config() -> RunConfig:
    return replace(
        SMALL, data=replace(SMALL.data, corpus="small-text"), inner=replace(SMALL.inner, steps=48, warmup_steps=4)
    )


def test_the_run_is_as_long_as_its_tokens_need() -> None:
    assert global_steps(300, 4, slow=1.0) == 300
    assert global_steps(300, 4, slow=3.0) == 360, "4 / (3 + 1/3)"
    assert global_steps(300, 4, slow=1.0, scavenged=4) == 200, "eight islands for half of the run, four for the rest"


def test_a_target_is_reached_between_two_marks() -> None:
    curve = [Mark(0.0, 0, 8.0), Mark(10.0, 1, 4.0), Mark(20.0, 2, 3.0)]
    assert time_at(curve, 3.5) == pytest.approx(15.0)
    assert time_at(curve, 9.0) == 0.0
    assert time_at(curve, 2.9) == math.inf


@pytest.mark.full
def test_rows_compare_time_and_loss(config: RunConfig, corpus: OpenCorpus, tmp_path: Path) -> None:
    found = time_to_loss.time_to_loss(config, 3, 3.0, [3], [0], tmp_path, lambda _: None)
    rows = {row["what"]: row for row in found["rows"]}
    longer = rows["3 islands, 3 more for half of the run, as long as without"]
    waiting, ours, more = rows["DiLoCo, 3 replicas"], rows["3 islands"], rows["3 islands, 3 more for half of the run"]
    assert waiting["time"] == pytest.approx(3.0 * config.inner.steps)
    assert more["time"] < ours["time"] < waiting["time"]
    assert all(row["time_to_target"] <= row["time"] for row in rows.values()), "all of them reach the target"
    assert waiting["loss_to_diloco"] == 1.0
    steps, tokens = config.inner.steps, 3 * config.inner.steps * config.tokens_per_step
    for row, extra in ((ours, 0), (more, 3)):
        assert row["tokens"] == pytest.approx(tokens, rel=0.12), "islands join and leave at step boundaries"
        assert row["time"] == pytest.approx(global_steps(steps, 3, 3.0, extra), abs=9.0), "the slow one is late"
    assert longer["time"] == pytest.approx(ours["time"], abs=9.0)
    assert longer["tokens"] > 1.3 * ours["tokens"]
    assert (tmp_path / "time.png").stat().st_size > 10_000


def test_the_comparison_without_training(
    config: RunConfig, corpus: OpenCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends_at(seconds: float, loss: float) -> list[Mark]:
        return [Mark(0.0, 0, 8.0), Mark(seconds, 100, loss)]

    monkeypatch.setattr(time_to_loss, "_waiting", lambda *_: ends_at(30.0, 4.0))
    monkeypatch.setattr(time_to_loss, "islands", lambda work, *_: ends_at(10.0, 1.5 + work.config.seed))
    options = time_to_loss.TimeOptions(islands=3, slow=3.0, scavenged=(3,), seeds=(0, 1), settings=config)
    assert time_to_loss.main(options) == 0
    found = json.loads(Path("runs/bench/time.json").read_text(encoding="utf-8"))
    rows = {row["what"]: row for row in found["rows"]}
    assert found["target"] == 4.0, "the best loss that every way reaches"
    assert rows["3 islands"]["time_to_target"] == pytest.approx(10.0 * 4 / 6)
    assert rows["3 islands"]["loss_to_diloco"] == 0.5
    assert rows["3 islands"]["spread"] == pytest.approx(math.sqrt(0.5)), "losses of 1.5 and 2.5"
    assert rows["DiLoCo, 3 replicas"]["spread"] == 0.0, "the same loss with both seeds"
    assert Path("runs/bench/time.png").stat().st_size > 10_000
