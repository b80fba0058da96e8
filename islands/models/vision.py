"""Small image classifiers: a transformer over patches (ViT, arXiv 2010.11929), for corpora of examples.

An example holds the pixels of one image, row by row and one byte each, and then its label.

Shapes in names: B images, S pixels of a side, N patches, Q pixels of a patch, W width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from archipelago.islands.models.depth import UNROLLED, Depth
from archipelago.islands.models.dimensions import Size
from archipelago.islands.models.interface import Model, Params
from archipelago.islands.models.layers import GAIN, Layer, functional, linear, mean_cross_entropy, rms_norm


@dataclass(frozen=True)
class Images:
    """The images that a classifier reads.

    Attributes:
        side: Pixels of a side.
        patch: Pixels of a patch's side. It divides `side`.
        brightest: The largest value of a pixel.
        classes: The number of labels.
    """

    side: int
    patch: int
    brightest: int
    classes: int

    @property
    def pixels(self) -> int:
        """The pixels of one image."""
        return self.side**2

    @property
    def patches(self) -> int:
        """The patches of one image."""
        return (self.side // self.patch) ** 2


def patches(pixels_BxSS: jax.Array, images: Images) -> jax.Array:
    """Cut each image into patches, row by row, and scale the pixels to −1 … 1. Returns float32 [B, N, Q]."""
    across, patch = images.side // images.patch, images.patch
    cut = pixels_BxSS.reshape(-1, across, patch, across, patch).transpose(0, 1, 3, 2, 4)
    return cut.reshape(-1, images.patches, patch**2).astype(jnp.float32) * (2.0 / images.brightest) - 1.0


class PatchTransformer(nnx.Module):
    """Embedded patches with learned positions, layers without a causal mask, the mean over patches, a projection."""

    def __init__(self, size: Size, images: Images, dtype: DTypeLike, rngs: nnx.Rngs, depth: Depth = UNROLLED) -> None:
        self.images, self.dtype, self.depth = images, dtype, depth
        area = images.patch**2
        self.patches = _embedding(area, size.width, GAIN / math.sqrt(area), rngs)
        self.positions = _embedding(images.patches, size.width, GAIN, rngs)
        self.layers = nnx.List([Layer(size, dtype, rngs, causal=False) for _ in range(size.layers)])
        self.norm = rms_norm(size.width, dtype)
        self.output = linear(size.width, images.classes, GAIN, jnp.float32, rngs)

    def __call__(self, pixels_BxSS: jax.Array) -> jax.Array:
        """Return the float32 logits [B, classes] of pixels [B, S · S]."""
        embedded = jnp.einsum("bnq,qw->bnw", patches(pixels_BxSS, self.images), self.patches.embedding[...])
        x_BxNxW = (embedded + self.positions.embedding[...][None]).astype(self.dtype)
        x_BxNxW, _ = self.depth.through(self.layers, x_BxNxW)
        logits: jax.Array = self.output(jnp.mean(self.norm(x_BxNxW).astype(jnp.float32), axis=1))
        return logits


def _embedding(count: int, width: int, deviation: float, rngs: nnx.Rngs) -> nnx.Embed:
    """A table with one learned row per item."""
    return nnx.Embed(count, width, embedding_init=jax.nn.initializers.normal(deviation), rngs=rngs)


def classifier(size: Size, images: Images, compute_dtype: DTypeLike, depth: Depth = UNROLLED) -> Model:
    """An image classifier. Its loss is the mean cross-entropy of the labels, the last byte of each example."""
    network = functional(lambda rngs: PatchTransformer(size, images, compute_dtype, rngs, depth))

    def logits(params: Params, pixels_BxSS: jax.Array) -> jax.Array:
        return network.apply(params, pixels_BxSS)[0]

    def loss(params: Params, examples_BxSS1: jax.Array) -> jax.Array:
        return mean_cross_entropy(logits(params, examples_BxSS1[:, :-1]), examples_BxSS1[:, -1])

    return Model(network.init, loss, network.tensors, logits, example_bytes=images.pixels + 1)
