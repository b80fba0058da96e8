"""The islands of `archipelago bench largest`: one process plays all of them, and passes each fragment once.

A real link and replica for each island, without training. The process holds one fragment at a time, and every fragment
begins with the same numbers, because in a real run an accelerator holds the parameters.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import numpy as np

from archipelago.broker.codecs import Vector
from archipelago.broker.config import MergeConfig, OuterConfig, RunConfig, SyncConfig, WireConfig
from archipelago.broker.errors import BrokerError, WireError
from archipelago.broker.manifest import Manifest, Tensor
from archipelago.broker.messages import Refusal, Resume, Snapshot
from archipelago.broker.process import return_freed_memory
from archipelago.broker.redis.transport import connect
from archipelago.broker.transport import Transport
from archipelago.broker.wire import pack
from archipelago.ops.bench.harness import INCARNATION, cpu_seconds, first_version, heartbeat_of, manifest_of

if TYPE_CHECKING:
    from archipelago.islands.sync.connection.outbox import ContributionHeader
    from archipelago.islands.sync.connection.snapshots import Arrival

RUN = "bench-largest"
BEAT_SECONDS = 1.0
#: The parts of a pass over a fragment.
PARTS = ("publish", "merge", "adopt")
#: The time limit for one fragment, and for a merger to begin.
PATIENCE_SECONDS = 600.0


@dataclass
class Passed:
    """The measurements of the islands' process.

    The fragment at which the merger is killed is in none of them but those of the restart.

    Attributes:
        bytes_up, bytes_down: Bytes that all islands sent and received.
        load_seconds, load_cpu_seconds: From the start of the first merger's process until it serves.
        restart_seconds: From the merger's kill until the next one has closed a round.
        restart_cpu_seconds: The processor time of the next one until then.
        seconds: The time of each part for each fragment: of all islands, one after the other, to publish; until one
            hears of a new version; of all islands to adopt it.
        cpu_seconds: The processor time of each part for each fragment, of the islands' process or of the merger.
    """

    fragments: int
    islands: int
    bytes_up: int = 0
    bytes_down: int = 0
    load_seconds: float = 0.0
    load_cpu_seconds: float = 0.0
    restart_seconds: float = 0.0
    restart_cpu_seconds: float = 0.0
    seconds: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})
    cpu_seconds: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})


def config_of(fragments: int, islands: int) -> RunConfig:
    """Return the settings: the defaults of a real run, but for what this measurement cannot have.

    A round waits for all islands, and no island is thought to have a thin link. The rule is `rda`, to which `isotropic`
    adds only arithmetic: the spectra of a billion parameters take minutes, and `bench merge` measures them.
    """
    return RunConfig(
        sync=SyncConfig(fragments=fragments, window=1, quorum=islands),
        merge=MergeConfig(embedding="rda", rest="rda"),
        outer=OuterConfig(rule="nesterov"),
        wire=WireConfig(up="int4", thin="", down="int4"),
    )


def manifest_of_equal(size: int, fragments: int, islands: int) -> Manifest:
    """Return a manifest of equal fragments, each of one tensor."""
    tensors = [Tensor(f"t{p:04}", (size,)) for p in range(fragments)]
    return manifest_of(RUN, config_of(fragments, islands), tensors, [[t.name] for t in tensors])


def pass_all(pipe: Connection, url: str, size: int, fragments: int, islands: int) -> None:
    """Create the run, and pass every fragment once a merger serves it.

    The parent receives "created", and answers with the merger's process id. Half-way it receives "half", kills the
    merger, and answers with the time of the kill and the next merger's id. At the end it receives the `Passed`.
    """
    return_freed_memory()  # as `archipelago island` does
    passed, manifest = Passed(fragments, islands), manifest_of_equal(size, fragments, islands)
    first_N = np.random.default_rng(0).standard_normal(size, np.float32) * np.float32(0.02)
    full = manifest.config.wire.full
    payload = pack(first_N, full, manifest.config.wire.full_zstd_level)
    with contextlib.closing(connect(url, RUN)) as transport:
        transport.create(manifest, [first_version(p, payload, full) for p in range(fragments)])
    fleet = WireIslands(url, manifest, first_N)
    pipe.send("created")
    merger, began = pipe.recv(), time.perf_counter()
    fleet.hear(Resume)
    passed.load_seconds, passed.load_cpu_seconds = time.perf_counter() - began, cpu_seconds(merger)
    for p in range(fragments):
        if p == fragments // 2:
            merger = fleet.passes_over_a_kill(p, passed, pipe)
        else:
            fleet.passes(p, passed, merger)
    fleet.require_nothing_lost()
    passed.bytes_up = sum(island.link.channels.bytes_up for island in fleet.islands)
    passed.bytes_down = sum(island.link.channels.bytes_down for island in fleet.islands)
    pipe.send(passed)
    pipe.poll(None)  # Stay alive, so that the parent can read the peak of memory.


class WireIslands:
    """All islands. They act one after the other, so that the seconds of each part are separate."""

    def __init__(self, url: str, manifest: Manifest, first_N: Vector) -> None:
        self.islands = [WireIsland(url, manifest, number, first_N) for number in range(manifest.config.sync.quorum)]
        self._manifest = manifest
        self._beat_at = float("-inf")

    def passes(self, p: int, passed: Passed, merger: int) -> None:
        """Pass fragment `p`, and note what each part took. `merger` is a process id."""
        for island in self.islands:
            island.train()
        parts: dict[str, Callable[[], None]] = {
            "publish": lambda: self.publish(p),
            "merge": lambda: self.hear(Snapshot),
            "adopt": lambda: self.adopt(p),
        }
        before_all = cpu_seconds(merger)
        for part, work in parts.items():
            began, before = time.perf_counter(), time.process_time()
            work()
            passed.seconds[part].append(time.perf_counter() - began)
            passed.cpu_seconds[part].append(time.process_time() - before)
        passed.cpu_seconds["merge"][-1] = cpu_seconds(merger) - before_all

    def passes_over_a_kill(self, p: int, passed: Passed, pipe: Connection) -> int:
        """Pass fragment `p`, whose merger the parent kills when it has one contribution. Return the next one's id."""
        first, *others = self.islands
        for island in self.islands:
            island.train()
        first.publish(p)
        pipe.send("half")
        killed_at, merger = pipe.recv()
        for island in others:
            island.publish(p)
        self.hear(Snapshot)
        passed.restart_seconds = time.monotonic() - killed_at
        passed.restart_cpu_seconds = cpu_seconds(merger)
        self.adopt(p)
        return int(merger)

    def hear(self, kind: type[Resume | Snapshot]) -> None:
        """Send heartbeats, and listen until an event of this kind arrives. Fetch no payload yet.

        Raises:
            WireError: The merger refused a contribution.
            BrokerError: Nothing arrived for PATIENCE_SECONDS.
        """
        link, deadline = self.islands[0].link, time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            self._beat()
            link.channels[0].inbox.listen(BEAT_SECONDS)
            for _, event in link.take().events:
                if isinstance(event, kind):
                    return
                if isinstance(event, Refusal):
                    raise WireError(f"the merger refused a fragment: {event.reason}", code="bench.wrong-result")
        raise BrokerError(
            f"the merger did not answer for {PATIENCE_SECONDS:g} s", "See its output above.", code="bench.timeout"
        )

    def _beat(self) -> None:
        if time.monotonic() - self._beat_at >= BEAT_SECONDS:
            self._beat_at = time.monotonic()
            for island in self.islands:
                island.transport.island.heartbeat(heartbeat_of(island.name))

    def publish(self, p: int) -> None:
        """Publish the contributions of all islands to fragment `p`."""
        for island in self.islands:
            island.publish(p)

    def adopt(self, p: int) -> None:
        """Let all islands adopt fragment `p`. Raise WireError unless they hold the same first version of it then."""
        for island in self.islands:
            island.adopt(p)
        arrivals = [island.arrival for island in self.islands]
        same = all(np.array_equal(arrival.params_N, arrivals[0].params_N) for arrival in arrivals)
        versions = {(arrival.snapshot.fragment, arrival.snapshot.version) for arrival in arrivals}
        if versions != {(p, 1)} or not same:
            raise WireError(f"the islands hold different values of fragment {p}: {versions}", code="bench.wrong-result")

    def require_nothing_lost(self) -> None:
        """Raise WireError unless each contribution was merged once, and each fragment has one new version."""
        reader, fragments = self.islands[0].transport.reader, len(self._manifest.fragments)
        books, versions = reader.books(), [head.version if head else None for head in reader.heads()]
        sent = fragments * len(self.islands)
        if (books.published, books.merged, books.refused) != (sent, sent, 0) or versions != [1] * fragments:
            what = f"{sent} contributions were sent, but Redis says: {books}, versions {versions}"
            raise WireError(what, code="bench.wrong-result")


