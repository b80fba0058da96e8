"""Two islands, a merger and a Redis, each a process, that `archipelago bench sync` commands and measures."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

import jax
import jax.numpy as jnp
import numpy as np

from archipelago.broker.config import DataConfig, InnerConfig, MergeConfig, RunConfig, SyncConfig, WireConfig
from archipelago.broker.machine import usable_cores
from archipelago.broker.manifest import Manifest, Tensor, balanced
from archipelago.broker.process import return_freed_memory
from archipelago.broker.redis.transport import connect
from archipelago.broker.transport import Transport
from archipelago.broker.wire import pack
from archipelago.islands.data.batches import Batches
from archipelago.islands.data.ranges import range_order
from archipelago.islands.inner import InnerState
from archipelago.islands.sync.connection.link import Link
from archipelago.islands.worker import Island
from archipelago.ops.bench.harness import (
    OF_ISLAND,
    MeasuredProcess,
    Pieces,
    Spent,
    child,
    first_version,
    manifest_of,
    own_redis,
    serve_merger,
    wait_until,
)
from archipelago.ops.chaos.proxy import LOOPBACK, Proxy
from archipelago.ops.launch.supervisor import thread_environment

RUN = "sync"
Rule = Literal["average", "rda", "isotropic"]
#: If there is a proxy, it is in front of the second island.
ISLANDS = ("near", "thin")
#: The processes that share this machine's cores.
PROCESSES = 1 + len(ISLANDS)
PARAMETERS = 10_000_000
#: The tensors have one shape, so that each fragment is two of them.
TENSORS, COLUMNS, FRAGMENTS = 12, 1000, 6
WIRE = WireConfig(up="int4", thin="", down="int4")
#: All fragments are due at each inner step, so a sync is of the whole model. The quorum waits for both islands.
AT_ONCE = SyncConfig(interval=1, fragments=FRAGMENTS, window=FRAGMENTS, quorum=len(ISLANDS))
#: The defaults except for the interval. No island waits for the other.
TRAINING = SyncConfig(interval=48, fragments=FRAGMENTS)
STEP_SECONDS = 0.1
THIN_MBIT, THIN_SYNCS = 20.0, 8
POLL_SECONDS = 0.001
PATIENCE_SECONDS = 120.0
TEXT_BYTES = 1 << 20
NOISE = 1e-3


@dataclass(frozen=True)
class SyncSize:
    """The size of a measurement.

    Attributes:
        parameters: Elements of the model.
        rounds: Syncs on loopback, of which the median counts.
        thin_syncs: Syncs over the thin link.
        step_seconds: How long an inner step takes.
        mbit: Rate of the thin link each way, in Mbit/s.
        rule: The merge rule of all tensors.
        pieces: Whether the processes count the time of their pieces (`ops.bench.harness`).
        merger_rtt_ms: The round trip between the merger and Redis, in milliseconds; 0 for one without a delay.
    """

    parameters: int = PARAMETERS
    rounds: int = 9
    thin_syncs: int = THIN_SYNCS
    step_seconds: float = STEP_SECONDS
    mbit: float = THIN_MBIT
    rule: Rule = "isotropic"
    pieces: bool = False
    merger_rtt_ms: float = 0.0

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """TENSORS of one shape, with `parameters` elements in all, rounded to whole rows."""
        return tuple(Tensor(f"layers.{n:02}", self.shape) for n in range(TENSORS))

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of each tensor."""
        return (max(1, round(self.parameters / TENSORS / COLUMNS)), COLUMNS)


@dataclass(frozen=True)
class Synced:
    """One sync of the whole model.

    Attributes:
        seconds: How long it took.
        committed: Whether both islands or replicas took part.
        megabytes: What crossed the link of one island or replica, both ways together.
    """

    seconds: float
    committed: bool
    megabytes: float = math.nan


