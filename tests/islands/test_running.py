"""An island's metrics and curve points."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest

from archipelago.broker.config import InnerConfig
from archipelago.islands import inner, running
from tests.harness import tiny


def test_the_exported_learning_rate_is_that_of_the_inner_step() -> None:
    for warmup_steps in (0, 1, 7, 1000):
        config = InnerConfig(steps=100, learning_rate=0.5, warmup_steps=warmup_steps, final_share=0.25)
        schedule = inner.learning_rate(config, config.steps)
        for step in (0, 1, 6, 7, 8, 50, 99, 100, 150):
            with jax.numpy_dtype_promotion("standard"):  # as the inner step computes it
                expected = float(schedule(jnp.asarray(step, jnp.int32)))
            assert config.rate_at(step) == pytest.approx(expected, rel=1e-5), (warmup_steps, step)


def test_a_training_island_gives_a_point_of_its_curves() -> None:
    run, island = tiny.played(9)
    run.pass_boundary(island)
    found = running.point(island)
    assert found is not None
    step, values = found
    assert step == island.ledger.global_step == 9
    assert set(values) == {"loss", "learning_rate", "tokens_per_second", "step_seconds", "staleness"}
    assert values["loss"] == pytest.approx(island.losses.mean / math.log(2.0))
    assert math.isfinite(values["loss"])
    assert values["learning_rate"] == pytest.approx(0.01, rel=0.01)
