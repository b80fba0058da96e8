"""The queues between an island and one shard of its run. Outside, fragments and rounds are those of the run.

The inbox and the outbox see the shard as a run of its own (`broker.shards.layout`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Contribution, Event
from archipelago.broker.transport import IslandTransport
from archipelago.islands.sync.connection.inbox import Inbox
from archipelago.islands.sync.connection.outbox import Draft, Outbox, Published
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
        self.inbox = Inbox(transport, manifest.of_shard(shard), self.outbox, uplink, clock)

    # -- sending --------------------------------------------------------------------------------------------------

    def send(self, draft: Draft) -> None:
        """Queue a contribution."""
        header = draft.header
        own = self._layout.place(header.fragment)[1]
        header = replace(header, round=self._layout.own_round(header.round), fragment=own)
        self.outbox.queue(replace(draft, header=header))

    def resume(self, in_flight: Sequence[Published]) -> None:
        """Send those contributions of an earlier incarnation again that belong to this shard."""
        mine = [
            replace(each, contribution=self._layout.in_shard(each.contribution))
            for each in in_flight
            if self._layout.place(each.contribution.fragment)[0] == self.shard
        ]
        self.outbox.resume(mine)

    def in_flight(self, marker: int) -> tuple[list[Published], list[Draft]]:
        """Return the contributions that were undecided at that marker, and the queue."""
        published, drafts = self.outbox.in_flight(marker)
        sent = [replace(each, contribution=self._in_run(each.contribution)) for each in published]
        fragments = self._layout.fragments[self.shard]
        queued = [
            replace(
                draft,
                header=replace(
                    draft.header,
                    round=self._layout.run_round(self.shard, draft.header.round),
                    fragment=fragments[draft.header.fragment],
                ),
            )
            for draft in drafts
        ]
        return sent, queued

    def _in_run(self, contribution: Contribution) -> Contribution:
        return self._layout.in_run(self.shard, contribution)

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
        return [self._arrival(arrival) for arrival in self.inbox.join()]

    def take(self) -> tuple[list[Event], list[Arrival]]:
        """Return the events since the last call in order, and the newest snapshot of each fragment."""
        events, arrivals = self.inbox.take()
        return (
            [self._layout.event_in_run(self.shard, event) for event in events],
            [self._arrival(arrival) for arrival in arrivals],
        )

    def held(self) -> dict[int, Arrival]:
        """Return the newest snapshot of each fragment as it was published; none if one is not held."""
        return {arrival.snapshot.fragment: arrival for arrival in map(self._arrival, self.inbox.snapshots.all_held())}

    def _arrival(self, arrival: Arrival) -> Arrival:
        return replace(arrival, snapshot=self._layout.in_run(self.shard, arrival.snapshot))
