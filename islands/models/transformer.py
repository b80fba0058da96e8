"""A decoder-only transformer, over bytes or over the tokens of a tokenizer.

Shapes in names: B sequences, T positions, W width, V vocabulary.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from archipelago.broker.config import BYTES
from archipelago.islands.models.depth import UNROLLED, Depth, Penalty
from archipelago.islands.models.dimensions import Size
from archipelago.islands.models.interface import Cache, Model
from archipelago.islands.models.layers import (
    CreateMLP,
    GatedMLP,
    Layer,
    decoder,
    functional,
    language_model,
    rms_norm,
)

#: The standard deviation of the first logits at every width. The first loss is then near ln V. Smaller embeddings
#: learn more slowly.
_LOGIT_DEVIATION = 0.5


class Transformer(nnx.Module):
    """An embedding, the layers, a norm, and the embedding again as the output projection.

    Each layer has its own tensors, because a fragment is a set of whole tensors.
    """

    def __init__(
        self,
        size: Size,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
        mlp: CreateMLP = GatedMLP,
        vocabulary: int = BYTES,
        depth: Depth = UNROLLED,
    ) -> None:
        self.dtype, self.depth = dtype, depth
        init = jax.nn.initializers.normal(_LOGIT_DEVIATION / math.sqrt(size.width))
        self.embedding = nnx.Param(init(rngs.params(), (vocabulary, size.width), jnp.float32))
        self.layers = nnx.List([Layer(size, dtype, rngs, mlp) for _ in range(size.layers)])
        self.norm = rms_norm(size.width, dtype)

    def __call__(self, tokens_BxT: jax.Array) -> jax.Array:
        """Return the float32 logits [B, T, V] of integer tokens [B, T]."""
        embedding_VxW = self.embedding[...].astype(self.dtype)
        x_BxTxW = embedding_VxW[tokens_BxT.astype(jnp.int32)]
        x_BxTxW, penalty = self.depth.through(self.layers, x_BxTxW)
        if penalty is not None:
            self.penalty = Penalty(penalty)
        return jnp.einsum("btw,vw->btv", self.norm(x_BxTxW), embedding_VxW, preferred_element_type=jnp.float32)

    def extend(self, cache: Cache, tokens_BxT: jax.Array, count: jax.Array) -> tuple[jax.Array, Cache]:
        """Read the first `count` tokens after those in the cache.

        Returns:
            The float32 logits [B, V] of the next token, and the cache with these tokens added.
        """
        embedding_VxW = self.embedding[...].astype(self.dtype)
        x_BxTxW = embedding_VxW[tokens_BxT.astype(jnp.int32)]
        cached: list[tuple[jax.Array, jax.Array]] = []
        for layer, keys, values in zip(self.layers, cache.keys, cache.values, strict=True):
            x_BxTxW, *new = layer.extend(x_BxTxW, keys, values, cache.length)
            cached.append((new[0], new[1]))
        last_BxW = self.norm(jax.lax.dynamic_index_in_dim(x_BxTxW, count - 1, axis=1, keepdims=False))
        logits_BxV = jnp.einsum("bw,vw->bv", last_BxW, embedding_VxW, preferred_element_type=jnp.float32)
        both = (tuple(keys for keys, _ in cached), tuple(values for _, values in cached))
        return logits_BxV, Cache(*both, cache.length + count)


def transformer(size: Size, compute_dtype: DTypeLike, vocabulary: int = BYTES, depth: Depth = UNROLLED) -> Model:
    """The dense transformer of this size. Parameters and cross-entropy are float32 in any `compute_dtype`."""
    network = functional(lambda rngs: Transformer(size, compute_dtype, rngs, vocabulary=vocabulary, depth=depth))
    return language_model(network, decoder(network, size, compute_dtype))
