"""The islands of `archipelago bench largest`: one process plays all of them, and passes each fragment once.

A real link and replica for each island, without training. The process holds one fragment at a time, and every fragment
begins with the same numbers, because in a real run an accelerator holds the parameters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import numpy as np

from archipelago.broker.codecs import Vector, codec
from archipelago.broker.config import MergeConfig, OuterConfig, RunConfig, SyncConfig, WireConfig
from archipelago.broker.errors import BrokerError, WireError
from archipelago.broker.manifest import Manifest, Tensor
from archipelago.broker.messages import Member, Refusal, Resume, Snapshot
from archipelago.broker.process import return_freed_memory
from archipelago.broker.redis.transport import connect
from archipelago.broker.transport import Transport
from archipelago.broker.wire import pack
from archipelago.ops.bench import measured_run
from archipelago.ops.bench.measured_run import INCARNATION, first_version, heartbeat_of
from archipelago.ops.bench.process import cpu_seconds

if TYPE_CHECKING:
    from archipelago.islands.sync.connection.outbox import ContributionHeader
    from archipelago.islands.sync.connection.snapshots import Arrival

RUN = "bench-largest"
BEAT_SECONDS = 1.0
#: The first step of Nesterov momentum has a formula of one line, and its state is as large as that of `scheduled`.
RATE, MOMENTUM = 0.7, 0.9
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
        outer=OuterConfig(rule="nesterov", learning_rate=RATE, momentum=MOMENTUM),
        wire=WireConfig(up="int4", thin="", down="int4"),
    )


def manifest_of(size: int, fragments: int, islands: int) -> Manifest:
    """Return a manifest of equal fragments, each of one tensor."""
    tensors = [Tensor(f"t{p:04}", (size,)) for p in range(fragments)]
    return measured_run.manifest_of(RUN, config_of(fragments, islands), tensors, [[t.name] for t in tensors])


def create(url: str, manifest: Manifest, first_N: Vector) -> None:
    """Create the run with the same numbers in all fragments."""
    down = manifest.config.wire.full
    payload = pack(first_N, down, manifest.config.wire.full_zstd_level)
    transport = connect(url, RUN)
    transport.create(manifest, [first_version(p, payload, down) for p in range(len(manifest.fragments))])
    transport.close()


def pass_all(pipe: Connection, url: str, size: int, fragments: int, islands: int) -> None:
    """Create the run, and pass every fragment once a merger serves it.

    The parent receives "created", and answers with the merger's process id. Half-way it receives "half", kills the
    merger, and answers with the time of the kill and the next merger's id. At the end it receives the `Passed`.
    """
    return_freed_memory()  # as `archipelago island` does
    passed, manifest = Passed(fragments, islands), manifest_of(size, fragments, islands)
    first_N = np.random.default_rng(0).standard_normal(size, np.float32) * np.float32(0.02)
    create(url, manifest, first_N)
    fleet = Fleet(url, manifest, first_N)
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


class Fleet:
    """All islands. They act one after the other, so that the seconds of each part are separate."""

    def __init__(self, url: str, manifest: Manifest, first_N: Vector) -> None:
        self.islands = [Island(url, manifest, number, first_N) for number in range(manifest.config.sync.quorum)]
        self._manifest = manifest
        self._beat_at = float("-inf")

    def passes(self, p: int, passed: Passed, merger: int) -> None:
        """Pass fragment `p`, and note what each part took. `merger` is a process id."""
        for island in self.islands:
            island.train()
        parts: dict[str, Callable[[], None]] = {
            "publish": lambda: self.publish(p), "merge": lambda: self.hear(Snapshot), "adopt": lambda: self.adopt(p)
        }  # fmt: skip
        before_all = cpu_seconds(merger)
        for part, work in parts.items():
            began, before = time.perf_counter(), time.process_time()
            work()
            passed.seconds[part].append(time.perf_counter() - began)
            passed.cpu_seconds[part].append(time.process_time() - before)
        passed.cpu_seconds["merge"][-1] = cpu_seconds(merger) - before_all
        self.require_merged(p)

    def publish(self, p: int) -> None:
        """Publish the contributions of all islands to fragment `p`."""
        for island in self.islands:
            island.publish(p)

    def adopt(self, p: int) -> None:
        """Let all islands adopt fragment `p`."""
        for island in self.islands:
            island.adopt(p)

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
        self.require_merged(p)
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
                    raise WireError(f"the merger refused a fragment: {event.reason}", code="bench.refused")
        raise BrokerError(
            f"the merger did not answer for {PATIENCE_SECONDS:g} s", "See its output above.", code="bench.timeout"
        )

    def _beat(self) -> None:
        if time.monotonic() - self._beat_at >= BEAT_SECONDS:
            self._beat_at = time.monotonic()
            for island in self.islands:
                island.transport.island.heartbeat(heartbeat_of(island.name))

    def require_merged(self, p: int) -> None:
        """Raise WireError unless all islands hold the same first version of fragment `p`, which is the right one."""
        (entry,) = self.islands[0].transport.reader.tape(1)
        first, *others = self.islands
        sent = {island.name: island.sent_N for island in self.islands}
        require_version(p, first.arrival)
        require_merge(first.first_N, sent, entry.members, first.arrival.params_N, self._manifest.config.wire.down)
        if not all(np.array_equal(first.arrival.params_N, other.arrival.params_N) for other in others):
            raise WireError(f"the islands hold different values of fragment {p}", code="bench.wrong-values")

    def require_nothing_lost(self) -> None:
        """Raise WireError unless each contribution was merged once, and each fragment has one new version."""
        reader, fragments = self.islands[0].transport.reader, len(self._manifest.fragments)
        books, versions = reader.books(), [head.version if head else None for head in reader.heads()]
        sent = fragments * len(self.islands)
        if (books.published, books.merged, books.refused) != (sent, sent, 0) or versions != [1] * fragments:
            raise WireError(
                f"{sent} contributions were sent, but Redis says: {books}, versions {versions}", code="bench.lost"
            )


class Island:
    """An island's end of the wire, with the replica of one fragment.

    Attributes:
        sent_N: Where its contribution led from `first_N`, as the merger reads it.
        arrival: The snapshot that it adopted last.
    """

    def __init__(self, url: str, manifest: Manifest, number: int, first_N: Vector) -> None:
        from archipelago.islands.sync.connection.link import Link
        from archipelago.islands.sync.replica import Replica

        self.name, self.first_N = f"island-{number}", first_N
        self.transport: Transport = connect(url, RUN)
        self.transport.island.claim_name(self.name, INCARNATION)
        self.link = Link(self.transport, manifest, f"{self.name}/{INCARNATION}", shards=[])
        self.sent_N, self.arrival = first_N, _version_0(manifest, 0, first_N)
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
        self.sent_N = np.asarray(self._replica.references[0])  # adopting replaces the reference

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


def require_version(p: int, arrival: Arrival) -> None:
    """Raise WireError unless the arrival is the first version of fragment `p`."""
    found = arrival.snapshot
    if (found.fragment, found.version) != (p, 1):
        raise WireError(
            f"version {found.version} of fragment {found.fragment} arrived instead of {p}'s first",
            code="bench.wrong-version",
        )


def require_merge(
    first_N: Vector, sent: Mapping[str, Vector], members: Sequence[Member], arrived_N: Vector, down: str
) -> None:
    """Compare with the merge of the contributions by RDA and a first Nesterov step, as numpy computes them.

    Args:
        first_N: The fragment before the round.
        sent: Where each island's contribution led, by its name.
        members: The contributions with the weights that the merger gave them.
        arrived_N: What the islands hold after the round.
        down: The codec of the difference, whose error is allowed.

    Raises:
        WireError: The values are others.
    """
    deltas = {member.island: first_N - sent[member.island] for member in members}
    lengths = {name: float(np.linalg.norm(delta_N)) for name, delta_N in deltas.items()}
    direction_N = np.zeros_like(first_N)
    for member in members:
        direction_N += np.float32(member.weight / lengths[member.island]) * deltas[member.island]
    length = sum(m.weight * lengths[m.island] for m in members) / float(np.linalg.norm(direction_N))
    step_N = np.float32(-RATE * (1.0 + MOMENTUM) * length) * direction_N
    if set(deltas) != set(sent) or not _is_near(arrived_N - first_N, step_N, codec(down).error_bound(step_N)):
        raise WireError("a fragment arrived with other values than the merged ones", code="bench.wrong-values")


def _is_near(found_N: Vector, wanted_N: Vector, error_N: Vector) -> bool:
    return bool((np.abs(found_N - wanted_N) <= np.float32(1.01) * error_N + np.float32(1e-7)).all())
