"""Our transformer with Llama's tensor names computes the same logits as Llama, here a forward pass in numpy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from archipelago.broker.config import ModelConfig
from archipelago.broker.errors import ConfigError
from archipelago.islands.models import llama
from archipelago.islands.models.llama import Place, Size
from archipelago.islands.models.registry import MODELS, build
from archipelago.islands.models.transformer import transformer
from tests.failing import failing
from tests.islands.models import mini

Doubles = NDArray[np.float64]


def llama_logits(weights: dict[str, Doubles], config: dict[str, Any], tokens_T: NDArray[np.int64]) -> Doubles:
    """Return the float64 logits [T, V] of Hugging Face's `LlamaForCausalLM`, from its tensors and its config alone."""
    heads, size = config["num_attention_heads"], config["hidden_size"] // config["num_attention_heads"]
    time = len(tokens_T)
    angle = np.arange(time)[:, None] / config["rope_theta"] ** (np.arange(0, size, 2) / size)
    cosine, sine = (np.concatenate([part, part], axis=1)[:, None, :] for part in (np.cos(angle), np.sin(angle)))

    def norm(x: Doubles, name: str) -> Doubles:
        scaled: Doubles = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + config["rms_norm_eps"])
        return np.multiply(scaled, weights[name])

    def turned(x: Doubles) -> Doubles:
        low, high = np.split(x, 2, axis=-1)
        both: Doubles = x * cosine + np.concatenate([-high, low], axis=-1) * sine
        return both

    def project(x: Doubles, name: str) -> Doubles:
        return x @ weights[name].T

    x = weights["model.embed_tokens.weight"][tokens_T]
    hidden = np.triu(np.full((time, time), -np.inf), 1)
    for number in range(config["num_hidden_layers"]):
        at = f"model.layers.{number}."
        y = norm(x, at + "input_layernorm.weight")
        q, k, v = (project(y, f"{at}self_attn.{part}_proj.weight").reshape(time, heads, size) for part in "qkv")
        scores = np.einsum("tnd,snd->nts", turned(q), turned(k)) / np.sqrt(size) + hidden
        share = np.exp(scores - scores.max(axis=-1, keepdims=True))
        share /= share.sum(axis=-1, keepdims=True)
        x = x + project(np.einsum("nts,snd->tnd", share, v).reshape(time, -1), at + "self_attn.o_proj.weight")
        y = norm(x, at + "post_attention_layernorm.weight")
        gate = project(y, at + "mlp.gate_proj.weight")
        x = x + project(gate / (1 + np.exp(-gate)) * project(y, at + "mlp.up_proj.weight"), at + "mlp.down_proj.weight")
    return norm(x, "model.norm.weight") @ weights["model.embed_tokens.weight"].T


def test_the_logits_equal_llamas() -> None:
    vocabulary, size = 300, Size(width=16, layers=2, heads=2, hidden=24)
    model = transformer(size, jnp.float32, vocabulary)
    # Scales that are all 1 would hide scales in the wrong places.
    params = mini.params_of(model, 1)
    weights = {}
    for name, value in params.items():
        place = llama.to_llama(name)
        weights[place.name] = np.asarray(value.T if place.transposed else value, np.float64)
    tokens_T = np.random.default_rng(0).integers(0, vocabulary, 50)
    config = llama.config_of(size, vocabulary, 128, "float32")
    own = np.asarray(jax.jit(model.logits)(params, jnp.asarray(tokens_T[None], jnp.int32)))[0]
    np.testing.assert_allclose(own, llama_logits(weights, config, tokens_T), atol=3e-5)
    assert np.abs(own).max() > 0.5


def test_dense_sizes_have_llama_names_and_configs_and_other_architectures_have_none() -> None:
    for size in MODELS:
        names = [tensor.name for tensor in build(ModelConfig(size)).tensors]
        if (dense := llama.DENSE.get(size)) is None:
            with pytest.raises(KeyError):
                [llama.to_llama(name) for name in names]
            continue
        there = [llama.to_llama(name) for name in names]
        assert len({place.name for place in there}) == len(names)
        back = [Place(name, place.transposed) for name, place in zip(names, there, strict=True)]
        assert [llama.from_llama(place.name) for place in there] == back
        assert [llama.from_llama(name) for name in names] == [Place(name, False) for name in names]
        assert llama.size_of(llama.config_of(dense, 256, 128, "float32")) == dense


OWN_CONFIG = llama.config_of(Size(width=64, layers=2, heads=2, hidden=176), 256, 128, "float32")


OTHERS: list[dict[str, Any]] = [
    {"rms_norm_eps": 1e-5},
    {"rope_parameters": {"rope_theta": 5e5}},
    {"rope_parameters": {"rope_type": "llama3"}},
    {"rope_parameters": "wide"},
    {"num_key_value_heads": 1},
    {"hidden_act": "gelu"},
    {"attention_bias": True},
    {"tie_word_embeddings": False},
]
IMPOSSIBLE: list[dict[str, Any]] = [
    {"hidden_size": None},
    {"hidden_size": float("inf")},
    {"hidden_size": 0},
    {"num_attention_heads": 3, "num_key_value_heads": 3},
    {"intermediate_size": "wide"},
]


def test_a_llama_with_another_architecture_or_an_impossible_size_is_refused() -> None:
    for changes, code in ((OTHERS, "llama.different"), (IMPOSSIBLE, "llama.damaged")):
        for change in changes:
            with failing(ConfigError, code):
                pytest.fail(f"{change}: {llama.size_of({**OWN_CONFIG, **change})}")
    llama.require_size(OWN_CONFIG, "tiny")
    llama.require_size(OWN_CONFIG, "own")
    with failing(ConfigError, "llama.different"):  # the same tensors, and other attention
        llama.require_size({**OWN_CONFIG, "num_attention_heads": 4, "num_key_value_heads": 4}, "tiny")
