"""Text generation: tokens are sampled one by one, and each costs the computation of one position.

Shapes in names: V vocabulary, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Ge, Gt, Le
from pydantic import ConfigDict

from archipelago.islands.models.interface import Cache, Decoder, Params


@dataclass(frozen=True)
class Sampling:
    """Settings of the choice of the next token from the logits.

    Attributes:
        temperature: Divides the logits. 0 takes the most probable token.
        top_k: Sample only from the k most probable tokens. 0 means all of them.
        top_p: Sample only from the most probable tokens that together have this probability (nucleus sampling, arXiv
            1904.09751).
    """

    __pydantic_config__ = ConfigDict(allow_inf_nan=False)
    temperature: Annotated[float, Ge(0.0), Le(100.0)] = 0.8
    top_k: Annotated[int, Ge(0)] = 0
    top_p: Annotated[float, Gt(0.0), Le(1.0)] = 1.0


def choose(logits_V: jax.Array, key: jax.Array, sampling: Sampling) -> jax.Array:
    """Sample a token (int32, []). `top_p` applies to the tokens that `top_k` leaves."""
    if sampling.temperature == 0.0:
        return jnp.argmax(logits_V).astype(jnp.int32)
    order_V = jnp.argsort(logits_V, descending=True)
    sorted_V = logits_V[order_V] / sampling.temperature
    if 0 < sampling.top_k < logits_V.size:
        sorted_V = jnp.where(jnp.arange(logits_V.size) < sampling.top_k, sorted_V, -jnp.inf)
    if sampling.top_p < 1.0:
        probability_V = jax.nn.softmax(sorted_V)
        before_V = jnp.cumsum(probability_V) - probability_V  # zero for the first token, so at least one remains
        sorted_V = jnp.where(before_V < sampling.top_p, sorted_V, -jnp.inf)
    return order_V[jax.random.categorical(key, sorted_V)].astype(jnp.int32)


def continuation(
    decoder: Decoder, params: Params, prompt: Sequence[int], context: int, sampling: Sampling, seed: int
) -> Iterator[int]:
    """Yield tokens that continue a prompt, without end. Equal seeds give equal tokens.

    Args:
        decoder: The model's decoder.
        params: The model's parameters.
        prompt: At least one token.
        context: The most tokens that the model sees at once, at least 2. When they are full, generation continues from
            the last half of them.
        sampling: How each token is chosen.
        seed: Seeds the random numbers.
    """
    step = _compile(decoder, sampling)
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
def _compile(decoder: Decoder, sampling: Sampling) -> Step:
    """Return a step that reads tokens and samples the next one.

    It compiles once per number of tokens. The cache is donated: it cannot be used again.
    """

    def step(
        params: Params, cache: Cache, tokens_1xT: jax.Array, count: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, Cache]:
        logits_1xV, after = decoder.extend(params, cache, tokens_1xT, count)
        return choose(logits_1xV[0], key, sampling), after

    return jax.jit(step, donate_argnums=1)


def _padded(count: int, context: int) -> int:
    """Round a number of tokens up to a power of two, so that few shapes are compiled."""
    return min(context, 1 << (count - 1).bit_length())
