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
from archipelago.islands.models.interface import Memory, Model
from archipelago.islands.models.layers import CreateMLP, GatedMLP, Layer, Norm, Size, decoder, next_token_model, wired

_LOGIT_DEVIATION = 0.5
"""deviation of the first logits at every width: the first loss is near ln V, and smaller embeddings learn slower"""


class Transformer(nnx.Module):
    """Embedding, layers, norm, and the embedding again as the output projection.

    The layers are unrolled, not stacked, because a fragment is a set of whole tensors.
    """

    def __init__(
        self, size: Size, dtype: DTypeLike, rngs: nnx.Rngs, mlp: CreateMLP = GatedMLP, vocabulary: int = BYTES
    ) -> None:
        self.dtype = dtype
        init = jax.nn.initializers.normal(_LOGIT_DEVIATION / math.sqrt(size.width))
        self.embedding = nnx.Param(init(rngs.params(), (vocabulary, size.width), jnp.float32))
        self.layers = nnx.List([Layer(size, dtype, rngs, mlp) for _ in range(size.layers)])
        self.norm = Norm(size.width)

    def __call__(self, tokens_BxT: jax.Array) -> jax.Array:
        """Integer tokens [B, T] to float32 logits [B, T, V]."""
        embedding_VxW = self.embedding[...].astype(self.dtype)
        x_BxTxW = embedding_VxW[tokens_BxT.astype(jnp.int32)]
        for layer in self.layers:
            x_BxTxW = layer(x_BxTxW)
        return jnp.einsum("btw,vw->btv", self.norm(x_BxTxW), embedding_VxW, preferred_element_type=jnp.float32)

    def extend(self, memory: Memory, tokens_BxT: jax.Array, count: jax.Array) -> tuple[jax.Array, Memory]:
        """Logits [B, V] after the first `count` tokens, which follow on `memory`, and the memory with these."""
        embedding_VxW = self.embedding[...].astype(self.dtype)
        x_BxTxW = embedding_VxW[tokens_BxT.astype(jnp.int32)]
        kept: list[tuple[jax.Array, jax.Array]] = []
        for layer, keys, values in zip(self.layers, memory.keys, memory.values, strict=True):
            x_BxTxW, *new = layer.extend(x_BxTxW, keys, values, memory.length)
            kept.append((new[0], new[1]))
        last_BxW = self.norm(jax.lax.dynamic_index_in_dim(x_BxTxW, count - 1, axis=1, keepdims=False))
        logits_BxV = jnp.einsum("bw,vw->bv", last_BxW, embedding_VxW, preferred_element_type=jnp.float32)
        both = (tuple(keys for keys, _ in kept), tuple(values for _, values in kept))
        return logits_BxV, Memory(*both, memory.length + count)


def transformer(size: Size, compute_dtype: DTypeLike, vocabulary: int = BYTES) -> Model:
    """The transformer of this size. Parameters, softmax and cross-entropy are float32 whatever `compute_dtype` is."""
    network = wired(lambda rngs: Transformer(size, compute_dtype, rngs, vocabulary=vocabulary))
    return next_token_model(network, decoder(network, size, compute_dtype))
