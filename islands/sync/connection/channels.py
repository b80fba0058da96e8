"""The channels of an island to the shards of its run. Outside, fragments and rounds are those of the run.

The inbox and the outbox see a shard as a run of its own (`broker.shards.layout`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Event
from archipelago.broker.transport import IslandTransport
from archipelago.islands.sync.connection.inbox import Announcements
from archipelago.islands.sync.connection.outbox import Draft, Outbox
from archipelago.islands.sync.connection.snapshots import Arrival
from archipelago.islands.sync.connection.uplink import Uplink


class Channel:
    """What one island sends to one shard, and what it gets from there.

    Args:
        transport: The connection to the shard.
        manifest: The manifest of the run.
        shard: The number of the shard.
        uplink: Measures of the island's link.
        clock: Monotonic seconds.
        changed: Notified each time a contribution has left the queue.
    """

    def __init__(
        self,
        transport: IslandTransport,
        manifest: Manifest,
        shard: int,
        uplink: Uplink,
        clock: Callable[[], float],
        changed: threading.Condition,
    ) -> None:
        self.transport, self.shard = transport, shard
        self._layout = manifest.shard_layout
        self.outbox = Outbox(transport, manifest.config.wire, uplink, clock, changed)
        self.inbox = Announcements(transport, manifest.of_shard(shard), self.outbox, uplink, clock)

    # -- sending --------------------------------------------------------------------------------------------------

    def send(self, draft: Draft) -> None:
        """Queue a contribution."""
        header = draft.header
        own = self._layout.place(header.fragment)[1]
        header = replace(header, round=self._layout.own_round(header.round), fragment=own)
        self.outbox.queue(replace(draft, header=header))

    @property
    def unsound(self) -> list[int]:
        """The fragments of contributions that were dropped, because they were not sound."""
        return [self._layout.fragments[self.shard][own] for own in self.outbox.unsound]

    def unresolved_rounds(self) -> set[int]:
        """Return the rounds of all contributions that are queued, or not decided yet."""
        return {self._layout.run_round(self.shard, number) for number in self.outbox.unresolved_rounds()}

    # -- receiving ------------------------------------------------------------------------------------------------

    def join(self) -> list[Arrival]:
        """Fetch all fragments of the shard. Later events are received from here on."""
        return [self.arrival(arrival) for arrival in self.inbox.join()]

    def take(self) -> tuple[list[Event], list[Arrival]]:
        """Return the events since the last call in order, and the newest snapshot of each fragment."""
        events, arrivals = self.inbox.take()
        return (
            [self._layout.event_in_run(self.shard, event) for event in events],
            [self.arrival(arrival) for arrival in arrivals],
        )

    def arrival(self, arrival: Arrival) -> Arrival:
        """Return an arrival of the shard as one of the run."""
        return replace(arrival, snapshot=self._layout.in_run(self.shard, arrival.snapshot))


class Channels(tuple[Channel, ...]):
    """The channel to each shard, in order."""

    def __new__(cls, manifest: Manifest, channels: Sequence[Channel]) -> Channels:
        """Hold the channels to the shards of the run with that manifest."""
        return super().__new__(cls, channels)

    def __init__(self, manifest: Manifest, channels: Sequence[Channel]) -> None:
        self._manifest, self._layout = manifest, manifest.shard_layout

    def send(self, draft: Draft) -> int:
        """Queue a contribution, and return the shard that it is for."""
        shard = self._layout.place(draft.header.fragment)[0]
        self[shard].send(draft)
        return shard

    def take(self) -> tuple[list[tuple[int, Event]], list[Arrival]]:
        """Return the events since the last call, each with its shard, and the newest snapshot of each fragment."""
        events, arrivals = [], []
        for channel in self:
            heard, arrived = channel.take()
            events += [(channel.shard, event) for event in heard]
            arrivals += arrived
        return events, arrivals

    def join(self) -> list[Arrival]:
        """Fetch all fragments, in order. Later events are received from here on."""
        arrivals = [arrival for channel in self for arrival in channel.join()]
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
        return sum(len(channel.unresolved_rounds()) for channel in self)

    @property
    def heard_round(self) -> int:
        """The newest round of any shard whose close was announced."""
        return max(self._layout.run_round(channel.shard, channel.inbox.heard_round) for channel in self)

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
        return [fragment for channel in self for fragment in channel.unsound]

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
        """The fragments of the run whose newest version could not be read, in order."""
        of_shards = self._layout.fragments
        return sorted(of_shards[channel.shard][p] for channel in self for p in list(channel.inbox.unreadable))

    @property
    def arrived_at(self) -> float:
        """When the last snapshot arrived."""
        return max(channel.inbox.arrived_at for channel in self)

    def all_held(self) -> list[Arrival]:
        """Return the newest snapshot of every fragment as it was published; an empty list if one is not held."""
        held = [channel.arrival(each) for channel in self for each in list(channel.inbox.snapshots.held.values())]
        in_order = sorted(held, key=lambda arrival: arrival.snapshot.fragment)
        return in_order if len(held) == self._layout.count else []
