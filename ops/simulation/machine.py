"""How long a machine takes for some work and for new memory: the one of docs/results/performance.md, or this one."""

from __future__ import annotations

import mmap
import time
from dataclasses import dataclass

import numpy as np

from archipelago.broker.codecs import codec

ELEMENTS = 1 << 20
TRIALS = 9
#: Processor seconds of `trial_seconds` on the machine of docs/results/performance.md.
REFERENCE_SECONDS = 0.00235
#: The new memory with which `measured_machine` measures.
NEW_BYTES = 256 << 20


@dataclass(frozen=True)
class Machine:
    """What a machine takes. By default it is the one of docs/results/performance.md.

    Attributes:
        slowness: The time that it takes for some arithmetic, over that of the default.
        new_byte_seconds: Processor time for a byte of new memory. The kernel clears it, and a virtual machine has to
            ask its host for it.
    """

    slowness: float = 1.0
    new_byte_seconds: float = 0.54e-9

    def slower(self, factor: float) -> Machine:
        """Return a machine that takes `factor` times as long for everything."""
        return Machine(factor * self.slowness, factor * self.new_byte_seconds)

    def seconds(self, work_seconds: float, new_bytes: float = 0.0) -> float:
        """Return the time for work that takes the default machine that long, and for that much new memory."""
        return self.slowness * work_seconds + self.new_byte_seconds * new_bytes


def measured_machine() -> Machine:
    """Measure this machine, in some 0.2 s."""
    return Machine(trial_seconds() / REFERENCE_SECONDS, new_memory_seconds(NEW_BYTES) / NEW_BYTES)


def trial_seconds() -> float:
    """Return the processor time for encoding and decoding ELEMENTS by int4 with numpy, the shortest of TRIALS."""
    values_N, int4 = np.random.default_rng(0).standard_normal(ELEMENTS, np.float32), codec("int4")
    seconds = []
    for _ in range(TRIALS):
        began = time.thread_time()
        int4.decode(int4.encode(values_N), ELEMENTS)
        seconds.append(time.thread_time() - began)
    return min(seconds)


def new_memory_seconds(size: int) -> float:
    """Return the processor time for writing to each page of `size` bytes of new memory, which are then given back."""
    with mmap.mmap(-1, size) as memory:
        began = time.thread_time()
        for page in range(0, size, mmap.PAGESIZE):
            memory[page] = 1
        return time.thread_time() - began
