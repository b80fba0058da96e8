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
from archipelago.islands.computation import Computation
from archipelago.islands.data.batches import Batches, range_order
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
from archipelago.ops.chaos.proxy import Proxy
from archipelago.ops.launch.devices import memory_share
from archipelago.ops.launch.supervisor import thread_environment

RUN = "sync"
Rule = Literal["average", "rda", "isotropic"]
ISLANDS = ("oslo", "lima")
#: The processes that share this machine's cores.
PROCESSES = 1 + len(ISLANDS)
PARAMETERS = 10_000_000
#: The tensors have one shape, so that each fragment is two of them.
TENSORS, COLUMNS, FRAGMENTS = 12, 1000, 6
WIRE = WireConfig(up="int4", thin="", down="int4")
#: All fragments are due at each inner step, so a sync is of the whole model. The quorum waits for both islands.
AT_ONCE = SyncConfig(interval=1, fragments=FRAGMENTS, window=FRAGMENTS, quorum=len(ISLANDS))
POLL_SECONDS = 0.001
PATIENCE_SECONDS = 120.0
TEXT_BYTES = 1 << 20
NOISE = 1e-3


@dataclass(frozen=True)
class SyncSize:
    """The size of a measurement.

    Attributes:
        parameters: Elements of the model.
        rounds: Syncs, of which the median counts.
        rule: The merge rule of all tensors.
        pieces: Whether the processes count the time of their pieces (`ops.bench.harness`).
        merger_rtt_ms: The round trip between the merger and Redis, in milliseconds; 0 for one without a delay.
    """

    parameters: int = PARAMETERS
    rounds: int = 9
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
def two_islands(size: SyncSize) -> Iterator[TwoIslands]:
    """Start a Redis as `up` does, a merger and two islands; yield when they are ready to sync."""
    with contextlib.ExitStack() as held:
        server = held.enter_context(own_redis())
        made, of_merger = connect(server.url, RUN), server.url
        held.callback(made.close)
        _create_run(made, size)
        if size.merger_rtt_ms:
            of_merger = held.enter_context(Proxy(server.port, size.merger_rtt_ms / 2e3)).url(server.url)
        # While the merger works, the islands wait, so its spectra may use all cores.
        merger = held.enter_context(child(serve_merger, of_merger, RUN, (), PROCESSES, usable_cores(), size.pieces))
        merger.receive(PATIENCE_SECONDS)
        islands = [held.enter_context(child(_train, server.url, name, size)) for name in ISLANDS]
        for island in islands:
            island.receive(2 * PATIENCE_SECONDS)
        wait_until(lambda: len(made.reader.presences()) == len(ISLANDS), "heartbeat of both islands", PATIENCE_SECONDS)
        found = TwoIslands(made, merger, islands)
        # The merger may close the first rounds before it knows both islands.
        wait_until(lambda: found.sync().committed, "sync of both islands", PATIENCE_SECONDS)
        yield found


def _create_run(transport: Transport, size: SyncSize) -> None:
    settings = RunConfig(
        data=DataConfig(sequence_length=64, batch_size=4, shards=8),
        inner=InnerConfig(steps=1 << 30),
        sync=AT_ONCE,
        merge=MergeConfig(embedding=size.rule, rest=size.rule),
        wire=WIRE,
    )
    manifest = manifest_of(RUN, settings, size.tensors, balanced(size.tensors, FRAGMENTS))
    random = np.random.default_rng(0)
    payloads = [pack(random.standard_normal(elements, np.float32), "float32", 0) for elements in manifest.sizes]
    transport.create(manifest, [first_version(p, payload) for p, payload in enumerate(payloads)])


class TwoIslands:
    """The run seen from outside: commands to its islands, and what Redis says about it."""

    def __init__(self, transport: Transport, merger: MeasuredProcess, islands: Sequence[MeasuredProcess]) -> None:
        self.transport, self.merger, self.islands = transport, merger, islands

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


# -- the processes ----------------------------------------------------------------------------------------------------


class Counts(NamedTuple):
    """An island's answer: when its sync began and ended, and the bytes of it."""

    began: float
    at: float
    bytes: int


def _ask(processes: Sequence[MeasuredProcess], command: str) -> list[Any]:
    """Send all processes a command at once, and collect their answers."""
    for process in processes:
        process.pipe.send(command)
    return [process.receive(2 * PATIENCE_SECONDS) for process in processes]


def _train(pipe: Connection, url: str, name: str, size: SyncSize) -> None:
    """An island's process: obey commands."""
    # as the launcher does, and before JAX looks at its devices
    os.environ |= {**thread_environment(PROCESSES), **memory_share(len(ISLANDS))}
    pieces = Pieces(OF_ISLAND if size.pieces else {})
    return_freed_memory()  # The real island does this too.
    transport = connect(url, RUN)
    manifest = transport.reader.manifest()
    link = Link(transport, manifest, f"{name}/bench", range_order(manifest.config.data.shards, manifest.config.seed))
    batches = Batches(np.zeros(TEXT_BYTES, np.uint8), manifest.config, link.lease)
    steps = stand_in(manifest, sum(name.encode()))
    island = Island(name, manifest, Computation(manifest, steps), batches, link, link.join(), incarnation="bench")
    link.pumps.start()
    island.warm_up()
    island.beat("training")
    pipe.send("ready")
    while True:
        match pipe.recv():
            case "advance":
                island.advance()
                jax.block_until_ready(island.inner.params)  # type: ignore[no-untyped-call]
                pipe.send("advanced")
            case "sync":
                pipe.send(_synced(island))
            case _:
                pipe.send(pieces.spent())


def _synced(island: Island) -> Counts:
    """Publish all fragments, and pass step boundaries until the merged version of each is adopted."""
    goal = [count.version + 1 for count in island.ledger.counts]
    uplink = island.link.uplink
    before, began = uplink.bytes_up + uplink.bytes_down, time.monotonic()

    def adopted() -> bool:
        island.boundary()
        return all(count.version >= version for count, version in zip(island.ledger.counts, goal, strict=True))

    wait_until(adopted, "merged version of all fragments", PATIENCE_SECONDS, POLL_SECONDS)
    jax.block_until_ready((island.inner.params, island.computation.replica.references))  # type: ignore[no-untyped-call]
    return Counts(began, time.monotonic(), uplink.bytes_up + uplink.bytes_down - before)


def stand_in(
    manifest: Manifest, seed: int
) -> Callable[[InnerState, jax.Array, jax.Array], tuple[InnerState, jax.Array]]:
    """Return inner steps that make a random walk, because noise does not compress."""
    random = np.random.default_rng(seed)
    noise = {t.name: jnp.asarray(random.standard_normal(t.shape, np.float32) * NOISE) for t in manifest.tensors}
    walked = jax.jit(lambda params: jax.tree.map(jnp.add, params, noise), donate_argnums=0)

    def steps(state: InnerState, tokens_nxBxT1: jax.Array, global_step: jax.Array) -> tuple[InnerState, jax.Array]:
        params = walked(state.params)
        return state._replace(params=params), jnp.full(tokens_nxBxT1.shape[0], 2.0, jnp.float32)

    return steps
