"""Two islands, a merger and a Redis, each a process, that `archipelago bench sync` commands and measures."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import jax
import jax.numpy as jnp
import numpy as np

from archipelago.broker.config import DataConfig, InnerConfig, MergeConfig, RunConfig, SyncConfig, WireConfig
from archipelago.broker.errors import BrokerError
from archipelago.broker.invitation import Member, key_text
from archipelago.broker.machine import usable_cores
from archipelago.broker.manifest import Corpus, Manifest, Tensor, balanced
from archipelago.broker.messages import Snapshot
from archipelago.broker.process import keep_freed_memory, return_freed_memory
from archipelago.broker.redis.membership import Membership
from archipelago.broker.redis.transport import connect
from archipelago.broker.signing import MERGER, generate
from archipelago.broker.transport import Transport
from archipelago.broker.wire import digest, pack
from archipelago.islands.data.batches import Batches
from archipelago.islands.data.sharding import shard_order
from archipelago.islands.inner import InnerState
from archipelago.islands.sync.connection.link import Link
from archipelago.islands.worker import Island
from archipelago.merger.beside import in_background
from archipelago.merger.service import Merger
from archipelago.merger.serving import serve
from archipelago.ops.bench.pieces import OF_ISLAND, OF_MERGER, Pieces, Spent
from archipelago.ops.bench.process import Child, child, wait_until
from archipelago.ops.bench.signed_clients import Address, connected, invitation, signing_seconds
from archipelago.ops.chaos.proxy import LOOPBACK, Proxy
from archipelago.ops.launch.embedded_redis import start_server
from archipelago.ops.launch.supervisor import thread_environment

RUN = "sync"
Rule = Literal["average", "rda", "isotropic"]
#: If there is a proxy, it is in front of the second island.
ISLANDS = ("near", "thin")
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
#: torchft's timeout over the thin link. Its own default is a minute.
THIN_TIMEOUT_SECONDS = 10.0
POLL_SECONDS = 0.001
PATIENCE_SECONDS = 120.0
TEXT_BYTES = 1 << 20
NOISE = 1e-3


@dataclass(frozen=True)
class Size:
    """The size of a measurement.

    Attributes:
        parameters: Elements of the model.
        rounds: Syncs on loopback, of which the median counts.
        thin_syncs: Syncs over the thin link.
        step_seconds: How long an inner step takes.
        mbit: Rate of the thin link each way, in Mbit/s.
        rule: The merge rule of all tensors.
        pieces: Whether the processes count the time of their pieces (`ops.bench.pieces`).
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
        signing: The seconds that one island spent on signatures.
    """

    seconds: float
    committed: bool
    megabytes: float = math.nan
    signing: float = 0.0


@contextlib.contextmanager
def two_islands(config: SyncConfig, size: Size, proxied: bool = False, *, signed: bool = False) -> Iterator[TwoIslands]:
    """Start a Redis as `up` does, a merger and two islands; yield when they are ready to sync.

    Args:
        config: How the islands sync.
        size: The size of the measurement.
        proxied: A proxy is in front of the second island.
        signed: All of them sign what they send.
    """
    with contextlib.ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        server = held.enter_context(start_server(folder / "redis"))
        proxy = held.enter_context(Proxy(LOOPBACK, server.port)) if proxied else None
        keys = {name: generate() for name in (*ISLANDS, MERGER)} if signed else {}
        made = connect(server.url, RUN, invitation(server.url, RUN, MERGER, keys))
        held.callback(made.close)
        _create_run(made, config, size)
        for name in ISLANDS if signed else ():
            Membership(made.connection).put(name, Member("island", key_text(keys[name][1])))
        urls = [server.url, _through(server.url, proxy.port) if proxy else server.url]
        for_merger = made.invitation or server.url
        if size.merger_rtt_ms:
            away = Proxy(LOOPBACK, server.port, delay_seconds=size.merger_rtt_ms / 2e3)
            for_merger = _through(server.url, held.enter_context(away).port)
        addresses = [invitation(url, RUN, name, keys) or url for name, url in zip(ISLANDS, urls, strict=True)]
        processes = [Process("the merger", held.enter_context(child(_merge, for_merger, size.pieces)))]
        processes += [
            Process(f"the island {name}", held.enter_context(child(_train, address, name, size)))
            for name, address in zip(ISLANDS, addresses, strict=True)
        ]
        for process in processes:
            process.answer()
        wait_until(lambda: len(made.reader.presences()) == len(ISLANDS), "heartbeat of both islands", PATIENCE_SECONDS)
        yield TwoIslands(made, proxy, processes, size)


def _through(url: str, port: int) -> str:
    """Return the Redis URL with the proxy's address."""
    address = urlsplit(url)
    return address._replace(netloc=f":{address.password or ''}@{LOOPBACK}:{port}").geturl()


