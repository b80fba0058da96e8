"""`bench start`: the parts add up to the start, and a second start finds the programs of the first."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from archipelago.broker.config import DataConfig, ModelConfig, RunConfig
from archipelago.broker.errors import BrokerError
from archipelago.ops.bench import start as bench_start
from archipelago.ops.bench.process import cpu_seconds
from archipelago.ops.bench.start import Start, rows, settled, start, started, summary, taken_over
from tests.failing import failing

linux = pytest.mark.skipif(sys.platform != "linux", reason="processor time is read from /proc")


def test_defaults_are_the_small_model_and_short_steps_and_settings_win() -> None:
    found = settled(RunConfig(), quick=False)
    assert (found.model.size, found.tokens_per_step) == ("small", 16)
    assert settled(RunConfig(), quick=True).model.size == "tiny"
    mine = replace(RunConfig(), model=ModelConfig("digits"), data=DataConfig(corpus="digits", sequence_length=64))
    kept = settled(mine, quick=False)
    assert (kept.model, kept.data) == (mine.model, mine.data)


def test_the_figures_are_medians_and_the_ratios_are_of_pairs() -> None:
    cold = Start(wall=20.0, total=16.0, imports=1.0, joining=0.5, programs=14.0, state=0.0)
    warm = [
        Start(2.0, 1.5, 0.75, 0.125, 0.375, 0.125),
        Start(4.0, 3.0, 1.5, 0.25, 0.75, 0.25),
        Start(3.0, 2.0, 1.0, 0.5, 0.25, 0.125),
    ]
    found = summary(cold, warm, [0.5, 1.5, 0.5], [(0.5, 0.25), (0.75, 0.125), (0.25, 0.5)])
    assert (found["standby_wall_seconds"], found["standby_cpu_seconds"]) == (0.5, 0.25)
    assert (found["cpu_seconds"], found["wall_seconds"], found["cold_cpu_seconds"]) == (2.0, 3.0, 16.0)
    assert (found["ratio"], found["ratio_from"], found["ratio_to"]) == (3.0, 2.0, 4.0)
    assert [each.first_step for each in warm] == [0.125, 0.25, 0.125]
    total, *parts, _, told, _, _ = rows(found)
    assert told["seconds"] == 0.25
    assert (total["seconds"], total["jax_alone"], total["ratio"], total["goal"]) == (2.0, 0.5, 4.0, 1.2)
    assert [part["seconds"] for part in parts] == [1.0, 0.25, 0.375, 0.125, 0.125]


@linux
def test_processor_time_counts_all_threads_of_a_process(until: Callable[..., None]) -> None:
    busy = "import threading\ndef spin():\n    while True: pass\nthreading.Thread(target=spin).start()"
    process = subprocess.Popen([sys.executable, "-c", busy])
    try:
        until(lambda: cpu_seconds(process.pid) > 0.2, "a busy thread's processor time")
    finally:
        process.kill()
        process.wait()
    with failing(BrokerError, "bench.process-gone"):
        cpu_seconds(process.pid)


@linux
def test_the_error_of_an_island_that_ends_early_quotes_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_start, "PACE", (*bench_start.PACE, "--wait-seconds", "0"))
    environment = {**os.environ, "ARCHIPELAGO_TURN_LOG": str(tmp_path / "turns"), "ARCHIPELAGO_URL": "unix:///nowhere"}
    for begin in (started, taken_over):
        with failing(BrokerError, "bench.process-failed") as caught:
            begin(tmp_path, environment)
        assert "nowhere" in caught.value.remedy


@pytest.mark.full
@pytest.mark.processes
@linux
def test_a_start_with_warm_caches_is_measured_in_its_parts() -> None:
    said: list[str] = []
    found = start(RunConfig(), quick=True, say=said.append)
    names = ("imports", "joining", "programs", "state")
    parts = {name: found[f"{name}_cpu_seconds"] for name in names}
    assert all(seconds > 0 for seconds in parts.values()), parts
    assert found["cpu_seconds"] < found["cold_cpu_seconds"] / 2, "programs are kept"
    assert found["cpu_seconds"] > found["floor_cpu_seconds"] > 0
    assert 0 < found["standby_cpu_seconds"] < found["cpu_seconds"], "a standby has loaded everything before"
    assert len(said) == 3
