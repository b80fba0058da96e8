"""AdamW and Muon, the schedule and the scan, compared with references in numpy."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any, get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.typing import NDArray

from archipelago.broker.config import InnerConfig, checked
from archipelago.broker.manifest import Tensor
from archipelago.islands.inner import (
    RULES,
    InnerState,
    InnerSteps,
    _ramp,
    begin,
    counts,
    learning_rate,
)
from archipelago.islands.models.interface import Model, Params
from tests.islands.models import mini

Wide = NDArray[np.float64]
CONFIG = InnerConfig(
    steps=10, learning_rate=0.1, warmup_steps=4, final_share=0.1, weight_decay=0.2, beta1=0.9, beta2=0.95,
    clip_norm=1.0, moments_warmup_steps=0,
)  # fmt: skip
MUON = replace(CONFIG, optimizer="muon", weight_decay=0.0, clip_norm=0.0)
#: Four batches of one sequence of one token and its target.
TOKENS_nxBxT1 = np.array([[[3, 1]], [[0, 2]], [[5, 4]], [[1, 1]]], np.uint8)


class Quadratic:
    """½‖kernel − t₀‖² + ½‖bias − t₁‖² for a sequence [t₀, t₁]: its gradients are the differences."""

    def __init__(self) -> None:
        self.traces = 0

    def loss(self, params: Params, tokens_BxT1: jax.Array) -> jax.Array:
        self.traces += 1
        assert tokens_BxT1.dtype == jnp.int32
        goal_B, other_B = tokens_BxT1.astype(jnp.float32).T
        return 0.5 * (jnp.sum((params["kernel"] - goal_B[0]) ** 2) + jnp.sum((params["bias"] - other_B[0]) ** 2))

    @property
    def model(self) -> Model:
        def logits(params: Params, tokens_BxT: jax.Array) -> jax.Array:
            raise NotImplementedError

        tensors = (Tensor("bias", (2,)), Tensor("kernel", (2, 2)))
        return Model(lambda seed: fresh(), self.loss, tensors, logits)


def fresh() -> Params:
    return {"bias": jnp.array([0.5, -0.5], jnp.float32), "kernel": jnp.array([[1.0, 2.0], [3.0, 4.0]], jnp.float32)}


@cache
def steps_by(config: InnerConfig) -> InnerSteps:
    return mini.steps_of(Quadratic().model, config)


def run(config: InnerConfig, tokens_nxBxT1: NDArray[Any], global_step: int = 0) -> tuple[InnerState, list[float]]:
    tokens, step = jnp.asarray(tokens_nxBxT1), jnp.asarray(global_step, jnp.int32)
    state, losses_n = steps_by(config)(begin(config, fresh()), tokens, step, np.int32(config.steps))
    return state, losses_n.tolist()


def assert_close(params: Params, expected: dict[str, Wide]) -> None:
    for name, value in expected.items():
        np.testing.assert_allclose(np.asarray(params[name]), value, rtol=2e-6)


class Reference:
    """AdamW (Loshchilov and Hutter, 2019) in float64."""

    def __init__(self, config: InnerConfig) -> None:
        self.config = config
        self.params: dict[str, Wide] = {name: np.asarray(value, np.float64) for name, value in fresh().items()}
        self.first = {name: np.zeros_like(value) for name, value in self.params.items()}
        self.second = {name: np.zeros_like(value) for name, value in self.params.items()}
        self.count = 0

    def step(self, tokens: list[int], rate: float) -> float:
        c = self.config
        gradients = {"kernel": self.params["kernel"] - tokens[0], "bias": self.params["bias"] - tokens[1]}
        squares = sum(float(np.sum(g**2)) for g in gradients.values())
        factor = min(1.0, c.clip_norm / math.sqrt(squares)) if c.clip_norm else 1.0
        self.count += 1
        for name, gradient in gradients.items():
            g = factor * gradient
            self.first[name] = c.beta1 * self.first[name] + (1 - c.beta1) * g
            self.second[name] = c.beta2 * self.second[name] + (1 - c.beta2) * g**2
            first = self.first[name] / (1 - c.beta1**self.count)
            second = self.second[name] / (1 - c.beta2**self.count)
            decay = c.weight_decay if name == "kernel" else 0.0  # vectors are not decayed
            self.params[name] = self.params[name] - rate * (
                first / (np.sqrt(second) + 1e-8) + decay * self.params[name]
            )
        return squares / 2


# -- the schedule --------------------------------------------------------------------------------------------------


def test_warm_up_and_cosine_by_hand() -> None:
    """A fifth of the peak comes first, so that the first of 4 warm-up steps has an effect; 0.055 is half-way down."""
    schedule = learning_rate(CONFIG, CONFIG.steps)
    rates = {0: 0.02, 2: 0.06, 4: 0.1, 7: 0.055, 10: 0.01, 1000: 0.01}
    assert {step: float(schedule(step)) for step in rates} == pytest.approx(rates, rel=1e-6)
    assert float(learning_rate(replace(CONFIG, warmup_steps=0), CONFIG.steps)(0)) == pytest.approx(0.1)


# -- the step ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clip_norm", "warmup", "shares"),
    [
        (1.0, 0, [1.0, 1.0, 1.0]),
        (0.0, 0, [1.0, 1.0, 1.0]),  # never clips
        (1.0, 4, [0.25, 0.5, 0.75]),  # fresh moments begin with a share of the rate, whatever the global step
        (1.0, 2, [0.5, 1.0, 1.0]),
    ],
)
def test_three_steps_of_adamw(clip_norm: float, warmup: int, shares: list[float]) -> None:
    config = replace(CONFIG, clip_norm=clip_norm, moments_warmup_steps=warmup)
    reference = Reference(config)
    # Steps 3 and 4 end the warm-up at 0.08 and 0.1; at step 5 the cosine is a sixth of the way down.
    rates = [0.08, 0.1, 0.01 + 0.045 * (1 + math.cos(math.pi / 6))]
    expected = [
        reference.step(TOKENS_nxBxT1[i, 0].tolist(), rate * share)
        for i, (rate, share) in enumerate(zip(rates, shares, strict=True))
    ]
    state, losses = run(config, TOKENS_nxBxT1[:3], global_step=3)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert_close(state.params, reference.params)


# -- the scan ------------------------------------------------------------------------------------------------------


def test_the_table_of_optimisers_has_the_names_of_the_setting() -> None:
    assert set(RULES) == set(get_args(get_type_hints(InnerConfig)["optimizer"]))
    for name in RULES:
        config = checked({"inner": {"optimizer": name}}).inner
        assert counts(begin(config, fresh()).optimizer), "`_ramp` reads a step count of its state"


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_scan_equals_the_same_number_of_steps(optimizer: str) -> None:
    """The compiler fuses a loop's body and a single step differently, so they differ in the last bits."""
    config, rtol = (CONFIG, 1e-6) if optimizer == "adamw" else (replace(MUON, moments_warmup_steps=3), 1e-5)
    scanned, losses = run(config, TOKENS_nxBxT1, global_step=2)
    state, singles, ramp = begin(config, fresh()), [], []
    for n in range(len(TOKENS_nxBxT1)):
        ramp.append(float(_ramp(state.optimizer, config.moments_warmup_steps)))
        batch, clock = jnp.asarray(TOKENS_nxBxT1[n : n + 1]), (jnp.int32(2 + n), jnp.int32(config.steps))
        state, losses_n = steps_by(config)(state, batch, *clock)
        singles += losses_n.tolist()
    assert ramp == pytest.approx([1, 1, 1, 1] if optimizer == "adamw" else [1 / 3, 2 / 3, 1, 1])
    assert {int(count) for count in counts(state.optimizer)} == {4}
    assert singles == pytest.approx(losses, rel=rtol)
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(scanned), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=10 * rtol, atol=rtol / 10)


