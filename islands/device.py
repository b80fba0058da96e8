"""Measure how many inner steps one dispatch should make on this device."""

from __future__ import annotations

import time

import jax
import numpy as np

from archipelago.islands.sync.arrays import device_copy
from archipelago.islands.worker import Island

#: Longer steps hide the cost of their dispatch, so they are dispatched singly. Calls are then answered sooner.
DISPATCH_MATTERS_SECONDS = 0.02
#: A call that takes longer is measured once.
LONG_SECONDS = 1.0
#: The longest time between two step boundaries when several steps are made at once.
BOUNDARY_SECONDS = 0.04


def best_scan_steps(island: Island) -> int:
    """Return the steps between two boundaries: 1, or a divisor of the stride that fits into 40 ms and is faster."""
    one = _seconds_a_step(island, 1)
    stride = max(1, island.config.sync.interval // len(island.manifest.fragments))
    if one > DISPATCH_MATTERS_SECONDS or stride == 1:
        return 1
    fitting = [n for n in range(2, stride + 1) if stride % n == 0 and n * one <= BOUNDARY_SECONDS]
    if not fitting:
        return 1
    many = fitting[-1]
    return many if _seconds_a_step(island, many) < 0.95 * one else 1


def _seconds_a_step(island: Island, scan_steps: int) -> float:
    """Return the shortest time of a step over several calls on copies, after one call that compiles."""
    data = island.config.data
    batch = jax.device_put(np.zeros((scan_steps, data.batch_size, data.sequence_length + 1), island.batches.dtype))
    state = device_copy(island.inner)
    best = float("inf")
    for attempt in range(4):
        began = time.perf_counter()
        state, losses_n = island.steps(state, batch, jax.device_put(np.int32(0)))
        losses_n.block_until_ready()
        if attempt:
            best = min(best, time.perf_counter() - began)
        if attempt and best > LONG_SECONDS:  # measuring again would delay the join by as much, and change nothing
            break
    return best / scan_steps
