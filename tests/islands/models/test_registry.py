"""The dense transformers: sizes, initial parameters, loss, causality, gradients, dtypes."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from archipelago.broker.config import ModelConfig
from archipelago.broker.errors import ConfigError
from archipelago.broker.manifest import Tensor
from archipelago.islands.models import layers, registry
from archipelago.islands.models.dimensions import Size
from archipelago.islands.models.registry import MODELS, Model, Params, build
from archipelago.islands.models.transformer import transformer
from tests.failing import failing
from tests.tiers import examples


@pytest.fixture(scope="module")
def tiny() -> Model:
    made = build("tiny", jnp.float32)
    return made._replace(loss=jax.jit(made.loss), logits=jax.jit(made.logits))


@pytest.fixture(scope="module")
def params(tiny: Model) -> Params:
    return tiny.init(0)


def random_tokens(batch: int, time: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, 256, (batch, time), dtype=np.uint8))


@pytest.mark.parametrize(
    ("size", "low", "high"),
    [
        ("tiny", 0.09e6, 0.13e6),
        ("small", 0.9e6, 1.1e6),
        ("base", 24e6, 26e6),
        ("124m", 120e6, 128e6),
        ("1b", 0.95e9, 1.05e9),
        ("tiny-moe", 0.3e6, 0.34e6),
        ("small-moe", 2.9e6, 3.1e6),
    ],
)
def test_every_size_has_about_the_parameters_that_its_name_says(size: str, low: float, high: float) -> None:
    assert low <= sum(tensor.size for tensor in build(size).tensors) <= high


def test_an_unknown_size_is_refused_with_the_known_ones() -> None:
    with failing(ConfigError, "model.unknown") as caught:
        build("huge")
    assert all(name in caught.value.remedy for name in MODELS)


def test_a_model_of_images_has_no_vocabulary() -> None:
    with failing(ConfigError, "model.no-vocabulary"):
        build(ModelConfig("digits", 300))


def test_the_tensors_describe_what_init_returns(tiny: Model, params: Params) -> None:
    names = [tensor.name for tensor in tiny.tensors]
    assert names == sorted(params)
    assert all(params[tensor.name].shape == tensor.shape for tensor in tiny.tensors)
    assert {value.dtype for value in params.values()} == {jnp.dtype(jnp.float32)}
    assert "layers.0.attention.query.kernel" in names
    assert tiny.example_bytes is None
    assert [tensor for tensor in tiny.tensors if tensor.kind == "embedding"] == [
        Tensor("embedding", (256, 64), "embedding")
    ]


def test_parameters_are_float32_even_with_bfloat16_activations() -> None:
    half = build("tiny", jnp.bfloat16)
    assert {value.dtype for value in half.init(0).values()} == {jnp.dtype(jnp.float32)}
    assert half.tensors == build("tiny", jnp.float32).tensors


def test_parameters_depend_on_the_seed_alone(tiny: Model, params: Params) -> None:
    again, other = build("tiny", jnp.float32).init(0), tiny.init(1)
    for name, value in params.items():
        assert np.array_equal(value, again[name])
        assert np.array_equal(value, other[name]) == name.endswith("norm.scale")


@pytest.mark.parametrize("size", ["tiny", pytest.param("small", marks=pytest.mark.full)])
def test_the_first_loss_is_near_that_of_a_uniform_guess(size: str) -> None:
    fresh = build(size, jnp.float32)
    loss = jax.jit(fresh.loss)(fresh.init(3), random_tokens(4, 65))
    assert loss.dtype == jnp.float32
    assert loss.shape == ()
    assert abs(float(loss) - math.log(256)) < 0.25


def test_the_loss_is_the_mean_over_the_targets_in_nats(tiny: Model, params: Params) -> None:
    tokens = random_tokens(2, 9)
    logits = np.asarray(tiny.logits(params, tokens[:, :-1]), dtype=np.float64)
    probability = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    targets = np.asarray(tokens)[:, 1:]
    by_hand = [-math.log(probability[b, t, targets[b, t]]) for b in range(2) for t in range(8)]
    assert float(tiny.loss(params, tokens)) == pytest.approx(np.mean(by_hand), rel=1e-5)
    assert float(tiny.loss(params, tokens.astype(jnp.int32))) == float(tiny.loss(params, tokens))
    assert [float(part) for part in tiny.objective(params, tokens)] == [float(tiny.loss(params, tokens))] * 2


def test_a_logit_depends_only_on_its_position_and_earlier_ones(tiny: Model, params: Params) -> None:
    tokens = random_tokens(2, 16)
    changed = tokens.at[:, 10].set(tokens[:, 10] ^ 1)
    before, after = tiny.logits(params, tokens), tiny.logits(params, changed)
    np.testing.assert_allclose(before[:, :10], after[:, :10], atol=1e-6)
    assert np.abs(np.asarray(before - after)[:, 10:]).max(axis=(0, 2)).min() > 1e-4


def test_every_tensor_has_a_gradient_and_sgd_fits_a_batch(tiny: Model, params: Params) -> None:
    tokens = random_tokens(4, 33)
    gradient = jax.jit(jax.value_and_grad(tiny.loss))
    first, slopes = gradient(params, tokens)
    assert all(float(jnp.abs(slope).max()) > 0 for slope in slopes.values())
    trained = params
    for _ in range(8):
        _, slopes = gradient(trained, tokens)
        trained = jax.tree.map(lambda value, slope: value - 0.3 * slope, trained, slopes)
    assert float(tiny.loss(trained, tokens)) < float(first) - 0.2


def test_equal_shapes_trace_once(tiny: Model, params: Params) -> None:
    traces = []

    @jax.jit
    def loss(params: Params, tokens: jax.Array) -> jax.Array:
        traces.append(tokens.shape)
        return tiny.loss(params, tokens)

    for seed in range(3):
        loss(tiny.init(seed), random_tokens(2, 9, seed))
    assert traces == [(2, 9)]


@pytest.mark.full
def test_bfloat16_gives_nearly_the_same_loss() -> None:
    size, tokens = Size(width=32, layers=1, heads=2, hidden=48), random_tokens(4, 33)
    half, single = transformer(size, jnp.bfloat16), transformer(size, jnp.float32)
    params = single.init(0)
    with jax.numpy_dtype_promotion("standard"):  # attention and norms mix bfloat16 with float32
        assert half.logits(params, tokens).dtype == jnp.float32
        loss, slopes = jax.jit(jax.value_and_grad(half.loss))(params, tokens)
    assert float(loss) == pytest.approx(float(jax.jit(single.loss)(params, tokens)), abs=0.01)
    assert {slope.dtype for slope in slopes.values()} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize(("backend", "dtype"), [("cpu", jnp.float32), ("gpu", jnp.bfloat16), ("tpu", jnp.bfloat16)])
def test_accelerators_compute_in_bfloat16(monkeypatch: pytest.MonkeyPatch, backend: str, dtype: type) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert registry.default_compute_dtype() == dtype


def test_rms_norm_by_hand() -> None:
    x, norm = jnp.asarray([[3.0, 4.0], [-1.0, 1.0]]), layers.rms_norm(2, jnp.float32)
    norm.scale = nnx.Param(jnp.asarray([1.0, 2.0]))
    out = norm(x)
    # root mean squares: sqrt((9 + 16) / 2) = 3.5355339 and 1
    np.testing.assert_allclose(out, [[0.8485281, 2.2627417], [-1.0, 2.0]], rtol=1e-5)


def test_rotary_positions_by_hand() -> None:
    x = jnp.asarray([1.0, 0.0, 0.0, 1.0]).reshape(1, 1, 1, 4)
    assert layers.rotate(x.astype(jnp.bfloat16), jnp.arange(1)).dtype == jnp.bfloat16
    out = layers.rotate(jnp.tile(x, (1, 3, 1, 1)), jnp.arange(3))[0, :, 0]
    # elements 0 and 2 rotate by the position, and 1 and 3 by the position / 100
    np.testing.assert_allclose(out[0], [1.0, 0.0, 0.0, 1.0], atol=1e-6)
    np.testing.assert_allclose(out[1], [0.5403023, -0.0099998, 0.8414710, 0.9999500], atol=1e-6)
    np.testing.assert_allclose(out[2], [-0.4161468, -0.0199987, 0.9092974, 0.9998000], atol=1e-6)


@settings(deadline=None, max_examples=examples(25))
@given(first=st.integers(0, 500), second=st.integers(0, 500), shift=st.integers(0, 500), seed=st.integers(0, 99))
def test_rotated_products_depend_only_on_the_distance(first: int, second: int, shift: int, seed: int) -> None:
    query, key = np.random.default_rng(seed).normal(size=(2, 1, 1, 1, 16)).astype(np.float32)

    def product(query_at: int, key_at: int) -> float:
        rotated_query = layers.rotate(jnp.asarray(query), jnp.asarray([query_at]))
        rotated_key = layers.rotate(jnp.asarray(key), jnp.asarray([key_at]))
        return float(jnp.sum(rotated_query * rotated_key))

    assert product(first, second) == pytest.approx(product(first + shift, second + shift), abs=2e-3)
