"""The memory that heartbeats report: measured, bounded, and not more often than needed."""

from __future__ import annotations

import psutil

from archipelago.broker.messages import COUNT_MAX, from_fields, to_fields
from archipelago.broker.presence import Heartbeat
from archipelago.islands.sync.heartbeat import FRESH_SECONDS, MemoryMeter, MemoryUse, measured
from tests import samples


def test_this_process_uses_a_part_of_its_host() -> None:
    found = measured()
    assert 0 < found.process < found.host < found.host_limit == psutil.virtual_memory().total
    assert 0 <= found.device <= found.device_limit <= COUNT_MAX


def test_it_is_measured_now_and_then() -> None:
    now, count = [0.0], [0]

    def measure() -> MemoryUse:
        count[0] += 1
        return MemoryUse(process=count[0])

    meter = MemoryMeter(lambda: now[0], measure)
    for _ in range(100):
        assert meter.newest().process == 1
    now[0] += FRESH_SECONDS
    assert meter.newest().process == 2


def test_a_heartbeat_carries_it() -> None:
    beat = samples.heartbeat(memory_bytes=3, host_memory_bytes=4, host_memory_limit_bytes=5, device_memory_bytes=6)
    assert from_fields(Heartbeat, to_fields(beat)) == beat
    old = {name: value for name, value in to_fields(beat).items() if "memory" not in name}
    assert from_fields(Heartbeat, old).memory_bytes == 0
