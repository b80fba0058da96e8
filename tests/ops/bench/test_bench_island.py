"""`bench island`: the figures follow from the turns, and a real island syncs in its turns."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from multiprocessing.connection import Connection

import numpy as np
import pytest

from archipelago.broker.config import ModelConfig, RunConfig, WireConfig
from archipelago.broker.errors import BrokerError
from archipelago.ops.bench.island import island, rows, settled, summary
from archipelago.ops.bench.process import (
    available_bytes,
    child,
    forget_peak,
    halves_of_the_cores,
    peak_bytes,
    wait_until,
)
from archipelago.ops.bench.turns import Found, Turn
from tests.failing import failing

linux = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")


def test_defaults_are_base_and_int4_and_settings_win() -> None:
    found = settled(RunConfig(), quick=False, backend="cpu")
    assert (found.model.size, found.wire.up, found.wire.down) == ("base", "int4", "int4")
    assert found.tokens_per_step < settled(RunConfig(), quick=False, backend="gpu").tokens_per_step
    mine = replace(RunConfig(), model=ModelConfig("small"), wire=WireConfig(up="int8"))
    kept = settled(mine, quick=False, backend="cpu")
    assert (kept.model, kept.wire) == (mine.model, mine.wire)
    assert settled(RunConfig(), quick=True, backend="cpu").model.size == "tiny"


def _found() -> Found:
    on = [Turn(1.1, 2.5, 900 << 20, 1000), Turn(1.2, 3.0, 700 << 20, 1000), Turn(1.5, 4.0, 800 << 20, 500)]
    off = [Turn(1.0, 2.0, 600 << 20), Turn(1.0, 2.0, 500 << 20), Turn(1.0, 2.0, 550 << 20)]
    return Found("gpu", 1, 10, 1000, 25 << 18, on, off, held_bytes=100 << 20, reference_bytes=0)


def test_the_figures_are_medians_of_pairs_and_differences_of_peaks() -> None:
    found = summary(_found(), alone_peak=400 << 20)
    assert (found["step_ratio"], found["step_ratio_from"], found["step_ratio_to"]) == (1.2, 1.1, 1.5)
    assert found["step_seconds_on"] == pytest.approx(0.12)
    assert found["cpu_seconds_a_synced_parameter"] == pytest.approx(1e-3)  # The median of 0.5, 1 and 4 ms.
    assert found["peak_bytes_beside"] == 500 << 20
    assert found["peak_bytes_beside_between_syncs"] == 200 << 20
    assert found["largest_fragment_bytes"] == 25 << 20
    step, memory = (row for row in rows(_found(), 400 << 20, "a model") if row["goal"])
    assert (step["goal"], memory["goal"], memory["ratio"]) == (1.03, 8.0, 20.0)  # 100 of 25 MiB held, and 4


@pytest.mark.full
@pytest.mark.processes
@linux
def test_an_island_syncs_in_every_other_turn() -> None:
    said: list[str] = []
    config = replace(RunConfig(), sync=replace(RunConfig().sync, interval=12, fragments=3))
    found = island(config, quick=True, say=said.append)
    assert found["turn_steps"] % 12 == 0
    assert found["synced_parameters_a_turn"] > 0
    assert found["step_seconds_on"] > 0
    assert found["step_ratio_from"] <= found["step_ratio"] <= found["step_ratio_to"]
    assert found["peak_bytes_alone"] > 4 * 3 * found["parameters"]
    assert found["held_bytes"] == 4 * found["parameters"]
    assert "tiny" in said[0]
    assert len({tuple(row) for row in found["rows"]}) == 1  # The rows are printed as one table.


# -- processes and memory ---------------------------------------------------------------------------------------------


def _fail(pipe: Connection) -> None:
    raise BrokerError("on purpose")


def _silent(pipe: Connection) -> None:
    pipe.poll(None)


@pytest.mark.processes
def test_a_child_that_ends_is_an_error_and_a_silent_one_is_not() -> None:
    with child(_fail) as ended, failing(BrokerError, "bench.process-failed"):
        ended.receive()
    with child(_silent) as silent:
        assert silent.receive(0.0) is None


def test_waiting_ends_with_an_error() -> None:
    with failing(BrokerError, "bench.timeout"):
        wait_until(lambda: False, "miracle", 0.0)


@linux
def test_a_peak_of_memory_stays_until_it_is_forgotten() -> None:
    size = 64 << 20
    forget_peak()
    before = peak_bytes(os.getpid())
    block = np.ones(size, np.uint8)
    assert block.sum() == size
    del block
    after = peak_bytes(os.getpid())
    assert after - before > 0.9 * size
    forget_peak()
    assert peak_bytes(os.getpid()) < after - 0.5 * size
    assert available_bytes() > 0


@linux
def test_the_measured_process_and_its_peers_share_no_core() -> None:
    mine, others = halves_of_the_cores()
    assert mine | others == os.sched_getaffinity(0)
    assert mine.isdisjoint(others) or len(mine) == 1
