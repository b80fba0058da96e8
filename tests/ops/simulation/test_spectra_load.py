"""The prediction of what spectra cost a merger, and its remedies."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from archipelago.broker.config import MergeConfig, ModelConfig
from archipelago.broker.manifest import Tensor
from archipelago.islands.models.registry import build
from archipelago.merger.spectra import cycle_operations
from archipelago.ops.simulation.cycle import SHARE_MAX, THREAD_RATE, decoder, spectra_load

ISOTROPIC = MergeConfig(embedding="isotropic", rest="isotropic", embedding_exponent=0.5, rest_exponent=0.0)
TENSORS = (Tensor("embedding", (256, 64), "embedding"), Tensor("a", (64, 64)), Tensor("b", (3, 100, 400)))


def test_the_prediction_is_the_arithmetic_over_the_rate() -> None:
    found = spectra_load(TENSORS, ISOTROPIC, 2, 1e9, 10.0)
    assert found.operations == cycle_operations(TENSORS, ISOTROPIC)
    assert (found.seconds, found.share) == (found.operations / 1e9, found.operations / 1e10)
    assert found.fits
    assert found.side_max == ISOTROPIC.isotropic_side_max
    assert spectra_load(TENSORS, ISOTROPIC, 2, 1e9, math.nan).fits, "nothing is known against it"
    assert spectra_load(TENSORS, MergeConfig(embedding="average", rest="rda"), 2, 1e9, 1e-9).fits


def test_the_remedies_make_it_fit() -> None:
    rate = 1e9
    slow = spectra_load(TENSORS, ISOTROPIC, 2, rate, cycle_operations(TENSORS, ISOTROPIC) / rate)
    assert not slow.fits
    assert slow.side_max == 64, "the largest matrices by RDA are enough"
    assert spectra_load(TENSORS, replace(ISOTROPIC, isotropic_side_max=64), 2, rate, slow.interval_seconds).fits
    assert f"--threads {math.ceil(2 / SHARE_MAX)}" in slow.remedy
    assert "--merge.isotropic-side-max 64" in slow.remedy
    assert slow.coarser == "--merge.rest rda", "the embedding alone fits"
    hopeless = spectra_load(TENSORS, ISOTROPIC, 2, rate, 1e-9)
    assert hopeless.side_max == 1
    assert "side-max" not in hopeless.remedy
    assert "--merge.rest rda --merge.embedding rda" in hopeless.remedy, "spectra of embeddings cost, too"


def test_the_default_limit_lets_eight_threads_serve_124_million_parameters() -> None:
    """An interval of 24 steps of one second, with any vocabulary. Without a limit, 1 B needs more threads."""
    for vocabulary in (256, 50_257):
        tensors = build(ModelConfig("124m", vocabulary)).tensors
        assert cycle_operations(tensors, ISOTROPIC) > 2e12, "all hidden matrices are changed"
        assert spectra_load(tensors, ISOTROPIC, 8, 8 * THREAD_RATE, 24.0).fits
    large = build(ModelConfig("1b")).tensors
    assert spectra_load(large, ISOTROPIC, 8, 8 * THREAD_RATE, 24.0).fits
    assert not spectra_load(large, replace(ISOTROPIC, isotropic_side_max=2048), 8, 8 * THREAD_RATE, 24.0).fits


@pytest.mark.parametrize("name", ["base", "124m", "1b"])
def test_a_number_of_parameters_stands_for_a_usual_decoder(name: str) -> None:
    tensors = build(ModelConfig(name)).tensors
    whole, parameters = replace(ISOTROPIC, isotropic_side_max=4096), sum(tensor.size for tensor in tensors)
    assumed = decoder(parameters)
    assert sum(tensor.size for tensor in assumed) == pytest.approx(parameters, rel=0.05)
    assert cycle_operations(assumed, whole) == pytest.approx(cycle_operations(tensors, whole), rel=0.5)
