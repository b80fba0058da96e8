"""The inner optimiser's state of a JAX loop, on its way to a newcomer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from archipelago.broker.errors import WireError
from archipelago.broker.messages import Handover
from archipelago.islands.own_loop.handover import STEPS_MAX
from archipelago.islands.own_loop.state import LoopState
from archipelago.islands.sync import recovery
from tests.failing import failing


def handed_over(state: Any) -> tuple[Handover, bytes]:
    leaves = LoopState(lambda: state).copies()
    assert leaves is not None
    return recovery.encode(recovery.StateForPeer("b/y", leaves, 3, 5), "a/x")


def adam(count: int = 3) -> Any:
    return optax.ScaleByAdamState(jnp.int32(count), {"w": jnp.ones(4)}, {"w": jnp.ones(4)})


def test_a_state_arrives_with_its_values_and_own_leaves_stay() -> None:
    own = (optax.ScaleByAdamState(jnp.int32(0), {"w": jnp.zeros(4)}, {"w": jnp.zeros(4)}), "mine")
    found = LoopState(lambda: own).decode(*handed_over((adam(), "theirs")))
    assert found[1] == "mine"
    jax.tree.map(np.testing.assert_array_equal, found[0], adam())


@pytest.mark.parametrize(
    "theirs",
    [
        {"a": jnp.ones(6), "b": jnp.ones((2, 3))},
        {"a": jnp.ones((3, 2)), "b": jnp.ones(6)},
        {"a": jnp.ones((2, 3)), "c": jnp.ones(6)},
        {"a": jnp.ones((2, 3)), "b": jnp.ones(6, jnp.int32)},
        {"a": jnp.ones((2, 3)), "b": {"b": jnp.ones(6)}},
        {"a": jnp.ones((2, 3)), "b": jnp.ones(3), "c": jnp.ones(3)},
        {"a": jnp.ones((2, 3)), "b": jnp.ones(7)},
    ],
)
def test_a_state_of_as_many_bytes_and_another_layout_is_refused(theirs: Any) -> None:
    own = {"a": jnp.zeros((2, 3)), "b": jnp.zeros(6)}
    with failing(WireError, "handover.shape"):
        LoopState(lambda: own).decode(*handed_over(theirs))


@pytest.mark.parametrize("count", [-1, STEPS_MAX + 1])
def test_a_count_that_no_steps_can_produce_is_refused(count: int) -> None:
    with failing(WireError, "handover.unsound"):
        LoopState(adam).decode(*handed_over(adam(count)))
