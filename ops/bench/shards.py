"""`archipelago bench shards`: the rounds a second of one merger process, and of two that share the shards of a run.

The islands publish one contribution to a round of every fragment while the mergers are stopped. Then the mergers go on,
and the time until all of these rounds have closed is measured. So the islands take no time of the mergers, but Redis
does. The runs take turns, so that a busy machine slows all of them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from archipelago.broker.config import DataConfig, InnerConfig, MergeConfig, RunConfig, SyncConfig, WireConfig
from archipelago.broker.errors import BrokerError, require_number
from archipelago.broker.manifest import Corpus, Manifest, Tensor
from archipelago.broker.messages import Snapshot
from archipelago.broker.process import keep_freed_memory
from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.broker.shards.transport import create, of_shard
from archipelago.broker.transport import Transport
from archipelago.broker.wire import digest, pack
from archipelago.ops.bench.output import OutputOptions, finish
from archipelago.ops.bench.players import Player
from archipelago.ops.bench.process import Child, child, keep_to, require_linux
from archipelago.ops.launch.embedded_redis import start_server
from archipelago.ops.launch.supervisor import thread_environment
from archipelago.ops.settings import say

ISLANDS = 2
FRAGMENTS = 8
#: Cycles at the beginning of each run that do not count, because the merger compiles.
WARM_UPS = 2
#: No lease ends while its merger is stopped.
LEASE_SECONDS = 3600.0
PATIENCE_SECONDS = 300.0
#: What the mergers of the runs may use: one process and one core, one process and all cores, a core for each of two.
RUNS = {"one merger, one core": (1, True), "one merger, all cores": (1, False), "two shards, two mergers": (2, True)}


@dataclass(frozen=True)
class ShardsOptions(OutputOptions):
    """Measure the rounds a second of one merger, and of two shards with a merger each, on two cores."""

    side: int = 1024
    """The rows and columns of each fragment, which is one matrix."""
    rules: tuple[str, ...] = ("rda", "isotropic")
    """The merge rules to measure."""
    cycles: int = 7
    """How many rounds of every fragment each run closes while it is measured."""


def main(options: ShardsOptions) -> int:
    """Measure, and write the results."""
    require_number("--side", options.side, "Give 1 or more.", "bench.side", 1)
    require_number("--cycles", options.cycles, "Give 1 or more.", "bench.cycles", 1)
    require_linux()
    return finish("shards", shards(options.side, options.rules, options.cycles, say), options)


def shards(side: int, rules: Sequence[str], cycles: int, report: Callable[[str], None]) -> dict[str, Any]:
    """Measure each rule.

    Returns:
        Plain data with `rows`. `rounds_a_second` is the median over the cycles, and `to_one` its ratio to that of one
        merger on one core.
    """
    rows = []
    for rule in rules:
        with contextlib.ExitStack() as held:
            runs = {name: held.enter_context(_run(*kind, side, rule)) for name, kind in RUNS.items()}
            seconds: dict[str, list[float]] = {name: [] for name in runs}
            for cycle in range(WARM_UPS + cycles):
                for name, run in runs.items():
                    took = run.closed_within(cycle)
                    seconds[name] += [took] if cycle >= WARM_UPS else []
        rates = {name: FRAGMENTS / statistics.median(taken) for name, taken in seconds.items()}
        usual = next(iter(rates.values()))
        rows += [
            {"rule": rule, "mergers": name, "rounds_a_second": rate, "to_one": rate / usual}
            for name, rate in rates.items()
        ]
        report(
            f"{rule}: two shards close {rates['two shards, two mergers'] / usual:.2f} times the rounds of one merger"
        )
    return {"side": side, "fragments": FRAGMENTS, "islands": ISLANDS, "load": os.getloadavg()[0], "rows": rows}


@dataclass(frozen=True)
class _Run:
    """One run, whose mergers are stopped between two cycles."""

    manifest: Manifest
    home: RedisTransport
    players: list[Player]
    mergers: list[Child]

    def closed_within(self, cycle: int) -> float:
        """Publish what the islands owe in a cycle, and return the seconds in which the mergers close its rounds."""
        shards = [
            _Shard(of_shard(self.home, self.manifest, shard), self.manifest.of_shard(shard))
            for shard in range(self.manifest.shards)
        ]
        for shard in shards:
            for fragment, size in enumerate(shard.manifest.sizes):
                for player in self.players:
                    number = cycle * len(shard.manifest.sizes) + fragment + 1
                    player.contribute(shard.transport, size, fragment, number, cycle)
        for player in self.players:
            player.beat(cycle + 1, time.monotonic())
        for merger in self.mergers:
            os.kill(merger.pid, signal.SIGCONT)
        began = time.monotonic()
        for shard in shards:
            shard.wait((cycle + 1) * len(shard.manifest.sizes))
        seconds = time.monotonic() - began
        for merger in self.mergers:
            os.kill(merger.pid, signal.SIGSTOP)
        return seconds


class _Shard:
    """What the measurement hears of a shard."""

    def __init__(self, transport: Transport, manifest: Manifest) -> None:
        self.transport, self.manifest = transport, manifest
        self._after = transport.reader.last_event()

    def wait(self, number: int) -> None:
        """Wait until that round of the shard has closed. Polling would take the mergers' time."""
        deadline, closed = time.monotonic() + PATIENCE_SECONDS, 0
        while closed < number:
            if time.monotonic() > deadline:
                raise BrokerError(
                    f"round {number} has not closed within {PATIENCE_SECONDS:g} s",
                    "Check whether the machine is very busy.",
                    code="bench.timeout",
                )
            for entry, event in self.transport.reader.events(self._after, 1.0):
                self._after = entry
                closed = event.round if isinstance(event, Snapshot) else closed


