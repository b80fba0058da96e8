"""Small models of each kind. Their programs compile once for all tests of a process."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from archipelago.broker.config import InnerConfig
from archipelago.islands.data.tokenizer import Tokens
from archipelago.islands.evaluation import BATCH, in_slices
from archipelago.islands.inner import InnerSteps
from archipelago.islands.models import moe
from archipelago.islands.models.interface import Model, Params
from archipelago.islands.models.llama import Size
from archipelago.islands.models.moe import Routing
from archipelago.islands.models.transformer import transformer
from archipelago.islands.sync.arrays import plain_templates
from archipelago.islands.sync.evaluator import Measures, mean_of
from archipelago.islands.tasks.model import TaskModel
from archipelago.islands.tasks.task import NamedTask, Task
from archipelago.islands.tasks.workload import compiled_steps

SIZE = Size(width=16, layers=1, heads=2, hidden=24)


@cache
def compiled(made: Model) -> Model:
    """Return the model with a compiled loss and compiled logits. Another program cannot call these."""
    return made._replace(loss=jax.jit(made.loss), logits=jax.jit(made.logits))


@cache
def dense() -> Model:
    return transformer(SIZE, jnp.float32)


@cache
def experts(routing: Routing) -> Model:
    return moe.transformer(SIZE, routing, jnp.float32)


@cache
def as_task(model: Model) -> TaskModel:
    """Return a model as our worker trains it, without a corpus."""
    task = Task(model.init, model.training_loss, lambda _: (), shapes=plain_templates(model.tensors))
    return TaskModel(NamedTask(task), 0)


def steps_of(model: Model, inner: InnerConfig) -> InnerSteps:
    """Return the inner steps of a model as our worker makes them."""
    return compiled_steps(as_task(model), inner)


def params_of(model: Model, seed: int = 0) -> Params:
    """Return random parameters of about the size of initial ones. `init` would compile a program for each shape."""
    random = np.random.default_rng(seed)
    params: Params = {}
    for tensor in model.tensors:
        values = random.normal(size=tensor.shape).astype(np.float32)
        is_scale = tensor.name.endswith("norm.scale")
        params[tensor.name] = jnp.asarray(1 + 0.1 * values if is_scale else values / np.sqrt(tensor.shape[0] * 1.0))
    return params


def tokens(batch: int, time: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, 256, (batch, time), dtype=np.uint8))


def measures(model: Model, held_out_NxT1: Tokens, params: Params, bytes_per_token: float = 1.0) -> Measures:
    """Return bits and accuracy of a whole evaluation."""
    return mean_of(in_slices(model, held_out_NxT1, BATCH, bytes_per_token)(params))
