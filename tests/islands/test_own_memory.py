"""The settings of an island whose device has less memory than those of others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from archipelago.broker.config import OWN_MODEL, DataConfig, ModelConfig, RunConfig
from archipelago.broker.errors import ConfigError
from archipelago.islands.own_memory import settings_here
from tests.failing import failing

CONFIG = RunConfig(data=DataConfig(batch_size=8))
TASK = replace(CONFIG, model=ModelConfig(OWN_MODEL))


def test_an_island_computes_by_the_settings_of_the_run_unless_it_has_its_own() -> None:
    assert settings_here(CONFIG, None, None) is CONFIG
    own = settings_here(CONFIG, 4, True)
    assert (own.inner.micro_batches, own.model.rematerialise) == (4, True)
    assert replace(own, inner=CONFIG.inner, model=CONFIG.model) == CONFIG
    assert settings_here(own, 1, False) == CONFIG


def test_a_task_knows_its_batches_itself() -> None:
    assert settings_here(TASK, 3, None).inner.micro_batches == 3


@pytest.mark.parametrize(
    ("config", "micro_batches", "rematerialise", "code"),
    [
        (CONFIG, 3, None, "config.micro-batches"),
        (TASK, 0, None, "config.micro-batches"),
        (TASK, None, True, "config.own-memory"),
        (replace(CONFIG, record=True), 2, None, "config.own-memory"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(
    config: RunConfig, micro_batches: int | None, rematerialise: bool | None, code: str
) -> None:
    with failing(ConfigError, code):
        settings_here(config, micro_batches, rematerialise)
