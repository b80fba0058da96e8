"""The link between an island's training loop and the broker.

The training thread touches only queues in memory. Four pumps do the rest, each with its own thread and
connection: sending, receiving, heartbeats, and optimiser state for newcomers. Each further shard of the run has pumps
of its own that send, receive and beat, so that a shard that is away or hangs holds up no other. In virtual time no
thread is started, and the owner calls `pump` instead.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from archipelago.broker.errors import BrokerError, WireError
from archipelago.broker.manifest import Manifest
from archipelago.broker.presence import Heartbeat
from archipelago.broker.ranges import ReadPosition
from archipelago.broker.shards.transport import shards_of
from archipelago.broker.transport import IslandTransport
from archipelago.islands.sync.connection.downloads import Arrival
from archipelago.islands.sync.connection.heartbeats import Channel, Heartbeats
from archipelago.islands.sync.connection.inbox import Inbox
from archipelago.islands.sync.connection.leases import IslandLeases
from archipelago.islands.sync.connection.outbox import Draft, Outbox
from archipelago.islands.sync.measures import Uplink
from archipelago.islands.sync.recovery import Giver, StateForPeer

BLOCK_SECONDS = 1.0
HEARTBEAT_SECONDS = 1.0
#: How often an island looks for newcomers. They wait for its answer.
HELP_SECONDS = 0.2
#: How many fragments that cannot be read a heartbeat names.
UNREADABLE_TOLD = 64
#: Seconds between two attempts, by the number of failures in a row.
RETRY_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0)
#: After this many refusals of its credentials in a row, about 15 s, an island leaves: they have been revoked.
REFUSALS_MAX = 10
#: The code of such a refusal.
REFUSED = "broker.access"
#: A thread waits so long for Python's lock, at most, while a training loop computes in Python. By default it is 5 ms,
#: for each of the hundreds of operations that take a snapshot apart.
SWITCH_SECONDS = 0.0005

log = logging.getLogger(__name__)


class Link:
    """The queues between one island and its broker.

    Attributes:
        channels: The queues to and from each shard, in order.
        heartbeats: What the island tells the mergers each second, and what it hears then.
        leases: Its leases of ranges of text.
        giver: Gives its inner optimiser state to newcomers.
        unsound: The fragments of contributions that were dropped, because they were not sound.
    """

    def __init__(
        self,
        transport: IslandTransport,
        manifest: Manifest,
        who: str,
        ranges: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Create a link whose threads do not run yet.

        Args:
            who: The island and its incarnation, `NAME/INCARNATION`.
            ranges: The ranges of the text that the island may read, in its order of preference.
        """
        self.transport, self.manifest, self.who, self.clock = transport, manifest, who, clock
        self.uplink = Uplink()
        self.unsound: list[int] = []
        self._joined: dict[int, list[Arrival]] = {}  # of the shards whose fragments could all be read
        self._changed = threading.Condition()
        self.channels = [self._channel(shard, each) for shard, each in enumerate(shards_of(transport))]
        self.heartbeats = Heartbeats(transport, self.channels, manifest, who, self.uplink, clock, wall, self._changed)
        self.leases = IslandLeases(transport, who, ranges)
        self.register_shards = self.leases.register_shards
        self.giver = Giver(transport, who)
        self._sending = [Pump(_named("send", channel), channel.outbox.pump) for channel in self.channels]
        receiving = [
            Pump(_named("receive", each), each.inbox.pump, patient_work=partial(each.inbox.pump, BLOCK_SECONDS))
            for each in self.channels
        ]
        self._beating = Pump("heartbeat", self._beat, wait_seconds=HEARTBEAT_SECONDS)
        self._telling = [
            Pump(_named("heartbeat", channel), partial(self.heartbeats.tell, channel.shard), HEARTBEAT_SECONDS)
            for channel in self.channels[1:]
        ]
        self._helping = Pump("handovers", self.pump_handovers, wait_seconds=HELP_SECONDS)
        pumps = [pump for pair in zip(self._sending, receiving, strict=True) for pump in pair]
        self.pumps = Pumps([*pumps, *self._telling, self._beating, self._helping], self._changed)

    def _channel(self, shard: int, transport: IslandTransport) -> Channel:
        outbox = Outbox(transport, self.manifest.config.wire, self.uplink, self.clock, self._changed, self.unsound)
        inbox = Inbox(transport, self.manifest.of_shard(shard), outbox, self.uplink, self.clock)
        return Channel(shard, transport, outbox, inbox)

    # -- the training thread's side: nothing here waits for the broker ------------------------------------------------

    def send(self, draft: Draft) -> None:
        """Queue a contribution."""
        shard = self.manifest.shard_layout.shard_of(draft.header.round)
        self.channels[shard].outbox.queue(draft)
        self._sending[shard].wake.set()

    @property
    def backlog(self) -> int:
        """The number of contributions that the broker has not taken yet."""
        return sum(len(channel.outbox.queued) for channel in self.channels)

    @property
    def queued_tokens(self) -> int:
        """Tokens of the contributions that the broker has not taken yet."""
        return sum(draft.header.tokens for channel in self.channels for draft in list(channel.outbox.queued))

    @property
    def blocked_shards(self) -> frozenset[int]:
        """The shards whose queues are as long as the window."""
        window = self.manifest.config.sync.window
        return frozenset(channel.shard for channel in self.channels if len(channel.outbox.queued) >= window)

    @property
    def unreadable(self) -> str:
        """The fragments whose newest version could not be read, as a heartbeat names them."""
        found = sorted(p for channel in self.channels for p in list(channel.inbox.unreadable))
        return " ".join(map(str, found[:UNREADABLE_TOLD]))

    @property
    def heard_round(self) -> int:
        """The newest round of any shard whose close was announced."""
        return max(channel.inbox.heard_round for channel in self.channels)

    def all_held(self) -> list[Arrival]:
        """Return the newest snapshot of every fragment as it was published; an empty list if one is not held."""
        held = [arrival for channel in self.channels for arrival in list(channel.inbox.held.values())]
        return _in_order(held) if len(held) == len(self.manifest.fragments) else []

    def hand_over(self, state: StateForPeer) -> None:
        """Queue inner optimiser state for a newcomer."""
        self.giver.hand_over(state)
        self._helping.wake.set()

    def lease(self, *, asks: bool = False) -> ReadPosition | None:
        """Return the next leased range, if any; `asks` waits for the broker. The heartbeat thread leases another."""
        if asks:
            try:
                if self.heartbeats.newest is not None:  # frees the ranges of an earlier incarnation
                    self.transport.island.heartbeat(self.heartbeats.newest)
                self.leases.pump()
            except BrokerError as error:
                log.debug("no range was leased: %s", error.what)
        place = self.leases.take()
        if place is not None:
            self._beating.wake.set()
        return place

    def offer(self, ranges: Sequence[str]) -> None:
        """Set the ranges that the island may read, in its order of preference, and let one of them be leased."""
        self.leases.ranges, self.leases.is_used = list(ranges), True
        self._beating.wake.set()

    def beat(self, heartbeat: Heartbeat) -> None:
        """Replace the next heartbeat. A change of state is sent at once."""
        if self.heartbeats.replace(heartbeat):
            self._wake_heartbeats()

    def _wake_heartbeats(self) -> None:
        for pump in (*self._telling, self._beating):
            pump.wake.set()

    def join(self) -> list[Arrival]:
        """Return all fragments as they are now. Later events are received from here on.

        Raises:
            ConfigError: The operator has excluded this island.
            BrokerError: The broker cannot be reached.
            WireError: A fragment cannot be read (`wire.fragment`). The mergers are told, and write it again. Another
                call fetches only what could not be read.
        """
        self.heartbeats.claim_name()
        fault: WireError | None = None
        for channel in (each for each in self.channels if each.shard not in self._joined):
            try:
                self._joined[channel.shard] = channel.inbox.join()
            except WireError as error:
                fault = fault or error
        if fault is not None:
            self.heartbeats.tell_unreadable(self.unreadable)
            raise fault
        arrivals = _in_order([arrival for joined in self._joined.values() for arrival in joined])
        self._joined.clear()
        self.heartbeats.begin()
        return arrivals

    # -- pumps --------------------------------------------------------------------------------------------------------

    def pump_receive(self) -> None:
        for channel in self.channels:
            channel.inbox.pump()

    def pump_heartbeat(self) -> None:
        """Send the heartbeat to all shards and the notes, and renew leases."""
        for channel in self.channels[1:]:
            self.heartbeats.tell(channel.shard)
        self._beat()

    def _beat(self) -> None:
        self.heartbeats.beat()
        if self.leases.is_used and self.heartbeats.is_heard:
            self.leases.pump()

    def pump_handovers(self) -> None:
        """Look for newcomers who ask for inner optimiser state, and hand it over to those who were promised it."""
        if not self.giver.is_willing:
            return
        beats = self.heartbeats
        if beats.is_heard and beats.newest is not None and beats.newest.state == "training":
            self.giver.offer()
        self.giver.pump()

    def pump(self) -> None:
        """Run each pump once in the calling thread."""
        self.pumps.run_once()

    # -- threads ------------------------------------------------------------------------------------------------------

    def drain(self, seconds: float) -> bool:
        """Wait up to `seconds` until everything queued and the newest heartbeat are sent; return whether they were."""
        self._wake_heartbeats()
        self._await(lambda: self._is_drained, seconds)
        return self._is_drained

    def await_decisions(self, seconds: float) -> int:
        """Wait up to `seconds` for the merger to decide about everything sent. Return how many contributions are left.

        The island lives meanwhile, so the merger of a finished run stays.
        """
        outboxes = [channel.outbox for channel in self.channels]
        self._await(lambda: not any(outbox.unresolved_rounds() for outbox in outboxes), seconds)
        return sum(len(outbox.unresolved_rounds()) for outbox in outboxes)

    def _await(self, holds: Callable[[], bool], seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: holds() or self.pumps.failure is not None, seconds)

    @property
    def _is_drained(self) -> bool:
        return (self.heartbeats.is_replaced or not self.backlog) and self.heartbeats.is_told


