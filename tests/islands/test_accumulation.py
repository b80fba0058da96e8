"""Gradient accumulation compared with the gradients of whole batches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from archipelago.broker.config import InnerConfig
from archipelago.broker.errors import ConfigError
from archipelago.islands.accumulation import accumulated
from archipelago.islands.inner import begin, compile_steps, gradient
from archipelago.islands.models.registry import build
from tests.failing import failing

TINY = build("tiny")
#: Two batches of twelve sequences.
TOKENS_nxBxT1 = np.random.default_rng(3).integers(0, 256, (2, 12, 97), np.uint8)


def test_gradients_of_parts_equal_those_of_the_whole_batch() -> None:
    params, tokens = TINY.init(0), TOKENS_nxBxT1[0]
    whole, loss = jax.jit(gradient(TINY))(params, tokens)
    parts, mean_loss = jax.jit(accumulated(gradient(TINY), 3))(params, tokens)
    assert float(mean_loss) == pytest.approx(float(loss), rel=1e-6)
    for name, expected in whole.items():
        np.testing.assert_allclose(parts[name], expected, rtol=1e-3, atol=1e-6, err_msg=name)


def test_inner_steps_in_parts_take_less_memory() -> None:
    """The losses of two steps differ by rounding only."""
    state, tokens, step = begin(InnerConfig(), TINY.init(0)), jnp.asarray(TOKENS_nxBxT1), jnp.int32(0)
    compiled = {
        parts: compile_steps(TINY, InnerConfig(micro_batches=parts)).lower(state, tokens, step).compile()  # type: ignore[attr-defined]
        for parts in (1, 6)
    }
    temporary = {parts: program.memory_analysis().temp_size_in_bytes for parts, program in compiled.items()}
    assert temporary[6] < 0.4 * temporary[1]
    losses = {parts: program(jax.tree.map(jnp.copy, state), tokens, step)[1] for parts, program in compiled.items()}
    np.testing.assert_allclose(losses[6], losses[1], rtol=1e-5)


def test_a_batch_that_has_no_equal_parts_is_refused() -> None:
    with failing(ConfigError, "config.micro-batches"):
        jax.eval_shape(accumulated(gradient(TINY), 5), TINY.init(0), TOKENS_nxBxT1[0])
