"""`archipelago bench largest`: send the largest model that fits on this machine, each fragment once up and down.

A real link, merger and Redis, each a process, without training. The island holds the replica of one fragment at a time,
and every fragment begins with the same numbers, because in a real run an accelerator holds the parameters. Fragments
follow one after another, so that the seconds of each part are separate. Redis keeps nothing on disk here.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from archipelago.broker.codecs import Parts, Vector
from archipelago.broker.config import MergeConfig, OuterConfig, RunConfig, SyncConfig, WireConfig
from archipelago.broker.errors import BrokerError, ConfigError, WireError
from archipelago.broker.manifest import Corpus, Manifest, Tensor
from archipelago.broker.messages import Refusal, Resume, Snapshot
from archipelago.broker.process import keep_compiled
from archipelago.broker.redis.transport import connect
from archipelago.broker.wire import digest, pack, unpack
from archipelago.ops.bench.output import OutputOptions, finish
from archipelago.ops.bench.process import Child, available_bytes, child, peak_bytes, require_linux
from archipelago.ops.launch.embedded_redis import start_server
from archipelago.ops.settings import say

if TYPE_CHECKING:
    from archipelago.islands.sync.connection.outbox import Draft
    from archipelago.islands.sync.connection.snapshots import Arrival

RUN = "bench-largest"
PARAMETERS, PARAMETERS_QUICK = 1e9, 2e7
FRAGMENTS = 128
RATE = 0.7
#: The share of the available memory that the measurement may take.
MEMORY_SHARE = 0.75
#: The measurement ends when the machine has less memory than this.
FLOOR_BYTES = 1 << 30
WATCH_SECONDS = 0.25
#: The time limit for one fragment, and for the merger to begin.
PATIENCE_SECONDS = 300.0

# The settings need as little memory as possible: SGD has no momentum, and bfloat16 halves the snapshots in Redis.
#: Bytes per parameter in Redis: its snapshot, the previous one, which may still have readers, and the merger's
#: exact one.
REDIS_BYTES = 2 * 2 + 4
#: Bytes per parameter in the merger: exact, and as published.
MERGER_BYTES = 4 + 4
#: Bytes per element of one fragment: all copies that an island and a merger make of it.
FRAGMENT_BYTES = 128
#: Bytes of three processes that hold no data yet, and of the gaps that the allocator leaves (both measured).
FIXED_BYTES = 3 << 29


@dataclass
class Passed:
    """The measurements of the island's process.

    Attributes:
        bytes_up: Bytes that the island sent.
        bytes_down: Bytes that the island received.
        create_seconds: Time to create the run.
        created_bytes: Payloads of version 0.
        load_seconds: From the run's creation until a merger serves it.
        publish_seconds: Per fragment, time to quantise, pack and upload.
        merge_seconds: Per fragment, from the acknowledgement until the island hears of the new version.
        adopt_seconds: Per fragment, time to fetch, check, decode and adopt.
    """

    bytes_up: int = 0
    bytes_down: int = 0
    create_seconds: float = 0.0
    created_bytes: int = 0
    load_seconds: float = 0.0
    publish_seconds: list[float] = field(default_factory=list)
    merge_seconds: list[float] = field(default_factory=list)
    adopt_seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class LargestOptions(OutputOptions):
    """Pass a large model over the wire on this machine: each fragment once up, merged and down, untrained."""

    parameters: float = 0.0
    """The parameters of the model. The default is 1e9, or 2e7 with --quick."""
    quick: bool = False
    """Use a smaller model."""


def main(options: LargestOptions) -> int:
    """Measure, and write the results."""
    keep_compiled()
    parameters = options.parameters or (PARAMETERS_QUICK if options.quick else PARAMETERS)
    return finish("largest", largest(parameters, say), options)


def largest(parameters: float, say: Callable[[str], None], fragments: int = FRAGMENTS) -> dict[str, Any]:
    """Pass a model of `parameters` elements. Return plain data with `rows`. Raise ConfigError if it does not fit."""
    require_linux()
    if not 1 <= parameters < 1e15:
        raise ConfigError(
            f"--parameters cannot be {parameters}", "Give a number such as 2.5e8.", code="bench.parameters"
        )
    size = max(1, math.ceil(parameters / fragments))
    require_room(size * fragments, fragments, available_bytes())
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        server = held.enter_context(start_server(folder / "redis", append_only=False))
        island = held.enter_context(child(_pass_all, server.url, size, fragments))
        _await(island)
        say(f"a run of {size * fragments:,} parameters in {fragments} fragments is in Redis")
        merger = held.enter_context(child(_serve, server.url))
        passed = _await(island)
        peaks = {name: peak_bytes(pid) for name, pid in
                 (("island", island.pid), ("merger", merger.pid), ("Redis", server.pid))}  # fmt: skip
    return {
        "parameters": size * fragments,
        "fragments": fragments,
        "append_only_file": False,
        "rows": rows(size * fragments, passed, peaks),
        "peak_bytes": peaks,
        **asdict(passed),
    }


def needed_bytes(parameters: int, fragments: int) -> int:
    """Estimate the most memory that all processes take together."""
    return FIXED_BYTES + (REDIS_BYTES + MERGER_BYTES) * parameters + FRAGMENT_BYTES * parameters // fragments


def require_room(parameters: int, fragments: int, available: int) -> None:
    """Raise ConfigError if the model does not fit. Its remedy names the largest model that would."""
    room, needed = int(MEMORY_SHARE * available), needed_bytes(parameters, fragments)
    if needed > room:
        fits = max(0, room - FIXED_BYTES) / (REDIS_BYTES + MERGER_BYTES + FRAGMENT_BYTES / fragments)
        raise ConfigError(
            f"{parameters:,} parameters would take about {needed / 2**30:.1f} GiB, but {MEMORY_SHARE:.0%} of this "
            f"machine's available memory are {room / 2**30:.1f} GiB",
            f"The largest model that fits now has {fits:.3g} parameters (--parameters {fits * 0.99:.2e})."
            if fits >= fragments
            else "Free some memory first.",
            code="bench.memory",
        )


def rows(parameters: int, passed: Passed, peaks: dict[str, int]) -> list[dict[str, Any]]:
    """Return a table for people: each part with its seconds and bytes, then the peaks of memory."""
    publish, merge, adopt = (sum(s) for s in (passed.publish_seconds, passed.merge_seconds, passed.adopt_seconds))

    def row(what: str, seconds: float | str, size: int | str) -> dict[str, Any]:
        each = size / parameters if isinstance(size, int) else ""
        gib = size / 2**30 if isinstance(size, int) else ""
        return {"what": what, "seconds": seconds, "GiB": gib, "bytes_a_parameter": each}

    return [
        row("create the run", passed.create_seconds, passed.created_bytes),
        row("a merger takes it up", passed.load_seconds, passed.created_bytes),
        row("publish", publish, passed.bytes_up),
        row("merge", merge, ""),
        row("adopt", adopt, passed.bytes_down),
        row("publish, merge and adopt", publish + merge + adopt, passed.bytes_up + passed.bytes_down),
        *(row(f"peak memory: {name}", "", size) for name, size in peaks.items()),
        row("peak memory: together, at most", "", sum(peaks.values())),
    ]


def _await(island: Child) -> Any:
    """Return the island's next message. Raise BrokerError if the machine runs out of memory first."""
    while (message := island.receive(WATCH_SECONDS)) is None:
        if available_bytes() < FLOOR_BYTES:
            raise BrokerError(
                "the measurement ended because this machine has hardly any memory left",
                "Give fewer --parameters, or stop another program first.",
                code="bench.memory",
            )
    return message


