"""The dense transformers: sizes, initial parameters, loss, causality, gradients, dtypes."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from archipelago.broker.config import ModelConfig
from archipelago.broker.errors import ConfigError
from archipelago.islands.models import registry
from archipelago.islands.models.interface import Model, Params
from archipelago.islands.models.layers import random_keys
from archipelago.islands.models.registry import MODELS, build
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
        assert low <= sum(tensor.size for tensor in build(ModelConfig(size)).tensors) <= high, size


def test_an_unknown_size_is_refused_with_the_known_ones() -> None:
    with failing(ConfigError, "model.unknown") as caught:
        build(ModelConfig("huge"))
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


def test_the_random_keys_are_those_of_flax() -> None:
    keys, theirs = random_keys(jax.random.key(5)), nnx.Rngs(jax.random.key(5))
    assert [(keys.params() == theirs.params()).item() for _ in range(4)] == [True] * 4


def test_the_loss_is_the_mean_over_the_targets_in_nats(tiny: Model, params: Params) -> None:
    tokens = mini.tokens(4, 65)
    logits = np.asarray(tiny.logits(params, tokens[:, :-1]), dtype=np.float64)
    probability = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    targets = np.asarray(tokens)[:, 1:]
    by_hand = [-math.log(probability[b, t, targets[b, t]]) for b in range(4) for t in range(64)]
    found = tiny.loss(params, tokens)
    assert (found.dtype, found.shape) == (jnp.float32, ())
    assert float(found) == pytest.approx(np.mean(by_hand), rel=1e-5)
    assert [float(part) for part in mini.as_task(tiny).objective(params, tokens)] == [float(found)] * 2


def test_the_accuracy_counts_every_next_token(tiny: Model, params: Params) -> None:
    seen = np.array(mini.tokens(4, 65))
    seen[:, 1:9] = np.asarray(tiny.logits(params, jnp.asarray(seen[:, :-1]))).argmax(-1)[:, :8]
    right = np.asarray(tiny.logits(params, jnp.asarray(seen[:, :-1]))).argmax(-1) == seen[:, 1:]
    assert mini.measures(mini.dense(), seen, params).accuracy == pytest.approx(right.mean())


def test_accelerators_compute_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend, dtype in (("cpu", jnp.float32), ("gpu", jnp.bfloat16), ("tpu", jnp.bfloat16)):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        assert registry.default_compute_dtype() == dtype