def _create_run(transport: Transport, config: SyncConfig, size: Size) -> None:
    settings = RunConfig(
        data=DataConfig(sequence_length=64, batch_size=4, shards=8),
        inner=InnerConfig(steps=1 << 30),
        sync=config,
        merge=MergeConfig(embedding=size.rule, rest=size.rule),
        wire=WIRE,
    )
    tensors = size.tensors
    manifest = Manifest(RUN, settings, tensors, balanced(tensors, FRAGMENTS), Corpus("none", "0" * 32, 1 << 20), {})
    random = np.random.default_rng(0)
    firsts = []
    for p, elements in enumerate(manifest.sizes):
        payload = pack(random.standard_normal(elements, np.float32), "float32", 0)
        firsts.append((Snapshot(0, p, 0, 0, "float32", len(payload), digest(payload), merged=""), payload))
    transport.create(manifest, firsts)


class TwoIslands:
    """The run seen from outside: commands to its islands, and what Redis says about it."""

    def __init__(self, transport: Transport, proxy: Proxy | None, processes: Sequence[Process], size: Size) -> None:
        self.transport, self.proxy, self.size = transport, proxy, size
        self.merger, *self.islands = processes

    def sync(self) -> Synced:
        """Let both islands move all parameters, then sync them. Time from the first publishing to the last adoption."""
        _ask(self.islands, "advance")
        ends = _ask(self.islands, "sync")
        seconds = max(end.at for end in ends) - min(end.began for end in ends)
        return Synced(seconds, self._both_in_all(), ends[-1].bytes / 1e6, ends[-1].signing)

    def merger_signing(self) -> float:
        """Return the seconds that the merger has spent on signatures since it started."""
        self.merger.tell("count")
        return float(self.merger.answer())

    def spent(self) -> tuple[dict[str, Spent], dict[str, Spent]]:
        """Return what the pieces of the merger and of the first island have taken since they started."""
        for process in (self.merger, self.islands[0]):
            process.tell("pieces")
        return self.merger.answer(), self.islands[0].answer()

    def _both_in_all(self) -> bool:
        """Return whether both islands are in the newest round of every fragment."""
        return all(len(entry.members) == len(ISLANDS) for entry in self.transport.reader.tape(FRAGMENTS))

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Let both islands train while the block runs. They have measured their speed in a first sync before it."""
        for island in self.islands:
            island.tell("train")
        self._next_sync()
        yield
        _ask(self.islands, "stop")

    @contextlib.contextmanager
    def throttled(self, mbit: float) -> Iterator[None]:
        """Throttle the link of the second island while the block runs, in Mbit/s each way."""
        assert self.proxy is not None  # noqa: S101
        self.proxy.set_rates(mbit, mbit)
        yield
        self.proxy.set_rates(math.inf, math.inf)

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


@dataclass(frozen=True)
class Counts:
    """An island's answer to a command.

    Attributes:
        began: When the command began, on the monotonic clock of the machine.
        at: When it ended.
        steps: Inner steps since the beginning.
        bytes: Sent and received, in this sync or since the beginning.
        signing: Seconds spent on signatures, in this sync or since the beginning.
    """

    began: float
    at: float
    steps: int
    bytes: int
    signing: float


@dataclass(frozen=True)
class Process:
    """A process that answers commands. Error messages call it `who`."""

    who: str
    child: Child

    def tell(self, command: str) -> None:
        """Send a command."""
        self.child.pipe.send(command)

    def answer(self) -> Any:
        """Wait for the answer. Raise BrokerError if there is none."""
        answer = self.child.receive(2 * PATIENCE_SECONDS)
        if answer is None:
            raise BrokerError(f"{self.who} does not answer", "See its output above, and run the bench again.")
        return answer


def _ask(processes: Sequence[Process], command: str) -> list[Counts]:
    """Send all processes a command at once, and collect their answers."""
    for process in processes:
        process.tell(command)
    return [process.answer() for process in processes]


def _merge(pipe: Connection, address: Address, counts_pieces: bool) -> None:
    """The merger's process: serve until it is killed, and answer with the seconds spent on signatures, or on pieces."""
    _share_the_cores()
    pieces = Pieces(OF_MERGER if counts_pieces else {})
    keep_freed_memory()  # The real merger does this too.
    transport = connected(address, RUN)
    merger = Merger(transport, threads=usable_cores(), beside=in_background)  # the islands wait while it works
    pipe.send("ready")

    def stopped() -> bool:
        if pipe.poll():
            pipe.send(pieces.spent() if pipe.recv() == "pieces" else signing_seconds(transport))
        return False

    serve(merger, stopped)