# -- the processes ---------------------------------------------------------------------------------------------------


def _manifest(size: int, fragments: int) -> Manifest:
    """Return a manifest of equal fragments, each of one tensor."""
    config = RunConfig(
        sync=SyncConfig(fragments=fragments, window=1),
        merge=MergeConfig(rest="average"),
        outer=OuterConfig(rule="sgd", learning_rate=RATE),
        wire=WireConfig(up="int4", thin="", down="bfloat16"),
    )
    tensors = tuple(Tensor(f"t{p:04}", (size,)) for p in range(fragments))
    return Manifest(RUN, config, tensors, tuple((t.name,) for t in tensors), Corpus("none", "0" * 32, 1), {})


def _serve(pipe: Connection, url: str) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"

    from archipelago.merger.service import Merger
    from archipelago.merger.serving import serve

    serve(Merger(connect(url, RUN)), pipe.poll)


def _pass_all(pipe: Connection, url: str, size: int, fragments: int) -> None:
    """Create the run and notify the parent. Once a merger serves it, pass every fragment, and send the `Passed`."""
    passed, manifest = Passed(), _manifest(size, fragments)
    first_N = np.random.default_rng(0).standard_normal(size, np.float32) * np.float32(0.02)
    began = time.perf_counter()
    passed.created_bytes = _create(url, manifest, first_N)
    passed.create_seconds = time.perf_counter() - began
    pipe.send("created")
    began = time.perf_counter()
    end = _IslandEnd(url, manifest, first_N)
    end.await_merger()
    passed.load_seconds = time.perf_counter() - began
    for p in range(fragments):
        publish, merge, adopt = end.passes(p)
        passed.publish_seconds.append(publish)
        passed.merge_seconds.append(merge)
        passed.adopt_seconds.append(adopt)
    passed.bytes_up, passed.bytes_down = end.link.channels.bytes_up, end.link.channels.bytes_down
    pipe.send(passed)
    pipe.poll(None)  # Stay alive, so that the parent can read the peak of memory.


