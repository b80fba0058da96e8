"""How an island begins: as it was when the whole run goes back to a checkpoint, or with inner optimiser state from a
peer, from its own checkpoint, or fresh; in this order.

Parameters come from the merger in all cases but the first, so that nothing is counted twice and no fresh or old
island ever becomes the truth. The learning rate follows the global step that the merger stamps, and the text is read
on from the cursors in Redis.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from archipelago.broker.errors import BrokerError, WireError
from archipelago.broker.transport import IslandTransport
from archipelago.islands.checkpoint import Found, IslandStore
from archipelago.islands.inner import require_sound
from archipelago.islands.progress import Totals
from archipelago.islands.sync import recovery
from archipelago.islands.sync.snapshots import Arrival
from archipelago.islands.worker import Island

log = logging.getLogger(__name__)


class Rejoin:
    """One island's beginning. `ask` before the first heartbeat, `complete` when everything is compiled."""

    def __init__(
        self,
        transport: IslandTransport,
        store: IslandStore | None,
        island: Island,
        arrivals: Sequence[Arrival],
        seconds: float = recovery.ASK_SECONDS,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """`seconds`: how long a peer's answer is waited for at the end."""
        self.transport, self.store, self.island = transport, store, island
        self.arrivals = arrivals
        self.seconds, self.pause = seconds, pause
        self._asked = False
        self._before = Totals()
        """what earlier incarnations of this island did, as they said it last"""

    @property
    def who(self) -> str:
        """The island and its incarnation."""
        return f"{self.island.name}/{self.island.incarnation}"

    def ask(self, *, peers: bool = True) -> None:
        """Looks around, and asks the peers if the run has begun: at its beginning fresh moments are right."""
        island = self.island
        try:
            presences = self.transport.reader.presences()
            if peers and island.ledger.global_step and recovery.peers(presences, island.name):
                self.transport.island.ask(self.who)
                self._asked = True
        except BrokerError as error:
            log.warning("no peer can be asked for optimiser state: %s", error.what)
            return
        for beat in (presence.heartbeat for presence in presences):
            if beat.island == island.name and beat.incarnation != island.incarnation:
                self._before = Totals(beat.steps, beat.tokens)

    def complete(self, whole: Found | None) -> None:
        """Brings the island up to where it should begin. `whole`: its checkpoint that the run has gone back to."""
        if whole is not None and self.store is not None and self.store.restore_whole(whole, self.island):
            self._tell(whole)
            self._withdraw()
            self._lease_again()
            for arrival in self.arrivals:
                if arrival.snapshot.version > self.island.ledger.counts[arrival.snapshot.fragment].version:
                    self.island.adopt(arrival)
            return
        from_peer = self._from_peer() if self._asked else None
        if from_peer is not None:
            self.island.take_over(from_peer)
        elif self.store is not None and (found := self.store.restore_moments(self.island)) is not None:
            self._tell(found)
        totals = self.island.totals
        totals.steps, totals.tokens = max(totals.steps, self._before.steps), max(totals.tokens, self._before.tokens)

    def _from_peer(self) -> recovery.Received | None:
        island = self.island
        try:
            return recovery.receive(
                self.transport, self.who, island.inner.optimizer, require_sound, lambda: island.beat("joining"),
                self.seconds, island.clock, self.pause,
            )  # fmt: skip
        except (BrokerError, WireError) as error:
            log.warning("no optimiser state from a peer: %s", error.what)
            return None

    def _tell(self, found: Found) -> None:
        """What an earlier incarnation did before that checkpoint, for the record of the run."""
        try:
            for actions in found.untold:
                self.transport.island.record_actions(actions)
        except (BrokerError, WireError) as error:
            log.warning("the record of the run may have a gap: %s", error.what)

    def _withdraw(self) -> None:
        """Nobody need answer any more."""
        try:
            if self._asked:
                self.transport.island.withdraw(self.who)
        except BrokerError as error:
            log.warning("a peer may answer in vain: %s", error.what)

    def _lease_again(self) -> None:
        """The shards that it was reading, and those whose end is not merged, unless somebody else has them now."""
        batches, link = self.island.batches, self.island.link
        link.leases.hold(batches.held())  # first: else the link leases them as something to read next
        try:
            for place in batches.places():
                self.transport.island.lease_shard([place.shard], self.who)
                ours = self.transport.island.leased([place.shard], self.who)
                pass_number, _ = self.transport.reader.cursors().get(place.shard, (0, 0))
                if not ours or pass_number != place.pass_number:
                    batches.forget([place.shard])
        except BrokerError as error:  # the link will find that they are not ours
            log.warning("shards cannot be leased again: %s", error.what)
        link.leases.hold(batches.held())
