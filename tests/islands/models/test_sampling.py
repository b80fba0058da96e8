"""Text generation: the cache does not change the logits, and tokens are sampled as requested."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from archipelago.islands.models.interface import Model, Params
from archipelago.islands.models.moe import Routing
from archipelago.islands.models.sampling import choose, continuation
from tests.islands.models import mini

GREEDY = 0.0
LOGITS_V = jnp.log(jnp.asarray([0.1, 0.4, 0.05, 0.3, 0.15], jnp.float32))


@cache
def programs(model: Model) -> tuple[Params, Any, Any]:
    """Return parameters of a model, and its compiled logits and extension of the cache."""
    return mini.params_of(model), mini.compiled(model).logits, mini.jitted(model.decoder.extend)


def generated(prompt: list[int], context: int, temperature: float, seed: int, count: int) -> list[int]:
    model = mini.dense()
    return list(islice(continuation(model.decoder, programs(model)[0], prompt, context, temperature, seed), count))


@pytest.fixture(scope="module")
def text() -> list[int]:
    return np.random.default_rng(3).integers(0, 256, 40).tolist()  # type: ignore[no-any-return]


#: It has a slot for every token. Otherwise the tokens without a slot would depend on how many are read together.
ROOMY = Routing(4, 2, capacity_factor=2.0)


@pytest.mark.parametrize("kind", ["dense", pytest.param("experts", marks=pytest.mark.full)])
def test_the_cache_gives_the_same_logits_as_a_full_pass(kind: str, text: list[int]) -> None:
    model = mini.dense() if kind == "dense" else mini.experts(ROOMY)
    params, logits, extend = programs(model)
    assert model.decoder is not None
    expected = np.asarray(logits(params, jnp.asarray([text], jnp.int32)))[0]
    cache = model.decoder.empty(len(text))
    first = jnp.asarray([text[:9] + [7] * 7], jnp.int32)  # the 7s only pad the shape
    logits_1xV, cache = extend(params, cache, first, jnp.int32(9))
    np.testing.assert_allclose(logits_1xV[0], expected[8], atol=2e-5)
    for place in range(9, len(text)):
        logits_1xV, cache = extend(params, cache, jnp.asarray([[text[place]]], jnp.int32), jnp.int32(1))
        np.testing.assert_allclose(logits_1xV[0], expected[place], atol=2e-5)
    assert int(cache.length) == len(text)


def naive(prompt: list[int], context: int, count: int) -> list[int]:
    """Return the most probable tokens, each computed by a full pass over all visible tokens."""
    params, logits, _ = programs(mini.dense())
    seen, window = list(prompt), len(prompt)
    for _ in range(count):
        if window > context:
            window = context // 2
        tokens_1xT = np.zeros((1, 40), np.int32)  # later tokens do not change earlier logits
        tokens_1xT[0, :window] = seen[-window:]
        seen.append(int(np.asarray(logits(params, tokens_1xT))[0, window - 1].argmax()))
        window += 1
    return seen[len(prompt) :]


@pytest.mark.parametrize(("prompt_length", "context"), [(5, 16), (40, 16)])
def test_generation_continues_beyond_the_context(text: list[int], prompt_length: int, context: int) -> None:
    prompt = text[:prompt_length]
    assert generated(prompt, context, GREEDY, 0, 30) == naive(prompt, context, 30)


def frequencies(temperature: float, count: int = 4000) -> dict[int, float]:
    keys = jax.random.split(jax.random.key(0), count)
    chosen = jax.vmap(lambda key: choose(LOGITS_V, key, temperature))(keys)
    return {token: times / count for token, times in sorted(Counter(np.asarray(chosen).tolist()).items())}


def test_tokens_have_the_probabilities_of_the_logits() -> None:
    found = frequencies(1.0)
    assert found == pytest.approx({0: 0.1, 1: 0.4, 2: 0.05, 3: 0.3, 4: 0.15}, abs=0.03)
    assert frequencies(GREEDY) == {1: 1.0}
    flat = frequencies(100.0)
    assert flat == pytest.approx(dict.fromkeys(range(5), 0.2), abs=0.03)
