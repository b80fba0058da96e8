"""How an island computes its inner steps if that differs from the run's settings, because its device has less memory.

Such an island contributes the same up to rounding, so it shares a run with the others.
"""

from __future__ import annotations

from dataclasses import replace

from archipelago.broker.config import RunConfig
from archipelago.broker.errors import ConfigError


def settings_here(
    config: RunConfig, micro_batches: int | None, rematerialise: bool | None, batch_size: int = 0
) -> RunConfig:
    """Return the settings by which this island computes.

    Args:
        config: The settings of the run.
        micro_batches: Replaces `inner.micro_batches`; None for the run's.
        rematerialise: Replaces `model.rematerialise`; None for the run's.
        batch_size: The sequences of this island's inner step; 0 for those of the run.

    Raises:
        ConfigError: They cannot be used here (`config.micro-batches`, `config.own-memory`).
    """
    inner = config.inner if micro_batches is None else replace(config.inner, micro_batches=micro_batches)
    model = config.model if rematerialise is None else replace(config.model, rematerialise=rematerialise)
    own = replace(config, inner=inner, model=model)
    size = batch_size or own.data.batch_size
    if inner.micro_batches < 1 or (not own.has_own_loops and size % inner.micro_batches):
        raise ConfigError(
            f"a batch of {size:,} sequences cannot be computed in {inner.micro_batches:,} equal parts",
            "Set --micro-batches to a divisor of the batch size.",
            code="config.micro-batches",
        )
    if own == config:
        return config
    if model != config.model and own.has_own_loops:
        raise ConfigError(
            "only a task itself can rematerialise its layers",
            "Use jax.checkpoint in its loss.",
            code="config.own-memory",
        )
    if config.record:
        raise ConfigError(
            "this run is recorded, to be repeated to the same bits, so all of its islands compute by its settings",
            "Leave out --micro-batches and --rematerialise.",
            code="config.own-memory",
        )
    return own
