"""A whole run in one process and in virtual time: real islands, a real merger, a clock that jumps from event to event.

Everything but the wall clock is exact and repeatable. Tests and `bench parity` use it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from archipelago.broker.manifest import Manifest
from archipelago.broker.memory.transport import MemoryBroker
from archipelago.broker.shards.transport import create, of_shard, whole
from archipelago.broker.transport import IslandClient, IslandTransport, ReaderClient, ReaderTransport, Transport
from archipelago.islands.data.batches import Supply
from archipelago.islands.sync.connection.downloads import Arrival
from archipelago.islands.sync.connection.link import Link
from archipelago.islands.sync.leaving import leave
from archipelago.islands.sync.recovery import Newcomer
from archipelago.islands.tasks.batches import TaskRun
from archipelago.islands.tasks.ours import first_snapshots
from archipelago.islands.tasks.workload import Workload
from archipelago.islands.worker import Island
from archipelago.merger.service import Merger
from archipelago.merger.spectra_trial import by_default_device


@dataclass
class VirtualClock:
    """A clock that only its owner moves, in seconds."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class ChangedTransport:
    """An island's connection, of which a part is replaced."""

    run: str
    island: IslandClient
    reader: ReaderClient


def paces(count: int, slow: float = 1.0, slowed: int = 0) -> list[float]:
    """Return the seconds of an inner step of each island.

    They differ by up to 2 %, because real machines never tick in unison. Those of the last `slowed` islands are
    `slow` times longer. At least one island is fast.
    """
    equal = [1.0 + 0.02 * number / max(1, count - 1) for number in range(count)]
    return [s * slow if is_slow else s for s, is_slow in zip(equal, are_slow(count, slowed), strict=True)]


def are_slow(count: int, slowed: int) -> list[bool]:
    """Return for each of `count` islands whether it is among the last `slowed`. All cannot be slow: then none is."""
    return [count - number <= slowed < count for number in range(count)]


