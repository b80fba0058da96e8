"""Text generation: tokens are sampled one by one, and each costs the computation of one position.

Shapes in names: V vocabulary, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from archipelago.islands.models.interface import Cache, Decoder, Params


def choose(logits_V: jax.Array, key: jax.Array, temperature: float) -> jax.Array:
    """Sample a token (int32, []) from the logits divided by the temperature. At 0 it is the most probable one."""
    found = jnp.argmax(logits_V) if temperature == 0.0 else jax.random.categorical(key, logits_V / temperature)
    return found.astype(jnp.int32)


def continuation(
    decoder: Decoder, params: Params, prompt: Sequence[int], context: int, temperature: float, seed: int
) -> Iterator[int]:
    """Yield tokens that continue a prompt, without end. Equal seeds give equal tokens.

    Args:
        prompt: At least one token.
        context: The most tokens that the model sees at once, at least 2. When they are full, generation continues from
            the last half of them.
    """
    step = _compile(decoder, temperature)
    key = jax.random.key(seed)
    seen = list(prompt)
    unread, cache, filled = seen, decoder.empty(context), 0
    for number in range(1 << 31):
        if filled + len(unread) > context:
            unread, cache, filled = seen[-max(1, context // 2) :], decoder.empty(context), 0
        tokens_1xT = np.zeros((1, 1 if filled else _padded(len(unread), context)), np.int32)
        tokens_1xT[0, : len(unread)] = unread
        token, cache = step(params, cache, tokens_1xT, np.int32(len(unread)), jax.random.fold_in(key, number))
        filled += len(unread)
        unread = [int(token)]
        seen = [*seen[-context:], *unread]
        yield unread[0]


Step = Callable[[Params, Cache, np.ndarray, np.int32, jax.Array], tuple[jax.Array, Cache]]


@cache
def _compile(decoder: Decoder, temperature: float) -> Step:
    """Return a step that reads tokens and samples the next one.

    It compiles once per number of tokens. The cache is donated: it cannot be used again.
    """

    def step(
        params: Params, cache: Cache, tokens_1xT: jax.Array, count: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, Cache]:
        logits_1xV, after = decoder.extend(params, cache, tokens_1xT, count)
        return choose(logits_1xV[0], key, temperature), after

    return jax.jit(step, donate_argnums=1)


def _padded(count: int, context: int) -> int:
    """Round a number of tokens up to a power of two, so that few shapes are compiled."""
    return min(context, 1 << (count - 1).bit_length())
