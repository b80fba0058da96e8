"""A run for tests of the link: a broker in memory whose calls can fail or hang, and a merger that the test acts."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from archipelago.broker.commits import Commit
from archipelago.broker.full_state import Compaction
from archipelago.broker.manifest import Manifest
from archipelago.broker.memory.transport import MemoryBroker
from archipelago.broker.messages import Call, Contribution, Event, Marker, Refusal, Resume, Snapshot
from archipelago.broker.transport import Memory, Transport
from archipelago.broker.wire import pack
from archipelago.islands.data.batches import range_order
from archipelago.islands.sync.connection.downloads import Arrival
from archipelago.islands.sync.connection.link import Link
from archipelago.islands.sync.connection.outbox import Draft
from tests import samples
from tests.intercept import Intercepted

#: Elements of each fragment of the sample run.
SIZE = 32
#: The calls that fail in an outage, or hang.
REACHING = frozenset({"publish", "holds", "heartbeat", "lease_range", "memory", "events", "fragment"})
Act = Callable[[], object]
Announced = TypeVar("Announced", Call, Resume, Marker)


def ranges_of(manifest: Manifest) -> list[str]:
    """Return the ranges of a run's text in the order of preference of an island."""
    return range_order(manifest.config.data.shards, manifest.config.seed)


