"""The dense transformers: sizes, initial parameters, loss, causality, gradients, dtypes."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from archipelago.broker.errors import ConfigError
from archipelago.islands.models import layers, registry
from archipelago.islands.models.registry import MODELS, Model, Params, build
from archipelago.islands.models.transformer import transformer
from tests.failing import failing
from tests.islands.models import mini


@pytest.fixture(scope="module")
def tiny() -> Model:
    return mini.compiled(mini.dense())


@pytest.fixture(scope="module")
def params() -> Params:
    return mini.params_of(mini.dense())


def test_every_size_has_about_the_parameters_that_its_name_says() -> None:
    for size, low, high in (
        ("tiny", 0.09e6, 0.13e6),
        ("small", 0.9e6, 1.1e6),
        ("base", 24e6, 26e6),
        ("124m", 120e6, 128e6),
        ("1b", 0.95e9, 1.05e9),
        ("tiny-moe", 0.3e6, 0.34e6),
        ("small-moe", 2.9e6, 3.1e6),
    ):
        assert low <= sum(tensor.size for tensor in build(size).tensors) <= high, size


def test_an_unknown_size_is_refused_with_the_known_ones() -> None:
    with failing(ConfigError, "model.unknown") as caught:
        build("huge")
    assert all(name in caught.value.remedy for name in MODELS)


def test_the_tensors_describe_what_init_returns_which_depends_on_the_seed_alone(tiny: Model) -> None:
    params, other = tiny.init(0), tiny.init(1)
    again = transformer(mini.SIZE, jnp.bfloat16)
    assert again.tensors == tiny.tensors
    assert [tensor.name for tensor in tiny.tensors] == sorted(params)
    for tensor in tiny.tensors:
        value = params[tensor.name]
        assert (value.shape, value.dtype) == (tensor.shape, jnp.float32)
        assert (tensor.kind == "embedding") == (tensor.name == "embedding")
        is_scale = tensor.name.endswith("norm.scale")
        assert np.array_equal(value, other[tensor.name]) == is_scale
    for name, value in again.init(0).items():
        assert np.array_equal(value, params[name]), "parameters are float32 even with bfloat16 activations"
    assert params["layers.0.attention.query.kernel"].shape == (16, 16)
    # The first loss is near that of a uniform guess.
    assert abs(float(tiny.loss(params, mini.tokens(4, 65))) - math.log(256)) < 0.25


def test_the_loss_is_the_mean_over_the_targets_in_nats(tiny: Model, params: Params) -> None:
    tokens = mini.tokens(4, 65)
    logits = np.asarray(tiny.logits(params, tokens[:, :-1]), dtype=np.float64)
    probability = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    targets = np.asarray(tokens)[:, 1:]
    by_hand = [-math.log(probability[b, t, targets[b, t]]) for b in range(4) for t in range(64)]
    found = tiny.loss(params, tokens)
    assert (found.dtype, found.shape) == (jnp.float32, ())
    assert float(found) == pytest.approx(np.mean(by_hand), rel=1e-5)
    assert [float(part) for part in tiny.objective(params, tokens)] == [float(found)] * 2


def test_the_accuracy_counts_every_next_token(tiny: Model, params: Params) -> None:
    seen = np.array(mini.tokens(4, 65))
    seen[:, 1:9] = np.asarray(tiny.logits(params, jnp.asarray(seen[:, :-1]))).argmax(-1)[:, :8]
    right = np.asarray(tiny.logits(params, jnp.asarray(seen[:, :-1]))).argmax(-1) == seen[:, 1:]
    assert mini.measures(mini.dense(), seen, params).accuracy == pytest.approx(right.mean())


def test_a_logit_depends_only_on_its_position_and_earlier_ones(tiny: Model, params: Params) -> None:
    tokens = mini.tokens(4, 64)
    changed = tokens.at[:, 10].set(tokens[:, 10] ^ 1)
    before, after = tiny.logits(params, tokens), tiny.logits(params, changed)
    np.testing.assert_allclose(before[:, :10], after[:, :10], atol=1e-6)
    assert np.abs(np.asarray(before - after)[:, 10:]).max(axis=(0, 2)).min() > 1e-4


def test_every_tensor_has_a_gradient_and_sgd_fits_a_batch(params: Params) -> None:
    tokens = mini.tokens(4, 65)

    def step(params: Params) -> tuple[jax.Array, Params, Params]:
        loss, slopes = jax.value_and_grad(mini.dense().loss)(params, tokens)
        return loss, slopes, jax.tree.map(lambda value, slope: value - 0.3 * slope, params, slopes)

    compiled = mini.jitted(step)
    first, slopes, trained = compiled(params)
    assert all(float(jnp.abs(slope).max()) > 0 for slope in slopes.values())
    losses = []
    for _ in range(8):
        loss, _, trained = compiled(trained)
        losses.append(float(loss))
    assert losses[-1] < float(first) - 0.2


def test_accelerators_compute_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend, dtype in (("cpu", jnp.float32), ("gpu", jnp.bfloat16), ("tpu", jnp.bfloat16)):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        assert registry.default_compute_dtype() == dtype


def test_rotary_positions_by_hand() -> None:
    x = jnp.asarray([1.0, 0.0, 0.0, 1.0]).reshape(1, 1, 1, 4)
    assert jax.eval_shape(layers.rotate, x.astype(jnp.bfloat16), jnp.arange(1)).dtype == jnp.bfloat16
    out = jax.jit(layers.rotate)(np.tile(x, (1, 3, 1, 1)), jnp.arange(3))[0, :, 0]
    # elements 0 and 2 rotate by the position, and 1 and 3 by the position / 100
    np.testing.assert_allclose(out[0], [1.0, 0.0, 0.0, 1.0], atol=1e-6)
    np.testing.assert_allclose(out[1], [0.5403023, -0.0099998, 0.8414710, 0.9999500], atol=1e-6)
    np.testing.assert_allclose(out[2], [-0.4161468, -0.0199987, 0.9092974, 0.9998000], atol=1e-6)
