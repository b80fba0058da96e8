"""A decoder-only transformer, over bytes or over the tokens of a tokenizer.

The passage through its layers is unrolled or one scan, with or without rematerialisation. Neither changes a parameter,
a name or a fragment. An unrolled program grows with the number of layers. A scan compiles one layer; for that, each
call stacks the layers' tensors, which costs one copy of them in the dtype of computation. Rematerialisation keeps only
the input of each layer for the backward pass, and computes the layer again there.

Shapes in names: B sequences, T positions, W width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from archipelago.broker.config import BYTES
from archipelago.islands.models.interface import Model
from archipelago.islands.models.layers import (
    CreateMLP,
    GatedMLP,
    Layer,
    Penalty,
    language_model,
    normal,
    rms_norm,
    rows_of,
)
from archipelago.islands.models.llama import Size

#: The standard deviation of the first logits at every width. The first loss is then near ln V. Smaller embeddings
#: learn more slowly.
_LOGIT_DEVIATION = 0.5


@dataclass(frozen=True)
class Depth:
    """How a model passes through its layers.

    Attributes:
        scan: Compile one layer and repeat it instead of one program for all layers.
        rematerialise: Compute each layer again in the backward pass instead of keeping its activations.
    """

    scan: bool = False
    rematerialise: bool = False

    def through(self, layers: Sequence[Any], x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Return the output of layers in turn, and the sum of their `Penalty` terms, unless the layers keep those."""
        if self == UNROLLED:
            for layer in layers:
                x = layer(x)
            return x, None
        if self.scan:
            for layer in layers:
                _cast(layer)
        graph = nnx.graphdef(layers[0])
        states = [nnx.state(layer) for layer in layers]

        def apply(x: jax.Array, state: Any) -> tuple[jax.Array, jax.Array]:
            layer = nnx.merge(graph, state)
            x = layer(x)
            return x, sum(jax.tree.leaves(nnx.pop(layer, Penalty)), jnp.zeros((), jnp.float32))

        if self.rematerialise:
            apply = jax.checkpoint(apply, prevent_cse=not self.scan)  # a scan prevents it anyway
        if self.scan:
            x, penalties = jax.lax.scan(apply, x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *states))
            return x, jnp.sum(penalties)
        total = jnp.zeros((), jnp.float32)
        for state in states:
            x, penalty = apply(x, state)
            total += penalty
        return x, total


#: The program of all layers in a row, which keeps their activations.
UNROLLED = Depth()


def _cast(layer: Any) -> None:
    """Cast the kernels of all projections to the dtype that they are used in, so that stacking copies fewer bytes."""
    for _, part in nnx.iter_modules(layer):
        if isinstance(part, nnx.Linear) and part.dtype is not None:
            part.kernel.set_value(part.kernel[...].astype(part.dtype))


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
        deviation = _LOGIT_DEVIATION / math.sqrt(size.width)
        self.embedding = nnx.Param(normal(deviation, rngs.params(), (vocabulary, size.width)))
        self.layers = nnx.List([Layer(size, dtype, rngs, mlp) for _ in range(size.layers)])
        self.norm = rms_norm(size.width, dtype)

    def __call__(self, tokens_BxT: jax.Array) -> jax.Array:
        """Return the float32 logits [B, T, V] of integer tokens [B, T]."""
        embedding_VxW = self.embedding[...].astype(self.dtype)
        x_BxTxW = rows_of(embedding_VxW, tokens_BxT)
        x_BxTxW, penalty = self.depth.through(self.layers, x_BxTxW)
        if penalty is not None:
            self.penalty = Penalty(penalty)
        return jnp.einsum("btw,vw->btv", self.norm(x_BxTxW), embedding_VxW, preferred_element_type=jnp.float32)


def transformer(size: Size, compute_dtype: DTypeLike, vocabulary: int = BYTES, depth: Depth = UNROLLED) -> Model:
    """The dense transformer of this size. Parameters and cross-entropy are float32 in any `compute_dtype`."""
    return language_model(lambda rngs: Transformer(size, compute_dtype, rngs, vocabulary=vocabulary, depth=depth))
