"""What `archipelago bench` measures of processes: a child behind a pipe, memory, processor time, cores and functions.

This module imports little, because the children of its tests import it, too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from archipelago.broker.errors import BrokerError
from archipelago.ops.bench.harness import (
    OF_ISLAND,
    OF_MERGER,
    Pieces,
    Spent,
    child,
    cpu_seconds,
    forget_peak,
    halves_of_the_cores,
    peak_bytes,
    wait_until,
)
from archipelago.ops.experiments.virtual_time import VirtualClock
from tests.failing import failing

linux = pytest.mark.skipif(sys.platform != "linux", reason="memory and processor time are read from /proc")


def _fail(pipe: Connection) -> None:
    raise BrokerError("on purpose")


def _silent(pipe: Connection) -> None:
    pipe.poll(None)


@pytest.mark.processes
def test_a_child_that_ends_or_is_silent_is_an_error() -> None:
    with child(_fail) as ended, failing(BrokerError, "bench.process-failed"):
        ended.receive()
    with child(_silent) as silent, failing(BrokerError, "bench.timeout"):
        silent.receive(0.0)


def test_waiting_ends_with_an_error() -> None:
    with failing(BrokerError, "bench.timeout"):
        wait_until(lambda: False, "miracle", 0.0)


@linux
def test_processor_time_counts_all_threads_of_a_process(until: Callable[..., None]) -> None:
    busy = "import threading\ndef spin():\n    while True: pass\nthreading.Thread(target=spin).start()"
    started = subprocess.Popen([sys.executable, "-c", busy])
    try:
        until(lambda: cpu_seconds(started.pid) > 0.2, "a busy thread's processor time")
    finally:
        started.kill()
        started.wait()
    with failing(BrokerError, "bench.process-failed"):
        cpu_seconds(started.pid)


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


@linux
def test_the_measured_process_and_its_peers_share_no_core() -> None:
    mine, others = halves_of_the_cores()
    assert mine | others == os.sched_getaffinity(0)
    assert mine.isdisjoint(others) or len(mine) == 1


# -- the time of named functions: their own, without that of named functions which they call -------------------------

NAME = "archipelago_test_of_pieces"


def test_a_piece_excludes_the_pieces_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, made = VirtualClock(), types.ModuleType(NAME)

    class Outer:
        def run(self) -> str:
            clock.now += 1.0
            made.inner(2.0)
            made.inner(3.0)
            return "done"

    def inner(seconds: float) -> None:
        clock.now += seconds

    made.__dict__.update(Outer=Outer, inner=inner)
    monkeypatch.setitem(sys.modules, NAME, made)
    counted = Pieces({f"{NAME}:Outer.run": "outer", f"{NAME}:inner": "inner"}, lambda: 2 * clock(), clock)
    assert Outer().run() == "done"
    made.inner(4.0)
    assert counted.spent() == {"outer": Spent(2.0, 1.0), "inner": Spent(18.0, 9.0)}


def test_the_named_functions_exist() -> None:
    for place in (*OF_ISLAND, *OF_MERGER):
        module, _, path = place.partition(":")
        owner: Any = __import__(module, fromlist=["_"])
        for name in path.split("."):
            owner = getattr(owner, name)
        assert callable(owner)
