"""Evaluation on held-out data, in bits per byte of text.

The loss is given per byte, so that models with different tokenizers are comparable: nats per token, times the tokens
of the held-out text over its bytes, over ln 2. When an island evaluates is in `islands.sync.evaluator`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from archipelago.broker.codecs import Vector
from archipelago.broker.config import RunConfig
from archipelago.broker.manifest import Manifest
from archipelago.broker.transport import ReaderTransport
from archipelago.islands.data.batches import held_out
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.islands.data.tokenizer import Tokens
from archipelago.islands.models.interface import Model, Params
from archipelago.islands.sync.evaluator import Measures, newest_merged

BATCH = 32

#: From parameters to the measures of each slice, which are made one by one: each is a short call of the device.
Evaluate = Callable[[Params], Iterator[Measures]]


def in_slices(model: Model, held_out_NxT1: Tokens, batch_size: int, bytes_per_token: float = 1.0) -> Evaluate:
    """Return the evaluation of a model on held-out sequences, in slices of at most `batch_size` sequences.

    It reads a whole number of batches of 32 sequences, or one batch if there are fewer. The first slice compiles.
    """
    whole = min(BATCH, len(held_out_NxT1))
    used = len(held_out_NxT1) // whole * whole
    size = math.gcd(used, batch_size) if used % min(used, batch_size) else min(used, batch_size)
    batches = jax.device_put(list(held_out_NxT1[:used].reshape(used // size, size, -1)))
    bits_per_nat = 1.0 / math.log(2.0) / bytes_per_token

    @jax.jit
    def nats_and_accuracy(params: Params, tokens_BxT1: jax.Array) -> jax.Array:
        tokens_BxT1 = tokens_BxT1.astype(jnp.int32)
        right = jnp.argmax(model.logits(params, tokens_BxT1[:, :-1]), axis=-1) == tokens_BxT1[:, 1:]
        return jnp.stack([model.loss(params, tokens_BxT1), jnp.mean(right, dtype=jnp.float32)])

    def evaluation(params: Params) -> Iterator[Measures]:
        for batch in batches:
            nats, accuracy = np.asarray(nats_and_accuracy(params, batch)).tolist()
            yield Measures(nats * bits_per_nat, accuracy)

    return evaluation


class CorpusEvaluation:
    """The evaluation of one of our models on the validation text of a corpus, or on another held-out text of it."""

    def __init__(self, config: RunConfig, corpus: OpenCorpus, text: Tokens | None = None) -> None:
        self._config, self._bytes_per_token = config, corpus.bytes_per_token
        self._text = corpus.valid if text is None else text
        self._evaluation: Evaluate | None = None

    def __call__(self, params: Params) -> Iterator[Measures]:
        """Return the measures of each slice. Raises DataError for a text too short."""
        from archipelago.islands.models.registry import build

        if self._evaluation is None:
            data, model = self._config.data, build(self._config.model)
            text = held_out(self._text, data.held_out_sequences, data.sequence_length)
            self._evaluation = in_slices(model, text, data.batch_size, self._bytes_per_token)
        return self._evaluation(params)


def assemble(manifest: Manifest, vectors: Sequence[Vector], place: Callable[[Any], Params] = jax.device_put) -> Params:
    """Return parameters by name from one flat vector for each fragment. `place` brings them to the devices."""
    # Slicing on the host compiles nothing. Slicing on the device compiles a program for each tensor.
    params: Params = place(manifest.named([np.asarray(vector_N) for vector_N in vectors]))
    return params


def published(transport: ReaderTransport, manifest: Manifest) -> tuple[Params, int, int]:
    """Return the newest published parameters, the last round in them, and their global step."""
    found = newest_merged(transport, manifest)
    return assemble(manifest, found.vectors), found.round, found.step
