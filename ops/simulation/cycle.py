"""Predict what a run takes in memory, bytes and time while each fragment is merged once, on one or more shards.

Memory comes from `broker.footprint` and bytes from the codecs. Times are seconds of a processor, without links; those
of spectra are a prediction of their own (`spectra_loads`). `archipelago bench largest` prints the memory and the bytes
beside what it measures. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from archipelago.broker.codecs import codec
from archipelago.broker.config import MergeConfig, RunConfig
from archipelago.broker.footprint import has_momentum, merger_parts, redis_parts
from archipelago.broker.manifest import Tensor
from archipelago.broker.transport import MEMORY_SHARE_MAX
from archipelago.merger.weights import cycle_work
from archipelago.ops.watch.formatting import seconds_text

# Processor time on the machine of docs/results/performance.md, with the time for new memory, measured by
# `archipelago bench largest` with 2e7 to 1e9 parameters in 26 to 256 fragments.
#: The merger, for each element of a contribution: fetch, check, decode and add.
ADD_SECONDS: Final = 1.8e-9
#: The merger, for each element of a round: finish the sum, take the outer step, quantise and send the difference.
CLOSE_SECONDS: Final = 3.0e-9
#: The merger, for each round of any size, and when it merges again what its predecessor has committed.
ROUND_SECONDS, AGAIN_SECONDS = 7.2e-3, 3.6e-3
#: A merger that starts: load its programs and compile; then read each byte from Redis, check and decode it.
START_SECONDS, LOAD_SECONDS = 1.1, 0.95e-9
#: New memory of a merger for each element that it loads, and that it merges again for the first time.
LOAD_NEW_SECONDS, AGAIN_NEW_SECONDS = 2.4e-9, 4.3e-9
#: It cannot load before the lease of its predecessor has ended (`archipelago merger --lease-seconds`), unless that one
#: ran on the same machine.
LEASE_SECONDS: Final = 5.0
#: Bytes of a Redis that holds no run.
REDIS_BASE: Final = 9_000_000
#: The share of a machine's memory that a merger may fill.
MERGER_SHARE_MAX: Final = 0.9
#: A merger that spends more of an interval on spectra has too little time for contributions, commits and checkpoints.
SHARE_MAX: Final = 0.7
#: A run has no more fragments (`sync.fragments`).
FRAGMENTS_MAX: Final = 4096


@dataclass(frozen=True)
class Cycle:
    """What a run takes while each of its fragments is merged once.

    Attributes:
        shards: The shards. Each has a merger and a part of Redis, here on machines of their own.
        merger_bytes: Memory of one merger at its peak.
        redis_first_bytes: Memory of Redis for one shard after the first cycle.
        redis_bytes: The most memory of Redis for one shard, just before a compaction covers what has been merged.
        bytes_up, bytes_down: Bytes that one island sends and receives, before zstd.
        merge_seconds: Processor time of one merger, without spectra, after the first cycle.
        restart_seconds: The longest time in which a merger that starts has merged again what no compaction covers.
    """

    shards: int
    merger_bytes: int
    redis_first_bytes: int
    redis_bytes: int
    bytes_up: int
    bytes_down: int
    merge_seconds: float
    restart_seconds: float


def cycle(
    config: RunConfig,
    parameters: int,
    fragments: int,
    islands: int,
    shards: int = 1,
    *,
    largest: int = 0,
    checkpoints: bool = True,
    slowness: float = 1.0,
) -> Cycle:
    """Predict a cycle of a run whose shards have equal parts of the fragments.

    `largest` are the elements of the largest fragment; by default, all are equal. `slowness` is the time that a core of
    the merger takes, over that of the machine of docs/results/performance.md.
    """
    wire, elements, rounds = config.wire, math.ceil(parameters / shards), math.ceil(fragments / shards)
    sizes = elements, largest or math.ceil(parameters / fragments)
    up, down, full = (codec(name).encoded_size(elements) for name in (wire.up, wire.down, wire.full))
    # Without differences, each round writes the full state, and the last snapshot stays for a while.
    written = islands * up + down if wire.sends_differences else full + 4 * elements * (1 + has_momentum(config))
    return Cycle(
        shards=shards,
        merger_bytes=sum(merger_parts(config, *sizes, checkpoints=checkpoints).values()),
        redis_first_bytes=REDIS_BASE + full + written,
        redis_bytes=REDIS_BASE + sum(redis_parts(config, *sizes, islands, rounds).values()),
        bytes_up=codec(wire.up).encoded_size(parameters),
        bytes_down=codec(wire.down).encoded_size(parameters),
        merge_seconds=slowness * merging_seconds(elements, rounds, islands),
        restart_seconds=_longest_restart_seconds(config, elements, rounds, islands, written, slowness),
    )


def merging_seconds(elements: int, rounds: int, islands: int, round_seconds: float = ROUND_SECONDS) -> float:
    """Return the processor time in which a merger closes rounds of that many elements in all."""
    return round_seconds * rounds + (ADD_SECONDS * islands + CLOSE_SECONDS) * elements


def _longest_restart_seconds(
    config: RunConfig, elements: int, rounds: int, islands: int, written: int, slowness: float
) -> float:
    """Return the restart time just before compactions. They are due when as much was written as they take themselves.

    They may wait for twice as much, but only while merging that again takes no longer than a few seconds. A merger
    cannot load before the lease of its predecessor has ended.
    """
    state = 4 * (2 + has_momentum(config))
    work = (LOAD_SECONDS * state + LOAD_NEW_SECONDS) * elements
    if config.wire.sends_differences:
        cycles = math.ceil(state * elements / written)
        work += cycles * merging_seconds(elements, rounds, islands, AGAIN_SECONDS) + AGAIN_NEW_SECONDS * elements
    return max(LEASE_SECONDS, slowness * START_SECONDS) + slowness * work


def fitting_cycle(
    config: RunConfig,
    parameters: int,
    fragments: int,
    islands: int,
    *,
    merger_bytes: float,
    redis_bytes: float,
    interval_seconds: float,
    slowness: float = 1.0,
) -> Cycle | None:
    """Predict a cycle with the fewest shards that fit into machines and whose mergers keep up; None if none do.

    The memory is that of a machine with a merger, and of one with a Redis primary. `fragments` counts those of each
    shard, and the interval is H times the time of an inner step.
    """
    for shards in range(1, FRAGMENTS_MAX // fragments + 1):
        found = cycle(config, parameters, fragments * shards, islands, shards, slowness=slowness)
        fits = found.merger_bytes <= MERGER_SHARE_MAX * merger_bytes
        fits &= found.redis_bytes <= MEMORY_SHARE_MAX * redis_bytes
        if fits and found.merge_seconds <= SHARE_MAX * interval_seconds:
            return found
    return None


# -- spectra ----------------------------------------------------------------------------------------------------------


class SpectraWay(NamedTuple):
    """What changes the spectra of a merger.

    Attributes:
        name: Its name in words.
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
    """Return the matrices of a usual decoder: 12 w² parameters a layer and w/64 layers of width w, as squares."""
    width = max(1, round((16.0 * parameters / 3.0) ** (1.0 / 3.0)))
    return (Tensor("layers", (max(1, round(parameters / width**2)), width, width)),)
