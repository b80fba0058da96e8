"""Gradient accumulation: the gradients of a batch, computed in parts one after the other.

A part needs the activations of its own examples only. The sum of the gradients takes the memory of one more gradient.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from archipelago.broker.errors import ConfigError
from archipelago.islands.models.interface import Gradient, Params


def accumulated(compute: Gradient, parts: int) -> Gradient:
    """Return a function to the mean gradients and the mean loss of `parts` equal parts of a batch.

    They equal those of the whole batch up to rounding, if the objective is a mean over examples. Terms that are no such
    mean, as the balance of experts, become means over parts. With one part, this is `compute` itself.
    """
    if parts == 1:
        return compute

    def in_parts(params: Params, batch: Any) -> tuple[Params, jax.Array]:
        def add(sums: tuple[Params, jax.Array], part: Any) -> tuple[tuple[Params, jax.Array], None]:
            return jax.tree.map(jnp.add, sums, compute(params, part)), None

        nothing = (jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.float32))
        sums, _ = jax.lax.scan(add, nothing, jax.tree.map(lambda leaf: _cut(leaf, parts), batch))
        gradients, loss = jax.tree.map(lambda leaf: leaf / parts, sums)
        return gradients, loss

    return in_parts


def require_divisible(examples: int, parts: int) -> None:
    """Raise ConfigError (`config.micro-batches`) unless the examples of a batch can be cut into equal parts."""
    if examples % parts:
        raise ConfigError(
            f"a batch of {examples:,} examples cannot be cut into {parts:,} equal micro-batches",
            "Set --inner.micro-batches to a divisor of the batch size.",
            code="config.micro-batches",
        )


def _cut(leaf: jax.Array, parts: int) -> jax.Array:
    """Cut [B, …] to [parts, B / parts, …]. Part k has the examples k, k + parts, k + 2 · parts, …

    A device that holds a block of the batch thus has its share of each part.
    """
    examples = leaf.shape[0] if leaf.ndim else 1
    require_divisible(examples, parts)
    return leaf.reshape(examples // parts, parts, *leaf.shape[1:]).swapaxes(0, 1)
