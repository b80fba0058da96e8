"""Routing with values worked out by hand, and mixtures of experts: causality, gradients, the penalty."""

from __future__ import annotations

import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from archipelago.islands.models import moe
from archipelago.islands.models.dimensions import Size
from archipelago.islands.models.interface import Model, Params
from archipelago.islands.models.moe import Routing, route
from tests.tiers import examples

SIZE = Size(width=16, layers=1, heads=2, hidden=24)
#: More than a third of all choices find no slot.
CROWDED = Routing(experts=4, choices=2, capacity_factor=0.6)


@cache
def model(routing: Routing) -> Model:
    made = moe.transformer(SIZE, routing, jnp.float32)
    return made._replace(loss=jax.jit(made.loss), logits=jax.jit(made.logits))


@pytest.fixture(scope="module")
def params() -> Params:
    """The parameters of four experts. They do not depend on the routing."""
    return model(CROWDED).init(0)


def tokens(batch: int, time: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, 256, (batch, time), np.uint8))


def logits(*rows: tuple[float, ...]) -> jax.Array:
    """Return the router's logits of one sequence from the probabilities at each position."""
    return jnp.log(jnp.asarray([rows], jnp.float32))


# -- routing --------------------------------------------------------------------------------------------------------


def test_one_choice_and_one_slot_by_hand() -> None:
    routes = route(logits((0.7, 0.3), (0.9, 0.1), (0.2, 0.8)), choices=1, slots=1)
    # The first expert's only slot is taken when the second token chooses it.
    assert routes.dispatch_BxTxExC[0, :, :, 0].tolist() == [[1, 0], [0, 0], [0, 1]]
    np.testing.assert_allclose(routes.combine_BxTxExC[0, :, :, 0], np.array([[0.7, 0], [0, 0], [0, 0.8]]), rtol=1e-6)
    # f = 2/3 and 1/3, P = 0.6 and 0.4. A token without a slot still counts as a choice of its expert.
    assert float(routes.balance) == pytest.approx(2 * (2 / 3 * 0.6 + 1 / 3 * 0.4), rel=1e-6)
    assert float(routes.router_z) == pytest.approx(0.0, abs=1e-12)  # these logits are log-probabilities


def test_two_choices_share_the_weight() -> None:
    routes = route(logits((0.5, 0.3, 0.2), (0.1, 0.3, 0.6)), choices=2, slots=2)
    combined_TxE = routes.combine_BxTxExC[0].sum(-1)
    np.testing.assert_allclose(combined_TxE, np.array([[0.625, 0.375, 0], [0, 1 / 3, 2 / 3]]), rtol=1e-6)
    assert routes.dispatch_BxTxExC[0, :, 1].tolist() == [[1, 0], [0, 1]]  # the second expert's slots, in order


def test_the_z_loss_by_hand() -> None:
    routes = route(jnp.full((1, 2, 4), 3.0), choices=1, slots=2)
    assert float(routes.router_z) == pytest.approx((3 + math.log(4)) ** 2, rel=1e-6)


@settings(deadline=None, max_examples=examples(25))
@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 7))
def test_each_slot_has_one_token_and_each_token_different_experts(seed: int, choices: int, slots: int) -> None:
    routes = route(jnp.asarray(np.random.default_rng(seed).normal(size=(3, 9, 4)), jnp.float32), choices, slots)
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


def test_the_balance_is_one_for_equal_use_of_experts() -> None:
    even = route(50.0 * jnp.eye(4)[None], choices=1, slots=4)
    one = route(jnp.zeros((1, 4, 4)).at[..., 2].set(50.0), choices=1, slots=4)
    assert float(even.balance) == pytest.approx(1.0)
    assert float(one.balance) == pytest.approx(4.0)


def test_minimising_the_balance_loss_spreads_tokens_over_experts() -> None:
    x_BxTxW = jnp.asarray(np.random.default_rng(0).normal(size=(2, 64, 8)), jnp.float32) + 1.0

    def balance(router_WxE: jax.Array) -> jax.Array:
        return route(jnp.einsum("btw,we->bte", x_BxTxW, router_WxE), 1, 64).balance

    router_WxE = jnp.zeros((8, 4)).at[:, 0].set(0.5)
    before = float(balance(router_WxE))
    descend = jax.jit(lambda router: router - 0.3 * jax.grad(balance)(router))
    for _ in range(200):
        router_WxE = descend(router_WxE)
    assert before > 2.5
    assert float(balance(router_WxE)) < 1.3


