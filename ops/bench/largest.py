"""`archipelago bench largest`: pass a model of a billion parameters through Redis once, and kill its merger half-way.

Links of two islands, mergers and Redis, without training: each fragment is published by both islands, merged, fetched
and adopted. Fragments follow one after another, so that the seconds of each part are separate. Redis keeps nothing on
disk here. The memory and the bytes that `ops.simulation.cycle` predicts stand beside what is measured.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from archipelago.broker.errors import BrokerError, ConfigError, require_number
from archipelago.broker.footprint import available_here
from archipelago.broker.messages import Resume, Snapshot
from archipelago.broker.process import keep_compiled, return_freed_memory
from archipelago.ops.bench.harness import (
    child,
    cpu_seconds,
    forget_peak,
    own_redis,
    peak_bytes,
    require_linux,
    resident_bytes,
    serve_merger,
)
from archipelago.ops.bench.largest_islands import RUN, WireIslands, config_of
from archipelago.ops.bench.output import OutputOptions, finish
from archipelago.ops.settings import say
from archipelago.ops.simulation.cycle import Cycle, cycle

PARAMETERS, PARAMETERS_QUICK = 1e9, 2e7
FRAGMENTS = 256
ISLANDS = 2
#: The share of the available memory that the measurement may take.
MEMORY_SHARE = 0.95
#: The measurement ends when the machine has less memory than this.
FLOOR_BYTES = 1 << 28
#: Memory of the islands' process before it holds a fragment, and for each island and element of one (both measured).
ISLANDS_BASE, ISLAND_FRAGMENT_BYTES = 290_000_000, 60


@dataclass(frozen=True)
class LargestOptions(OutputOptions):
    """Pass a large model over the wire on this machine, untrained: each fragment up from two islands, merged and down.

    The merger is killed half-way, and another one goes on. Memory and bytes stand beside their predictions.
    """

    parameters: float = 0.0
    """The parameters of the model. The default is 1e9, or 2e7 with --quick."""
    fragments: int = FRAGMENTS
    """The fragments into which they are split."""
    islands: int = ISLANDS
    """The islands, at least two."""
    quick: bool = False
    """Use a smaller model."""


def main(options: LargestOptions) -> int:
    """Measure, and write the results."""
    keep_compiled()
    require_number("--fragments", options.fragments, "Give 1 or more.", 1)
    require_number("--islands", options.islands, "Give 2 or more.", 2)
    parameters = options.parameters or (PARAMETERS_QUICK if options.quick else PARAMETERS)
    return finish("largest", largest(parameters, options.fragments, options.islands), options)


class Predicted(NamedTuple):
    """The memory of the islands' process, and memory and bytes of the rest."""

    islands_bytes: int
    cycle: Cycle

    @property
    def together_bytes(self) -> int:
        """The memory of all processes together."""
        return self.islands_bytes + self.cycle.merger_bytes + self.cycle.redis_first_bytes


def predict(parameters: int, fragments: int, islands: int) -> Predicted:
    """Predict a pass over that many parameters (`ops.simulation.cycle`)."""
    return Predicted(
        ISLANDS_BASE + ISLAND_FRAGMENT_BYTES * islands * math.ceil(parameters / fragments),
        cycle(config_of(fragments, islands), parameters, fragments, islands, checkpoints=False),
    )


def require_room(predicted: Predicted, available: int) -> None:
    """Raise ConfigError if the model does not fit."""
    room, needed = int(MEMORY_SHARE * available), predicted.together_bytes
    if needed > room:
        raise ConfigError(
            f"the model would take about {needed / 2**30:.1f} GiB, but {MEMORY_SHARE:.0%} of this machine's available "
            f"memory are {room / 2**30:.1f} GiB",
            f"Pass about {room / needed:.2f} of these parameters (--parameters), or free some memory first.",
            code="bench.memory",
        )


class PeakMemory:
    """The memory of several processes.

    Attributes:
        processes: The process IDs by name.
        peaks: The most memory that each of them had when it was looked at last.
        together: The most that all of them had at one time.
    """

    def __init__(self, **processes: int) -> None:
        self.processes, self.peaks, self.together = processes, dict[str, int](), 0

    def look(self) -> None:
        """Note the sizes and peaks. Raise BrokerError if the machine has hardly any memory left."""
        self.together = max(self.together, sum(map(resident_bytes, self.processes.values())))
        self.peaks |= {name: peak_bytes(pid) for name, pid in self.processes.items()}
        if available_here() < FLOOR_BYTES:
            raise BrokerError(
                "the measurement ended because this machine has hardly any memory left",
                "Give fewer --parameters, or stop another program first.",
                code="bench.memory",
            )


