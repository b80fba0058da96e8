"""Measure how slow this machine is, compared with the one whose figures `ops.simulation.cycle` scales."""

from __future__ import annotations

import time

import numpy as np

from archipelago.broker.codecs import codec

ELEMENTS = 1 << 20
TRIALS = 5
#: Processor seconds of `trial_seconds` on the machine of docs/results/performance.md.
REFERENCE_SECONDS = 0.0030


def measured_slowness() -> float:
    """Return the time that this machine takes for a fixed work over that of the reference, in about 0.1 s."""
    return trial_seconds() / REFERENCE_SECONDS


def trial_seconds() -> float:
    """Return the processor time for encoding and decoding ELEMENTS by int4 with numpy, the shortest of TRIALS."""
    values_N, int4 = np.random.default_rng(0).standard_normal(ELEMENTS, np.float32), codec("int4")
    seconds = []
    for _ in range(TRIALS):
        began = time.thread_time()
        int4.decode(int4.encode(values_N), ELEMENTS)
        seconds.append(time.thread_time() - began)
    return min(seconds)
