"""Held-out text: bits per byte of the merger's parameters, never of an island's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from broker.codecs import Vector
from broker.manifest import Manifest
from broker.transport import Transport
from broker.wire import unpack
from islands.model import Model, Params
from islands.replica import unflatten

BATCH = 32


def compile_evaluation(model: Model, held_out_NxT1: NDArray[np.uint8]) -> Callable[[Params], float]:
    """From parameters to bits per byte over those sequences (a whole number of batches of 32, or all if fewer)."""
    size = min(BATCH, len(held_out_NxT1))
    count = len(held_out_NxT1) // size
    batches = jnp.asarray(held_out_NxT1[: count * size].reshape(count, size, -1))

    @jax.jit
    def mean_nats(params: Params) -> jax.Array:
        nats: jax.Array = jax.lax.map(lambda tokens: model.loss(params, tokens.astype(jnp.int32)), batches)
        return nats.mean()

    return lambda params: float(mean_nats(params)) / math.log(2.0)


def assemble(manifest: Manifest, vectors: Sequence[Vector]) -> Params:
    """Parameters by name from one flat vector a fragment."""
    params: Params = {}
    for rows, vector_N in zip(manifest.layout, vectors, strict=True):
        params |= unflatten(rows, jnp.asarray(vector_N))
    return dict(sorted(params.items()))


def published(transport: Transport, manifest: Manifest) -> tuple[Params, int, int]:
    """The newest published parameters, the last round in them, and the global step stamped on it."""
    found = [transport.fragment(p) for p in range(len(manifest.fragments))]
    vectors = [unpack(payload, size) for (_, payload), size in zip(found, manifest.sizes, strict=True)]
    newest = max((snapshot for snapshot, _ in found), key=lambda s: s.round)
    return assemble(manifest, vectors), newest.round, max(snapshot.step for snapshot, _ in found)
