"""The channels of an island: one to each shard of its run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Event
from archipelago.broker.transport import IslandTransport
from archipelago.islands.sync.connection.inbox import Announcements
from archipelago.islands.sync.connection.outbox import Outbox
from archipelago.islands.sync.connection.snapshots import Arrival
from archipelago.islands.sync.connection.uplink import Uplink


class Channel(NamedTuple):
    """What one island sends to one shard, and what it gets from there."""

    shard: int
    transport: IslandTransport
    outbox: Outbox
    inbox: Announcements


class Channels(list[Channel]):
    """The channel to each shard, in order.

    Args:
        manifest: The manifest of the run.
        transports: The connection to each shard.
        uplink: Measures of the island's link.
        clock: Monotonic seconds.
        changed: Notified each time a contribution has left a queue.
    """

    def __init__(
        self,
        manifest: Manifest,
        transports: Sequence[IslandTransport],
        uplink: Uplink,
        clock: Callable[[], float],
        changed: threading.Condition,
    ) -> None:
        self._manifest = manifest
        for shard, transport in enumerate(transports):
            outbox = Outbox(transport, manifest.config.wire, uplink, clock, changed)
            inbox = Announcements(transport, manifest.of_shard(shard), outbox, uplink, clock)
            self.append(Channel(shard, transport, outbox, inbox))

    def take(self) -> tuple[list[tuple[int, Event]], list[Arrival]]:
        """Return the events since the last call, each with its shard, and the newest snapshot of each fragment."""
        events, arrivals = [], []
        for channel in self:
            heard, arrived = channel.inbox.take()
            events += [(channel.shard, event) for event in heard]
            arrivals += arrived
        return events, arrivals

    def join(self) -> list[Arrival]:
        """Fetch all fragments, in order. Later events are received from here on."""
        arrivals = [arrival for channel in self for arrival in channel.inbox.join()]
        return sorted(arrivals, key=lambda arrival: arrival.snapshot.fragment)

    @property
    def backlog(self) -> int:
        """The number of contributions that the broker has not taken yet."""
        return sum(len(channel.outbox) for channel in self)

    def blocked_shards(self) -> frozenset[int]:
        """Return the shards whose queues are as long as the window."""
        window = self._manifest.config.sync.window
        return frozenset(channel.shard for channel in self if len(channel.outbox) >= window)

    @property
    def undecided(self) -> int:
        """The number of contributions that the merger has neither merged nor refused yet."""
        return sum(len(channel.outbox.unresolved_rounds()) for channel in self)

    @property
    def heard_round(self) -> int:
        """The newest round of any shard whose close was announced."""
        return max(channel.inbox.heard_round for channel in self)

    @property
    def sent(self) -> int:
        """The number of contributions that were sent."""
        return sum(channel.outbox.sent for channel in self)

    @property
    def queued_tokens(self) -> int:
        """Tokens of the contributions that the broker has not taken yet."""
        return sum(channel.outbox.queued_tokens for channel in self)

    @property
    def unsound(self) -> list[int]:
        """The fragments of contributions that were dropped, because they were not sound."""
        return [fragment for channel in self for fragment in channel.outbox.unsound]

    @property
    def bytes_up(self) -> int:
        """Bytes of all sent payloads."""
        return sum(channel.outbox.bytes_up for channel in self)

    @property
    def bytes_down(self) -> int:
        """Bytes of all downloaded payloads."""
        return sum(channel.inbox.snapshots.bytes_down for channel in self)

    @property
    def unreadable(self) -> list[int]:
        """The fragments whose newest version could not be read, in order."""
        return sorted(p for channel in self for p in list(channel.inbox.unreadable))

    @property
    def arrived_at(self) -> float:
        """When the last snapshot arrived."""
        return max(channel.inbox.arrived_at for channel in self)

    def all_held(self) -> list[Arrival]:
        """Return the newest snapshot of every fragment as it was published; an empty list if one is not held."""
        held = [arrival for channel in self for arrival in list(channel.inbox.snapshots.held.values())]
        in_order = sorted(held, key=lambda arrival: arrival.snapshot.fragment)
        return in_order if len(held) == len(self._manifest.fragments) else []
