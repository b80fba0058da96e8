"""Check the options that experiments of `archipelago bench` share, and shorten their configs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from archipelago.broker.config import RunConfig
from archipelago.broker.errors import ConfigError

ISLANDS_MAX = 64
QUICK_STEPS, QUICK_WARMUP_STEPS = 400, 40


def require_counts(flag: str, counts: Sequence[int], most: int = ISLANDS_MAX) -> None:
    """Raise ConfigError unless all numbers of islands are from 1 to `most`, and there is at least one."""
    if not counts or not all(1 <= count <= most for count in counts):
        shown = " ".join(map(str, counts)) or "empty"
        raise ConfigError(f"{flag} cannot be {shown}", f"Give numbers from 1 to {most}.", code="config.islands")


def require_slow(slow: float) -> None:
    """Raise ConfigError unless `slow` is a factor of at least 1."""
    if not slow >= 1:
        raise ConfigError(f"--slow cannot be {slow}", "Give a factor of at least 1.", code="config.slow")


def shortened(config: RunConfig) -> RunConfig:
    """Return the config of a quick comparison."""
    inner = dataclasses.replace(config.inner, steps=QUICK_STEPS, warmup_steps=QUICK_WARMUP_STEPS)
    return dataclasses.replace(config, inner=inner)
