"""`archipelago bench largest`: pass a model of a billion parameters through Redis once, and kill its merger half-way.

Mergers and Redis are the real ones. This process plays the islands: each publishes every fragment, and when that is
merged, fetches the difference and adds it to what it held. Fragments follow one after another, and all begin with the
same numbers. Redis keeps nothing on disk here. The memory and the bytes that `ops.simulation.cycle` predicts stand
beside what is measured.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from archipelago.broker.codecs import Vector
from archipelago.broker.config import MergeConfig, OuterConfig, RunConfig, SyncConfig, WireConfig
from archipelago.broker.errors import BrokerError, ConfigError, WireError, require_number
from archipelago.broker.footprint import available_here
from archipelago.broker.machine import return_freed_memory
from archipelago.broker.manifest import Manifest, Tensor
from archipelago.broker.messages import Resume, Snapshot
from archipelago.broker.process import keep_compiled
from archipelago.broker.transport import Transport
from archipelago.broker.wire import after_difference, digest_of, pack
from archipelago.ops.bench.harness import (
    child,
    forget_peak,
    manifest_of,
    own_run,
    peak_bytes,
    require_linux,
    serve_merger,
)
from archipelago.ops.bench.output import OutputOptions, finish, ratio_row
from archipelago.ops.bench.played import PlayedIslands
from archipelago.ops.settings import say
from archipelago.ops.simulation.cycle import Cycle, cycle

RUN = "bench-largest"
PARAMETERS, PARAMETERS_QUICK = 1e9, 2e7
FRAGMENTS = 256
ISLANDS = 2
#: The share of the available memory that the measurement may take.
MEMORY_SHARE = 0.95
#: The measurement ends when the machine has less memory than this.
FLOOR_BYTES = 1 << 28
#: Memory of the islands' process without fragments, and for each element of one (both measured).
ISLANDS_BASE, ISLANDS_FRAGMENT_BYTES = 85_000_000, 20


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
    keep_compiled()
    require_number("--fragments", options.fragments, "Give 1 or more.", 1)
    require_number("--islands", options.islands, "Give 2 or more.", 2)
    parameters = options.parameters or (PARAMETERS_QUICK if options.quick else PARAMETERS)
    return finish("largest", largest(parameters, options.fragments, options.islands), options)


def config_of(fragments: int, islands: int) -> RunConfig:
    """Return the settings: the defaults of a real run, but for what this measurement cannot have.

    A round waits for all islands, and no island is thought to have a thin link. The rule is `rda`, to which `isotropic`
    adds only arithmetic: the spectra of a billion parameters take minutes, and `bench accelerator` measures some.
    """
    return RunConfig(
        sync=SyncConfig(fragments=fragments, window=1, quorum=islands),
        merge=MergeConfig(embedding="rda", rest="rda"),
        outer=OuterConfig(rule="nesterov"),
        wire=WireConfig(up="int4", thin="", down="int4"),
    )


def predict(parameters: int, fragments: int, islands: int) -> tuple[Cycle, int]:
    """Predict a pass over that many parameters (`ops.simulation.cycle`), and the memory of all processes together."""
    found = cycle(config_of(fragments, islands), parameters, fragments, islands, checkpoints=False)
    own = ISLANDS_BASE + ISLANDS_FRAGMENT_BYTES * math.ceil(parameters / fragments)
    return found, own + found.merger_bytes + found.redis_first_bytes


def require_room(needed: int, available: int) -> None:
    """Raise ConfigError if the model does not fit."""
    room = int(MEMORY_SHARE * available)
    if needed > room:
        raise ConfigError(
            f"the model would take about {needed / 2**30:.1f} GiB, but {MEMORY_SHARE:.0%} of this machine's available "
            f"memory are {room / 2**30:.1f} GiB",
            f"Pass about {room / needed:.2f} of these parameters (--parameters), or free some memory first.",
            code="bench.memory",
        )


class Fleet(PlayedIslands):
    """The islands of a new run, whose fragments all begin with the same numbers.

    Attributes:
        bytes_up, bytes_down: What they have sent and fetched.
    """

    def __init__(self, transport: Transport, manifest: Manifest, first_N: Vector, islands: int) -> None:
        wire, size = manifest.config.wire, first_N.size
        payloads = {
            f"island-{number}": pack(_normal(number + 1, size, 1e-3), wire.up, wire.zstd_level)
            for number in range(islands)
        }
        super().__init__(transport, payloads)
        self._manifest, self._first_N = manifest, first_N
        self.bytes_up = self.bytes_down = 0

    def passes(self, p: int) -> None:
        """Let all islands send fragment `p`, and adopt it when it is merged."""
        require_memory()
        self.send(p, *self.payloads)
        self.adopt(p, self.hear(Snapshot))

    def send(self, p: int, *names: str) -> None:
        """Let these islands publish their contributions to fragment `p`."""
        config = self._manifest.config
        steps, step = config.sync.interval, 1 + p * config.sync.interval // config.sync.fragments
        tokens = steps * config.tokens_per_step
        self.publish(names, sequence=p, round=p + 1, fragment=p, tokens=tokens, steps=steps, global_step=step)
        self.bytes_up += sum(len(self.payloads[name]) for name in names)

    def adopt(self, p: int, heard: Snapshot) -> None:
        """Let all islands fetch the first version of fragment `p`. Raise WireError unless the merger has announced it
        (`heard`) and holds the same values.
        """
        for _ in self.payloads:
            found = after_difference(self._transport.reader, self._manifest, p, 1, self._first_N)
            is_announced = (heard.fragment, heard.version) == (p, 1)
            if found is None or not is_announced or digest_of(found[0]) != heard.held:
                raise WireError(f"the islands hold other values of fragment {p}: {heard}", code="bench.wrong-result")
            self.bytes_down += found[1]

    def require_nothing_lost(self) -> None:
        """Raise WireError unless each contribution was merged once, and each fragment has one new version."""
        reader, fragments = self._transport.reader, len(self._manifest.fragments)
        counters, versions = reader.counters(), [head.version if head else None for head in reader.heads()]
        sent = fragments * len(self.payloads)
        if (counters.published, counters.merged, counters.refused) != (sent, sent, 0) or versions != [1] * fragments:
            what = f"{sent} contributions were sent, but Redis says: {counters}, versions {versions}"
            raise WireError(what, code="bench.wrong-result")


def _normal(seed: int, size: int, deviation: float) -> Vector:
    return np.random.default_rng(seed).standard_normal(size, np.float32) * np.float32(deviation)


def require_memory() -> None:
    """Raise BrokerError if the machine has hardly any memory left."""
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
    predicted, together = predict(size * fragments, fragments, islands)
    require_room(together, available_here())
    return_freed_memory()  # as `archipelago island` does
    forget_peak()
    tensors, first_N = [Tensor(f"t{p:04}", (size,)) for p in range(fragments)], _normal(0, size, 0.02)
    manifest = manifest_of(RUN, config_of(fragments, islands), tensors, [[tensor.name] for tensor in tensors])
    payload = pack(first_N, manifest.config.wire.full, manifest.config.wire.full_zstd_level)
    with own_run(manifest, [payload] * fragments, append_only=False) as (server, transport):
        fleet, half = Fleet(transport, manifest, first_N, islands), fragments // 2
        first, *others = fleet.payloads
        say(f"a run of {size * fragments:,} parameters in {fragments} fragments is in Redis")
        began = time.monotonic()
        with child(serve_merger, server.url, RUN) as merger:
            fleet.hear(Resume)
            loaded = time.monotonic() - began
            for p in range(half):
                fleet.passes(p)
            fleet.send(half, first)
            first_peak = peak_bytes(merger.pid)
        killed_at = time.monotonic()
        say("the merger was killed, and another one starts")
        with child(serve_merger, server.url, RUN) as merger:
            fleet.send(half, *others)
            heard = fleet.hear(Snapshot)
            restarted = time.monotonic() - killed_at
            fleet.adopt(half, heard)
            for p in range(half + 1, fragments):
                fleet.passes(p)
            peaks = [max(first_peak, peak_bytes(merger.pid)), peak_bytes(server.pid), peak_bytes(os.getpid())]
        whole = time.monotonic() - began
        fleet.require_nothing_lost()
    times = {
        "the whole pass": whole, "  the first merger starts and loads": loaded,
        "  from the kill to the next closed round": restarted,
    }  # fmt: skip
    rows = [ratio_row(f"{what}, s", seconds, "", "", "") for what, seconds in times.items()]
    rows += _byte_rows(fleet, peaks, predicted, together)
    return {
        "parameters": size * fragments,
        "fragments": fragments,
        "islands": islands,
        "rows": rows,
        "predicted": asdict(predicted) | {"together_bytes": together},
        "load": os.getloadavg()[0],
    }


# -- the table --------------------------------------------------------------------------------------------------------


def _byte_rows(fleet: Fleet, peaks: Sequence[int], need: Cycle, together: int) -> list[dict[str, Any]]:
    """Return the rows of bytes. `peaks` are the most memory of a merger, of Redis and of the islands' process."""
    islands, (merger, server, _) = len(fleet.payloads), peaks
    return [
        ratio_row(f"{what}, GB", 1e-9 * measured, "the prediction", 1e-9 * expected)
        for what, measured, expected in (
            ("bytes up, all islands", fleet.bytes_up, islands * need.bytes_up),
            ("bytes down, all islands", fleet.bytes_down, islands * need.bytes_down),
            ("peak memory: merger", merger, need.merger_bytes),
            ("peak memory: Redis", server, need.redis_first_bytes),
            ("peak memory: sum of all processes", sum(peaks), together),
        )
    ]