class VirtualRun:
    """A run whose islands act in the order of a virtual clock.

    Args:
        work: What the run trains, with its settings.
        step_seconds: How long each island takes for an inner step.
        connect: Makes a connection to the broker; default a broker in memory.
        sending_seconds: How long each contribution of each island is on its way, one after another. Their rounds close
            without them, and the contributions are merged stale.
        others: What some islands train instead, by name, such as on other data.
        shards: The number of shards, each with a merger of its own.
    """

    def __init__(
        self,
        work: Workload,
        step_seconds: Sequence[float],
        connect: Callable[[], Transport] | None = None,
        run: str = "virtual",
        sending_seconds: Sequence[float] = (),
        others: Mapping[str, Workload] | None = None,
        shards: int = 1,
    ) -> None:
        self.clock = VirtualClock()
        broker = MemoryBroker(self.clock)
        self._connect: Callable[[], Transport] = connect or (lambda: broker.connect(run))
        self._work, self._others = work, dict(others or {})
        primary = self.connect_as("admin")
        self.manifest: Manifest = replace(work.describe(run), shards=shards)
        create(primary, self.manifest, first_snapshots(self.manifest, work.model.init()))
        self.transport: ReaderTransport = whole(primary, self.manifest)
        self.mergers: list[Merger] = [self.merger_of(shard) for shard in range(shards)]
        self.islands: dict[str, Island] = {}
        self._step_seconds: dict[str, float] = {}
        self._sending_seconds = {f"island-{i}": seconds for i, seconds in enumerate(sending_seconds) if seconds}
        self._agenda: list[tuple[float, int, Island, Callable[[Island], None]]] = []
        self._on_its_way: set[Island] = set()  # The islands that have a contribution on its way.
        self._events = self._born = 0
        for index, seconds in enumerate(step_seconds):
            self.add_island(f"island-{index}", seconds)

    def connect_as(self, who: str) -> Transport:
        """Return a connection of an island of that name, of the `merger` or of the `admin`."""
        return self._connect()

    def connect_island(self, name: str) -> IslandTransport:
        """Return the connection of an island to all shards."""
        return whole(self.connect_as(name), self.manifest)

    @property
    def merger(self) -> Merger:
        """The merger of the run, or of its shard 0."""
        return self.mergers[0]

    def merger_of(self, shard: int) -> Merger:
        """Return another merger, which has taken the lease of a shard and loaded it."""
        transport = of_shard(self.connect_as("merger"), self.manifest, shard)
        merger = Merger(
            transport,
            self.clock,
            holder="virtual",
            live_poll_seconds=0.0,
            wall=self.clock,
            faster=by_default_device,
        )
        merger.acquire()
        merger.load()
        return merger

    def turn(self) -> None:
        """Let each merger read what has arrived, and close the rounds that are due."""
        for merger in self.mergers:
            merger.turn(0.0)

    def add_island(self, name: str, step_seconds: float, origin: Literal["fresh", "peer"] = "fresh") -> Island:
        """Let an island join and train, with a fresh optimiser or with the state of a peer, which answers at once."""
        transport = self.connect_island(name)
        self._born += 1
        incarnation = f"v{self._born}"
        link = Link(transport, self.manifest, f"{name}/{incarnation}", (), clock=self.clock, wall=self.clock)
        arrivals = link.join()
        work, seed = self._others.get(name, self._work), self.manifest.config.seed
        supply = work.supply(TaskRun(name, self._born, seed, link))
        island = self.new_island(name, work, supply, link, arrivals, incarnation)
        newcomer = Newcomer(transport, island, seconds=0.0)
        newcomer.ask(wants_state=origin == "peer")
        island.beat("joining")
        island.link.pump()
        if origin == "peer":  # All others pass a step boundary, in no virtual time.
            for peer in self.islands.values():
                peer.link.pump()
                peer.boundary()
                peer.link.pump()
        newcomer.complete()
        island.beat("training")
        island.link.pump()
        self.islands[name], self._step_seconds[name] = island, step_seconds
        self._plan(self.clock.now, island, self._step)
        return island

    def new_island(
        self, name: str, work: Workload, supply: Supply, link: Link, arrivals: Sequence[Arrival], incarnation: str
    ) -> Island:
        """Return an island that begins from these snapshots."""
        computation = work.computation(self.manifest)
        return Island(name, self.manifest, computation, supply, link, arrivals, self.clock, incarnation)

    def remove_island(self, name: str) -> None:
        """Let an island leave as on SIGTERM, with a farewell."""
        island = self.islands.pop(name)
        leave(island, flush_seconds=0.0)
        island.link.pump()
        self.turn()

    def advance_until(self, done: Callable[[], bool]) -> None:
        """Play events until `done()`, or until every island has finished and left."""
        while self.islands and not done():
            self.play_one()

    def finish(self) -> None:
        """Play events to the run's end, and merge the last contributions."""
        self.advance_until(lambda: False)
        self.turn()

    def play_one(self) -> None:
        """Play the next event: a grace window that ends, or an island at its step boundary."""
        deadlines = [at for merger in self.mergers if (at := merger.rounds.deadline()) is not None]
        deadline = min(deadlines, default=None)
        if self._agenda and deadline is not None and deadline <= self._agenda[0][0]:
            self.clock.now = max(self.clock.now, deadline)
            self.turn()
            return
        at, _, island, act = heapq.heappop(self._agenda)
        self.clock.now = max(self.clock.now, at)
        if self.islands.get(island.name) is island:  # Otherwise the island has left. A new one may have its name.
            act(island)

    def _step(self, island: Island) -> None:
        name = island.name
        if island.reason:
            self.remove_island(name)
            return
        self._exchange(island)
        island.boundary()
        self._exchange(island)
        self.turn()
        island.advance()
        self._plan(self.clock.now + self._step_seconds[name], island, self._step)

    def _exchange(self, island: Island) -> None:
        """Run all pumps. What the island sends arrives later if its link takes time."""
        link, seconds = island.link, self._sending_seconds.get(island.name)
        if seconds is None:
            link.pump()
            return
        link.pump_receive()
        link.pump_heartbeat()
        link.pump_handovers()
        if link.backlog and island not in self._on_its_way:
            self._on_its_way.add(island)
            self._plan(self.clock.now + seconds, island, self._arrive)

    def _arrive(self, island: Island) -> None:
        self._on_its_way.discard(island)
        for channel in island.link.channels:
            if channel.outbox.queued:
                channel.outbox.send_oldest()
        self.turn()
        self._exchange(island)

    def _plan(self, at: float, island: Island, act: Callable[[Island], None]) -> None:
        self._events += 1
        heapq.heappush(self._agenda, (at, self._events, island, act))
