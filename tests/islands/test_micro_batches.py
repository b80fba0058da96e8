"""Gradient accumulation: inner steps whose batches are computed in parts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from archipelago.broker.config import InnerConfig
from archipelago.broker.errors import ConfigError
from archipelago.islands.inner import accumulated, begin
from tests.failing import failing
from tests.islands.models import mini

TINY = mini.dense()
#: Two batches of twelve sequences.
TOKENS_nxBxT1 = np.random.default_rng(3).integers(0, 256, (2, 12, 97), np.uint8)


@pytest.mark.full
def test_inner_steps_in_parts_take_less_memory_and_differ_by_rounding_only() -> None:
    state, inputs = begin(InnerConfig(), mini.params_of(TINY)), (jnp.asarray(TOKENS_nxBxT1), jnp.int32(0), jnp.int32(9))
    compiled: dict[int, Any] = {
        parts: jax.jit(mini.steps_of(TINY, InnerConfig(micro_batches=parts))).lower(state, *inputs).compile()
        for parts in (1, 6)
    }
    temporary = {parts: program.memory_analysis().temp_size_in_bytes for parts, program in compiled.items()}
    assert temporary[6] < 0.4 * temporary[1]
    (one, losses), (other, others) = (program(state, *inputs) for program in compiled.values())
    np.testing.assert_allclose(others, losses, rtol=1e-5)
    whole, parts = (optax.tree_utils.tree_get(each.optimizer, "mu") for each in (one, other))
    for name, expected in whole.items():
        np.testing.assert_allclose(parts[name], expected, rtol=1e-3, atol=1e-6, err_msg=name)


def test_a_batch_that_has_no_equal_parts_is_refused() -> None:
    with failing(ConfigError, "config.value"):
        jax.eval_shape(accumulated(mini.as_task(TINY).gradient, 5), mini.params_of(TINY), TOKENS_nxBxT1[0])
