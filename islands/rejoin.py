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

from archipelago.broker.errors import BrokerError, WireError
from archipelago.broker.transport import IslandTransport
from archipelago.islands.checkpoint import Found, IslandStore
from archipelago.islands.inner import moment_bounds, require_sound
from archipelago.islands.sync import recovery
from archipelago.islands.sync.progress import Totals
from archipelago.islands.sync.snapshots import Arrival
from archipelago.islands.sync.state_tree import decode
from archipelago.islands.worker import Island

#: The largest total that an island takes over from its last heartbeat.
TOTAL_MAX = 1 << 60

log = logging.getLogger(__name__)


class Rejoin:
    """The start of one incarnation. Call `ask` before its first heartbeat, and `complete` after compilation."""

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
        self.transport, self.store, self.island = transport, store, island
        self.arrivals = arrivals
        self.seconds, self.pause = seconds, pause
        self._asked = False
        self._before = Totals()  # totals of earlier incarnations, from their last heartbeat

    @property
    def who(self) -> str:
        """The island and its incarnation."""
        return f"{self.island.name}/{self.island.incarnation}"

    def ask(self, *, peers: bool = True) -> None:
        """Look for peers, and ask them for optimiser state unless the run is at its beginning."""
        island = self.island
        try:
            presences = self.transport.reader.presences()
            if peers and island.ledger.global_step and recovery.peers(presences, island.name):
                self.transport.island.request_state(self.who)
                self._asked = True
        except BrokerError as error:
            log.warning("no peer can be asked for optimiser state: %s", error.what)
            return
        for beat in (presence.heartbeat for presence in presences):
            if beat.island == island.name and beat.incarnation != island.incarnation:
                # Anyone may have written this heartbeat. Larger totals could not be reported any more.
                self._before = Totals(min(beat.steps, TOTAL_MAX), min(beat.tokens, TOTAL_MAX))

    def complete(self, whole: Found | None) -> None:
        """Bring the island to its starting state.

        Args:
            whole: The island's checkpoint of the number to which the run has gone back, if the run has.
        """
        if whole is not None and self.store is not None and self.store.restore_whole(whole, self.island):
            self._count_earlier()
            self._send_actions(whole)
            self._withdraw()
            self._lease_again()
            for arrival in self.arrivals:
                if arrival.snapshot.version > self.island.ledger.counts[arrival.snapshot.fragment].version:
                    self.island.adopt(arrival)
            return
        from_peer = self._from_peer() if self._asked else None
        if from_peer is not None:
            self.island.use_state_of_peer(from_peer)
        elif self.store is not None and (found := self.store.restore_moments(self.island)) is not None:
            self._send_actions(found)
        self._count_earlier()

    def _count_earlier(self) -> None:
        """Continue the totals of earlier incarnations. What they did and lost was trained, too."""
        totals = self.island.totals
        totals.steps, totals.tokens = max(totals.steps, self._before.steps), max(totals.tokens, self._before.tokens)

    def _from_peer(self) -> recovery.Received | None:
        island = self.island
        check = partial(require_sound, bounds=moment_bounds(island.config.inner))
        like = island.inner.optimizer
        try:
            return recovery.receive(
                self.transport, self.who, lambda about, payload: decode(about, payload, like, check),
                lambda: island.beat("joining"), self.seconds, island.clock, self.pause,
            )  # fmt: skip
        except (BrokerError, WireError) as error:
            log.warning("no optimiser state from a peer: %s", error.what)
            return None

    def _send_actions(self, found: Found) -> None:
        """Send the actions before a checkpoint that an earlier incarnation may not have sent."""
        try:
            for actions in found.unsent_actions:
                self.transport.island.record_actions(actions)
        except (BrokerError, WireError) as error:
            log.warning("the record of the run may have a gap: %s", error.what)

    def _withdraw(self) -> None:
        """Withdraw the request to the peers."""
        try:
            if self._asked:
                self.transport.island.withdraw_request(self.who)
        except BrokerError as error:
            log.warning("the request to the peers could not be withdrawn: %s", error.what)

    def _lease_again(self) -> None:
        """Lease the restored shards again. Give up those that another island holds by now."""
        batches, link = self.island.batches, self.island.link
        link.leases.hold(batches.held())  # first, because the link would otherwise lease one of them as the next shard
        try:
            for place in batches.places():
                self.transport.island.lease_shard([place.shard], self.who)
                is_ours = self.transport.island.leased([place.shard], self.who)
                pass_number, _ = self.transport.reader.cursors().get(place.shard, (0, 0))
                if not is_ours or pass_number != place.pass_number:
                    batches.forget([place.shard])
        except BrokerError as error:  # the next heartbeat checks the leases
            log.warning("shards cannot be leased again: %s", error.what)
        link.leases.hold(batches.held())