def test_steps_compile_once_for_each_length_and_donate_the_given_state() -> None:
    quadratic = Quadratic()
    steps = mini.steps_of(quadratic.model, CONFIG)
    state = begin(CONFIG, fresh())
    traces = []
    for n, global_step in [(1, 0), (1, 1), (1, 5000), (3, 2), (3, 7), (1, 3)]:
        before = state
        state, _ = steps(state, jnp.asarray(TOKENS_nxBxT1[:n]), np.int32(global_step), np.int32(CONFIG.steps))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before.params))
        traces.append(quadratic.traces)
    first, second = traces[0], traces[3] - traces[0]
    assert traces == [first, first, first, first + second, first + second, first + second]


# -- Muon ----------------------------------------------------------------------------------------------------------


def newton_schulz(x: Wide) -> Wide:
    """Return the matrix after five of Jordan's quintic iterations."""
    x = x / np.linalg.norm(x)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def test_the_first_step_of_muon_by_hand() -> None:
    """A matrix moves by 0.2 · √2 times its orthogonalised gradient, a vector by Adam with Nesterov's momentum."""
    state, _ = run(MUON, np.array([[[0, 0]]], np.uint8), global_step=4)
    kernel = np.array([[1.0, 2.0], [3.0, 4.0]])
    moved = (kernel - np.asarray(state.params["kernel"], np.float64)) / 0.1
    np.testing.assert_allclose(moved, 0.2 * math.sqrt(2) * newton_schulz(kernel), rtol=2e-3)
    ahead = 0.9 * 0.1 / (1 - 0.9**2) + 1.0  # β times the corrected moment one step later, plus the corrected gradient
    bias = np.array([0.5, -0.5]) - 0.1 * ahead * np.sign([0.5, -0.5])
    np.testing.assert_allclose(np.asarray(state.params["bias"]), bias, rtol=1e-5)


