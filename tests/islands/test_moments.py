"""First moments that islands average at each sync: what travels, and what an island makes of an average."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipelago.broker.config import OWN_MODEL, InnerConfig, ModelConfig, RunConfig, SyncConfig, WireConfig
from archipelago.broker.errors import ConfigError
from archipelago.broker.manifest import MOMENT_PREFIX, synced
from archipelago.islands import inner
from archipelago.islands.inner import InnerState
from archipelago.islands.moments import SyncedState
from archipelago.islands.sync.adoption import RULES
from archipelago.islands.sync.replica import moments_after
from tests.failing import failing
from tests.harness import tiny
from tests.tiers import examples

CONFIG = replace(tiny.CONFIG.inner, clip_norm=0.0)
MANIFEST = tiny.averaging(replace(tiny.CONFIG, inner=CONFIG))
SYNCED = SyncedState(MANIFEST)
SCALE = MOMENT_PREFIX + "scale"
DESCEND = inner.descent(CONFIG)


def begun() -> InnerState:
    return inner.begin(CONFIG, {tensor.name: jnp.ones(tensor.shape) for tensor in tiny.TENSORS})


def after(state: InnerState, *gradients: float) -> InnerState:
    """Return the state after one step with each of these gradients of all elements."""
    for value in gradients:
        state = DESCEND(state, {t.name: jnp.full(t.shape, value) for t in tiny.TENSORS}, jnp.int32(0))
    return state


def sent(state: InnerState) -> float:
    """Return the first moment of `scale` as it travels."""
    return float(SYNCED.tensors(1, state)[SCALE][0])


def adopted(state: InnerState, new: float, then: float, steps: int, rule: str = "carry") -> InnerState:
    """Return the state after it adopted a moment, `steps` steps after it sent `then`."""
    tensors, share = SYNCED.tensors(1, state), SYNCED.share(state, steps)
    own_N = tensors[SCALE]
    moment_N = moments_after(RULES[rule], jnp.full_like(own_N, new), own_N, jnp.full_like(own_N, then), share)
    return SYNCED.replaced(state, {**tensors, SCALE: moment_N})


def test_a_moment_travels_as_the_mean_of_the_gradients() -> None:
    """Otherwise an island that has just begun would drag the average towards zero."""
    found = [sent(after(begun(), *[2.0] * steps)) for steps in (0, 1, 7)]
    assert found == [0.0, pytest.approx(2.0), pytest.approx(2.0)]


GRADIENTS = st.lists(st.floats(-2.0, 2.0, width=32), min_size=1, max_size=12)


@settings(max_examples=examples(50))
@given(GRADIENTS, GRADIENTS, st.floats(-2.0, 2.0, width=32).filter(bool))
def test_a_late_average_counts_as_if_it_had_come_at_once(before: list[float], since: list[float], new: float) -> None:
    """Steps that the island makes between sending and adopting neither get lost nor age the average less."""
    then = after(begun(), *before)
    at_once = after(adopted(then, new, sent(then), 0), *since)
    late = adopted(after(then, *since), new, sent(then), len(since))
    assert sent(late) == pytest.approx(sent(at_once), abs=1e-5)


def test_the_other_moments_and_the_count_stay() -> None:
    before = after(begun(), 1.0, 2.0)
    now = adopted(before, 5.0, 1.0, 1)
    own, other = (optax.tree_utils.tree_get(state.optimizer, "mu") for state in (before, now))
    assert np.asarray(own["kernel"]).tobytes() == np.asarray(other["kernel"]).tobytes()
    assert float(own["scale"][0]) != float(other["scale"][0])
    for name in ("nu", "count"):
        one, same = (optax.tree_utils.tree_get(state.optimizer, name) for state in (before, now))
        assert tiny.leaf_bytes(one) == tiny.leaf_bytes(same)


def test_an_island_without_steps_takes_nothing_and_zeros_stand_for_no_moments() -> None:
    """Its optimiser would divide the moment by the weight of no gradient."""
    assert sent(adopted(begun(), 5.0, 0.0, 0)) == 0.0
    assert sent(after(adopted(begun(), 5.0, 0.0, 0), 2.0)) == pytest.approx(2.0)
    before = after(begun(), 1.0, 2.0)
    for rule in RULES:
        assert sent(adopted(before, 0.0, 1.0, 1, rule)) == pytest.approx(sent(before))
    assert sent(adopted(before, 5.0, 1.0, 1, "overwrite")) == pytest.approx(5.0), "overwriting takes the average alone"


def test_what_cannot_average_moments_is_refused() -> None:
    config = RunConfig(sync=SyncConfig(moments="average"))
    assert len(synced(tiny.TENSORS, config)[0]) == 4
    for other in (
        replace(config, inner=InnerConfig(optimizer="muon")),
        replace(config, model=ModelConfig(size=OWN_MODEL)),
        replace(config, wire=WireConfig(up="top3")),
    ):
        with failing(ConfigError, "config.moments"):
            synced(tiny.TENSORS, other)
