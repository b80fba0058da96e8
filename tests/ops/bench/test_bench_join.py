"""`bench join`: a call of `sync` without an event is far below a training step, and the table has every part."""

from __future__ import annotations

import pytest

from archipelago.broker.errors import ConfigError
from archipelago.ops.bench.join import STEPS, JoinOptions, main, measured
from tests.failing import failing


@pytest.mark.full
@pytest.mark.processes
def test_calls_and_transfers_are_measured() -> None:
    found = measured(width=64, calls=STEPS)
    assert found["calls"] == STEPS
    assert found["parameters"] == 10 * 64 * 64
    assert [row["what"] for row in found["rows"]] == [
        "a training step", "sync without an event", "send the whole model", "adopt the whole model",
    ]  # fmt: skip
    assert all(row["thread_ms"] > 0.0 for row in found["rows"])
    assert all(row["device_ms"] >= row["thread_ms"] for row in found["rows"][2:])


def test_too_little_is_refused() -> None:
    with failing(ConfigError, "bench.join"):
        main(JoinOptions(parameters=0.0))
