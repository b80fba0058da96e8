"""A small run, and its inner steps compiled once for all tests with the same inner settings."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from archipelago.broker.config import InnerConfig, ModelConfig, RunConfig
from archipelago.islands.inner import InnerSteps
from archipelago.islands.models.registry import build
from tests.islands.models.mini import steps_of

_DEFAULT = RunConfig()
#: The configuration of a run that takes a second or two.
SMALL = replace(
    _DEFAULT,
    data=replace(_DEFAULT.data, sequence_length=32, batch_size=4, shards=8, held_out_sequences=32),
    inner=replace(_DEFAULT.inner, steps=48, warmup_steps=4),
    sync=replace(_DEFAULT.sync, interval=12, fragments=6),
)


def compiled(config: RunConfig) -> InnerSteps:
    """Return the compiled inner steps of the tiny model."""
    return _compiled(config.inner)


@cache
def _compiled(inner: InnerConfig) -> InnerSteps:
    return steps_of(build(ModelConfig("tiny")), inner)