@contextlib.contextmanager
def two_islands(config: SyncConfig, size: SyncSize, proxied: bool = False) -> Iterator[TwoIslands]:
    """Start a Redis as `up` does, a merger and two islands; yield when they are ready to sync.

    Args:
        config: How the islands sync.
        size: The size of the measurement.
        proxied: A proxy is in front of the second island.
    """
    with contextlib.ExitStack() as held:
        server = held.enter_context(own_redis())
        made = connect(server.url, RUN)
        held.callback(made.close)
        _create_run(made, config, size)

        def through(proxy: Proxy) -> str:
            """Return the Redis URL with the proxy's address."""
            address, port = urlsplit(server.url), held.enter_context(proxy).port
            return address._replace(netloc=f":{address.password or ''}@{LOOPBACK}:{port}").geturl()

        proxy = Proxy(server.port) if proxied else None
        delay_seconds = size.merger_rtt_ms / 2e3
        of_merger = through(Proxy(server.port, delay_seconds=delay_seconds)) if delay_seconds else server.url
        urls = [server.url, through(proxy) if proxy else server.url]
        # While the merger works, the islands wait, so its spectra may use all cores.
        merger = held.enter_context(child(serve_merger, of_merger, RUN, (), PROCESSES, usable_cores(), size.pieces))
        merger.answer(PATIENCE_SECONDS)
        islands = [held.enter_context(child(_train, *each, size)) for each in zip(urls, ISLANDS, strict=True)]
        for island in islands:
            island.answer(2 * PATIENCE_SECONDS)
        wait_until(lambda: len(made.reader.presences()) == len(ISLANDS), "heartbeat of both islands", PATIENCE_SECONDS)
        yield TwoIslands(made, proxy, merger, islands, size)


def _create_run(transport: Transport, config: SyncConfig, size: SyncSize) -> None:
    settings = RunConfig(
        data=DataConfig(sequence_length=64, batch_size=4, shards=8),
        inner=InnerConfig(steps=1 << 30),
        sync=config,
        merge=MergeConfig(embedding=size.rule, rest=size.rule),
        wire=WIRE,
    )
    manifest = manifest_of(RUN, settings, size.tensors, balanced(size.tensors, FRAGMENTS))
    random = np.random.default_rng(0)
    payloads = [pack(random.standard_normal(elements, np.float32), "float32", 0) for elements in manifest.sizes]
    transport.create(manifest, [first_version(p, payload) for p, payload in enumerate(payloads)])


class TwoIslands:
    """The run seen from outside: commands to its islands, and what Redis says about it."""

    def __init__(
        self,
        transport: Transport,
        proxy: Proxy | None,
        merger: MeasuredProcess,
        islands: Sequence[MeasuredProcess],
        size: SyncSize,
    ) -> None:
        self.transport, self.proxy, self.size = transport, proxy, size
        self.merger, self.islands = merger, islands

    def sync(self) -> Synced:
        """Let both islands move all parameters, then sync them. Time from the first publishing to the last adoption."""
        _ask(self.islands, "advance")
        ends = _ask(self.islands, "sync")
        seconds = max(end.at for end in ends) - min(end.began for end in ends)
        return Synced(seconds, self._both_in_all(), ends[-1].bytes / 1e6)

    def spent(self) -> tuple[dict[str, Spent], dict[str, Spent]]:
        """Return what the pieces of the merger and of the first island have taken since they started."""
        merger, island = _ask((self.merger, self.islands[0]), "pieces")
        return merger, island

    def _both_in_all(self) -> bool:
        """Return whether both islands are in the newest round of every fragment."""
        return all(len(entry.members) == len(ISLANDS) for entry in self.transport.reader.tape(FRAGMENTS))

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Let both islands train while the block runs. They have measured their speed in a first sync before it."""
        for island in self.islands:
            island.pipe.send("train")
        self._next_sync()
        yield
        _ask(self.islands, "stop")

    def syncs(self, count: int) -> tuple[list[Synced], float]:
        """Wait for `count` syncs. Return them, and the second island's inner steps per second meanwhile."""
        (before,) = _ask(self.islands[1:], "count")
        syncs = [self._next_sync() for _ in range(count)]
        (after,) = _ask(self.islands[1:], "count")
        return syncs, (after.steps - before.steps) / (after.at - before.at)

    def _next_sync(self) -> Synced:
        """Wait until each fragment has had one more round."""
        (before,) = _ask(self.islands[1:], "count")
        goal, began = self._round() + FRAGMENTS, time.monotonic()
        wait_until(lambda: self._round() >= goal, "sync", PATIENCE_SECONDS, 10 * POLL_SECONDS)
        seconds, committed = time.monotonic() - began, self._both_in_all()
        (after,) = _ask(self.islands[1:], "count")
        return Synced(seconds, committed, (after.bytes - before.bytes) / 1e6)

    def _round(self) -> int:
        """Return the number of the last closed round."""
        newest = self.transport.reader.tape(1)
        return newest[-1].round if newest else 0