@contextlib.contextmanager
def _run(shards: int, is_pinned: bool, side: int, rule: str) -> Iterator[_Run]:
    with contextlib.ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        server = held.enter_context(start_server(folder / "redis"))
        home = connect(server.url, "shards")
        held.callback(home.close)
        manifest = _manifest(shards, side, rule)
        payload = pack(np.zeros(side * side, np.float32), "float32", 0)
        first = Snapshot(0, 0, 0, 0, "float32", len(payload), digest(payload), merged="")
        create(home, manifest, [(replace(first, fragment=p), payload) for p in range(FRAGMENTS)])
        cores = sorted(os.sched_getaffinity(0))
        mergers = []
        for shard in range(shards):
            own = {cores[shard % len(cores)]} if is_pinned else set(cores)
            mergers.append(held.enter_context(child(_merge, server.url, shard if shards > 1 else None, own)))
        for merger in mergers:
            merger.receive(PATIENCE_SECONDS)
        players = [Player(home, manifest, number) for number in range(ISLANDS)]
        yield _Run(manifest, home, players, mergers)
        for merger in mergers:
            os.kill(merger.pid, signal.SIGCONT)


def _manifest(shards: int, side: int, rule: str) -> Manifest:
    settings = RunConfig(
        data=DataConfig(sequence_length=64, batch_size=4, shards=2 * ISLANDS),
        inner=InnerConfig(steps=1 << 30),
        sync=SyncConfig(interval=FRAGMENTS, fragments=FRAGMENTS, window=FRAGMENTS, quorum=ISLANDS),
        merge=MergeConfig(rest=rule),  # type: ignore[arg-type]
        wire=WireConfig(up="int4", thin="", down="int4"),
    )
    names = [f"layer-{p}" for p in range(FRAGMENTS)]
    tensors = tuple(Tensor(name, (side, side)) for name in names)
    fragments = tuple((name,) for name in names)
    return Manifest("shards", settings, tensors, fragments, Corpus("none", "0" * 32, 1 << 32), {}).with_shards(shards)


def _merge(pipe: Connection, url: str, shard: int | None, cores: set[int]) -> None:
    """The merger's process: serve until it is killed."""
    keep_to(cores)
    os.environ |= thread_environment(2 if len(cores) == 1 else 1)
    keep_freed_memory()  # as `archipelago merger` does

    from archipelago.merger.beside import in_background
    from archipelago.merger.service import Merger  # loads JAX, which reads the environment
    from archipelago.merger.serving import serve

    home = connect(url, "shards")
    transport = home if shard is None else home.of_shard(shard)
    merger = Merger(transport, lease_seconds=LEASE_SECONDS, threads=len(cores), beside=in_background)
    merger.warm_up()
    pipe.send("ready")
    serve(merger, lambda: False)