def largest(parameters: float, fragments: int = FRAGMENTS, islands: int = ISLANDS) -> dict[str, Any]:
    """Pass a model of `parameters` elements. Return plain data with `rows`. Raise ConfigError if it does not fit."""
    require_linux()
    if not 1 <= parameters < 1e15:
        raise ConfigError(f"--parameters cannot be {parameters}", "Give a number such as 2.5e8.", code="config.value")
    size = max(1, math.ceil(parameters / fragments))
    found = predict(size * fragments, fragments, islands)
    require_room(found, available_here())
    return_freed_memory()  # as `archipelago island` does
    forget_peak()
    with own_redis(append_only=False) as server:
        fleet, half = WireIslands(server.url, size, fragments, islands), fragments // 2
        memory = PeakMemory(islands=os.getpid(), Redis=server.pid)
        say(f"a run of {size * fragments:,} parameters in {fragments} fragments is in Redis")
        began = time.monotonic()
        with child(serve_merger, server.url, RUN) as merger:
            memory.processes["first merger"] = merger.pid
            fleet.hear(Resume)
            loaded, load_cpu = time.monotonic() - began, cpu_seconds(merger.pid)
            for p in range(half):
                fleet.passes(p, merger.pid)
                memory.look()
            fleet.train()
            fleet.islands[0].publish(half)
            memory.look()
        killed_at = time.monotonic()
        say("the merger was killed, and another one starts")
        del memory.processes["first merger"]
        with child(serve_merger, server.url, RUN) as merger:
            memory.processes["second merger"] = merger.pid
            fleet.publish(half, first=1)
            fleet.hear(Snapshot)
            restarted, restart_cpu = time.monotonic() - killed_at, cpu_seconds(merger.pid)
            fleet.adopt(half)
            for p in range(half + 1, fragments):
                fleet.passes(p, merger.pid)
                memory.look()
            memory.look()
        fleet.require_nothing_lost()
    rows = [
        row("the first merger starts and loads", load_cpu, seconds=loaded),
        *_part_rows(fleet, fragments),
        row("the second merger starts, loads and merges again", restart_cpu),
        row("from the kill to the next closed round", restarted, unit="s"),
        *_byte_rows(fleet, memory, found),
    ]
    return {
        "parameters": size * fragments,
        "fragments": fragments,
        "islands": islands,
        "rows": rows,
        "predicted": found._asdict() | {"cycle": asdict(found.cycle)},
        "load": os.getloadavg()[0],
    }


# -- the table --------------------------------------------------------------------------------------------------------


def row(
    what: str, measured: float, predicted: float | str = "", seconds: float | str = "", unit: str = "processor s"
) -> dict[str, Any]:
    """Return a line of the table: what was measured and predicted, and the time of day that it took."""
    ratio = "" if isinstance(predicted, str) else measured / predicted
    return {"what": what, "wall seconds": seconds, "unit": unit, "measured": measured, "predicted": predicted,
            "ratio": ratio}  # fmt: skip


def _part_rows(fleet: WireIslands, fragments: int) -> list[dict[str, Any]]:
    """Return a line of each part of a pass. The fragment of the kill counts like the mean of the others."""
    return [
        row(f"{part}, all islands" if part != "merge" else part, spent.cpu_seconds * fragments / max(1, spent.calls),
            seconds=spent.seconds)
        for part, spent in fleet.spent.items()
    ]  # fmt: skip


def _byte_rows(fleet: WireIslands, memory: PeakMemory, predicted: Predicted) -> list[dict[str, Any]]:
    need, uplinks = predicted.cycle, [island.link.uplink for island in fleet.islands]
    up, down = sum(each.bytes_up for each in uplinks), sum(each.bytes_down for each in uplinks)
    merger = max(memory.peaks["first merger"], memory.peaks["second merger"])
    return [
        row(what, 1e-9 * measured, 1e-9 * expected, unit="GB")
        for what, measured, expected in (
            ("bytes up, all islands", up, len(uplinks) * need.bytes_up),
            ("bytes down, all islands", down, len(uplinks) * need.bytes_down),
            ("peak memory: merger", merger, need.merger_bytes),
            ("peak memory: Redis", memory.peaks["Redis"], need.redis_first_bytes),
            ("peak memory: islands' process", memory.peaks["islands"], predicted.islands_bytes),
            ("peak memory: all together", memory.together, predicted.together_bytes),
        )
    ]