# -- the processes ----------------------------------------------------------------------------------------------------


class Counts(NamedTuple):
    """An island's answer: when its command began and ended, its steps so far, and bytes, of a sync or in all."""

    began: float
    at: float
    steps: int
    bytes: int


def _ask(processes: Sequence[MeasuredProcess], command: str) -> list[Any]:
    """Send all processes a command at once, and collect their answers."""
    for process in processes:
        process.pipe.send(command)
    return [process.answer(2 * PATIENCE_SECONDS) for process in processes]


def _train(pipe: Connection, url: str, name: str, size: SyncSize) -> None:
    """An island's process: obey commands, and train between them once it was asked to."""
    os.environ |= thread_environment(PROCESSES)  # as the launcher does, and before JAX looks at its devices
    pieces = Pieces(OF_ISLAND if size.pieces else {})
    return_freed_memory()  # The real island does this too.
    transport = connect(url, RUN)
    manifest = transport.reader.manifest()
    link = Link(transport, manifest, f"{name}/bench", range_order(manifest.config.data.shards, manifest.config.seed))
    batches = Batches(np.zeros(TEXT_BYTES, np.uint8), manifest.config, link.lease)
    steps = stand_in(manifest, sum(name.encode()), 0.0 if manifest.config.sync == AT_ONCE else size.step_seconds)
    island = Island(name, manifest, steps, batches, link, link.join(), incarnation="bench")
    link.pumps.start()
    island.warm_up()
    island.beat("training")
    pipe.send("ready")
    training = False
    while True:
        if training and not pipe.poll():
            island.boundary()
            island.advance()
            continue
        match pipe.recv():
            case "advance":
                island.advance()
                jax.block_until_ready(island.inner.params)  # type: ignore[no-untyped-call]
                pipe.send(_counts(island))
            case "sync":
                pipe.send(_synced(island))
            case "pieces":
                pipe.send(pieces.spent())
            case "train":
                training = True
            case command:
                training = training and command != "stop"
                pipe.send(_counts(island))


def _counts(island: Island) -> Counts:
    now = time.monotonic()
    size = island.link.channels.bytes_up + island.link.channels.bytes_down
    return Counts(now, now, island.totals.steps, size)


def _synced(island: Island) -> Counts:
    """Publish all fragments, and pass step boundaries until the merged version of each is adopted."""
    goal = [count.version + 1 for count in island.ledger.counts]
    before = _counts(island)

    def adopted() -> bool:
        island.boundary()
        return all(count.version >= version for count, version in zip(island.ledger.counts, goal, strict=True))

    wait_until(adopted, "merged version of all fragments", PATIENCE_SECONDS, POLL_SECONDS)
    jax.block_until_ready((island.inner.params, island.computation.replica.references))  # type: ignore[no-untyped-call]
    after = _counts(island)
    return Counts(before.at, after.at, after.steps, after.bytes - before.bytes)


def stand_in(
    manifest: Manifest, seed: int, step_seconds: float
) -> Callable[[InnerState, jax.Array, jax.Array], tuple[InnerState, jax.Array]]:
    """Return inner steps that take `step_seconds` each: a random walk, because noise does not compress."""
    random = np.random.default_rng(seed)
    noise = {t.name: jnp.asarray(random.standard_normal(t.shape, np.float32) * NOISE) for t in manifest.tensors}
    walked = jax.jit(lambda params: jax.tree.map(jnp.add, params, noise), donate_argnums=0)

    def steps(state: InnerState, tokens_nxBxT1: jax.Array, global_step: jax.Array) -> tuple[InnerState, jax.Array]:
        until = time.monotonic() + step_seconds * tokens_nxBxT1.shape[0]
        params = walked(state.params)
        jax.block_until_ready(params)  # type: ignore[no-untyped-call]
        time.sleep(max(0.0, until - time.monotonic()))
        return state._replace(params=params), jnp.full(tokens_nxBxT1.shape[0], 2.0, jnp.float32)

    return steps
