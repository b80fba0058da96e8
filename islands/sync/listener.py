"""A listener: reads the published parameters of a run, version by version, and never writes to the run.

It receives as an island does, through the inbox of each shard, with an outbox that stays empty.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

from archipelago.broker.control import run_steps
from archipelago.broker.manifest import Manifest
from archipelago.broker.shards.transport import shards_of, whole
from archipelago.broker.transport import IslandTransport, Transport
from archipelago.islands.sync.connection.downloads import Arrival, require_same_run
from archipelago.islands.sync.connection.inbox import Inbox
from archipelago.islands.sync.connection.link import BLOCK_SECONDS, Pump, Pumps
from archipelago.islands.sync.connection.outbox import Outbox
from archipelago.islands.sync.leaving import lacking
from archipelago.islands.sync.measures import Uplink

#: How often a listener looks whether the run is over.
WATCH_SECONDS = 1.0
#: How many cycles of rounds may be incomplete. More are, only if a fragment cannot be read.
CYCLES_KEPT = 3


class Version(NamedTuple):
    """Parameters of a run as its merger published them.

    Attributes:
        round: How many rounds are merged in it. In a run with one shard, that is the number of the last one.
        step: The run's global inner step then.
        params: The parameters, in the form that the listener was given.
    """

    round: int
    step: int
    params: Any


class Cycles:
    """The versions of a shard's fragments, gathered into versions of the whole shard.

    A cycle is one round of each fragment. After its last round, all fragments have the same version.
    """

    def __init__(self, fragments: Sequence[int]) -> None:
        self._fragments = fragments
        self._lock = threading.Lock()
        self._building: dict[int, dict[int, Arrival]] = {}  # by version
        self._newest: dict[int, Arrival] = {}
        self._whole: Sequence[Arrival] = ()

    def add(self, arrival: Arrival) -> None:
        """Take a version of a fragment."""
        p, version = arrival.snapshot.fragment, arrival.snapshot.version
        with self._lock:
            self._newest[p] = arrival
            cycle = self._building.setdefault(version, {})
            cycle[p] = arrival
            if len(cycle) == len(self._fragments):
                self._whole = [cycle[each] for each in self._fragments]
                # This one stays: the run may lose a fragment of it, which comes again.
                self._building = {number: of for number, of in self._building.items() if number >= version}
            for number in sorted(self._building)[:-CYCLES_KEPT]:
                del self._building[number]

    def forget(self, p: int) -> None:
        """Forget a fragment, and the whole version of which it was a part, because the run went back."""
        with self._lock:
            self._newest.pop(p, None)
            self._whole = ()
            for cycle in self._building.values():
                cycle.pop(p, None)

    def arrivals(self, *, consistent: bool) -> Sequence[Arrival]:
        """Return the fragments after the last whole cycle, or the newest of each; an empty list before the first."""
        with self._lock:
            if consistent:
                return self._whole
            return [self._newest[p] for p in self._fragments] if len(self._newest) == len(self._fragments) else ()


class _Channel(NamedTuple):
    inbox: Inbox
    cycles: Cycles


class Receiver:
    """What a listener receives, in threads or when the owner runs its pumps.

    Attributes:
        changed: Notified when something has arrived, or failed.
        forgotten: How often a fragment was forgotten, because the run went back.
        is_over: Whether the run is finished, and everything that it merged has arrived.
    """

    def __init__(self, transport: Transport, manifest: Manifest, clock: Callable[[], float] = time.monotonic) -> None:
        self._primary, self.manifest, self._transport = transport, manifest, whole(transport, manifest)
        self.changed, self.uplink, self.is_over = threading.Condition(), Uplink(), False
        self.forgotten, self._steps = 0, manifest.config.inner.steps
        self._joined: set[int] = set()
        self._channels = [self._channel(shard, each, clock) for shard, each in enumerate(shards_of(self._transport))]
        pumps = [
            Pump(f"receive-{shard}", partial(self._receive, shard, 0.0), None, partial(self._receive, shard))
            for shard in range(len(self._channels))
        ]
        self.pumps = Pumps([*pumps, Pump("watch", self._watch, WATCH_SECONDS)], self.changed, "and is tried again")

    def _channel(self, shard: int, transport: IslandTransport, clock: Callable[[], float]) -> _Channel:
        of_shard = self.manifest.of_shard(shard)
        outbox = Outbox(transport, of_shard.config.wire, self.uplink, clock, self.changed, [])
        inbox, cycles = Inbox(transport, of_shard, outbox, self.uplink, clock), Cycles(of_shard.own_fragments)

        def forget(p: int) -> None:
            cycles.forget(p)
            self.forgotten += 1  # last, so that no listener takes what is being forgotten for news

        inbox.built, inbox.forgotten = cycles.add, forget
        return _Channel(inbox, cycles)

    def arrivals(self, *, consistent: bool) -> list[Arrival]:
        """Return the newest version of all fragments, in order; an empty list before the first one."""
        found = [channel.cycles.arrivals(consistent=consistent) for channel in self._channels]
        arrivals = [arrival for of_shard in found for arrival in of_shard]
        return sorted(arrivals, key=lambda arrival: arrival.snapshot.fragment) if all(found) else []

    def stop(self) -> None:
        """End the threads and the connection."""
        self.pumps.stop()
        self._primary.close()

    def _receive(self, shard: int, block_seconds: float | None = None) -> None:
        inbox = self._channels[shard].inbox
        try:
            if shard in self._joined:
                inbox.pump(BLOCK_SECONDS if block_seconds is None else block_seconds)
            else:
                inbox.join()
                self._joined.add(shard)
        finally:
            inbox.take()  # a listener does nothing at events
            with self.changed:
                self.changed.notify_all()

    def _watch(self) -> None:
        """Look how long the run is, and whether it is over."""
        reader = self._transport.reader
        if (uid := reader.uid()) not in (None, self.manifest.uid):
            require_same_run(reader, self.manifest)
        if uid is not None:  # a Redis without the run has no requests either
            self._steps = run_steps(self.manifest.config, reader.control(), self._steps)
        for channel in self._channels:
            channel.inbox.run_steps = self._steps
        is_done = max(channel.inbox.step for channel in self._channels) >= self._steps
        if not is_done or lacking(self._transport, self.manifest, {}, is_over=True):
            return
        held = [arrival.snapshot.version for arrival in self.arrivals(consistent=False)]
        self.is_over = held == [head.version if head else -1 for head in reader.heads()]
        with self.changed:
            self.changed.notify_all()


class Listener:
    """Yields the versions of a run's parameters as they are published, and ends with the run.

    Versions that come while the caller works are skipped but for the newest. Leave it with `close`, or use it as a
    context manager.
    """

    def __init__(
        self, receiver: Receiver, fill: Callable[[Mapping[str, Any]], Any], *, consistent: bool = True
    ) -> None:
        """Begin before the first version.

        Args:
            receiver: Receives the run's parameters. `close` stops it.
            fill: Brings parameters by name, float32, to the form that the caller uses.
            consistent: Whether versions are those after a whole cycle of rounds, which each shard has of its own.
                Otherwise each new version of a fragment makes one. The last version of a finished run has all rounds.
        """
        self._receiver, self._fill, self._consistent = receiver, fill, consistent
        self._order = (0, -1)
        self.close = weakref.finalize(self, receiver.stop)

    def newest(self) -> Version | None:
        """Return the newest version without waiting; None if there is none that was not returned before.

        Raises:
            ConfigError: Another run has the name of this one (`island.other-run`).
            BrokerError: The credentials are refused again and again (`broker.access`).
        """
        if self._receiver.pumps.failure is not None:
            raise self._receiver.pumps.failure from None
        found, order = self._found()
        if order <= self._order:
            return None
        self._order = order
        named = self._receiver.manifest.named([arrival.params_N for arrival in found])
        return Version(order[1], max(arrival.snapshot.step for arrival in found), self._fill(named))

    def __iter__(self) -> Iterator[Version]:
        return self

    def __next__(self) -> Version:
        """Wait for the next version. Raises what `newest` raises."""
        while True:
            is_over = self._receiver.is_over or not self.close.alive
            if (found := self.newest()) is not None:
                return found
            if is_over:
                self.close()
                raise StopIteration
            with self._receiver.changed:
                self._receiver.changed.wait_for(self._has_news, BLOCK_SECONDS)

    def _found(self) -> tuple[list[Arrival], tuple[int, int]]:
        """Return the newest arrivals, and what grows with each version: `Receiver.forgotten`, and their rounds."""
        forgotten = self._receiver.forgotten
        found = self._receiver.arrivals(consistent=self._consistent and not self._receiver.is_over)
        return found, (forgotten, sum(arrival.snapshot.version for arrival in found)) if found else (0, -1)

    def _has_news(self) -> bool:
        receiver = self._receiver
        return receiver.is_over or receiver.pumps.failure is not None or self._found()[1] > self._order

    @property
    def manifest(self) -> Manifest:
        """The run."""
        return self._receiver.manifest

    @property
    def bytes_down(self) -> int:
        """How many bytes of parameters were downloaded."""
        return self._receiver.uplink.bytes_down

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