def _in_order(arrivals: Sequence[Arrival]) -> list[Arrival]:
    return sorted(arrivals, key=lambda arrival: arrival.snapshot.fragment)


def _named(what: str, channel: Channel) -> str:
    return f"{what}-{channel.shard}" if channel.shard else what


# -- work on threads of its own, repeated after outages ----------------------------------------------------------------


@dataclass
class Pump:
    """One kind of work.

    Attributes:
        work: Does everything that is pending, without waiting for more.
        wait_seconds: How long its thread rests between two calls unless it is woken; None rests until it is woken.
        patient_work: Called by its thread instead of `work`; it may wait for more work.
        wake: Set this to wake the thread.
        trouble: Its last error, until a call succeeds.
        refusals: How many calls in a row were refused for their credentials.
    """

    name: str
    work: Callable[[], None]
    wait_seconds: float | None = None
    patient_work: Callable[[], None] | None = None
    wake: threading.Event = field(default_factory=threading.Event)
    trouble: str = ""
    refusals: int = 0


class Pumps:
    """The pumps of one island. After an outage they retry forever. Any other error stops them and is kept in `failure`.

    Credentials that the broker refuses again and again are no outage.

    Attributes:
        failure: An error that a retry cannot fix. The island stops on it.
    """

    def __init__(
        self, pumps: Sequence[Pump], changed: threading.Condition, meanwhile: str = "training continues"
    ) -> None:
        """Create pumps that do not run yet; `changed` is notified of a failure. `meanwhile` is for log messages."""
        self._pumps, self._meanwhile = pumps, meanwhile
        self._changed = changed
        self.failure: Exception | None = None
        self._stopping = threading.Event()
        self.threads: list[threading.Thread] = []

    @property
    def trouble(self) -> str:
        """The last error of any failing pump; empty if none fails."""
        return next((pump.trouble for pump in self._pumps if pump.trouble), "")

    def run_once(self) -> None:
        """Run each pump once in the calling thread, without waiting. After an outage, pending work is kept."""
        for pump in self._pumps:
            self._attempt(pump, pump.work)

    def start(self) -> None:
        """Start one thread for each pump."""
        sys.setswitchinterval(min(SWITCH_SECONDS, sys.getswitchinterval()))
        for pump in self._pumps:
            thread = threading.Thread(target=self._keep_pumping, args=(pump,), name=f"link-{pump.name}", daemon=True)
            thread.start()
            self.threads.append(thread)

    def stop(self, seconds: float = 5.0) -> None:
        """End the threads within `seconds`. A thread that hangs in a call is left behind and ends with the process.

        Python ends such a thread wherever it is, and in the middle of PyTorch's code that aborts the process.
        """
        self._stopping.set()
        for pump in self._pumps:
            pump.wake.set()
        deadline = time.monotonic() + seconds
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _keep_pumping(self, pump: Pump) -> None:
        failures = 0
        while not self._stopping.is_set():
            if self._attempt(pump, pump.patient_work or pump.work):
                failures = 0
                if pump.patient_work is None:
                    pump.wake.wait(pump.wait_seconds)
                    pump.wake.clear()
            else:
                self._stopping.wait(RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)])
                failures += 1

    def _attempt(self, pump: Pump, work: Callable[[], None]) -> bool:
        try:
            work()
        except (BrokerError, WireError) as error:
            if not self.trouble and not self._stopping.is_set():  # the owner may have closed the connection
                log.warning("the link is down, %s: %s", self._meanwhile, error.what)
            pump.trouble = error.what[:500]
            pump.refusals = pump.refusals + 1 if error.code == REFUSED else 0
            if pump.refusals >= REFUSALS_MAX:
                self._fail(error)
            return False
        except Exception as error:  # noqa: BLE001 - the island raises it, so that no thread dies unnoticed
            self._fail(error)
            return False
        was_in_trouble, pump.trouble, pump.refusals = bool(pump.trouble), "", 0
        if was_in_trouble and not self.trouble:
            log.info("the link is up again")
        return True

    def _fail(self, error: Exception) -> None:
        self.failure = error
        self._stopping.set()
        with self._changed:
            self._changed.notify_all()
