"""The warning of a loop that drops what `sync` returns, and loops that must not be warned."""

from __future__ import annotations

import logging

import jax.numpy as jnp
import numpy as np
import pytest

from archipelago.broker.errors import ConfigError
from archipelago.islands.user_loop.parameters import TreeParameters
from tests.failing import failing


def merges(caplog: pytest.LogCaptureFixture, *, assigns: bool, step: float, back: float = 0.0) -> list[str]:
    """Let a loop make a step after each of some merges, and return what is logged.

    The step is random, and leads the share `back` of the way from the merged parameters to those before the merge.
    """
    caplog.set_level(logging.WARNING)
    random = np.random.default_rng(0)
    tree = {"large": jnp.zeros((300, 300)), "small": jnp.zeros(40)}
    parameters = TreeParameters(tree)
    parameters.start(tree)
    for _ in range(8):
        parameters.offer(tree)
        merged = {name: leaf + random.standard_normal(leaf.shape) for name, leaf in parameters.named().items()}
        parameters.replace(merged)
        taken = parameters.tree if assigns else tree
        led = {name: leaf + back * (tree[name] - leaf) for name, leaf in taken.items()}
        tree = {name: leaf + step * random.standard_normal(leaf.shape) for name, leaf in led.items()}
    parameters.offer(tree)
    return [record.message for record in caplog.records]


def test_a_loop_that_drops_the_merged_parameters_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    (said,) = merges(caplog, assigns=False, step=0.01)
    assert "params = run.sync(params" in said


@pytest.mark.parametrize(("assigns", "step"), [(True, 0.01), (True, 3.0), (False, 3.0)])
def test_others_are_not(assigns: bool, step: float, caplog: pytest.LogCaptureFixture) -> None:
    assert merges(caplog, assigns=assigns, step=step) == [], "large steps say nothing"


def test_steps_that_lead_back_from_a_merge_are_not_taken_for_lost_ones(caplog: pytest.LogCaptureFixture) -> None:
    assert merges(caplog, assigns=True, step=0.01, back=0.7) == []


def test_a_merge_that_takes_one_step_back_is_not_lost(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    tree = {"a": jnp.zeros(40)}
    parameters = TreeParameters(tree)
    parameters.start(tree)
    for turn in range(20):
        parameters.offer(tree)
        if turn % 2:
            parameters.replace({"a": parameters.named()["a"] - 1.0})
        tree = {"a": parameters.tree["a"] + 1.0}
    assert caplog.records == []


def test_a_leaf_that_is_not_there_is_an_error_of_the_tree() -> None:
    tree = {"a": jnp.zeros(4), "b": jnp.zeros(4)}
    parameters = TreeParameters(tree)
    parameters.start(tree)
    parameters.offer(tree)
    parameters.replace({name: leaf + 1 for name, leaf in parameters.named().items()})
    with failing(ConfigError, "loop.other-tree"):
        parameters.offer({"a": jnp.zeros(4)})
