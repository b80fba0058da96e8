"""`bench hosts`: the figures follow from the turns, and two real processes take them."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from archipelago.broker.config import RunConfig
from archipelago.broker.errors import ConfigError
from archipelago.ops.bench.host_processes import Cost, HostTurn
from archipelago.ops.bench.hosts import HostsBenchOptions, hosts, main, rows, summary
from tests.failing import failing


def test_the_figures_are_medians_of_turns() -> None:
    two = [
        HostTurn(24, Cost(on, 0.3), Cost(0.2, 0.2), 6, Cost(untold, 0.1), 1e-5, longest, 100.0, 900.0)
        for on, untold, longest in ((0.25, 0.19, 1e-3), (0.3, 0.18, 5e-3), (0.9, 0.1, 2e-3))
    ]
    one = [HostTurn(24, Cost(0.125, 0.2), Cost(0.1, 0.15), 6)] * 3
    found = summary(two, one)
    assert found["two_steps_a_second_off"] == pytest.approx(5.0)
    assert found["two_steps_a_second_on"] == pytest.approx(1 / 0.3)
    assert found["boundary_seconds"] == pytest.approx(0.02)
    assert found["boundary_cpu_seconds"] == pytest.approx(0.1)
    assert found["two_seconds_a_sync"] == pytest.approx(0.1 * 24 / 6)
    assert found["one_cpu_seconds_a_sync"] == pytest.approx(0.05 * 24 / 6)
    assert (found["step_bytes"], found["sync_bytes"]) == (100.0, 900.0)
    assert (found["tell_seconds"], found["tell_seconds_longest"]) == (1e-5, 5e-3)
    assert len({tuple(row) for row in rows(found)}) == 1  # The rows are printed as one table.


def test_no_devices_are_refused() -> None:
    with failing(ConfigError, "bench.devices"):
        main(HostsBenchOptions(devices=0))


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_two_processes_and_one_take_turns() -> None:
    said: list[str] = []
    config = replace(RunConfig(), sync=replace(RunConfig().sync, interval=12, fragments=3))
    found = hosts(config, quick=True, devices=1, say=said.append)
    assert found["turn_steps"] % 12 == 0
    assert 0 < found["tell_seconds"] < found["untold_step_seconds"]
    assert found["step_bytes"] > 0
    assert found["sync_bytes"] > 0, "a snapshot's payload and a few dozen bytes for each message"
    assert found["tell_seconds"] <= found["tell_seconds_longest"]
    assert all(found[f"{side}_steps_a_second_{which}"] > 0 for side in ("one", "two") for which in ("on", "off"))
    assert len(said) == 4
