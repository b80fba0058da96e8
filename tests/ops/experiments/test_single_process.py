"""The process that `up` starts for comparison: it trains, and it writes its curve."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from archipelago.broker.errors import ConfigError
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.ops.experiments import baselines
from archipelago.ops.experiments.baselines import Point
from archipelago.ops.experiments.single_process import SingleProcessOptions, run
from tests.failing import failing
from tests.small import SMALL

CONFIG = replace(SMALL, data=replace(SMALL.data, corpus="small-text"))


def test_the_curve_is_written(corpus: OpenCorpus, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(work: Any, tokens: int, progress: Any, params: Any) -> list[Point]:
        points = [Point(0, 8.0), Point(tokens, 2.0)]
        for point in points:
            progress(point)
        return points

    monkeypatch.setattr(baselines, "one_process", trained)
    assert run(SingleProcessOptions(tokens=640, output=Path("curve.json"), settings=CONFIG)) == 0
    assert json.loads(Path("curve.json").read_text(encoding="utf-8")) == {
        "tokens": 640,
        "curve": [[0, 8.0], [640, 2.0]],
    }


def test_tokens_must_be_positive() -> None:
    with failing(ConfigError, "config.tokens"):
        run(SingleProcessOptions(tokens=0, output=Path("curve.json"), settings=CONFIG))
