"""Predict what a run takes in memory and bytes while each fragment is merged once, on one or more shards.

Memory comes from `broker.footprint` and bytes from the codecs. `archipelago bench largest` prints both beside what it
measures. Of time, only spectra are predicted (`spectra_loads`). Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from archipelago.broker.codecs import codec
from archipelago.broker.config import MergeConfig, RunConfig
from archipelago.broker.footprint import footprint, has_momentum, merger_parts, redis_parts
from archipelago.broker.manifest import SHARDS_MAX, Manifest, Tensor, balanced, dealt
from archipelago.broker.transport import MEMORY_SHARE_MAX
from archipelago.merger.spectra import default_threads
from archipelago.merger.weights import cycle_work, spectra_bytes
from archipelago.ops.watch.formatting import seconds_text

#: Bytes of a Redis that holds no run.
REDIS_BASE: Final = 9_000_000
#: The share of a machine's memory that a merger may fill.
MERGER_SHARE_MAX: Final = 0.9
#: A merger that spends more of an interval on spectra has too little time for contributions, commits and checkpoints.
SHARE_MAX: Final = 0.7
#: The rows of the embedding of a usual decoder, as of Llama 3.
VOCABULARY: Final = 128_256
#: The threads that change spectra in each merger, for its memory.
THREADS: Final = 8


@dataclass(frozen=True)
class Cycle:
    """What a run takes while each of its fragments is merged once.

    Attributes:
        shards: The shards. Each has a merger and a part of Redis, here on machines of their own.
        merger_bytes: Memory of the merger of the largest shard at its peak.
        redis_first_bytes: Memory of Redis for that shard after the first cycle.
        redis_bytes: The most memory of Redis for that shard, just before a compaction covers what has been merged.
        bytes_up, bytes_down: Bytes that one island sends and receives, before zstd.
    """

    shards: int
    merger_bytes: int
    redis_first_bytes: int
    redis_bytes: int
    bytes_up: int
    bytes_down: int


def cycle(
    config: RunConfig,
    parameters: int,
    fragments: int,
    islands: int,
    shards: int = 1,
    *,
    tensors: Sequence[Tensor] = (),
    checkpoints: bool = True,
) -> Cycle:
    """Predict a cycle of the largest shard, and the largest fragment of a run.

    `tensors` become fragments and shards as those of a run do, and a merger takes memory for their spectra, on THREADS
    threads. Without any, all fragments have one size, and all shards have as many of them.
    """
    shares = (parameters, shards), (parameters, fragments), (fragments, shards)
    elements, largest, rounds = (math.ceil(all_ / parts) for all_, parts in shares)
    if tensors:
        elements, largest, rounds = _largest(tuple(tensors), fragments, shards)
    wire, sizes = config.wire, (elements, largest)
    spectra = spectra_bytes(tensors, config.merge, sizes[1], THREADS)
    up, down, full = (codec(name).encoded_size(elements) for name in (wire.up, wire.down, wire.full))
    # Without differences, each round writes the full state, and the last snapshot stays for a while.
    written = islands * up + down if wire.sends_differences else full + 4 * elements * (1 + has_momentum(config))
    return Cycle(
        shards=shards,
        merger_bytes=sum(merger_parts(config, *sizes, spectra, checkpoints=checkpoints).values()),
        redis_first_bytes=REDIS_BASE + full + written,
        redis_bytes=REDIS_BASE + sum(redis_parts(config, *sizes, islands, rounds).values()),
        bytes_up=codec(wire.up).encoded_size(parameters),
        bytes_down=codec(wire.down).encoded_size(parameters),
    )


@lru_cache(maxsize=1024)
def _largest(tensors: tuple[Tensor, ...], fragments: int, shards: int) -> tuple[int, int, int]:
    """Return the most elements of a shard, those of the largest fragment, and the most fragments of a shard."""
    size_of = {tensor.name: tensor.size for tensor in tensors}
    sizes = [sum(size_of[name] for name in names) for names in balanced(tensors, fragments)]
    hands = dealt(sizes, shards)
    return max(sum(sizes[p] for p in hand) for hand in hands), max(sizes), max(map(len, hands))


def fitting_cycle(
    config: RunConfig,
    parameters: int,
    fragments: int,
    islands: int,
    *,
    merger_bytes: float,
    redis_bytes: float,
    tensors: Sequence[Tensor] = (),
) -> Cycle | None:
    """Predict a cycle with the fewest shards that fit into machines; None if none do.

    The memory is that of a machine with a merger, and of one with a Redis primary. `fragments` counts those of each
    shard. A run has at most as many as tensors, since each has a whole one at least.
    """

    def fits(found: Cycle) -> bool:
        has_redis = found.redis_bytes <= MEMORY_SHARE_MAX * redis_bytes
        return has_redis and found.merger_bytes <= MERGER_SHARE_MAX * merger_bytes

    elements, most = sum(tensor.size for tensor in tensors) or parameters, len(tensors) or fragments * SHARDS_MAX
    for shards in range(1, min(SHARDS_MAX, most) + 1):
        of_run = config, elements, min(fragments * shards, most), islands, shards
        # Equal parts need the least, and are soon computed.
        if fits(cycle(*of_run)) and fits(found := cycle(*of_run, tensors=tensors)):
            return found
    return None


def footprint_here(manifest: Manifest) -> dict[str, int]:
    """Estimate the memory of a run (`footprint`) whose merger changes spectra on the processors of this machine."""
    config, largest = manifest.config.merge, max(manifest.sizes, default=0)
    return footprint(manifest, spectra_bytes(manifest.tensors, config, largest, default_threads()))


# -- the links -------------------------------------------------------------------------------------------------------


class Way(NamedTuple):
    """A choice of interval H and of the codecs `up` and `down`, with the reason `why`."""

    interval: int
    up: str
    down: str
    why: str


#: From the least loss of quality to the least traffic. Fewer bits cost less quality than longer intervals.
LADDER = (
    Way(24, "bfloat16", "float32", "16 bits up, all 32 down; rounding errors are sent with the next contribution"),
    Way(24, "int8", "int8", "8 bits both ways, at hardly any cost"),
    Way(24, "int4", "int4", "4 bits both ways, which costs little (published: +0.09 % validation loss)"),
    Way(50, "int4", "int4", "4 bits both ways and twice the interval"),
    Way(100, "int4", "int4", "4 bits both ways and four times the interval"),
    Way(200, "int4", "int4", "4 bits both ways and the longest interval that was tried and is stable"),
    Way(200, "top3", "int4", "the largest 3 % up, 4 bits down, and the longest interval"),
)


# -- spectra ----------------------------------------------------------------------------------------------------------


class SpectraWay(NamedTuple):
    """What changes the spectra of a merger.

    Attributes:
        rate: Its operations a second.
        copy_seconds: The time in which an element is copied there and back.
    """

    name: str
    rate: float
    copy_seconds: float = 0.0


#: A thread does 30 GFLOP/s in float64. The rates of one with AMX and of an H100 were measured with a matrix of
#: 1024 × 4096 (docs/results). Copies are predicted from 7.5 GB/s to that H100 and back, and four copies on the host.
WAYS: Final = (
    SpectraWay("8 threads", 8 * 30e9),
    SpectraWay("64 threads", 64 * 30e9),
    SpectraWay("8 threads with AMX", 8 * 150e9),
    SpectraWay("64 threads with AMX", 64 * 150e9),
    SpectraWay("an H100 (--spectra gpu)", 46e12, 2.8e-9),
)


@dataclass(frozen=True)
class SpectraLoad:
    """The spectra of one cycle, in which each fragment is merged once, in each merger of one kind.

    Attributes:
        way: What changes them.
        seconds: The time that they take.
        share: That time as a share of the interval, which is H times the time of an inner step.
    """

    way: str
    seconds: float
    share: float

    @property
    def stretch(self) -> float:
        """The smallest interval with which such a merger keeps up, as a multiple of the run's; at least 1."""
        return max(1.0, self.share / SHARE_MAX)

    def describe(self) -> str:
        """Return the cost in words."""
        return f"spectra take {seconds_text(self.seconds)} a cycle, {self.share:.0%} of the interval"


