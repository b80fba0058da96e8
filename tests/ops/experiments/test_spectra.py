"""`bench spectra`: the comparison of one matrix worked out by hand, and a short real one."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from archipelago.broker.errors import ConfigError
from archipelago.broker.manifest import Tensor
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.ops.experiments.spectra import (
    GROUPS,
    SpectraOptions,
    compared,
    draw,
    grouped,
    hidden_matrices,
    main,
    spectra,
)
from tests.failing import failing
from tests.small import SMALL


def test_one_matrix_by_hand() -> None:
    """Two islands agree on a strong direction, and on a weak one that data-parallel follows in the long run."""
    one, other = np.diag([4.0, 1.0, 0.0]), np.diag([4.0, 1.0, 0.0])
    together, again, later = np.diag([4.0, 0.0, 0.0]), np.diag([0.0, 0.0, 4.0]), np.diag([3.0, 3.0, 0.0])
    found = compared([one, other], together, again, later)
    assert found.lengths["one island"] == found.lengths["the islands, RDA"] == pytest.approx(math.sqrt(17) / 4)
    assert found.lengths["isotropic, exponent 0"] == pytest.approx(math.sqrt(17) / 4)
    assert found.cosines["the islands, RDA"] == pytest.approx(4 / math.sqrt(17))
    assert found.cosines["isotropic, exponent 0"] == pytest.approx(1 / math.sqrt(2), rel=1e-3)
    assert found.later["isotropic, exponent 0"] == pytest.approx(1.0, rel=1e-3)
    assert found.cosines["data-parallel on other text"] == 0.0
    along = found.profiles["data-parallel along them, later"]
    assert along[0] == pytest.approx(math.sqrt(3 / 2))
    assert along[-1] == pytest.approx(0.0)


def test_equal_values_have_a_profile_of_ones() -> None:
    for count in (1, 5, GROUPS, 100):
        np.testing.assert_allclose(grouped(np.full(count, 1 / math.sqrt(count))), np.ones(GROUPS))


def test_a_negative_start_is_refused() -> None:
    with failing(ConfigError, "config.after"):
        main(SpectraOptions(after=-1))


def test_a_model_without_hidden_matrices_is_refused() -> None:
    vectors = (Tensor("e", (8, 4), "embedding"), Tensor("v", (4,)), Tensor("row", (1, 4)), Tensor("experts", (2, 4, 4)))
    assert hidden_matrices((*vectors, Tensor("k", (4, 4))), "own") == ["k"]
    with failing(ConfigError, "config.no-matrices"):
        hidden_matrices(vectors, "own")


@pytest.mark.full
def test_a_short_comparison(corpus: OpenCorpus, tmp_path: Path) -> None:
    config = replace(SMALL, data=replace(SMALL.data, corpus="small-text"), sync=replace(SMALL.sync, interval=2))
    found = spectra(config, corpus, islands=2, after=4)
    rows = {row["movement"]: row for row in found["rows"]}
    assert all(row["length"] > 0 for row in rows.values())
    assert rows["the islands, averaged"]["length"] < rows["the islands, RDA"]["length"]
    cosines = [row[name] for row in rows.values() for name in row if name.startswith("cosine")]
    assert all(0 < cosine <= 1 for cosine in cosines)  # All of them go down the same slope.
    draw(tmp_path / "spectra.png", found["profiles"], 2)
    assert (tmp_path / "spectra.png").stat().st_size > 10_000