class WireIsland:
    """An island's end of the wire, with the replica of one fragment.

    Attributes:
        arrival: The snapshot that it adopted last.
    """

    def __init__(self, url: str, manifest: Manifest, number: int, first_N: Vector) -> None:
        from archipelago.islands.sync.connection.link import Link
        from archipelago.islands.sync.replica import Replica

        self.name, self.first_N = f"island-{number}", first_N
        self.transport: Transport = connect(url, RUN)
        self.transport.island.claim_name(self.name, INCARNATION)
        self.link = Link(self.transport, manifest, f"{self.name}/{INCARNATION}", ranges=[])
        self.arrival = _version_0(manifest, 0, first_N)
        self._manifest = manifest
        own = np.random.default_rng(number + 1).standard_normal(first_N.size, np.float32)
        self._progress_N = own * np.float32(1e-3)
        tensor = Tensor("one", first_N.shape)
        self._replica = Replica(replace(manifest, tensors=(tensor,), fragments=((tensor.name,),)))
        self._params = self._replica.begin([first_N])
        self._replica.warm_up(self._params)

    def train(self) -> None:
        """Begin with the first numbers, and move them as if by training, which is complete at the end."""
        begun = self._replica.begin([self.first_N])
        self._params = {name: (x_N - self._progress_N).block_until_ready() for name, x_N in begun.items()}

    def publish(self, p: int) -> None:
        """Publish this island's contribution to fragment `p`."""
        from archipelago.islands.sync.connection.outbox import Draft

        parts = self._replica.measure(0, self._params)
        self.link.send(Draft(self._header(p), parts, self.first_N.size))
        self.link.pump_send()

    def adopt(self, p: int) -> None:
        """Fetch the new version of fragment `p` as a difference, and adopt it."""
        snapshots = self.link.channels[0].inbox.snapshots
        snapshots.held[p] = _version_0(self._manifest, p, self.first_N)
        self.link.pump_receive()
        (self.arrival,) = self.link.take().arrivals
        snapshots.held.pop(p)
        for x_N in self._replica.adopt(0, self._params, self.arrival.params_N).values():
            x_N.block_until_ready()

    def _header(self, p: int) -> ContributionHeader:
        from archipelago.islands.sync.connection.outbox import ContributionHeader

        config = self._manifest.config
        steps, step = config.sync.interval, 1 + p * config.sync.interval // config.sync.fragments
        return ContributionHeader(
            island=self.name, incarnation=INCARNATION, sequence=p, round=p + 1, fragment=p, base=0,
            tokens=steps * config.tokens_per_step, steps=steps, global_step=step, loss=1.0, step_seconds=1.0,
            farewell=False, codec=config.wire.up,
        )  # fmt: skip


def _version_0(manifest: Manifest, p: int, first_N: Vector) -> Arrival:
    from archipelago.islands.sync.connection.snapshots import Arrival

    return Arrival(Snapshot(0, p, 0, 0, manifest.config.wire.full, 1, "0" * 32, merged=""), first_N)
