"""Routing with values worked out by hand, and mixtures of experts: causality, gradients, the penalty."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from archipelago.islands.models import moe
from archipelago.islands.models.interface import Params
from archipelago.islands.models.moe import Routing, route
from tests.islands.models import mini
from tests.tiers import examples

#: More than a third of all choices find no slot.
CROWDED = Routing(experts=4, choices=2, capacity_factor=0.6)


@pytest.fixture(scope="module")
def params() -> Params:
    """The parameters of four experts. They do not depend on the routing."""
    return mini.params_of(mini.experts(CROWDED))


#: Compiles once for each number of choices and slots.
routed = jax.jit(route, static_argnums=(1, 2))


def logits(*rows: tuple[float, ...]) -> jax.Array:
    """Return the router's logits of one sequence from the probabilities at each position."""
    return jnp.asarray(np.log(np.asarray([rows], np.float32)))


# -- routing --------------------------------------------------------------------------------------------------------


def test_one_choice_and_one_slot_by_hand() -> None:
    routes = routed(logits((0.7, 0.3), (0.9, 0.1), (0.2, 0.8)), 1, 1)
    dispatch, combine = (np.asarray(x)[0, :, :, 0] for x in (routes.dispatch_BxTxExC, routes.combine_BxTxExC))
    # The first expert's only slot is taken when the second token chooses it.
    assert dispatch.tolist() == [[1, 0], [0, 0], [0, 1]]
    np.testing.assert_allclose(combine, np.array([[0.7, 0], [0, 0], [0, 0.8]]), rtol=1e-6)
    # f = 2/3 and 1/3, P = 0.6 and 0.4. A token without a slot still counts as a choice of its expert.
    assert float(routes.balance) == pytest.approx(2 * (2 / 3 * 0.6 + 1 / 3 * 0.4), rel=1e-6)
    assert float(routes.router_z) == pytest.approx(0.0, abs=1e-12)  # these logits are log-probabilities


@settings(deadline=None, max_examples=examples(25))
@given(st.integers(0, 10_000), st.sampled_from([(1, 2), (2, 3), (4, 7)]))
def test_each_slot_has_one_token_and_each_token_different_experts(seed: int, bounds: tuple[int, int]) -> None:
    choices, slots = bounds
    routes = routed(np.random.default_rng(seed).normal(size=(3, 9, 4)).astype(np.float32), choices, slots)
    dispatch = np.asarray(routes.dispatch_BxTxExC)
    assert set(np.unique(dispatch)) <= {0.0, 1.0}
    assert dispatch.sum(axis=1).max() <= 1
    assert dispatch.sum(axis=3).max() <= 1
    assert dispatch.sum(axis=(2, 3)).max() <= choices
    assert dispatch.sum() == np.minimum(_named(seed, choices), slots).sum(), "a free slot was refused"
    assert np.array_equal(np.asarray(routes.combine_BxTxExC) > 0, dispatch > 0)


def _named(seed: int, choices: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Return how many tokens of each sequence choose each expert, [B, E]."""
    order = np.argsort(-np.random.default_rng(seed).normal(size=(3, 9, 4)), axis=-1)[..., :choices]
    return np.stack([np.bincount(row.ravel(), minlength=4) for row in order])


# -- the model ------------------------------------------------------------------------------------------------------


def test_without_full_experts_the_output_is_the_weighted_sum() -> None:
    """Compare with each expert applied to every token, in numpy."""
    mlp = moe.RoutedMLP(Routing(experts=4, choices=2, capacity_factor=2.0), mini.SIZE, jnp.float32, nnx.Rngs(0))
    x_BxTxW = np.random.default_rng(1).normal(size=(1, 8, mini.SIZE.width)).astype(np.float32)
    found, *answers = nnx.jit(lambda mlp, x: [mlp(x), *(expert(x) for expert in mlp.experts)])(mlp, x_BxTxW)
    scores = x_BxTxW @ np.asarray(mlp.router.kernel[...])
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    weights[weights < np.sort(weights, axis=-1)[..., -2:-1]] = 0.0
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("btwe,bte->btw", np.stack(answers, axis=-1), weights)
    assert np.abs(expected).max() > 0.05
    np.testing.assert_allclose(np.asarray(found), expected, atol=1e-5)


def test_a_logit_depends_only_on_earlier_tokens_of_its_sequence_even_with_full_experts(params: Params) -> None:
    seen, logits = mini.tokens(2, 16), mini.compiled(mini.experts(CROWDED)).logits
    before = np.asarray(logits(params, seen))
    for at in range(16):
        after = np.asarray(logits(params, seen.at[:, at].set(seen[:, at] ^ 1)))
        np.testing.assert_allclose(before[:, :at], after[:, :at], atol=1e-6)
        assert np.abs(before - after)[:, at].max() > 1e-4
    np.testing.assert_allclose(before[1], logits(params, seen.at[0].set(7))[1], atol=1e-6)


@pytest.mark.full
def test_training_minimises_the_penalty_and_does_not_report_it(params: Params) -> None:
    made, free = mini.experts(Routing(4, 2)), mini.experts(Routing(4, 2, balance=0.0, router_z=0.0))
    seen = mini.tokens(4, 17)
    slope = jax.value_and_grad(mini.as_task(made).objective, has_aux=True)
    (objective, reported), slopes = jax.jit(slope)(params, seen)
    free_slopes = jax.jit(jax.grad(free.loss))(params, seen)
    loss, free_loss = (float(mini.compiled(each).loss(params, seen)) for each in (made, free))
    assert float(reported) == pytest.approx(loss, rel=1e-6)
    assert loss == free_loss
    # About 0.01 · 1 from a router that is nearly even, and at least 0.001 · (ln 4)².
    assert 0.01 < float(objective) - float(reported) < 0.03
    assert float(jax.jit(mini.as_task(free).objective)(params, seen)[0]) == pytest.approx(free_loss)
    router = "layers.0.mlp.router.kernel"
    assert float(jnp.abs(slopes[router] - free_slopes[router]).max()) > 1e-5
    assert {tensor.name for tensor in made.tensors} == set(slopes)
    assert all(float(jnp.abs(slope).max()) > 0 for slope in slopes.values())
