"""The units of losses."""

from __future__ import annotations

import math

import pytest

from archipelago.broker.manifest import NO_CORPUS, Corpus
from archipelago.broker.observe.losses import loss_unit, shortened


def test_a_text_has_bits_per_byte() -> None:
    unit = loss_unit(Corpus("text", "0" * 32, 1000))
    assert (unit.name, shortened(unit.name)) == ("bits per byte", "bits/byte")
    assert unit.from_nats(3 * math.log(2.0)) == pytest.approx(3.0)
    assert math.isnan(unit.from_nats(math.nan))
    assert unit.from_evaluation(3.0) == 3.0
    unit = loss_unit(Corpus("text", "0" * 32, 1000, "1" * 32, 250))
    assert unit.name == "bits per byte"
    assert unit.from_nats(8 * math.log(2.0)) == pytest.approx(2.0)  # Eight bits for a token of four bytes.
    assert unit.from_evaluation(2.0) == 2.0  # Evaluations are recorded per byte.


def test_a_script_or_a_task_has_a_loss_of_its_own() -> None:
    unit = loss_unit(NO_CORPUS)
    assert unit.from_nats(2.5) == 2.5
    assert unit.from_evaluation(1.0) == pytest.approx(math.log(2.0))