# -- the model ------------------------------------------------------------------------------------------------------


def test_without_full_experts_the_output_is_the_weighted_sum() -> None:
    """Compare with each expert applied to every token, in numpy."""
    mlp = moe.RoutedMLP(Routing(experts=4, choices=2, capacity_factor=2.0), SIZE, jnp.float32, nnx.Rngs(0))
    x_BxTxW = np.random.default_rng(1).normal(size=(1, 8, SIZE.width)).astype(np.float32)
    scores = x_BxTxW @ np.asarray(mlp.router.kernel[...])
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    weights[weights < np.sort(weights, axis=-1)[..., -2:-1]] = 0.0
    weights /= weights.sum(-1, keepdims=True)
    answers = np.stack([np.asarray(expert(jnp.asarray(x_BxTxW))) for expert in mlp.experts], axis=-1)
    expected = np.einsum("btwe,bte->btw", answers, weights)
    assert np.abs(expected).max() > 0.05
    np.testing.assert_allclose(np.asarray(mlp(jnp.asarray(x_BxTxW))), expected, atol=1e-5)


def test_a_logit_depends_only_on_earlier_tokens_even_with_full_experts(params: Params) -> None:
    seen, logits = tokens(2, 16), model(CROWDED).logits
    before = logits(params, seen)
    for at in range(16):
        after = logits(params, seen.at[:, at].set(seen[:, at] ^ 1))
        np.testing.assert_allclose(before[:, :at], after[:, :at], atol=1e-6)
        assert np.abs(np.asarray(before - after)[:, at]).max() > 1e-4


def test_sequences_of_a_batch_are_independent(params: Params) -> None:
    seen, logits = tokens(2, 16), model(CROWDED).logits
    np.testing.assert_allclose(logits(params, seen)[1], logits(params, seen.at[0].set(7))[1], atol=1e-6)


@pytest.mark.full
def test_training_minimises_the_penalty_and_does_not_report_it(params: Params) -> None:
    made, free, seen = model(Routing(4, 2)), model(Routing(4, 2, balance=0.0, router_z=0.0)), tokens(4, 17)
    slope = jax.value_and_grad(made.objective, has_aux=True)
    (objective, reported), slopes = jax.jit(slope)(params, seen)
    free_slopes = jax.jit(jax.grad(free.loss))(params, seen)
    assert float(reported) == pytest.approx(float(made.loss(params, seen)), rel=1e-6)
    assert float(made.loss(params, seen)) == float(free.loss(params, seen))
    # About 0.01 · 1 from a router that is nearly even, and at least 0.001 · (ln 4)².
    assert 0.01 < float(objective) - float(reported) < 0.03
    assert float(jax.jit(free.objective)(params, seen)[0]) == pytest.approx(float(free.loss(params, seen)), rel=1e-6)
    router = "layers.0.mlp.router.kernel"
    assert float(jnp.abs(slopes[router] - free_slopes[router]).max()) > 1e-5
    assert {tensor.name for tensor in made.tensors} == set(slopes)
    assert all(float(jnp.abs(slope).max()) > 0 for slope in slopes.values())


def test_each_expert_has_its_own_tensors(params: Params) -> None:
    assert params["layers.0.mlp.experts.3.gate.kernel"].shape == (16, 24)
    assert params["layers.0.mlp.experts.3.down.kernel"].shape == (24, 16)
    assert params["layers.0.mlp.router.kernel"].shape == (16, 4)
    assert not np.array_equal(params["layers.0.mlp.experts.0.up.kernel"], params["layers.0.mlp.experts.1.up.kernel"])


@pytest.mark.full
def test_bfloat16_gives_nearly_the_same_loss(params: Params) -> None:
    half, seen = moe.transformer(SIZE, Routing(4, 2), jnp.bfloat16), tokens(4, 17)
    with jax.numpy_dtype_promotion("standard"):
        loss = jax.jit(half.loss)(params, seen)
    assert float(loss) == pytest.approx(float(model(Routing(4, 2)).loss(params, seen)), abs=0.02)
