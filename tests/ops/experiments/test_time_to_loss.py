"""Time to loss: who works for how long, and what the numbers are of."""

from __future__ import annotations

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


@pytest.mark.parametrize("scavenged", [0, 3])
def test_islands_train_on_as_many_tokens_in_less_time(config: RunConfig, corpus: OpenCorpus, scavenged: int) -> None:
    """Against those who wait: with one of three at a third of the speed they are done in 1.29 of a run's time."""
    curve = time_to_loss.islands(config, corpus, 3, 3.0, scavenged)
    tokens = 3 * config.inner.steps * config.tokens_per_step
    assert curve[-1].tokens == pytest.approx(tokens, rel=0.12), "who comes and goes does it at step boundaries"
    assert curve[-1].seconds == pytest.approx(global_steps(config.inner.steps, 3, 3.0, scavenged), abs=9.0), (
        "the slow one hears of the end at one of its own boundaries, and makes a last step"
    )
    assert [mark.seconds for mark in curve] == sorted(mark.seconds for mark in curve)
    assert curve[-1].bits_per_byte < 0.9 * curve[0].bits_per_byte


def test_rows_say_who_is_faster_and_how_good(config: RunConfig, corpus: OpenCorpus, tmp_path: Path) -> None:
    found = time_to_loss.time_to_loss(config, 3, 3.0, [3], [0, 1], tmp_path, lambda _: None)
    rows = {row["what"]: row for row in found["rows"]}
    longer = rows["3 islands, 3 more for half of the run, as long as without"]
    waiting, ours, more = rows["DiLoCo, 3 replicas"], rows["3 islands"], rows["3 islands, 3 more for half of the run"]
    assert waiting["time"] == pytest.approx(3.0 * config.inner.steps)
    assert more["time"] < ours["time"] < waiting["time"]
    assert all(row["time_to_target"] <= row["time"] for row in rows.values()), (
        "the target is one that all of them reach"
    )
    assert waiting["loss_to_diloco"] == 1.0
    assert longer["time"] == pytest.approx(ours["time"], abs=9.0)
    assert longer["tokens"] > 1.3 * ours["tokens"]
    assert waiting["spread"] > 0.0, "two seeds"
    assert (tmp_path / "time.png").stat().st_size > 10_000
