"""`archipelago bench largest`: pass a model of a billion parameters through Redis once, and kill its merger half-way.

Links of two islands, mergers and Redis, each a process, without training: each fragment is published by both islands,
merged, fetched and adopted. Fragments follow one after another, so that the seconds of each part are separate. Redis
keeps nothing on disk here. The same figures are predicted (`ops.simulation.cycle`), and printed beside the measured
ones.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from archipelago.broker.codecs import codec
from archipelago.broker.errors import BrokerError, ConfigError, require_number
from archipelago.broker.footprint import available_here, memory_text
from archipelago.broker.process import keep_compiled
from archipelago.ops.bench.harness import (
    MeasuredProcess,
    child,
    own_redis,
    peak_bytes,
    require_linux,
    resident_bytes,
    serve_merger,
)
from archipelago.ops.bench.largest_islands import RUN, Passed, config_of, pass_all
from archipelago.ops.bench.output import OutputOptions, finish
from archipelago.ops.settings import say
from archipelago.ops.simulation.cycle import (
    FIRST_MERGE_BYTES,
    Cycle,
    Machine,
    again_seconds,
    cycle,
    loading_seconds,
    measured_machine,
    new_memory_seconds,
)

PARAMETERS, PARAMETERS_QUICK = 1e9, 2e7
FRAGMENTS = 256
ISLANDS = 2
#: The share of the available memory that the measurement may take.
MEMORY_SHARE = 0.95
#: The measurement ends when the machine has less memory than this.
FLOOR_BYTES = 1 << 28
WATCH_SECONDS = 0.25
MERGERS = ("first merger", "second merger")
#: Memory of the islands' process before it holds a fragment, and for each island and element of one (both measured).
ISLANDS_BASE, ISLAND_FRAGMENT_BYTES = 290_000_000, 60


@dataclass(frozen=True)
class LargestOptions(OutputOptions):
    """Pass a large model over the wire on this machine, untrained: each fragment up from two islands, merged and down.

    The merger is killed half-way, and another one goes on. Measured and predicted figures stand side by side.
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


@dataclass(frozen=True)
class Predicted:
    """What the measurement should find.

    Attributes:
        machine: How fast this machine is.
        islands_bytes: Memory of the islands' process.
        load_seconds: Processor time of a merger that starts and loads the run.
        merge_seconds: Processor time of the mergers in the first cycle, after that.
        restart_seconds: The same from the kill until the next merger has closed a round. Its process runs on the same
            machine, so it does not wait for a lease.
        cycle: Memory, bytes and time of the rest.
    """

    machine: Machine
    islands_bytes: int
    load_seconds: float
    merge_seconds: float
    restart_seconds: float
    cycle: Cycle

    @property
    def together_bytes(self) -> int:
        """The memory of all processes together."""
        return self.islands_bytes + self.cycle.merger_bytes + self.cycle.redis_first_bytes


