"""The inner optimiser's state of a JAX loop, on its way to a newcomer."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from archipelago.broker.config import STEPS_MAX
from archipelago.broker.errors import WireError
from archipelago.broker.messages import Handover
from archipelago.islands.own_loop.parameters import LoopState
from archipelago.islands.sync import recovery
from tests.failing import failing


def handed_over(state: Any) -> tuple[Handover, bytes]:
    leaves = LoopState(lambda: state).copies()
    assert leaves is not None
    return recovery.encode(recovery.StateForPeer("b/y", leaves, 5), "a/x")


def adam(count: int = 3) -> Any:
    return optax.ScaleByAdamState(jnp.int32(count), {"w": jnp.ones(4)}, {"w": jnp.ones(4)})


def test_a_state_arrives_with_its_values_and_own_leaves_stay() -> None:
    own = (optax.ScaleByAdamState(jnp.int32(0), {"w": jnp.zeros(4)}, {"w": jnp.zeros(4)}), "mine")
    found = LoopState(lambda: own).decode(*handed_over((adam(), "theirs")))
    assert found[1] == "mine"
    jax.tree.map(np.testing.assert_array_equal, found[0], adam())


def test_a_state_of_as_many_bytes_and_another_layout_is_refused() -> None:
    own = {"a": jnp.zeros((2, 3)), "b": jnp.zeros(6)}
    others: list[Any] = [
        {"a": jnp.ones(6), "b": jnp.ones((2, 3))},
        {"a": jnp.ones((3, 2)), "b": jnp.ones(6)},
        {"a": jnp.ones((2, 3)), "c": jnp.ones(6)},
        {"a": jnp.ones((2, 3)), "b": jnp.ones(6, jnp.int32)},
        {"a": jnp.ones((2, 3)), "b": {"b": jnp.ones(6)}},
        {"a": jnp.ones((2, 3)), "b": jnp.ones(3), "c": jnp.ones(3)},
        {"a": jnp.ones((2, 3)), "b": jnp.ones(7)},
    ]
    for theirs in others:
        with failing(WireError, "handover.shape"):
            LoopState(lambda: own).decode(*handed_over(theirs))


def test_what_is_no_plain_number_stays_the_islands_own() -> None:
    kinds: list[Any] = [
        np.zeros(2, "m8[s]"),
        np.zeros(2, [("a", "f4"), ("b", "i4")]),
        np.longdouble(2),
        np.ma.masked_array([1.0, 2.0], [False, True]),
        np.ones(2, object),
    ]
    for own in kinds:
        mine = LoopState(partial(dict, own=own, mu=jnp.zeros(3)))
        found = mine.decode(*handed_over({"own": own, "mu": jnp.ones(3)}))
        assert found["own"] is own
        np.testing.assert_array_equal(found["mu"], np.ones(3))


def test_a_state_that_cannot_be_read_does_not_end_training(caplog: pytest.LogCaptureFixture) -> None:
    for broken in (lambda: 1 / 0, lambda: {3: jnp.ones(2), "a": jnp.ones(2)}):
        caplog.clear()
        assert LoopState(broken).copies() is None
        assert "state" in caplog.text


def test_a_count_that_no_steps_can_produce_is_refused() -> None:
    for count in (-1, STEPS_MAX + 1):
        with failing(WireError, "handover.unsound"):
            LoopState(adam).decode(*handed_over(adam(count)))
