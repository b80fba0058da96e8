"""Held-out text: bits per byte of the merger's parameters, never of an island's own. Of examples, bits per label.

Per byte also where a token is more than one, so that models with different tokenizers compare: nats a token, times the
tokens of the whole held-out text over its bytes, over ln 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from archipelago.broker.codecs import Vector
from archipelago.broker.config import RunConfig
from archipelago.broker.manifest import Manifest
from archipelago.broker.transport import ReaderTransport
from archipelago.broker.wire import unpack
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.islands.data.sharding import held_out
from archipelago.islands.data.tokenizer import Tokens
from archipelago.islands.models.interface import Model, Params
from archipelago.islands.sync.arrays import unflatten

BATCH = 32


class Measures(NamedTuple):
    """How well a model does on held-out sequences."""

    bits: float
    """per byte of text, per label of examples; without what training adds to the loss"""
    accuracy: float
    """share of the targets that the model finds the most probable of all, 0 … 1"""


def compile_evaluation(model: Model, held_out_NxT1: Tokens, bytes_per_token: float = 1.0) -> Callable[[Params], float]:
    """From parameters to bits per byte over those sequences (a whole number of batches of 32, or all if fewer)."""
    mean_nats = _mean_over(held_out_NxT1, model.loss)
    return lambda params: float(mean_nats(params)) / math.log(2.0) / bytes_per_token


def compile_validation(config: RunConfig, corpus: OpenCorpus, text: Tokens | None = None) -> Callable[[Params], float]:
    """From parameters of the run's model to bits per byte over its share of the corpus's validation text, or of `text`.

    Raises DataError when there are fewer sequences in it than the config wants.
    """
    from archipelago.islands.models.registry import build

    wanted = held_out(
        corpus.valid if text is None else text, config.data.held_out_sequences, config.data.sequence_length
    )
    return compile_evaluation(build(config.model), wanted, corpus.bytes_per_token)


def compile_measures(model: Model, held_out_NxT1: Tokens, bytes_per_token: float = 1.0) -> Callable[[Params], Measures]:
    """From parameters to the same bits and the accuracy over the same sequences."""

    def both(params: Params, tokens_BxT1: jax.Array) -> jax.Array:  # the compiler goes through the model once
        guesses = jnp.argmax(model.logits(params, tokens_BxT1[:, :-1]), axis=-1)
        targets = tokens_BxT1[:, -1] if guesses.ndim == 1 else tokens_BxT1[:, 1:]
        return jnp.stack([model.loss(params, tokens_BxT1), jnp.mean(guesses == targets, dtype=jnp.float32)])

    mean_2 = _mean_over(held_out_NxT1, both)

    def measure(params: Params) -> Measures:
        nats, accuracy = np.asarray(mean_2(params)).tolist()
        return Measures(nats / math.log(2.0) / bytes_per_token, accuracy)

    return measure


def _mean_over(
    held_out_NxT1: Tokens, measure: Callable[[Params, jax.Array], jax.Array]
) -> Callable[[Params], jax.Array]:
    size = min(BATCH, len(held_out_NxT1))
    count = len(held_out_NxT1) // size
    batches = jnp.asarray(held_out_NxT1[: count * size].reshape(count, size, -1))

    @jax.jit
    def mean(params: Params) -> jax.Array:
        each: jax.Array = jax.lax.map(lambda tokens: measure(params, tokens.astype(jnp.int32)), batches)
        return each.mean(axis=0)

    return mean


def assemble(manifest: Manifest, vectors: Sequence[Vector]) -> Params:
    """Parameters by name from one flat vector a fragment."""
    params: Params = {}
    for rows, vector_N in zip(manifest.layout, vectors, strict=True):
        params |= unflatten(rows, jnp.asarray(vector_N))
    return dict(sorted(params.items()))


def published(transport: ReaderTransport, manifest: Manifest) -> tuple[Params, int, int]:
    """The newest published parameters, the last round in them, and the global step stamped on it."""
    found = [transport.reader.fragment(p) for p in range(len(manifest.fragments))]
    vectors = [unpack(payload, size) for (_, payload), size in zip(found, manifest.sizes, strict=True)]
    newest = max((snapshot for snapshot, _ in found), key=lambda s: s.round)
    return assemble(manifest, vectors), newest.round, max(snapshot.step for snapshot, _ in found)