class FaultyTransport(Intercepted):
    """A transport whose calls the test can make hang, fail, or do more work.

    Attributes:
        outage: The error of the calls in `failing`; None if they succeed.
        before: What happens before the next call of that name, once.
        after: What happens after the next call of that name, once.
        calls: How many calls of each name were made.
        room: The broker's answer to `memory`; None for the real answer.
        damaged_fragments: How many of the next downloads are damaged.
    """

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.unblocked = threading.Event()
        self.unblocked.set()
        self.outage: Exception | None = None
        self.failing = REACHING
        self.hanging = 0
        self.lock = threading.Lock()
        self.before: dict[str, Act] = {}
        self.after: dict[str, Act] = {}
        self.calls: Counter[str] = Counter()
        self.room: Memory | None = None
        self.damaged_fragments = 0

    def intercept(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.calls[name] += 1
        if name in REACHING and not self.unblocked.is_set():
            with self.lock:
                self.hanging += 1
            self.unblocked.wait()
        if name in self.failing and self.outage is not None:
            raise self.outage
        if act := self.before.pop(name, None):
            act()
        answer = method(*args, **kwargs)
        if act := self.after.pop(name, None):
            act()
        if name == "memory":
            return self.room or answer
        if name == "fragment" and self.damaged_fragments:
            self.damaged_fragments -= 1
            return answer[0], answer[1][:-1] + b"?"
        return answer


def raising(error: Exception) -> Act:
    """Return a function that raises an error."""

    def act() -> None:
        raise error

    return act


class Harness:
    """A broker with a run. The test acts as the merger."""

    def __init__(self, manifest: Manifest, snapshots: Sequence[tuple[Snapshot, bytes]]) -> None:
        self.manifest = manifest
        self.broker = MemoryBroker()
        self.transport = self.broker.connect(manifest.run)
        self.transport.create(manifest, snapshots)
        self.epoch = self.transport.merger.acquire("merger", 1e6) or 0
        self.transports: list[FaultyTransport] = []
        self.links: list[Link] = []
        #: How far the clock of the links is ahead, in seconds.
        self.ahead = 0.0

    @property
    def stored(self) -> Any:
        """The run as the broker has it."""
        return self.broker.runs[self.manifest.run]

    def link(self, who: str = "a/x", ranges: Sequence[str] | None = None) -> Link:
        """Return the link of an island that has joined."""
        link = self.new_link(who, ranges)
        link.join()
        return link

    def new_link(self, who: str = "a/x", ranges: Sequence[str] | None = None) -> Link:
        """Return the link of an island that has not joined yet."""
        faulty = FaultyTransport(self.broker.connect(self.manifest.run))
        wanted = ranges_of(self.manifest) if ranges is None else ranges
        link = Link(faulty, self.manifest, who, wanted, lambda: time.monotonic() + self.ahead)
        self.transports.append(faulty)
        self.links.append(link)
        return link

    @property
    def faulty(self) -> FaultyTransport:
        return self.transports[-1]

    def announce(self, event: Announced) -> Announced:
        self.transport.merger.announce(self.epoch, event)
        return event

    def call(self, number: int) -> Call:
        return self.announce(Call(number, (number - 1) % 2))

    def resume(self, number: int) -> Resume:
        return self.announce(Resume(number, self.epoch))

    def close(self, number: int, value: float, *merged: Contribution) -> Snapshot:
        """Close a round that sets all elements of its fragment to `value`."""
        payload = pack(np.full(SIZE, value, np.float32), "float32", 1)
        plain = samples.commit([], payload, number)
        snapshot = replace(plain.snapshot, fragment=(number - 1) % 2, merged=" ".join(c.identity_text for c in merged))
        entries = [d.entry for d in self.deliveries() if d.contribution in merged]
        members = tuple(
            replace(plain.tape.members[0], island=c.island, incarnation=c.incarnation, sequence=c.sequence)
            for c in merged
        )
        tape = replace(plain.tape, fragment=snapshot.fragment, members=members)
        self.transport.merger.commit(self.epoch, Commit(snapshot, Compaction(snapshot, payload), "{}", tape, entries))
        return snapshot

    def lose_rounds(self, after: int) -> None:
        """Lose the newest rounds, as a failover may. What they merged waits again."""
        for entry in (entry for entry in self.stored.tape if entry.round > after):
            for name in [name for name, kept in self.stored.kept.items() if kept.contribution.round == entry.round]:
                self.stored.updates[name] = self.stored.kept.pop(name)
        self.stored.tape = [entry for entry in self.stored.tape if entry.round <= after]

    def refuse(self, contribution: Contribution, *, repeat: bool = False) -> None:
        c = contribution
        refusal = Refusal(c.island, c.incarnation, c.sequence, c.round, c.fragment, c.tokens, "no", repeat)
        entry = next(d.entry for d in self.deliveries() if d.contribution == contribution)
        samples.refuse(self.transport, self.epoch, [(entry, refusal)])

    def deliveries(self) -> list[Any]:
        """Return all undecided contributions."""
        self.transport.merger.rewind()
        return list(self.transport.merger.updates(0.0))

    def published(self) -> list[Contribution]:
        return [delivery.contribution for delivery in self.deliveries()]

    def rounds(self) -> list[int]:
        """Return the rounds of all undecided contributions."""
        return [contribution.round for contribution in self.published()]

    def forget(self, entry: str) -> None:
        """Lose an acknowledged entry, as a crashed server may."""
        del self.stored.updates[entry]

    def end(self) -> None:
        """End all hanging calls and threads."""
        for faulty in self.transports:
            faulty.outage = None
            faulty.unblocked.set()
        for link in self.links:
            link.pumps.stop(30.0)
            assert not any(thread.is_alive() for thread in link.pumps.threads)


def draft(number: int) -> Draft:
    """Return a contribution to a round. Each element is the number of the round."""
    header = samples.contribution(round=number, fragment=(number - 1) % 2, sequence=number, bytes=0, digest="")
    return Draft(header, (jnp.full(SIZE, float(number), jnp.float32),), SIZE)


def send(link: Link, *numbers: int) -> None:
    """Send contributions to these rounds."""
    for number in numbers:
        link.send(draft(number))
    link.pump()


def received(link: Link) -> tuple[list[Event], list[Arrival]]:
    """Return the events and snapshots since the last call."""
    taken = [channel.inbox.take() for channel in link.channels]
    return [event for events, _ in taken for event in events], [each for _, arrivals in taken for each in arrivals]


def arrived(link: Link) -> dict[int, float]:
    """Return the value of each snapshot since the last call, by its round."""
    return {arrival.snapshot.round: float(arrival.params_N[0]) for arrival in received(link)[1]}


def unresolved(link: Link) -> set[int]:
    return link.channels[0].outbox.unresolved_rounds()


def heartbeat(link: Link, state: str = "training") -> None:
    """Send a heartbeat of the link's island, which also renews its leases."""
    island, _, incarnation = link.who.partition("/")
    link.beat(samples.heartbeat(island, state, incarnation=incarnation))
    link.pump_heartbeat()
    link.pump_handovers()