def spectra_loads(
    tensors: Sequence[Tensor],
    config: MergeConfig,
    interval_seconds: float,
    mergers: int = 1,
    ways: Sequence[SpectraWay] = WAYS,
) -> tuple[SpectraLoad, ...]:
    """Predict the spectra of a run whose mergers share them, for each way; nothing if its rules change none."""
    operations, elements = cycle_work(tensors, config)
    seconds = [(operations / way.rate + elements * way.copy_seconds) / mergers for way in ways if elements]
    return tuple(SpectraLoad(way.name, each, each / interval_seconds) for way, each in zip(ways, seconds, strict=False))


def decoder(parameters: float) -> tuple[Tensor, ...]:
    """Return the matrices of a usual decoder of width w: about w/64 layers of 12 w² parameters, and two embeddings.

    These have VOCABULARY rows, but at most an eighth of the parameters.
    """
    width = max(1, round((16.0 * parameters / 3.0) ** (1.0 / 3.0)))
    rows, hidden = min(VOCABULARY, int(parameters / (16 * width))), round(8 * width / 3)
    ends = [Tensor(name, (rows, width), "embedding") for name in ("embedding", "output")] if rows else []
    shapes = dict.fromkeys(("query", "key", "value", "out"), (width, width))
    shapes |= {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    layers = max(1, round((parameters - 2 * rows * width) / (12 * width**2)))
    return (*ends, *(Tensor(f"{n}.{name}", shape) for n in range(layers) for name, shape in shapes.items()))
