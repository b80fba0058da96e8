"""The channels of an island to all shards of its run, and what they add up to."""

from __future__ import annotations

from collections.abc import Sequence

from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Event
from archipelago.islands.sync.connection.channel import Channel
from archipelago.islands.sync.connection.outbox import Draft, Published
from archipelago.islands.sync.connection.snapshots import Arrival


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
    def ignored(self) -> int:
        """The number of announcements that were ignored."""
        return sum(channel.inbox.ignored for channel in self)

    @property
    def arrived_at(self) -> float:
        """When the last snapshot arrived."""
        return max(channel.inbox.arrived_at for channel in self)

    def unresolved_rounds(self, shard: int) -> set[int]:
        """Return the rounds of a shard whose contributions are queued, or not decided yet."""
        return self[shard].unresolved_rounds()

    def in_flight(self, marker: int = 0) -> tuple[list[Published], list[Draft]]:
        """Return the contributions that were undecided at the mergers' checkpoint `marker`, and the queue."""
        found = [channel.in_flight(marker) for channel in self]
        return [each for sent, _ in found for each in sent], [draft for _, queued in found for draft in queued]

    def passed_marker(self, shard: int, number: int) -> None:
        """Forget the contributions that were undecided at a shard's marker, which the training loop has passed."""
        self[shard].outbox.passed(number)

    def all_held(self) -> list[Arrival]:
        """Return the newest snapshot of every fragment as it was published; an empty list if one is not held."""
        held = {p: arrival for channel in self for p, arrival in channel.held().items()}
        return [held[p] for p in sorted(held)] if len(held) == self._layout.count else []
