"""The device of an island: which one it is, whether the run fits, and how many inner steps one dispatch makes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import jax

from archipelago.broker.footprint import available_here, device_and_host, footprint, memory_text, shortage
from archipelago.broker.manifest import Manifest
from archipelago.islands.mesh.shape import MeshShape
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


def unused_devices(devices: Sequence[jax.Device], shape: MeshShape, environ: Mapping[str, str]) -> str:
    """Return which devices the island does not use, and how to use them; empty if it uses all."""
    if len(devices) <= shape.devices:
        return ""
    used = devices[0]
    begin = f"this island uses {shape.devices} of {len(devices)} devices: {used.device_kind}, --mesh {shape}"
    if used.platform == "cpu":
        return f"{begin}; the others come from XLA_FLAGS and add no cores: one CPU device uses all that it may use"
    is_rocm = "rocm" in getattr(used.client, "platform_version", "").lower()
    variable = VISIBLE.get("rocm" if is_rocm else used.platform, VISIBLE["gpu"])
    names = [name.strip() for name in environ.get(variable, "").split(",") if name.strip()]
    if len(names) != len(devices):
        names = [str(number) for number in range(len(devices))]
    others = ",".join(names[shape.devices :])
    return f"{begin}; another mesh can use the others, or another island: {variable}={others} archipelago island"


def memory_in_words(manifest: Manifest, device: jax.Device, shape: MeshShape | None = None) -> tuple[str, list[str]]:
    """Return how much memory the run takes by part, and what does not fit here.

    Args:
        manifest: The run.
        device: One of the island's devices.
        shape: Their mesh; None for one device.
    """
    needed, available = footprint(manifest), available_here()
    said = f"memory: {needed.describe()}"
    if device.platform == "cpu":
        words = shortage("this island", needed.island, available)
        return f"{said}; {memory_text(available)} are available here", [words] if words else []
    whole, on_host = device_and_host(manifest)
    on_device = whole // (shape.fsdp * shape.tensor if shape else 1)
    limit = (device.memory_stats() or {}).get("bytes_limit", 0)
    each = "each device" if shape and shape.devices > 1 else "the device"
    said += f"; here {memory_text(on_device)} of {memory_text(limit) if limit else 'the memory'} on {each}, and "
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
    batch, state = island.batches.sample(scan_steps), device_copy(island.inner)
    arguments = island.computation.arguments(batch, 0, island.link.run_steps)
    best = float("inf")
    for attempt in range(4):
        began = time.perf_counter()
        state, losses_n = island.steps(state, *arguments)
        losses_n.block_until_ready()
        if attempt:
            best = min(best, time.perf_counter() - began)
        if attempt and best > LONG_SECONDS:  # measuring again would delay the join by as much, and change nothing
            break
    return best / scan_steps
