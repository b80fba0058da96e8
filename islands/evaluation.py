"""Evaluation on held-out data, in bits per byte of text.

The loss is given per byte, so that models with different tokenizers are comparable: nats per token, times the tokens
of the held-out text over its bytes, over ln 2. Evaluations use the merger's parameters, never an island's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from archipelago.broker.codecs import Vector
from archipelago.broker.config import RunConfig
from archipelago.broker.manifest import LossUnit, Manifest
from archipelago.broker.transport import ReaderTransport
from archipelago.broker.wire import newest
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.islands.data.ranges import held_out
from archipelago.islands.data.tokenizer import Tokens
from archipelago.islands.models.interface import Model, Params

BATCH = 32


class Measures(NamedTuple):
    """The quality of a model on held-out sequences.

    Attributes:
        bits: Bits per byte of text, without auxiliary terms of the objective. Of a task, its loss in bits.
        accuracy: Share of the targets that the model finds most probable, 0 … 1.
    """

    bits: float
    accuracy: float

    def describe(self, unit: LossUnit) -> str:
        """Return the measures in words, in the run's unit. A task may give no accuracy."""
        right = f", {100 * self.accuracy:.1f} % right" if math.isfinite(self.accuracy) else ""
        return f"{unit.from_evaluation(self.bits):.4f} {unit.name} on held-out data{right}"


def _nats_and_accuracy(model: Model, params: Params, tokens_BxT1: jax.Array) -> jax.Array:
    """Return both measures, so that the model is compiled once."""
    guesses = jnp.argmax(model.logits(params, tokens_BxT1[:, :-1]), axis=-1)
    return jnp.stack([model.loss(params, tokens_BxT1), jnp.mean(guesses == tokens_BxT1[:, 1:], dtype=jnp.float32)])


class Slices(Protocol):
    """An evaluation in slices, each of them a short call of the device.

    Attributes:
        slices: The number of slices.
    """

    slices: int

    def measure_slice(self, params: Params, index: int) -> Measures:
        """Return the measures of one slice, once the device has made them."""


class SlicedMeasures:
    """An evaluation in slices of a few sequences, each of them a short call of the device.

    It reads a whole number of batches of 32 sequences, or one batch if there are fewer.

    Attributes:
        slices: The number of slices.
    """

    def __init__(
        self, model: Model, held_out_NxT1: Tokens, params: Params, batch_size: int, bytes_per_token: float = 1.0
    ) -> None:
        """Compile the program of a slice. `params` gives the shapes; a slice has at most `batch_size` sequences."""
        whole = min(BATCH, len(held_out_NxT1))
        used = len(held_out_NxT1) // whole * whole
        size = math.gcd(used, batch_size) if used % min(used, batch_size) else min(used, batch_size)
        self.slices = used // size
        self._batches = jax.device_put(list(held_out_NxT1[:used].reshape(self.slices, size, -1)))
        self._bits = 1.0 / math.log(2.0) / bytes_per_token
        both = jax.jit(lambda params, tokens: _nats_and_accuracy(model, params, tokens.astype(jnp.int32)))
        self._run = both.lower(params, self._batches[0]).compile()

    def measure_slice(self, params: Params, index: int) -> Measures:
        """Return the measures of one slice, once the device has made them."""
        nats, accuracy = np.asarray(self._run(params, self._batches[index])).tolist()
        return Measures(nats * self._bits, accuracy)


class CorpusEvaluation:
    """The evaluation of one of our models on the validation text of a corpus, or on another held-out text of it.

    As the `evaluate` of a task it is compiled, and measured in slices between inner steps.
    """

    def __init__(self, config: RunConfig, corpus: OpenCorpus, text: Tokens | None = None) -> None:
        self._config, self._bytes_per_token = config, corpus.bytes_per_token
        self._text = corpus.valid if text is None else text
        self._compiled: SlicedMeasures | None = None

    def compiled(self, params: Params) -> SlicedMeasures:
        """Return the evaluation, compiled for parameters of these shapes. Raises DataError for a text too short."""
        from archipelago.islands.models.registry import build

        if self._compiled is None:
            data, model = self._config.data, build(self._config.model)
            text = held_out(self._text, data.held_out_sequences, data.sequence_length)
            self._compiled = SlicedMeasures(model, text, params, data.batch_size, self._bytes_per_token)
        return self._compiled


def measured(slices: Slices, params: Params) -> Measures:
    """Return a whole evaluation."""
    return mean_of([slices.measure_slice(params, index) for index in range(slices.slices)])


def mean_of(slices: Sequence[Measures]) -> Measures:
    """Return the measures of an evaluation from those of its slices. No number is infinite."""
    bits = math.fsum(each.bits for each in slices) / len(slices)
    accuracy = math.fsum(each.accuracy for each in slices) / len(slices)
    return Measures(bits if math.isfinite(bits) else math.nan, accuracy)


def assemble(manifest: Manifest, vectors: Sequence[Vector], place: Callable[[Any], Params] = jax.device_put) -> Params:
    """Return parameters by name from one flat vector for each fragment. `place` brings them to the devices."""
    # Slicing on the host compiles nothing. Slicing on the device compiles a program for each tensor.
    parts = {
        tensor.name: vector_N[offset : offset + tensor.size].reshape(tensor.shape)
        for rows, vector_N in zip(manifest.layout, map(np.asarray, vectors), strict=True)
        for tensor, offset in rows
    }
    params: Params = place(dict(sorted(parts.items())))
    return params


def published(
    transport: ReaderTransport, manifest: Manifest, place: Callable[[Any], Params] = jax.device_put
) -> tuple[Params, int, int]:
    """Return the newest published parameters, the last round in them, and their global step."""
    found = [newest(transport.reader, manifest, p) for p in range(len(manifest.fragments))]
    last, step = max(part.snapshot.round for part in found), max(part.snapshot.step for part in found)
    return assemble(manifest, [part.params_N for part in found], place), last, step
