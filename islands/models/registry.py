"""The models that a config can name.

To add a model:

1. Write a function that returns a `Model` (see `interface`) from a compute dtype and a vocabulary. The parts in
   `layers` help, but nothing requires them.
2. Add a row for it to `MODELS`. Another size of the dense transformer needs a row in `llama.DENSE` besides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from archipelago.broker.config import OWN_MODEL, SMALLEST_RATE, ModelConfig
from archipelago.broker.errors import ConfigError
from archipelago.islands.models import moe
from archipelago.islands.models.interface import Model
from archipelago.islands.models.llama import DENSE, Size
from archipelago.islands.models.moe import Routing
from archipelago.islands.models.transformer import Depth, transformer


@dataclass(frozen=True)
class NamedModel:
    """One row of `MODELS`.

    Attributes:
        create: From the compute dtype and the vocabulary to a `Model`. It takes `depth`, which says how to pass through
            the layers.
        learning_rate: The inner learning rate of a config that names none.
    """

    create: Callable[..., Model]
    learning_rate: float = 3e-3


def _dense(size: str, learning_rate: float) -> NamedModel:
    return NamedModel(partial(transformer, DENSE[size]), learning_rate)


#: The learning rates of `tiny` and `tiny-moe` are the best of those that we measured, that of `small` is the only one
#: measured with isotropic merging (docs/results/learning.md). Those of `base` and larger models are from GPT-3
#: (arXiv 2005.14165, table 2.1); we tried no others. In a mixture, `hidden` is the width of one expert: two experts do
#: the work of the MLP of the dense size.
MODELS: dict[str, NamedModel] = {
    "tiny": _dense("tiny", SMALLEST_RATE),
    "small": _dense("small", 1e-3),
    "base": _dense("base", 6e-4),
    "124m": _dense("124m", 6e-4),
    "1b": _dense("1b", 2e-4),
    "tiny-moe": NamedModel(
        partial(moe.transformer, Size(width=64, layers=2, heads=2, hidden=88), Routing(experts=8, choices=2))
    ),
    "small-moe": NamedModel(
        partial(moe.transformer, Size(width=128, layers=5, heads=4, hidden=176), Routing(experts=8, choices=2)), 1e-3
    ),
}


def default_compute_dtype() -> DTypeLike:
    """Return bfloat16 if the default device is an accelerator, else float32. CPUs compute bfloat16 slowly."""
    dtype: DTypeLike = jnp.bfloat16 if jax.default_backend() in ("gpu", "tpu") else jnp.float32
    return dtype


def learning_rate(size: str) -> float:
    """Return the default inner learning rate of the model of that name."""
    return MODELS[size].learning_rate if size in MODELS else SMALLEST_RATE


@cache
def build(config: ModelConfig) -> Model:
    """Return a model by its config. The dtype of activations suits the default device if the config names none.

    Raises:
        ConfigError: There is no such model (`model.unknown`), or only its users' scripts know it (`model.own`).
    """
    size = config.size
    if size == OWN_MODEL:
        raise ConfigError(
            "the model of a run with users' own training scripts is known to those scripts only",
            "`archipelago.create` makes such a run, and `archipelago.join` trains it (docs/guide/your-training.md).",
            code="model.own",
        )
    if size not in MODELS:
        raise ConfigError(
            f"there is no model of size {size!r:.80}", f"Choose one of {', '.join(MODELS)}.", code="model.unknown"
        )
    dtype = default_compute_dtype() if config.compute_dtype == "device" else jnp.dtype(config.compute_dtype)
    return MODELS[size].create(dtype, config.vocabulary, depth=Depth(config.scan_layers, config.recomputes_layers))
