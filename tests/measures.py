"""A whole evaluation of one of our models, for tests."""

from __future__ import annotations

from archipelago.islands.data.tokenizer import Tokens
from archipelago.islands.evaluation import BATCH, Measures, SlicedMeasures, measured
from archipelago.islands.models.interface import Model, Params


def measures(model: Model, held_out_NxT1: Tokens, params: Params, bytes_per_token: float = 1.0) -> Measures:
    """Return bits and accuracy over these sequences."""
    return measured(SlicedMeasures(model, held_out_NxT1, params, BATCH, bytes_per_token), params)
