"""How much memory a run takes, by part, estimated from its tensors and settings. Pure, except for `available_here`.

The estimates are for processes on a CPU. With an accelerator, the island's part is mostly on the device. They were
calibrated with measured peaks (docs/guide/operating.md); other batches and codecs change them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import psutil

from archipelago.broker.codecs import codec
from archipelago.broker.manifest import Manifest
from archipelago.broker.transport import DIFFERENCES_KEPT

#: Bytes of an island and of a merger before they hold a model: the interpreter, JAX and compiled programs.
ISLAND_BASE: Final = 550_000_000
MERGER_BASE: Final = 350_000_000
#: Bytes per parameter of an island: parameters, gradients, two moments, their next values, references, the published
#: parameters, a checkpoint that is being written, and an evaluation, in float32.
ISLAND_PER_PARAMETER: Final = 54
#: Bytes per parameter that a user's own training script needs more as an island: references, the published parameters,
#: and arrivals, in float32.
OWN_LOOP_PER_PARAMETER: Final = 16
#: Bytes per synced first moment of an island: the reference, the published moment, and copies of both, in float32.
ISLAND_PER_MOMENT: Final = 16
#: Bytes per element of a merger, a parameter or a synced first moment: exact parameters, momentum, sums, snapshots, and
#: a checkpoint, in float32.
MERGER_PER_PARAMETER: Final = 41
#: Bytes per element in Redis: the newest snapshot, and the exact parameters and momentum.
REDIS_PER_PARAMETER: Final = 12
#: Bytes of activations per token of a batch and element of a norm. A layer has two norms of its width.
ACTIVATION_BYTES: Final = 68


@dataclass(frozen=True)
class Footprint:
    """Bytes of memory that the parts of a run need: one island, a merger, and Redis at its peak."""

    island: int
    merger: int
    redis: int

    def describe(self) -> str:
        """Return the parts in words."""
        island, merger, redis = (memory_text(part) for part in (self.island, self.merger, self.redis))
        return f"an island {island}, the merger {merger}, Redis {redis}"


def footprint(manifest: Manifest) -> Footprint:
    """Estimate the memory of a run."""
    parameters, elements = manifest.parameters, manifest.elements
    norms = sum(tensor.size for tensor in manifest.parameter_tensors if len(tensor.shape) == 1)
    activations = ACTIVATION_BYTES * manifest.config.tokens_per_step * norms
    moments = ISLAND_PER_MOMENT * (elements - parameters)
    island = ISLAND_BASE + ISLAND_PER_PARAMETER * parameters + moments + activations
    return Footprint(
        island=OWN_LOOP_PER_PARAMETER * parameters if manifest.config.has_own_loops else island,
        merger=MERGER_BASE + MERGER_PER_PARAMETER * elements,
        redis=sum(redis_parts(manifest).values()),
    )


def redis_parts(manifest: Manifest) -> dict[str, int]:
    """Estimate the memory of a run in Redis at its peak, by part in words."""
    wire, elements = manifest.config.wire, manifest.elements
    difference = codec(wire.down).encoded_size(elements) if wire.sends_differences else 0
    return {
        "parameters and momentum": REDIS_PER_PARAMETER * elements,
        "differences": DIFFERENCES_KEPT * difference,
        "contributions": 4 * codec(wire.up).encoded_size(elements),
    }


def memory_text(size: float) -> str:
    """Return a number of bytes in GB, or in MB if it is small."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.0f} MB"


def shortage(part: str, needed: int, available: int) -> str:
    """Return why a part does not fit into the available memory, and what to do; empty if it fits."""
    if needed <= available:
        return ""
    return (
        f"{part} needs about {memory_text(needed)} of memory, and {memory_text(available)} are available: "
        "it may be killed. Free some, use another machine, or choose a smaller model or batch"
    )


def available_here() -> int:
    """Return the bytes of memory that are available on this machine."""
    return int(psutil.virtual_memory().available)
