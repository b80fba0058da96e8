"""The islands of `archipelago bench largest`, which pass each fragment once.

A real link and replica for each island, without training. One process plays all of them and holds one fragment at a
time, and every fragment begins with the same numbers, because in a real run an accelerator holds the parameters.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from archipelago.broker.codecs import Vector
from archipelago.broker.config import MergeConfig, OuterConfig, RunConfig, SyncConfig, WireConfig
from archipelago.broker.errors import BrokerError, WireError
from archipelago.broker.manifest import Manifest, Tensor
from archipelago.broker.messages import Contribution, Refusal, Resume, Snapshot
from archipelago.broker.redis.transport import connect
from archipelago.broker.transport import Transport
from archipelago.broker.wire import pack
from archipelago.islands.sync.connection.downloads import Arrival
from archipelago.islands.sync.connection.link import Link
from archipelago.islands.sync.connection.outbox import Draft
from archipelago.islands.sync.replica import Replica
from archipelago.ops.bench.harness import INCARNATION, Spent, cpu_seconds, first_version, heartbeat_of, manifest_of

RUN = "bench-largest"
BEAT_SECONDS = 1.0
#: The time limit for one fragment, and for a merger to begin.
PATIENCE_SECONDS = 600.0


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


class WireIslands:
    """All islands of a new run. They act one after the other, so that the times of each part are separate.

    Attributes:
        spent: What publishing, merging and adopting has taken: the seconds of all islands together, or until one hears
            of a new version; and the processor time of this process, or of the merger.
    """

    def __init__(self, url: str, size: int, fragments: int, islands: int) -> None:
        """Create a run of `fragments`, each with `size` elements, and its islands."""
        tensors = [Tensor(f"t{p:04}", (size,)) for p in range(fragments)]
        self._manifest = manifest_of(RUN, config_of(fragments, islands), tensors, [[t.name] for t in tensors])
        wire, first_N = self._manifest.config.wire, np.random.default_rng(0).standard_normal(size, np.float32)
        first_N *= np.float32(0.02)
        payload = pack(first_N, wire.full, wire.full_zstd_level)
        with contextlib.closing(connect(url, RUN)) as transport:
            transport.create(self._manifest, [first_version(p, payload, wire.full) for p in range(fragments)])
        self.islands = [WireIsland(url, self._manifest, number, first_N) for number in range(islands)]
        self.spent = dict.fromkeys(("publish", "merge", "adopt"), Spent())
        self._beat_at = float("-inf")

    def passes(self, p: int, merger: int) -> None:
        """Pass fragment `p`, and count what each part takes. `merger` is a process ID."""
        self.train()
        before = cpu_seconds(merger)
        self._count("publish", lambda: self.publish(p))
        self._count("merge", lambda: self.hear(Snapshot), cpu=lambda: cpu_seconds(merger) - before)
        self._count("adopt", lambda: self.adopt(p))

    def _count(self, part: str, work: Callable[[], None], cpu: Callable[[], float] | None = None) -> None:
        began, used = time.perf_counter(), time.process_time()
        work()
        seconds, own = time.perf_counter() - began, time.process_time() - used
        self.spent[part] = self.spent[part].plus(Spent(1, seconds, cpu() if cpu else own))

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

    def train(self) -> None:
        """Let all islands train a fragment."""
        for island in self.islands:
            island.train()

    def publish(self, p: int, first: int = 0) -> None:
        """Publish the contributions of the islands from number `first` on to fragment `p`."""
        for island in self.islands[first:]:
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
        counters, versions = reader.counters(), [head.version if head else None for head in reader.heads()]
        sent = fragments * len(self.islands)
        if (counters.published, counters.merged, counters.refused) != (sent, sent, 0) or versions != [1] * fragments:
            what = f"{sent} contributions were sent, but Redis says: {counters}, versions {versions}"
            raise WireError(what, code="bench.wrong-result")


class WireIsland:
    """An island's end of the wire, with the replica of one fragment.

    Attributes:
        arrival: The snapshot that it adopted last.
    """

    def __init__(self, url: str, manifest: Manifest, number: int, first_N: Vector) -> None:
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
        parts = self._replica.measure(0, self._params)
        self.link.send(Draft(self._header(p), parts, self.first_N.size))
        self.link.channels[0].outbox.pump()

    def adopt(self, p: int) -> None:
        """Fetch the new version of fragment `p` as a difference, and adopt it."""
        held = self.link.channels[0].inbox.held
        held[p] = _version_0(self._manifest, p, self.first_N)
        self.link.pump_receive()
        (self.arrival,) = self.link.take().arrivals
        held.pop(p)
        for x_N in self._replica.adopt(0, self._params, self.arrival.params_N).values():
            x_N.block_until_ready()

    def _header(self, p: int) -> Contribution:
        config = self._manifest.config
        steps, step = config.sync.interval, 1 + p * config.sync.interval // config.sync.fragments
        return Contribution(
            island=self.name, incarnation=INCARNATION, sequence=p, round=p + 1, fragment=p, base=0,
            tokens=steps * config.tokens_per_step, steps=steps, global_step=step, loss=1.0, step_seconds=1.0,
            farewell=False, codec=config.wire.up, bytes=0, digest="",
        )  # fmt: skip


def _version_0(manifest: Manifest, p: int, first_N: Vector) -> Arrival:
    return Arrival(Snapshot(0, p, 0, 0, manifest.config.wire.full, 1, "0" * 32, merged=""), first_N)