def _train(pipe: Connection, address: Address, name: str, size: Size) -> None:
    """An island's process: obey commands, and train between them once it was asked to."""
    _share_the_cores()
    pieces = Pieces(OF_ISLAND if size.pieces else {})
    return_freed_memory()  # The real island does this too.
    transport = connected(address, RUN)
    manifest = transport.reader.manifest()
    link = Link(transport, manifest, f"{name}/bench", shard_order(manifest.config.data.shards, manifest.config.seed))
    batches = Batches(np.zeros(TEXT_BYTES, np.uint8), manifest.config, link.lease)
    steps = stand_in(manifest, sum(name.encode()), 0.0 if manifest.config.sync == AT_ONCE else size.step_seconds)
    island = Island(name, manifest, steps, batches, link, link.join(), incarnation="bench")
    link.start()
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
            case "stop":
                training = False
                pipe.send(_counts(island))
            case _:
                pipe.send(_counts(island))


def _share_the_cores() -> None:
    """Limit the threads as the launcher does for the workers of one machine. Call before JAX looks at its devices."""
    os.environ |= thread_environment(1 + len(ISLANDS))


def _counts(island: Island) -> Counts:
    now = time.monotonic()
    size = island.link.channels.bytes_up + island.link.channels.bytes_down
    return Counts(now, now, island.totals.steps, size, signing_seconds(island.link.transport))


def _synced(island: Island) -> Counts:
    """Publish all fragments, and pass step boundaries until the merged version of each is adopted."""
    goal = [count.version + 1 for count in island.ledger.counts]
    before = _counts(island)

    def adopted() -> bool:
        island.boundary()
        return all(count.version >= version for count, version in zip(island.ledger.counts, goal, strict=True))

    wait_until(adopted, "merged version of all fragments", PATIENCE_SECONDS, POLL_SECONDS)
    jax.block_until_ready((island.inner.params, island.replica.references))  # type: ignore[no-untyped-call]
    after = _counts(island)
    return Counts(before.at, after.at, after.steps, after.bytes - before.bytes, after.signing - before.signing)


def stand_in(
    manifest: Manifest, seed: int, step_seconds: float
) -> Callable[[InnerState, jax.Array, jax.Array], tuple[InnerState, jax.Array]]:
    """Return inner steps that take `step_seconds` each: a random walk, because noise does not compress."""
    random = np.random.default_rng(seed)
    noise = {
        t.name: jnp.asarray(random.standard_normal(t.shape, np.float32) * NOISE) for t in manifest.parameter_tensors
    }
    walked = jax.jit(lambda params: jax.tree.map(jnp.add, params, noise), donate_argnums=0)

    def steps(state: InnerState, tokens_nxBxT1: jax.Array, global_step: jax.Array) -> tuple[InnerState, jax.Array]:
        until = time.monotonic() + step_seconds * tokens_nxBxT1.shape[0]
        params = walked(state.params)
        jax.block_until_ready(params)  # type: ignore[no-untyped-call]
        time.sleep(max(0.0, until - time.monotonic()))
        return state._replace(params=params), jnp.full(tokens_nxBxT1.shape[0], 2.0, jnp.float32)

    return steps
