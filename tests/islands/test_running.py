"""An island's metrics and curve points."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from archipelago.broker.config import InnerConfig
from archipelago.broker.observe.metrics import new_registry
from archipelago.islands import inner, running
from archipelago.islands.worker import Island
from tests.harness import tiny


def test_the_exported_learning_rate_is_that_of_the_inner_step() -> None:
    for warmup_steps in (0, 1, 7, 1000):
        config = InnerConfig(steps=100, learning_rate=0.5, warmup_steps=warmup_steps, final_share=0.25)
        schedule = inner.learning_rate(config)
        for step in (0, 1, 6, 7, 8, 50, 99, 100, 150):
            with jax.numpy_dtype_promotion("standard"):  # as the inner step computes it
                expected = float(schedule(jnp.asarray(step, jnp.int32)))
            assert config.rate_at(step) == pytest.approx(expected, rel=1e-5), (warmup_steps, step)


def scraped(island: Island) -> dict[str, float]:
    registry = new_registry()
    registry.register(running.IslandCollector(island))
    text = generate_latest(registry).decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert {tuple(sorted(sample.labels.items())) for sample in samples} <= {(("island", "a"), ("run", "tiny"))}
    return {sample.name.removeprefix("archipelago_island_"): sample.value for sample in samples}


def test_a_training_island_exports_all_metrics() -> None:
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
    shown = scraped(island)
    assert shown["steps_total"] == 9
    assert shown["tokens_total"] == island.totals.tokens > 0
    assert shown["sent_contributions_total"] == island.link.uplink.contributions > 0
    assert shown["sent_bytes_total"] == island.link.uplink.bytes_up > 0
    assert shown["link_up"] == 1
    run.clock.now = island.link.uplink.arrived_at + 7.0
    assert scraped(island)["snapshot_age_seconds"] == 7.0
