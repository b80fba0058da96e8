"""Rejoin: bring a new incarnation of an island to its starting state.

If the whole run has gone back to a checkpoint, the island restores its own of the same number. Otherwise its inner
optimiser state comes from a peer, from its own checkpoint, or is fresh, in this order; its parameters come from the
merger, so that no progress counts twice and no outdated island overwrites the run. The learning rate follows the global
step of the merger, and reading continues at the cursors in Redis.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from archipelago.broker.errors import BrokerError
from archipelago.broker.transport import IslandTransport
from archipelago.islands.checkpoint import IslandCheckpoint, IslandStore
from archipelago.islands.inner import require_sound
from archipelago.islands.sync import recovery
from archipelago.islands.sync.arrays import decode_tree
from archipelago.islands.sync.connection.snapshots import Arrival
from archipelago.islands.sync.recovery import Newcomer
from archipelago.islands.worker import Island

log = logging.getLogger(__name__)


class Rejoin(Newcomer):
    """The start of one incarnation of our worker. Call `ask` before its first heartbeat, and `complete` later."""

    island: Island

    def __init__(
        self,
        transport: IslandTransport,
        store: IslandStore | None,
        island: Island,
        arrivals: Sequence[Arrival],
        seconds: float = recovery.ASK_SECONDS,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """Store the parts; this contacts no peer.

        Args:
            transport: The connection to the broker.
            store: The island's own checkpoints, if it keeps any.
            island: The island.
            arrivals: The snapshots with which it was created.
            seconds: How long `complete` waits for a peer's answer.
            pause: Sleeps for some seconds.
        """
        super().__init__(transport, island, seconds, pause)
        self.store, self.arrivals = store, arrivals

    def complete(self, whole: IslandCheckpoint | None) -> None:
        """Bring the island to its starting state.

        Args:
            whole: The island's checkpoint of the number to which the run has gone back, if the run has.
        """
        if whole is not None and self.store is not None and self.store.restore_whole(whole, self.island):
            log.info("the island went back with the run to checkpoint %s", whole.number)
            self.count_earlier()
            self.withdraw()
            self._lease_again()
            for arrival in self.arrivals:
                if arrival.snapshot.version > self.island.ledger.counts[arrival.snapshot.fragment].version:
                    self.island.adopt(arrival)
            return
        from_peer = self._from_peer()
        if from_peer is not None:
            self.island.use_state_of_peer(from_peer)
        elif self.store is not None:
            self.store.restore_moments(self.island)
        self.count_earlier()

    def _from_peer(self) -> recovery.Received | None:
        if not self._asked:
            return None
        check = partial(require_sound, bounds=self.island.moment_bounds)
        like = self.island.computation.optimizer_like()
        return self.received(lambda about, payload: decode_tree(about, payload, like, check))

    def _lease_again(self) -> None:
        """Lease the restored ranges again. Give up those that another island holds by now."""
        batches, link = self.island.batches, self.island.link
        link.leases.hold(batches.held())  # first, because the link would otherwise lease one of them as the next range
        try:
            for position in batches.positions():
                self.transport.island.lease_range([position.range], self.who)
                is_ours = self.transport.island.leased([position.range], self.who)
                pass_number, _ = self.transport.reader.cursors().get(position.range, (0, 0))
                if not is_ours or pass_number != position.pass_number:
                    self.island.forget_ranges(frozenset([position.range]))
        except BrokerError as error:  # the next heartbeat checks the leases
            log.warning("ranges of the text cannot be leased again: %s", error.what)
        link.leases.hold(batches.held())
