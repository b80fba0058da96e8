"""A run that a test plays in virtual time: a broker, a merger that has loaded, and the links of islands.

Each kind of island adds how it joins and how it makes a step. Nothing happens unless the test asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from archipelago.broker.manifest import Manifest
from archipelago.broker.memory.transport import MemoryBroker
from archipelago.broker.messages import Snapshot
from archipelago.broker.transport import Transport
from archipelago.islands.sync.connection.link import Link
from archipelago.merger.checkpointer import Checkpointer
from archipelago.merger.service import Merger
from archipelago.ops.experiments.virtual_time import VirtualClock

Connect = Callable[[], Transport]


class Boundary(Protocol):
    """An island of any kind that can pass a step boundary."""

    @property
    def link(self) -> Link: ...

    def boundary(self) -> object: ...


class Trains(Boundary, Protocol):
    """An island that makes its own steps."""

    def advance(self) -> object: ...


def started(merger: Merger) -> Merger:
    """Let a merger take the lease and load the run, and return it."""
    assert merger.acquire()
    merger.load()
    return merger


class CreatedRun:
    """A run that no merger serves yet.

    Args:
        manifest: The run to create.
        first: Version 0 of each fragment.
        connect: Makes a connection to the run; by default to a broker in memory.
    """

    def __init__(
        self, manifest: Manifest, first: Sequence[tuple[Snapshot, bytes]], connect: Connect | None = None
    ) -> None:
        self.manifest = manifest
        self.clock = VirtualClock()
        self.broker = MemoryBroker(self.clock)
        self.connect: Connect = connect or (lambda: self.broker.connect(manifest.run))
        self.transport = self.connect()
        self.transport.create(manifest, first)


class PlayedRun(CreatedRun):
    """A run and its merger.

    Args:
        manifest: The run to create.
        first: Version 0 of each fragment.
        connect: Makes a connection to the run; by default to a broker in memory.
        checkpointer: Takes the merger's checkpoints.
    """

    def __init__(
        self,
        manifest: Manifest,
        first: Sequence[tuple[Snapshot, bytes]],
        connect: Connect | None = None,
        checkpointer: Checkpointer | None = None,
    ) -> None:
        super().__init__(manifest, first, connect)
        self.merger = self.new_merger(checkpointer=checkpointer)

    def new_merger(self, holder: str = "merger", checkpointer: Checkpointer | None = None) -> Merger:
        """Return another merger, which has taken the lease and loaded the run."""
        return started(Merger(self.connect(), self.clock, holder, live_poll_seconds=0.0, checkpointer=checkpointer))

    def link(self, who: str, ranges: Sequence[str] = ()) -> Link:
        """Return a link of an island's incarnation (`name/incarnation`), which has not joined yet."""
        return Link(self.connect(), self.manifest, who, ranges, self.clock)

    def turn(self, link: Link, act: Callable[[], object], seconds: float = 1.0) -> None:
        """Let an island act, exchange everything before and after it, and let the merger act."""
        self.clock.now += seconds
        link.pump()
        act()
        link.pump()
        self.merger.turn(0.0)

    def pass_boundary(self, island: Boundary, seconds: float = 1.0) -> None:
        """Let an island pass a step boundary, exchange everything before and after it, and let the merger act."""
        self.turn(island.link, island.boundary, seconds)

    def play(self, island: Trains, steps: int) -> None:
        """Make `steps` steps of an island, each after a boundary."""
        for _ in range(steps):
            self.pass_boundary(island)
            island.advance()
