"""What a new incarnation of an island takes over: inner optimiser state from a peer, and the totals of its name."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from archipelago.broker.errors import BrokerError, WireError
from archipelago.broker.transport import IslandTransport
from archipelago.islands.sync import recovery
from archipelago.islands.sync.participant import Participant
from archipelago.islands.sync.progress import Totals

#: The largest total that an island takes over from its last heartbeat.
TOTAL_MAX = 1 << 60

log = logging.getLogger(__name__)


class Newcomer:
    """The start of one incarnation. Call `ask` before its first heartbeat, and the rest after compilation."""

    def __init__(
        self,
        transport: IslandTransport,
        island: Participant,
        seconds: float = recovery.ASK_SECONDS,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """Store the parts; this contacts no peer.

        Args:
            transport: The connection to the broker.
            island: The island.
            seconds: How long `received` waits for a peer's answer.
            pause: Sleeps for some seconds.
        """
        self.transport, self.island = transport, island
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

    def received(self, decode: recovery.Decode) -> recovery.Received | None:
        """Wait for a peer's state if one was asked, and return it; None if there is none that can be used."""
        if not self._asked:
            return None
        island = self.island
        try:
            return recovery.receive(
                self.transport, self.who, decode, lambda: island.beat("joining"), self.seconds, island.clock, self.pause
            )
        except (BrokerError, WireError) as error:
            log.warning("no optimiser state from a peer: %s", error.what)
            return None

    def withdraw(self) -> None:
        """Withdraw the request to the peers."""
        try:
            if self._asked:
                self.transport.island.withdraw_request(self.who)
        except BrokerError as error:
            log.warning("the request to the peers could not be withdrawn: %s", error.what)

    def count_earlier(self) -> None:
        """Continue the totals of earlier incarnations. What they did and lost was trained, too."""
        totals = self.island.totals
        totals.steps, totals.tokens = max(totals.steps, self._before.steps), max(totals.tokens, self._before.tokens)
