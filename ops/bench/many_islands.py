"""`archipelago bench islands`: what a contribution and a round cost the merger and Redis in runs of more islands.

The merger and Redis are processes of their own, as in a real run. One more process plays the islands: each claims its
name, leases a shard, sends heartbeats and contributes to every round through the real transport, with a payload that
was encoded before. The merger admits, compares, merges and commits all of them. Only processor time is compared,
because the islands share this machine's cores with what is measured. What is written to Redis is counted by Redis, with
all that the merger and the islands send: contributions, differences, compactions and heartbeats.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from archipelago.broker.config import DataConfig, InnerConfig, RunConfig, SyncConfig, WireConfig
from archipelago.broker.errors import BrokerError, require_number
from archipelago.broker.manifest import Corpus, Manifest, Tensor
from archipelago.broker.messages import Refusal, Snapshot
from archipelago.broker.process import keep_freed_memory
from archipelago.broker.redis.transport import connect
from archipelago.broker.transport import Transport
from archipelago.broker.wire import digest, pack
from archipelago.merger.claims import ACCOUNTS_MAX
from archipelago.ops.bench.output import OutputOptions, finish
from archipelago.ops.bench.players import Player, beat_all
from archipelago.ops.bench.process import Child, child, cpu_seconds, require_linux
from archipelago.ops.experiments.parity import require_counts
from archipelago.ops.launch.embedded_redis import start_server
from archipelago.ops.launch.supervisor import thread_environment
from archipelago.ops.settings import say

RUN = "many"
#: Ratios compare with this number of islands. With fewer, what each round costs once weighs more.
COMPARED = 16
#: Rounds at the beginning of each run that do not count: the merger compiles, and meets the islands.
WARM_UPS = 3
#: Each figure is the median of this many parts of a run.
PARTS = 3
PATIENCE_SECONDS = 300.0


@dataclass(frozen=True)
class ManyIslandsOptions(OutputOptions):
    """Measure what a contribution costs with 4, 16, 64 and 256 islands in one run, and what a round writes."""

    islands: tuple[int, ...] = (4, 16, 64, 256)
    """The numbers of islands to measure, each in a run of its own."""
    contributions: int = 3072
    """How many contributions each run merges while it is measured."""
    parameters: int = 1 << 14
    """The elements of a contribution."""


def main(options: ManyIslandsOptions) -> int:
    """Measure, and write the results."""
    require_counts("--islands", options.islands, ACCOUNTS_MAX)
    require_number("--contributions", options.contributions, "Give 1 or more.", "bench.contributions", 1)
    require_number("--parameters", options.parameters, "Give 1 or more.", "bench.parameters", 1)
    require_linux()
    found = many_islands(options.islands, options.contributions, options.parameters, say)
    return finish("islands", found, options)


def many_islands(
    numbers: Sequence[int], contributions: int, parameters: int, report: Callable[[str], None]
) -> dict[str, Any]:
    """Measure one run for each number of islands.

    Returns:
        Plain data with `rows`. `merger_ms` and `redis_ms` are milliseconds of processor time for each contribution.
        Those of Redis include heartbeats and leases. `to_16` is the merger's, over that of the run of 16 islands.
        `sent_bytes` were sent to Redis, and `file_bytes` were appended to its file, for each parameter and round.
        `memory_bytes` is the peak of its memory for each parameter.
    """
    rows = []
    for islands in numbers:
        rounds = max(1, contributions // islands // PARTS)
        with _run(islands, parameters) as run:
            before = run.stored()
            parts = [run.measured(rounds) for _ in range(PARTS)]
            sent, appended, memory = run.stored()
        rows.append({
            "islands": islands, **{n: statistics.median(p[n] for p in parts) for n in parts[0]},
            "sent_bytes": (sent - before[0]) / (PARTS * rounds * parameters),
            "file_bytes": (appended - before[1]) / (PARTS * rounds * parameters),
            "memory_bytes": memory / parameters,
        })  # fmt: skip
        report(f"{islands} islands: {rows[-1]['merger_ms']:.2f} ms of the merger for each contribution")
    usual = next((row["merger_ms"] for row in rows if row["islands"] == COMPARED), float("nan"))
    rows = [{**row, f"to_{COMPARED}": row["merger_ms"] / usual} for row in rows]
    return {"parameters": parameters, "contributions": contributions, "load": os.getloadavg()[0], "rows": rows}


@dataclass(frozen=True)
class _Run:
    """One run: its merger, its Redis and its islands are processes.

    Attributes:
        islands: How many islands it has.
        players: The process that plays them. It receives a number of rounds, and answers once they have closed.
        merger: The process id of the merger.
        redis: The process id of Redis.
        info: A client of that Redis.
    """

    islands: int
    players: Child
    merger: int
    redis: int
    info: Any

    def stored(self) -> tuple[int, int, int]:
        """Return the bytes that were sent to Redis, those of its append-only file, and the peak of its memory."""
        found = self.info.info("all")
        return found["total_net_input_bytes"], found["aof_current_size"], found["used_memory_peak"]

    def play(self, rounds: int) -> None:
        """Let all islands contribute to that many rounds, and wait until these have closed."""
        self.players.pipe.send(rounds)
        if self.players.receive(PATIENCE_SECONDS) is None:
            raise BrokerError(
                f"{self.islands} islands have not finished {rounds} rounds within {PATIENCE_SECONDS:g} s",
                "Measure fewer contributions, or check whether the machine is very busy.",
                code="bench.timeout",
            )

    def measured(self, rounds: int) -> dict[str, float]:
        """Return what that many rounds cost, for each contribution."""
        before, began = (cpu_seconds(self.merger), cpu_seconds(self.redis)), time.monotonic()
        self.play(rounds)
        seconds, after = time.monotonic() - began, (cpu_seconds(self.merger), cpu_seconds(self.redis))
        merger_ms, redis_ms = (
            1e3 * (end - begin) / (rounds * self.islands) for begin, end in zip(before, after, strict=True)
        )
        return {"rounds_a_second": rounds / seconds, "merger_ms": merger_ms, "redis_ms": redis_ms}


@contextlib.contextmanager
def _run(islands: int, parameters: int) -> Iterator[_Run]:
    with contextlib.ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        server = held.enter_context(start_server(folder / "redis"))
        made = connect(server.url, RUN)
        held.callback(made.close)
        _create_run(made, islands, parameters)
        merger = held.enter_context(child(_merge, server.url))
        players = held.enter_context(child(_play, server.url, islands))
        for process in (merger, players):
            process.receive(PATIENCE_SECONDS)
        run = _Run(islands, players, merger.pid, server.pid, made.connection.redis)
        run.info.config_set("auto-aof-rewrite-percentage", 0)  # a rewritten file would be smaller
        run.play(WARM_UPS)
        yield run


def _create_run(transport: Transport, islands: int, parameters: int) -> None:
    settings = RunConfig(
        data=DataConfig(sequence_length=64, batch_size=4, shards=2 * islands),
        inner=InnerConfig(steps=1 << 30),
        sync=SyncConfig(interval=1, fragments=1, window=1, quorum=islands),
        wire=WireConfig(up="int4", thin="", down="int4"),
    )
    tensors = (Tensor("all", (parameters,)),)
    manifest = Manifest(RUN, settings, tensors, (("all",),), Corpus("none", "0" * 32, 1 << 32), {})
    payload = pack(np.zeros(parameters, np.float32), "float32", 0)
    transport.create(manifest, [(Snapshot(0, 0, 0, 0, "float32", len(payload), digest(payload), merged=""), payload)])


# -- the processes ----------------------------------------------------------------------------------------------------


def _merge(pipe: Connection, url: str) -> None:
    """The merger's process: serve until it is killed."""
    os.environ |= thread_environment(2)
    keep_freed_memory()  # The real merger does this too.

    from archipelago.merger.beside import in_background
    from archipelago.merger.service import Merger  # loads JAX, which reads the environment
    from archipelago.merger.serving import serve

    merger = Merger(connect(url, RUN), beside=in_background)
    pipe.send("ready")
    serve(merger, lambda: False)


def _play(pipe: Connection, url: str, islands: int) -> None:
    """The islands' process: send heartbeats, and contribute to as many rounds as the parent asks for."""
    transport = connect(url, RUN)
    manifest = transport.reader.manifest()
    players: list[Player] = []
    for number in range(islands):
        beat_all(players, 0)
        players.append(Player(transport, manifest, number))
    after, closed = transport.reader.last_event(), 0
    pipe.send("ready")
    while True:
        if not pipe.poll(0.01):
            beat_all(players, closed)
            continue
        for _ in range(pipe.recv()):
            for player in players:
                beat_all(players, closed)
                player.contribute(transport, manifest.sizes[0], 0, closed + 1, closed)
            goal = closed + 1
            while closed < goal:
                for entry, event in transport.reader.events(after, 0.1):
                    if isinstance(event, Refusal):
                        raise BrokerError(f"a contribution was refused: {event.reason}", code="bench.refused")
                    after, closed = entry, event.round if isinstance(event, Snapshot) else closed
                beat_all(players, closed)
        pipe.send(closed)