def predict(parameters: int, fragments: int, islands: int, machine: Machine) -> Predicted:
    """Predict a pass over that many parameters (`ops.simulation.cycle`)."""
    config = config_of(fragments, islands)
    expected = cycle(config, parameters, fragments, islands, checkpoints=False, machine=machine)
    load_seconds = loading_seconds(parameters, codec(config.wire.full).encoded_size(parameters) / parameters, machine)
    return Predicted(
        machine,
        ISLANDS_BASE + ISLAND_FRAGMENT_BYTES * islands * math.ceil(parameters / fragments),
        load_seconds,
        expected.merge_seconds + machine.seconds(0.0, FIRST_MERGE_BYTES * parameters),
        load_seconds + again_seconds(parameters // 2, fragments // 2, islands, machine),
        expected,
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


def row(what: str, unit: str, measured: float, expected: float, seconds: float | str = "") -> dict[str, Any]:
    """Return a line of the table: what was measured and predicted."""
    ratio = measured / expected if expected else ""
    return {"what": what, "wall seconds": seconds, "unit": unit, "measured": measured, "predicted": expected,
            "ratio": ratio}  # fmt: skip


def rows(passed: Passed, memory: _Memory, predicted: Predicted) -> list[dict[str, Any]]:
    """Return a table for people: each part with its time of day, and what was measured and predicted."""
    need, islands = predicted.cycle, passed.islands
    restarted = passed.restart_cpu_seconds, predicted.restart_seconds

    def processor(what: str, part: str, expected: float) -> dict[str, Any]:
        of_all = passed.fragments * statistics.fmean(passed.cpu_seconds[part] or [0.0])
        return row(what, "processor s", of_all, expected, sum(passed.seconds[part]))

    def gigabytes(what: str, measured: float, expected: float) -> dict[str, Any]:
        return row(what, "GB", 1e-9 * measured, 1e-9 * expected)

    loaded = passed.load_cpu_seconds, predicted.load_seconds, passed.load_seconds
    times = [
        row("the first merger starts and loads", "processor s", *loaded),
        processor("publish, all islands", "publish", islands * need.publish_seconds),
        processor("merge", "merge", predicted.merge_seconds),
        processor("adopt, all islands", "adopt", islands * need.adopt_seconds),
        row("the second merger starts, loads and merges again", "processor s", *restarted),
    ]
    together = (sum(each[column] for each in times) for column in ("measured", "predicted"))
    return [
        *times,
        row("all of these together", "processor s", *together),
        row("from the kill to the next closed round", "s", passed.restart_seconds, predicted.restart_seconds),
        gigabytes("bytes up, all islands", passed.bytes_up, islands * need.bytes_up),
        gigabytes("bytes down, all islands", passed.bytes_down, islands * need.bytes_down),
        gigabytes("peak memory: merger", max(memory.peaks[name] for name in MERGERS), need.merger_bytes),
        gigabytes("peak memory: Redis", memory.peaks["Redis"], need.redis_first_bytes),
        gigabytes("peak memory: islands' process", memory.peaks["islands"], predicted.islands_bytes),
        gigabytes("peak memory: all together", memory.together, predicted.together_bytes),
    ]


class _Memory:
    """The memory of several processes: the peak of each, and of all together."""

    def __init__(self) -> None:
        self.processes: dict[str, int] = {}
        self.peaks: dict[str, int] = {}
        self.together = 0

    def await_(self, process: MeasuredProcess) -> Any:
        """Return the process's next message, and note the sizes meanwhile, and the peaks so far at the end.

        Raises:
            BrokerError: The machine has hardly any memory left.
        """
        while (message := process.receive(WATCH_SECONDS)) is None:
            self._look()
        self._look()
        self.peaks |= {name: peak_bytes(pid) for name, pid in self.processes.items()}
        return message

    def _look(self) -> None:
        self.together = max(self.together, sum(resident_bytes(pid) for pid in self.processes.values()))
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
    needed = predict(size * fragments, fragments, islands, Machine())
    require_room(needed, available_here())
    say(f"all of the memory is taken once before: {memory_text(needed.together_bytes)}")
    # The host of a virtual machine takes back memory that is free, and takes long to find it again.
    first_seconds = new_memory_seconds(needed.together_bytes) / needed.together_bytes
    predicted = predict(size * fragments, fragments, islands, measured_machine())
    memory = _Memory()
    with ExitStack() as held:
        server = held.enter_context(own_redis(append_only=False))
        players = held.enter_context(child(pass_all, server.url, size, fragments, islands))
        memory.processes = {"islands": players.pid, "Redis": server.pid}
        memory.await_(players)
        say(f"a run of {size * fragments:,} parameters in {fragments} fragments is in Redis")
        with child(serve_merger, server.url, RUN) as first:
            memory.processes[MERGERS[0]] = first.pid
            players.pipe.send(first.pid)
            memory.await_(players)
            del memory.processes[MERGERS[0]]
            killed_at = time.monotonic()
        say("the merger was killed, and another one starts")
        second = held.enter_context(child(serve_merger, server.url, RUN))
        memory.processes[MERGERS[1]] = second.pid
        players.pipe.send((killed_at, second.pid))
        passed: Passed = memory.await_(players)
    # The price of as much memory as the run takes, beside the price afterwards, which the prediction uses.
    prices = 1e9 * first_seconds, 1e9 * predicted.machine.new_byte_seconds
    return {
        "parameters": size * fragments,
        "append_only_file": False,
        "rows": [
            row("new memory when it is taken before the run", "s a GB", *prices),
            *rows(passed, memory, predicted),
        ],
        "predicted": asdict(predicted),
        "load": os.getloadavg()[0],
        "peak_bytes": memory.peaks,
        "together_bytes": memory.together,
        **asdict(passed),
    }
