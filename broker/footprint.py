"""How much memory a run takes, by part, estimated from its tensors and settings. Pure, except for `available_here`.

The estimates are for processes on a CPU. With an accelerator, the island's part is mostly on the device. They were
calibrated with measured peaks (docs/guide/scaling.md); other batches and codecs change them.
"""

from __future__ import annotations

from typing import Final

import psutil

from archipelago.broker.codecs import codec
from archipelago.broker.commits import DIFFERENCES_KEPT, tape_kept
from archipelago.broker.config import RunConfig
from archipelago.broker.manifest import Manifest

#: Bytes of an island and of a merger before they hold a model: the interpreter, JAX and compiled programs.
ISLAND_BASE: Final = 550_000_000
MERGER_BASE: Final = 350_000_000
#: Bytes per parameter of an island: parameters, gradients, two moments, their next values, references, the published
#: parameters, a checkpoint that is being written, and an evaluation, in float32.
ISLAND_PER_PARAMETER: Final = 54
#: Bytes per parameter that a user's own training script needs more as an island: references, the published parameters,
#: and arrivals, in float32.
USER_LOOP_PER_PARAMETER: Final = 16
#: Bytes per parameter of the sum of gradients, where an island accumulates them (`inner.micro_batches`).
SUM_PER_PARAMETER: Final = 4
#: Bytes per element of the largest fragment that a merger takes for one round: contributions, sums, the new state and
#: what is sent, in float32 (`archipelago bench largest --parameters 8e7`, with 8 fragments and with 128).
MERGER_PER_FRAGMENT: Final = 60
#: Bytes per element in Redis of a compaction: a full snapshot, and the exact parameters and momentum.
REDIS_PER_PARAMETER: Final = 12
#: Contributions and differences since the last compaction, as a multiple of its bytes, at most (`merger.committing`).
REDIS_LOG: Final = 2
#: Bytes per element of the full snapshot that a compaction has replaced, which readers may still be reading.
REPLACED_PER_PARAMETER: Final = 4
#: Bytes of an entry of the tape, and of the merger's state, for each island; and of the rest of an entry.
TAPE_PER_ISLAND: Final = 300
STATE_PER_ISLAND: Final = 320
TAPE_ENTRY: Final = 600
#: Bytes of activations per token of a batch and element of a norm. A layer has two norms of its width.
ACTIVATION_BYTES: Final = 68


def footprint(manifest: Manifest, spectra: int) -> dict[str, int]:
    """Estimate the memory of a run in bytes: of one island, a merger, and Redis at its peak, by these words.

    `spectra` is what its merger takes to change spectra (`merger.weights.spectra_bytes`).
    """
    parameters, largest = manifest.parameters, max(manifest.sizes, default=0)
    island = USER_LOOP_PER_PARAMETER * parameters
    if manifest.task or not manifest.config.has_user_loops:  # our worker trains it
        island = ISLAND_BASE + ISLAND_PER_PARAMETER * parameters + _of_batches(manifest)
    return {
        "an island": island,
        "the merger": sum(merger_parts(manifest.config, parameters, largest, spectra).values()),
        "Redis": sum(redis_parts(manifest.config, parameters, largest).values()),
    }


def _of_batches(manifest: Manifest) -> int:
    """Estimate the bytes of activations, and of the sum of gradients where an island computes them in parts.

    Of a user's task, whose activations are not known, there are only the latter.
    """
    config = manifest.config
    norms = [] if manifest.task else [tensor.size for tensor in manifest.tensors if len(tensor.shape) == 1]
    an_element = ACTIVATION_BYTES * sum(norms)
    if config.model.recomputes_layers and norms:  # the inputs of all layers, and all of one layer with its two norms
        an_element = min(an_element, 2 * sum(norms) + 2 * ACTIVATION_BYTES * max(norms))
    parts = config.inner.micro_batches
    sums = SUM_PER_PARAMETER * manifest.parameters if parts > 1 else 0
    return sums + an_element * config.tokens_per_step // parts


def merger_parts(
    config: RunConfig, parameters: int, largest: int, spectra: int, *, checkpoints: bool = True
) -> dict[str, int]:
    """Estimate the memory of a merger at its peak, by part in words.

    `largest` is the size of the largest fragment; `spectra` are the bytes by `merger.weights.spectra_bytes`, or 0 if an
    accelerator changes them.
    """
    is_rounded = config.wire.full != "float32" or config.wire.sends_differences
    state = 4 * (1 + has_momentum(config) + is_rounded) * parameters
    return {
        "the process": MERGER_BASE,
        "exact and published parameters, momentum": state,
        "a checkpoint that is written": state if checkpoints else 0,
        "what rounds replace meanwhile": state if checkpoints else 0,
        "the fragment that is merged": MERGER_PER_FRAGMENT * largest,
        "spectra that are changed": spectra,
    }


def has_momentum(config: RunConfig) -> bool:
    """Return whether the outer step keeps momentum, which takes as much memory as the parameters."""
    return config.outer.rule != "sgd"


def redis_parts(
    config: RunConfig, parameters: int, largest: int, islands: int = 4, fragments: int = 1
) -> dict[str, int]:
    """Estimate the memory of a run, or of one shard, in Redis at its peak, by part in words.

    `largest` is the size of its largest fragment; `islands` is how many contribute to each round.
    """
    wire = config.wire
    entry = TAPE_ENTRY + TAPE_PER_ISLAND * islands
    up = codec(wire.up)
    difference = codec(wire.down).encoded_size(parameters) if wire.sends_differences else 0
    return {
        "parameters and momentum": REDIS_PER_PARAMETER * parameters,
        "differences": DIFFERENCES_KEPT * difference,
        "contributions": max(4 * up.encoded_size(parameters), islands * up.encoded_size(largest)),
        "contributions since the last compaction": REDIS_LOG * REDIS_PER_PARAMETER * parameters if difference else 0,
        "replaced snapshots": REPLACED_PER_PARAMETER * parameters,
        "a compaction that is written": REDIS_PER_PARAMETER * largest,
        "the tape": entry * tape_kept(entry, fragments),  # with many islands, a compaction covers each round
        "the merger's state": STATE_PER_ISLAND * islands,
    }


def memory_text(size: float) -> str:
    """Return a number of bytes in GB, or in MB if it is small."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.0f} MB"


def available_here() -> int:
    """Return the bytes of memory that are available on this machine."""
    return int(psutil.virtual_memory().available)
