"""Text generation: tokens are sampled one by one, each from all the tokens that the model sees.

Shapes in names: V vocabulary, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from archipelago.islands.models.interface import Params

#: From parameters and integer tokens [B, T] to float32 logits [B, T, V].
Logits = Callable[[Params, jax.Array], jax.Array]


#: A lower temperature changes no choice, and float32 could not divide by it.
COLD = 1e-6


def choose(logits_V: jax.Array, key: jax.Array, temperature: float) -> jax.Array:
    """Sample a token (int32, []) from the logits divided by the temperature. Near 0 it is the most probable one."""
    found = jnp.argmax(logits_V) if temperature < COLD else jax.random.categorical(key, logits_V / temperature)
    return found.astype(jnp.int32)


def continuation(
    logits: Logits, params: Params, prompt: Sequence[int], context: int, temperature: float, seed: int
) -> Iterator[int]:
    """Yield tokens that continue a prompt, without end. Equal seeds give equal tokens.

    Args:
        logits: Those of a model.
        prompt: At least one token.
        context: The most tokens that the model sees at once.
    """
    step, key, seen = _compile(logits, temperature), jax.random.key(seed), list(prompt)
    for number in range(1 << 31):
        seen = seen[-context:]
        tokens_1xT = np.zeros((1, _padded(len(seen), context)), np.int32)
        tokens_1xT[0, : len(seen)] = seen
        seen.append(int(step(params, tokens_1xT, np.int32(len(seen)), jax.random.fold_in(key, number))))
        yield seen[-1]


@cache
def _compile(logits: Logits, temperature: float) -> Callable[[Params, np.ndarray, np.int32, jax.Array], jax.Array]:
    """Return a step that samples the token after the first `count` ones. The others only pad the shape."""

    def step(params: Params, tokens_1xT: jax.Array, count: jax.Array, key: jax.Array) -> jax.Array:
        return choose(logits(params, tokens_1xT)[0, count - 1], key, temperature)

    return jax.jit(step)


def _padded(count: int, context: int) -> int:
    """Round a number of tokens up to 64, 256, 1024 and so on, so that few shapes are compiled."""
    size = 64
    while size < count:
        size *= 4
    return min(context, size)
