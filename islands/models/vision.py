"""Small image classifiers: a transformer over patches (ViT, arXiv 2010.11929), for corpora of examples.

An example is the pixels of one image, row by row, a byte each, and then its label.

Shapes in names: B images, S pixels of a side, N patches, Q pixels of a patch, W width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from archipelago.islands.models.interface import Model, Params
from archipelago.islands.models.layers import GAIN, Layer, Norm, Size, cross_entropy, linear, wired


@dataclass(frozen=True)
class Images:
    """What is to be seen."""

    side: int
    """pixels"""
    patch: int
    """pixels of a patch's side; divides `side`"""
    brightest: int
    """the largest value of a pixel"""
    classes: int

    @property
    def pixels(self) -> int:
        """Of one image."""
        return self.side**2


SIZES: dict[str, tuple[Size, Images]] = {
    "digits": (
        Size(width=48, layers=2, heads=2, hidden=128),
        Images(side=8, patch=2, brightest=16, classes=10),
    ),
}


def patches(pixels_BxSS: jax.Array, images: Images) -> jax.Array:
    """The patches of each image, row by row, scaled to −1 … 1; float32 [B, N, Q]."""
    across, patch = images.side // images.patch, images.patch
    cut = pixels_BxSS.reshape(-1, across, patch, across, patch).transpose(0, 1, 3, 2, 4)
    return cut.reshape(-1, across**2, patch**2).astype(jnp.float32) * (2.0 / images.brightest) - 1.0


class PatchTransformer(nnx.Module):
    """Patches and their positions embedded, layers in which each sees all, the mean over patches, a projection."""

    def __init__(self, size: Size, images: Images, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.images, self.dtype = images, dtype
        area, count = images.patch**2, (images.side // images.patch) ** 2
        self.patches = Embedding(area, size.width, GAIN / math.sqrt(area), rngs)
        self.positions = Embedding(count, size.width, GAIN, rngs)
        self.layers = nnx.List([Layer(size, dtype, rngs, causal=False) for _ in range(size.layers)])
        self.norm = Norm(size.width)
        self.output = linear(size.width, images.classes, GAIN, jnp.float32, rngs)

    def __call__(self, pixels_BxSS: jax.Array) -> jax.Array:
        """Pixels [B, S · S] to float32 logits [B, classes]."""
        embedded = jnp.einsum("bnq,qw->bnw", patches(pixels_BxSS, self.images), self.patches.embedding[...])
        x_BxNxW = (embedded + self.positions.embedding[...][None]).astype(self.dtype)
        for layer in self.layers:
            x_BxNxW = layer(x_BxNxW)
        logits: jax.Array = self.output(jnp.mean(self.norm(x_BxNxW).astype(jnp.float32), axis=1))
        return logits


class Embedding(nnx.Module):
    """One learnt row for each of `count` things."""

    def __init__(self, count: int, width: int, deviation: float, rngs: nnx.Rngs) -> None:
        init = jax.nn.initializers.normal(deviation)
        self.embedding = nnx.Param(init(rngs.params(), (count, width), jnp.float32))


def classifier(size: tuple[Size, Images], compute_dtype: DTypeLike) -> Model:
    """Images to classes. The loss is the mean cross-entropy of the labels, the last byte of each example."""
    numbers, images = size
    network = wired(lambda rngs: PatchTransformer(numbers, images, compute_dtype, rngs))

    def logits(params: Params, pixels_BxSS: jax.Array) -> jax.Array:
        return network.apply(params, pixels_BxSS)[0]

    def loss(params: Params, examples_BxSS1: jax.Array) -> jax.Array:
        labels_B = examples_BxSS1[:, -1].astype(jnp.int32)
        return jnp.mean(cross_entropy(logits(params, examples_BxSS1[:, :-1]), labels_B))

    return Model(network.init, loss, network.tensors, logits, example_bytes=images.pixels + 1)
