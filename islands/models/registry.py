"""The models that islands train, by name.

Another size is another row of `SIZES`, and of `RATES`. Another architecture is another entry of `BUILDERS`: a function
from the dtype to compute in, and the vocabulary where the model reads text, to a `Model`, of `islands.layers` or of
anything else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from archipelago.broker.config import BYTES, ModelConfig
from archipelago.broker.errors import ConfigError
from archipelago.islands.models import moe, vision
from archipelago.islands.models.interface import Model, Params
from archipelago.islands.models.layers import Size
from archipelago.islands.models.transformer import transformer

__all__ = ["BUILDERS", "SIZES", "Model", "Params", "build", "default_compute_dtype"]

SIZES = {
    "tiny": Size(width=64, layers=2, heads=2, hidden=176),
    "small": Size(width=128, layers=5, heads=4, hidden=344),
    "base": Size(width=512, layers=8, heads=8, hidden=1368),
    "124m": Size(width=896, layers=13, heads=14, hidden=2368),
    "1b": Size(width=2048, layers=20, heads=16, hidden=5504),
}

RATES = {"tiny": 3e-3, "small": 1e-3, "base": 6e-4, "124m": 6e-4, "1b": 2e-4, "small-moe": 1e-3}
"""The inner learning rate that suits a size, SMALLEST_RATE where it is not named. `tiny`: the best of those measured;
`small`: 0.4 % worse than 6e-4 on batches of 256 bytes, and meant for the default's, four times as large
(docs/results/learning.md). From `base` on those of GPT-3 (arXiv 2005.14165, table 2.1). No others were tried."""


def default_compute_dtype() -> DTypeLike:
    """bfloat16 where the default device is an accelerator, float32 on a CPU (which computes bfloat16 slowly)."""
    dtype: DTypeLike = jnp.bfloat16 if jax.default_backend() in ("gpu", "tpu") else jnp.float32
    return dtype


BUILDERS: dict[str, Callable[..., Model]] = {
    **{name: partial(transformer, size) for name, size in SIZES.items()},
    **{name: partial(moe.transformer, size) for name, size in moe.SIZES.items()},
    **{name: partial(vision.classifier, size) for name, size in vision.SIZES.items()},
}


@cache
def build(model: str | ModelConfig, compute_dtype: DTypeLike | None = None) -> Model:
    """That model, computing in `compute_dtype` (default: what suits the default device); by its name alone, of bytes.

    Raises ConfigError that lists the names when there is no such model.
    """
    size, vocabulary = (model, BYTES) if isinstance(model, str) else (model.size, model.vocabulary)
    if size not in BUILDERS:
        raise ConfigError(f"there is no model of size {size!r:.80}", f"Choose one of {', '.join(BUILDERS)}.")
    dtype = default_compute_dtype() if compute_dtype is None else compute_dtype
    if vocabulary == BYTES:
        return BUILDERS[size](dtype)
    if size in vision.SIZES:
        raise ConfigError(
            f"the model {size!r} reads images and has no vocabulary of {vocabulary:,}", "Leave --model.vocabulary out."
        )
    return BUILDERS[size](dtype, vocabulary)