def _create(url: str, manifest: Manifest, first_N: Vector) -> int:
    """Create the run with the same numbers in all fragments. Return the bytes of all payloads."""
    down = manifest.config.wire.full
    payload = pack(first_N, down, manifest.config.wire.full_zstd_level)
    of_all = [
        (Snapshot(0, p, 0, 0, down, len(payload), digest(payload), merged=""), payload)
        for p in range(len(manifest.fragments))
    ]
    transport = connect(url, RUN)
    transport.create(manifest, of_all)
    transport.close()
    return len(payload) * len(of_all)


class _IslandEnd:
    """An island's end of the wire, with the replica of one fragment. It times each part of a fragment's round trip."""

    def __init__(self, url: str, manifest: Manifest, first_N: Vector) -> None:
        from archipelago.islands.sync.connection.link import Link
        from archipelago.islands.sync.replica import Replica

        self.link = Link(connect(url, RUN), manifest, "island/bench", shards=[])
        self._manifest = manifest
        wire = manifest.config.wire
        self._first_N = unpack(pack(first_N, wire.full, 0), first_N.size)  # Islands hold the rounded values.
        self._progress_N = np.random.default_rng(1).standard_normal(first_N.size, np.float32) * np.float32(1e-3)
        tensor = Tensor("one", first_N.shape)
        self._replica = Replica(replace(manifest, tensors=(tensor,), fragments=((tensor.name,),)))
        self._replica.warm_up(self._replica.begin([self._first_N]))

    def await_merger(self) -> None:
        """Wait until a merger serves the run."""
        self._hear(Resume)

    def passes(self, p: int) -> tuple[float, float, float]:
        """Pass fragment `p`. Return the seconds of publishing, merging and adopting.

        Raises:
            WireError: The merged values are wrong.
        """
        params = {name: x_N - self._progress_N for name, x_N in self._replica.begin([self._first_N]).items()}
        began = time.perf_counter()
        parts = self._replica.measure(0, params)
        self.link.send(self._draft(p, parts))
        self.link.pump_send()
        published = time.perf_counter()
        self._hear(Snapshot)
        heard = time.perf_counter()
        self.link.pump_receive()
        (arrival,) = self.link.take().arrivals
        sent_N = self._replica.references[0]  # The island's position when it sent. Adopting changes it.
        params = self._replica.adopt(0, params, arrival.params_N)
        for x_N in params.values():
            x_N.block_until_ready()
        adopted = time.perf_counter()
        self._require_merged(p, arrival, np.asarray(sent_N))
        return published - began, heard - published, adopted - heard

    def _draft(self, p: int, parts: Parts) -> Draft:
        from archipelago.islands.sync.connection.outbox import ContributionHeader, Draft

        config = self._manifest.config
        steps = config.sync.interval
        header = ContributionHeader(
            island="island", incarnation="bench", sequence=p, round=p + 1, fragment=p, base=0,
            tokens=steps * config.tokens_per_step, steps=steps, global_step=steps, loss=1.0, step_seconds=1.0,
            farewell=False, codec=config.wire.up,
        )  # fmt: skip
        return Draft(header, parts, self._first_N.size)

    def _hear(self, kind: type[Resume | Snapshot]) -> None:
        """Listen until an event of this kind arrives. Fetch no payload yet."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            self.link.channels[0].inbox.listen(1.0)
            for _, event in self.link.take().events:
                if isinstance(event, kind):
                    return
                if isinstance(event, Refusal):
                    raise WireError(f"the merger refused a fragment: {event.reason}", code="bench.refused")
        raise BrokerError(
            f"the merger did not answer for {PATIENCE_SECONDS:g} s", "See its output above.", code="bench.timeout"
        )

    def _require_merged(self, p: int, arrival: Arrival, sent_N: Vector) -> None:
        """Compare with the expected merge of one contribution: an SGD step from the first numbers."""
        stepped_N = self._first_N - np.float32(self._manifest.config.outer.learning_rate) * (self._first_N - sent_N)
        snapshot = arrival.snapshot
        if (snapshot.fragment, snapshot.version) != (p, 1):
            raise WireError(
                f"version {snapshot.version} of fragment {snapshot.fragment} arrived instead of {p}'s first",
                code="bench.wrong-version",
            )
        if not np.allclose(arrival.params_N, stepped_N, rtol=2**-7, atol=1e-6):
            raise WireError(f"fragment {p} arrived with other values than the merged ones", code="bench.wrong-values")
