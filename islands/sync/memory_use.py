"""The memory that an island's process, its host and its device use, for operators."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from archipelago.broker.messages import COUNT_MAX

#: Seconds for which a measurement is reported again.
FRESH_SECONDS = 5.0


@dataclass(frozen=True)
class MemoryUse:
    """Bytes in use, and the limits; 0 where the machine does not report them.

    Attributes:
        process: Resident memory of this process.
        host: Memory in use on the host, by all processes.
        device: Memory in use on this process's devices, by this process.
    """

    process: int = 0
    host: int = 0
    host_limit: int = 0
    device: int = 0
    device_limit: int = 0


def measured(devices: Sequence[Any] = ()) -> MemoryUse:
    """Measure the memory in use now. A machine that does not report some of it gives 0.

    Args:
        devices: The accelerators of this process. Each has `memory_stats`, as JAX's devices do.
    """
    try:
        process, host = psutil.Process().memory_info().rss, psutil.virtual_memory()
        used, limit = host.total - host.available, host.total
    except (psutil.Error, OSError):
        process = used = limit = 0
    stats = [device.memory_stats() or {} for device in devices]
    device, device_limit = (sum(int(each.get(name, 0)) for each in stats) for name in ("bytes_in_use", "bytes_limit"))
    found = (process, used, limit, device, device_limit)
    return MemoryUse(*(min(COUNT_MAX, max(0, value)) for value in found))


class MemoryMeter:
    """Measures the memory now and then, because heartbeats are prepared after every inner step."""

    def __init__(self, clock: Callable[[], float], measure: Callable[[], MemoryUse] = measured) -> None:
        self._clock, self._measure = clock, measure
        self._due = -math.inf
        self._newest = MemoryUse()

    def newest(self) -> MemoryUse:
        """Return a measurement that is at most a few seconds old."""
        if self._clock() >= self._due:
            self._newest, self._due = self._measure(), self._clock() + FRESH_SECONDS
        return self._newest
