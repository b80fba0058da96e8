"""Predict what a run takes in memory, bytes and time while each fragment is merged once, on one or more shards. Pure.

Memory comes from `broker.footprint` and bytes from the codecs. Times are seconds of a processor, without spectra
(`ops.simulation.spectra_load`) and without links (`ops.simulation.links`). `archipelago bench largest` prints the
prediction beside what it measures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from archipelago.broker.codecs import codec
from archipelago.broker.config import RunConfig
from archipelago.broker.footprint import has_momentum, memory_text, merger_parts, redis_parts
from archipelago.broker.transport import MEMORY_SHARE_MAX
from archipelago.ops.simulation.spectra_load import SHARE_MAX
from archipelago.ops.watch.formatting import seconds_text

# Seconds on the machine of docs/results/performance.md, measured by
# `archipelago bench largest`, with 1e9 parameters and with `--parameters 8e7 --fragments 8`, `--parameters 8e7
# --fragments 128` and `--parameters 2e8 --fragments 64`.
#: An island, for each element: quantise, pack and upload; fetch, check, decode and adopt.
PUBLISH_SECONDS, ADOPT_SECONDS = 6.5e-9, 3.4e-9
#: The merger, for each element of a contribution: fetch, check, decode and add.
ADD_SECONDS: Final = 2.8e-9
#: The merger, for each element of a round: finish the sum, take the outer step, quantise and send the difference.
CLOSE_SECONDS: Final = 4.4e-9
#: The merger, for each round of any size.
ROUND_SECONDS: Final = 10e-3
#: A merger that starts: load its programs and compile; then read each byte from Redis, check and decode it.
START_SECONDS: Final = 1.7
LOAD_SECONDS: Final = 1.2e-9
#: It cannot load before the lease of its predecessor has ended (`archipelago merger --lease-seconds`), unless that one
#: ran on the same machine.
LEASE_SECONDS: Final = 5.0
#: Bytes of a Redis that holds no run.
REDIS_BASE: Final = 9_000_000
#: The share of a machine's memory that a merger may fill.
MERGER_SHARE_MAX: Final = 0.9
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
        publish_seconds, adopt_seconds: Processor time of one island.
        merge_seconds: Processor time of one merger, without spectra.
        restart_seconds: The longest time in which a merger that starts has merged again what no compaction covers.
    """

    shards: int
    merger_bytes: int
    redis_first_bytes: int
    redis_bytes: int
    bytes_up: int
    bytes_down: int
    publish_seconds: float
    adopt_seconds: float
    merge_seconds: float
    restart_seconds: float

    def describe(self) -> str:
        """Return the memory and the time of a merger, and the memory of its Redis, in words."""
        return (
            f"a merger takes {memory_text(self.merger_bytes)} and {seconds_text(self.merge_seconds)} a cycle without "
            f"spectra, and {seconds_text(self.restart_seconds)} at most to restart; Redis takes "
            f"{memory_text(self.redis_first_bytes)} after the first cycle, {memory_text(self.redis_bytes)} at most"
        )


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
    """Predict a cycle.

    Args:
        config: The run's config: codecs and outer rule.
        parameters: The elements of all fragments.
        fragments: The fragments of the run.
        islands: The islands that contribute to each round.
        shards: The shards, which have equal parts of the fragments.
        largest: The elements of the largest fragment; by default, all are equal.
        checkpoints: Whether mergers write checkpoints.
        slowness: The time that this machine takes for some work, over that of the machine that was measured.
    """
    wire, elements, rounds = config.wire, math.ceil(parameters / shards), math.ceil(fragments / shards)
    sizes = elements, largest or math.ceil(parameters / fragments)
    up, down, full = (codec(name).encoded_size(elements) for name in (wire.up, wire.down, wire.full))
    # Without differences, each round writes the full state, and the last snapshot stays for a while.
    written = islands * up + down if wire.sends_differences else full + 4 * elements * (1 + has_momentum(config))
    merge_seconds = slowness * merging_seconds(elements, rounds, islands)
    return Cycle(
        shards=shards,
        merger_bytes=sum(merger_parts(config, *sizes, checkpoints=checkpoints).values()),
        redis_first_bytes=REDIS_BASE + full + written,
        redis_bytes=REDIS_BASE + sum(redis_parts(config, *sizes).values()),
        bytes_up=codec(wire.up).encoded_size(parameters),
        bytes_down=codec(wire.down).encoded_size(parameters),
        publish_seconds=slowness * PUBLISH_SECONDS * parameters,
        adopt_seconds=slowness * ADOPT_SECONDS * parameters,
        merge_seconds=merge_seconds,
        restart_seconds=_longest_restart_seconds(config, elements, written, merge_seconds, slowness),
    )


def merging_seconds(elements: int, rounds: int, islands: int) -> float:
    """Return the processor time in which a merger closes rounds of that many elements in all."""
    return ROUND_SECONDS * rounds + (ADD_SECONDS * islands + CLOSE_SECONDS) * elements


def takeover_seconds(loaded_bytes: int, slowness: float, lease_seconds: float = LEASE_SECONDS) -> float:
    """Return the time from a merger's end until another one, which starts then, has loaded full states of that size."""
    return max(lease_seconds, slowness * START_SECONDS) + slowness * LOAD_SECONDS * loaded_bytes


def _longest_restart_seconds(
    config: RunConfig, elements: int, written: int, merge_seconds: float, slowness: float
) -> float:
    """Return the restart time just before compactions. They are due when as much was written as they take themselves.

    They may wait for twice as much, but only while merging that again takes no longer than a few seconds.
    """
    state = 4 * elements * (2 + has_momentum(config))
    cycles = math.ceil(state / written) if config.wire.sends_differences else 0
    return takeover_seconds(state, slowness) + cycles * merge_seconds


def shards_needed(
    config: RunConfig,
    parameters: int,
    fragments: int,
    islands: int,
    *,
    merger_bytes: float,
    redis_bytes: float,
    interval_seconds: float,
    slowness: float = 1.0,
) -> int:
    """Return the fewest shards whose mergers and Redis fit into machines, and whose mergers keep up; 0 if none do.

    Args:
        config: The run's config.
        parameters: The elements of all fragments.
        fragments: The fragments of each shard.
        islands: The islands.
        merger_bytes: The memory of a machine with a merger.
        redis_bytes: The memory of a machine with a Redis primary.
        interval_seconds: H times the time of an inner step.
        slowness: As for `cycle`.
    """
    for shards in range(1, FRAGMENTS_MAX // fragments + 1):
        found = cycle(config, parameters, fragments * shards, islands, shards, slowness=slowness)
        fits = found.merger_bytes <= MERGER_SHARE_MAX * merger_bytes
        fits &= found.redis_bytes <= MEMORY_SHARE_MAX * redis_bytes
        if fits and found.merge_seconds <= SHARE_MAX * interval_seconds:
            return shards
    return 0
