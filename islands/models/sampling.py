"""Writing text with a model: sampled token by token, each at the cost of one.

Shapes in names: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Ge, Gt, Le
from pydantic import ConfigDict

from archipelago.islands.models.interface import Decoder, Memory, Params


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from the logits."""

    __pydantic_config__ = ConfigDict(allow_inf_nan=False)
    temperature: Annotated[float, Ge(0.0), Le(100.0)] = 0.8
    """logits are divided by it; 0 takes the most probable token"""
    top_k: Annotated[int, Ge(0)] = 0
    """only the k most probable tokens; 0 for all"""
    top_p: Annotated[float, Gt(0.0), Le(1.0)] = 1.0
    """only the most probable tokens that have this much probability together (nucleus sampling, arXiv 1904.09751)"""


def choose(logits_V: jax.Array, key: jax.Array, sampling: Sampling) -> jax.Array:
    """A token (int32, []). What `top_k` leaves is what `top_p` is taken of."""
    if sampling.temperature == 0.0:
        return jnp.argmax(logits_V).astype(jnp.int32)
    order_V = jnp.argsort(logits_V, descending=True)
    sorted_V = logits_V[order_V] / sampling.temperature
    if 0 < sampling.top_k < logits_V.size:
        sorted_V = jnp.where(jnp.arange(logits_V.size) < sampling.top_k, sorted_V, -jnp.inf)
    if sampling.top_p < 1.0:
        probability_V = jax.nn.softmax(sorted_V)
        before_V = jnp.cumsum(probability_V) - probability_V  # the first has none before it, and always stays
        sorted_V = jnp.where(before_V < sampling.top_p, sorted_V, -jnp.inf)
    return order_V[jax.random.categorical(key, sorted_V)].astype(jnp.int32)


def continuation(
    decoder: Decoder, params: Params, prompt: Sequence[int], context: int, sampling: Sampling, seed: int
) -> Iterator[int]:
    """Tokens that follow on `prompt` (at least one), without end; the same for the same seed.

    The model sees at most `context` tokens (at least 2), as many as it was trained on. When these are full, it goes on
    from the last half of them.
    """
    step = _compiled(decoder, sampling)
    key = jax.random.key(seed)
    seen = list(prompt)
    unread, memory, filled = seen, decoder.empty(context), 0
    for number in range(1 << 31):
        if filled + len(unread) > context:
            unread, memory, filled = seen[-max(1, context // 2) :], decoder.empty(context), 0
        tokens_1xT = np.zeros((1, 1 if filled else _room(len(unread), context)), np.int32)
        tokens_1xT[0, : len(unread)] = unread
        token, memory = step(params, memory, tokens_1xT, np.int32(len(unread)), jax.random.fold_in(key, number))
        filled += len(unread)
        unread = [int(token)]
        seen = [*seen[-context:], *unread]
        yield unread[0]


Step = Callable[[Params, Memory, np.ndarray, np.int32, jax.Array], tuple[jax.Array, Memory]]


def _compiled(decoder: Decoder, sampling: Sampling) -> Step:
    """Reads tokens and chooses the next; compiled once for each number of tokens. Uses up the memory that goes in."""

    def step(
        params: Params, memory: Memory, tokens_1xT: jax.Array, count: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, Memory]:
        logits_1xV, after = decoder.extend(params, memory, tokens_1xT, count)
        return choose(logits_1xV[0], key, sampling), after

    return jax.jit(step, donate_argnums=1)


def _room(count: int, context: int) -> int:
    """A shape for so many tokens: a power of two, so that few are compiled."""
    return min(context, 1 << (count - 1).bit_length())
