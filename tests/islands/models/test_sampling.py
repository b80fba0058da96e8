"""Text generation: each token follows from all that the model sees, and is sampled as requested."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from archipelago.islands.models.sampling import choose, continuation
from tests.islands.models import mini

GREEDY = 0.0
LOGITS_V = jnp.log(jnp.asarray([0.1, 0.4, 0.05, 0.3, 0.15], jnp.float32))


def generated(prompt: list[int], context: int, temperature: float, seed: int, count: int) -> list[int]:
    model = mini.dense()
    return list(islice(continuation(model.logits, mini.params_of(model), prompt, context, temperature, seed), count))


@pytest.fixture(scope="module")
def text() -> list[int]:
    return np.random.default_rng(3).integers(0, 256, 40).tolist()  # type: ignore[no-any-return]


def naive(prompt: list[int], context: int, count: int) -> list[int]:
    """Return the most probable tokens, each computed from all visible tokens."""
    params, logits = mini.params_of(mini.dense()), mini.compiled(mini.dense()).logits
    seen = list(prompt)
    for _ in range(count):
        visible = seen[-context:]
        tokens_1xT = np.zeros((1, 40), np.int32)  # later tokens do not change earlier logits
        tokens_1xT[0, : len(visible)] = visible
        seen.append(int(np.asarray(logits(params, jnp.asarray(tokens_1xT)))[0, len(visible) - 1].argmax()))
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
