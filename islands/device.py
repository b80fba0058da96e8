"""The device of an island: which one it is, whether the run fits, and how many inner steps one dispatch makes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from archipelago.broker.footprint import ISLAND_BASE, available_here, footprint, memory_text, shortage
from archipelago.broker.manifest import Manifest
from archipelago.islands.sync.arrays import device_copy
from archipelago.islands.worker import Island

#: Longer steps hide the cost of their dispatch, so they are dispatched singly. Calls are then answered sooner.
DISPATCH_MATTERS_SECONDS = 0.02
#: A call that takes longer is measured once.
LONG_SECONDS = 1.0
#: The longest time between two step boundaries when several steps are made at once.
BOUNDARY_SECONDS = 0.04


#: The variable that hides devices from JAX, by platform.
VISIBLE = {"gpu": "CUDA_VISIBLE_DEVICES", "rocm": "HIP_VISIBLE_DEVICES", "tpu": "TPU_VISIBLE_CHIPS"}
#: Bytes per synced element that an island keeps in the memory of its machine when it trains on an accelerator.
HOST_PER_PARAMETER = 16


def unused_devices(devices: Sequence[jax.Device], environ: Mapping[str, str]) -> str:
    """Return which of several devices the island uses, and how to use the others; empty if there is only one."""
    if len(devices) < 2:
        return ""
    used = devices[0]
    begin = f"this island uses one of {len(devices)} devices: {used} ({used.device_kind})"
    if used.platform == "cpu":
        return f"{begin}; the others come from XLA_FLAGS and add no cores: one CPU device uses all that it may use"
    is_rocm = "rocm" in getattr(used.client, "platform_version", "").lower()
    variable = VISIBLE.get("rocm" if is_rocm else used.platform, VISIBLE["gpu"])
    names = [name.strip() for name in environ.get(variable, "").split(",") if name.strip()]
    if len(names) != len(devices):
        names = [str(number) for number in range(len(devices))]
    others = ", ".join(f"{variable}={name} archipelago island" for name in names[1:])
    return f"{begin}; start one more island for each of the others: {others}"


def memory_in_words(manifest: Manifest, device: jax.Device) -> tuple[str, list[str]]:
    """Return how much memory the run takes by part, and what does not fit here."""
    needed, available = footprint(manifest), available_here()
    said = f"memory: {needed.describe()}"
    if device.platform == "cpu":
        words = shortage("this island", needed.island, available)
        return f"{said}; {memory_text(available)} are available here", [words] if words else []
    on_device = needed.island - ISLAND_BASE
    on_host = ISLAND_BASE + HOST_PER_PARAMETER * manifest.elements
    limit = (device.memory_stats() or {}).get("bytes_limit", 0)
    said += f"; here {memory_text(on_device)} of {memory_text(limit) if limit else 'the memory'} on the device, and "
    said += f"{memory_text(on_host)} of {memory_text(available)} on the machine"
    troubles = [shortage("this island, on its machine,", on_host, available)]
    troubles += [shortage("this island, on its device,", on_device, limit)] if limit else []
    return said, [words for words in troubles if words]


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
    batch = jax.device_put(island.batches.sample(scan_steps))
    state, length = device_copy(island.inner), island.length_argument(island.link.run_steps)
    best = float("inf")
    for attempt in range(4):
        began = time.perf_counter()
        state, losses_n = island.steps(state, batch, jax.device_put(np.int32(0)), *length)
        losses_n.block_until_ready()
        if attempt:
            best = min(best, time.perf_counter() - began)
        if attempt and best > LONG_SECONDS:  # measuring again would delay the join by as much, and change nothing
            break
    return best / scan_steps
