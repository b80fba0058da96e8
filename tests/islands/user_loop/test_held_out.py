"""Held-out losses of scripts: what they report, and the merged parameters that one of them evaluates."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from archipelago.broker.errors import ConfigError
from archipelago.broker.manifest import loss_unit
from archipelago.broker.messages import Evaluation
from archipelago.broker.redis.transport import connect
from tests.conftest import Until
from tests.failing import failing
from tests.islands.user_loop.any_framework import Framework
from tests.islands.user_loop.conftest import SYNC


def recorded(url: str) -> list[Evaluation]:
    return connect(url, "own").reader.evaluations()


def losses(url: str) -> list[float]:
    transport = connect(url, "own")
    unit = loss_unit(transport.reader.manifest().corpus)
    return [unit.from_evaluation(each.bits_per_byte) for each in transport.reader.evaluations()]


NO_LOSSES: list[Any] = [math.nan, math.inf, 1e300, "0.5", b"1", True, None, [0.5], np.ones(2), object(), 1j]


def test_a_script_reports_what_it_has_measured(framework: Framework, url: str, until: Until) -> None:
    array = framework.array
    assert framework.create(url, "own", framework.model(), sync=SYNC, steps=1000)
    with failing(ConfigError, "loop.left"):
        framework.join(url).session.report(held_out=1.0)
    with framework.join(url, island="a") as script:
        for wrong in [*NO_LOSSES, array([1.0, 2.0]), array(math.nan)]:
            with failing(ConfigError, "loop.argument"):
                script.session.report(held_out=wrong)
        script.session.report(held_out=2.5)
        until(lambda: recorded(url), "the first loss")
        script.train(3)
        for loss in (np.float32(-1.5), array(0.25), 3):
            script.session.report(held_out=loss)
    assert losses(url) == pytest.approx([2.5, -1.5, 0.25, 3.0], rel=1e-12), "the last ones are sent when it leaves"
    assert [(each.step, each.by) for each in recorded(url)] == [(0, "a"), *[(3, "a")] * 3]