def test_muon_leaves_embeddings_routers_and_outputs_to_adam() -> None:
    matrix, vector = jnp.ones((3, 4)), jnp.ones(4)
    hidden = ("layers.0.mlp.up.kernel", "layers.0.mlp.experts.2.up.kernel", "layers.1.attention.out.kernel")
    others = ("embedding", "patches.embedding", "layers.0.mlp.router.kernel", "output.kernel")
    params = dict.fromkeys((*hidden, *others), matrix) | {"norm.scale": vector}
    second_moments = optax.tree_utils.tree_get(begin(MUON, params).optimizer, "nu")
    assert {name for name, value in second_moments.items() if hasattr(value, "shape")} == {*others, "norm.scale"}


# -- penalties -----------------------------------------------------------------------------------------------------


def test_a_penalty_is_minimised_and_not_reported() -> None:
    """With a penalty of ½‖kernel‖², the kernel's gradient is 2 · kernel − t₀ instead of kernel − t₀."""
    quadratic = Quadratic()

    def penalised(params: Params, tokens_BxT1: jax.Array) -> tuple[jax.Array, jax.Array]:
        return quadratic.loss(params, tokens_BxT1), 0.5 * jnp.sum(params["kernel"] ** 2)

    config = replace(CONFIG, clip_norm=0.0)
    batch, step = jnp.asarray(TOKENS_nxBxT1[:1]), jnp.asarray(0, jnp.int32)
    steps = mini.steps_of(quadratic.model._replace(loss_and_penalty=penalised), config)
    state, losses_n = steps(begin(config, fresh()), batch, step, np.int32(config.steps))
    plain, plain_losses = run(config, TOKENS_nxBxT1[:1])
    assert losses_n.tolist() == pytest.approx(plain_losses)
    first, without = (optax.tree_utils.tree_get(s.optimizer, "mu") for s in (state, plain))
    np.testing.assert_allclose(first["kernel"], without["kernel"] + 0.1 * fresh()["kernel"], rtol=1e-5)
    np.testing.assert_allclose(first["bias"], without["bias"], rtol=1e-6)
