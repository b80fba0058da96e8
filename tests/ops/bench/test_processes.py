"""What `archipelago bench` measures of processes: a child behind a pipe, memory, processor time and cores.

This module imports little, because the children of its tests import it, too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np
import pytest

from archipelago.broker.errors import BrokerError
from archipelago.ops.bench.harness import (
    child,
    cpu_seconds,
    forget_peak,
    halves_of_the_cores,
    peak_bytes,
    wait_until,
)
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
