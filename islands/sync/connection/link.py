"""The link between an island's training loop and the broker.

The training thread touches only queues in memory. Four pumps do the rest, each with its own thread and
connection: sending, receiving, heartbeats, and optimiser state for newcomers. Each further shard of the run has pumps
of its own that send, receive and beat, so that a shard that is away or hangs holds up no other. In virtual time no
thread is started, and the owner calls `pump` instead.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from archipelago.broker.control import DRAIN, EXPEL, island_field, require_welcome, run_steps
from archipelago.broker.errors import BrokerError, UnreachableError, WireError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import NOTE_MAX, Event, Note
from archipelago.broker.presence import Heartbeat, NameClaim
from archipelago.broker.ranges import ReadPosition
from archipelago.broker.shards.transport import shards_of
from archipelago.broker.transport import IslandTransport
from archipelago.islands.sync import recovery
from archipelago.islands.sync.connection.channels import Channel, Channels
from archipelago.islands.sync.connection.leases import IslandLeases
from archipelago.islands.sync.connection.outbox import Draft
from archipelago.islands.sync.connection.pumps import Pump, Pumps
from archipelago.islands.sync.connection.snapshots import Arrival
from archipelago.islands.sync.connection.uplink import Uplink
from archipelago.islands.sync.connection.watch import MergerWatch, require_same_run
from archipelago.islands.sync.heartbeat import first_heartbeat
from archipelago.islands.sync.recovery import StateForPeer

BLOCK_SECONDS = 1.0
HEARTBEAT_SECONDS = 1.0
#: What a heartbeat says may be this old when it is sent. So an island of short steps need not describe itself at each.
FRESH_SECONDS = 0.05
#: An island hands its optimiser state over to this many newcomers at a time. Each copy takes memory of the device.
HANDOVERS_AT_ONCE = 2
#: How many newcomers are remembered as answered.
ANSWERED_KEPT = 4096
#: Under this name, a run registers the number of the shards of its task's data.
SHARDS_OF_TASK = "shards of the task"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class News:
    """Everything that the link has received since the last step boundary.

    Attributes:
        events: The announcements of the mergers, each with the shard that it is about. Those of a shard are in order.
        arrivals: The newest snapshot of each fragment.
        lost_ranges: Ranges of the text whose lease the island no longer holds.
        asked_by: Newcomers to whom this island has promised its inner optimiser state.
    """

    events: list[tuple[int, Event]]
    arrivals: list[Arrival]
    lost_ranges: frozenset[str]
    asked_by: list[str]


class Link:
    """The queues between one island and its broker.

    Attributes:
        operator_request: The operator's request to this island: `drain`, `expel`, or empty.
        uplink: Measures of the connection.
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
            transport: The connection to the broker.
            manifest: The run.
            who: The island and its incarnation, `NAME/INCARNATION`.
            ranges: The ranges of the text that the island may read, in its order of preference.
            clock: Monotonic seconds.
            wall: Seconds of the wall clock, for notes.
        """
        self.transport = transport
        self.manifest = manifest
        self.who = who
        self.clock, self.wall = clock, wall
        self.uplink = Uplink()
        self.operator_request = ""
        #: The length of the run in steps, which an operator can change.
        self.run_steps = manifest.config.inner.steps
        #: A loop has stalled if it asks for no heartbeat for this long. No peer waits for it then.
        self.stall_seconds = math.inf
        #: Whether the island answers newcomers who ask for inner optimiser state.
        self.gives_state = True
        #: Whether a newer process has taken this island's name over. The island leaves, and sends nothing more.
        self.is_replaced = False
        #: The incarnation of that process.
        self._claim: NameClaim | None = None
        #: Whether a merger serves the run.
        self.serving = MergerWatch(transport.reader, manifest.run, clock)
        self._changed = threading.Condition()
        self.channels = Channels(manifest, shards_of(transport), self.uplink, clock, self._changed)
        self.leases = IslandLeases(transport, who, ranges)
        self._notes: deque[Note] = deque()
        self._handovers: deque[StateForPeer] = deque()
        self._asked_by: deque[str] = deque()
        self._answered: dict[str, None] = {}  # newcomers, in order; a flood of repeated requests gets one answer each
        #: The next heartbeat.
        self.heartbeat: Heartbeat | None = None
        self._beat_at = 0.0
        self._alive_at = 0.0
        self._is_stalled = False
        #: The newest heartbeat that each shard was told, or has missed.
        self._told: list[Heartbeat | None] = [None] * len(self.channels)
        self._sending = [Pump(_named("send", channel), partial(self._publish, channel)) for channel in self.channels]
        receiving = [
            Pump(_named("receive", channel), partial(self._receive, channel, 0.0),
                 patient_work=partial(self._receive, channel, BLOCK_SECONDS))
            for channel in self.channels
        ]  # fmt: skip
        self._beating = Pump("heartbeat", self._beat_primary, wait_seconds=HEARTBEAT_SECONDS)
        self._telling = [
            Pump(_named("heartbeat", channel), partial(self._tell, channel), wait_seconds=HEARTBEAT_SECONDS)
            for channel in self.channels[1:]
        ]
        self._handing_over = Pump("handovers", self.pump_handovers)
        pumps = [pump for pair in zip(self._sending, receiving, strict=True) for pump in pair]
        self.pumps = Pumps([*pumps, *self._telling, self._beating, self._handing_over], self._changed)

    # -- the training thread's side: nothing here waits for the broker ------------------------------------------------

    def send(self, draft: Draft) -> None:
        """Queue a contribution."""
        shard = self.manifest.shard_layout.shard_of(draft.header.round)
        self.channels[shard].outbox.queue(draft)
        self._sending[shard].wake.set()

    def take(self) -> News:
        """Return what was received since the last call."""
        events, arrivals = self.channels.take()
        asked_by = [self._asked_by.popleft() for _ in range(len(self._asked_by))]
        return News(events, arrivals, self.leases.take_lost(), asked_by)

    def hand_over(self, state: StateForPeer) -> None:
        """Queue inner optimiser state for a newcomer."""
        self._handovers.append(state)
        self._handing_over.wake.set()

    def lease(self, *, asks: bool = False) -> ReadPosition | None:
        """Return the next leased range, if any; `asks` waits for the broker. The heartbeat thread leases another."""
        if asks:
            try:
                if self.heartbeat is not None:  # frees the ranges of an earlier incarnation
                    self.transport.island.heartbeat(self.heartbeat)
                self.leases.pump()
            except BrokerError as error:
                log.debug("no range was leased: %s", error.what)
        place = self.leases.take()
        if place is not None:
            self._beating.wake.set()
        return place

    def offer(self, ranges: Sequence[str]) -> None:
        """Set the ranges that the island may read, in its order of preference, and let one of them be leased."""
        self.leases.ranges = list(ranges)
        self._beating.wake.set()

    def register_shards(self, count: int) -> int:
        """Return how many shards the run's task has, by the island that registered it first; `count` in an outage."""
        try:
            return int(self.transport.island.register_corpus(SHARDS_OF_TASK, str(count)))
        except (BrokerError, ValueError) as error:
            log.debug("the number of shards was not compared: %s", error)
            return count

    def wants_beat(self, state: str) -> bool:
        """Note that the loop goes on, in that state, and return whether to replace the next heartbeat."""
        self._alive_at = self.clock()
        is_fresh = self._alive_at - self._beat_at < FRESH_SECONDS
        return self.heartbeat is None or self.heartbeat.state != state or not is_fresh

    def beat(self, heartbeat: Heartbeat) -> None:
        """Replace the next heartbeat. A change of state is sent at once."""
        changed = self.heartbeat is None or self.heartbeat.state != heartbeat.state
        self.heartbeat, self._beat_at = heartbeat, self.clock()
        self._alive_at = self._beat_at
        if changed:
            self._wake_heartbeats()

    def _wake_heartbeats(self) -> None:
        for pump in (*self._telling, self._beating):
            pump.wake.set()

    def note(self, kind: str, text: str) -> None:
        """Queue a note about the island. It is sent with the next heartbeat."""
        self._notes.append(Note(self.wall(), self.name, kind, text[:NOTE_MAX]))

    @property
    def name(self) -> str:
        """The island's name."""
        return self.who.partition("/")[0]

    def join(self) -> list[Arrival]:
        """Return all fragments as they are now. Later events are received from here on.

        Raises:
            ConfigError: The operator has excluded this island.
            BrokerError: The broker cannot be reached.
            WireError: A fragment cannot be read (`wire.fragment`). The mergers are told, and write it again.
        """
        requests = self.transport.reader.control()
        require_welcome(requests, self.name, self.manifest.run)
        self._set_run_steps(requests)
        name, _, incarnation = self.who.partition("/")
        if name:  # a rehearsal has none
            self._claim = self.transport.island.claim_name(name, incarnation)
        try:
            arrivals = self.channels.join()
        except WireError:
            if name:
                self._tell_unreadable()
            raise
        if name:
            self.serving.look(is_over=self._is_over)
        return arrivals

    def _tell_unreadable(self) -> None:
        """Tell the mergers which fragments this island cannot read while it joins, so that they write them again."""
        found = (presence.heartbeat for presence in self.transport.reader.presences())
        before = next((beat for beat in found if beat.island == self.name), None)
        beat = first_heartbeat(self.who, before, self.channels.unreadable)
        for channel in self.channels:
            channel.transport.island.heartbeat(beat)

    # -- pumps --------------------------------------------------------------------------------------------------------

    def pump_send(self) -> None:
        """Publish everything queued, unless the name was taken over."""
        for channel in self.channels:
            self._publish(channel)

    def _publish(self, channel: Channel) -> None:
        if not self.is_replaced:
            channel.outbox.pump()

    def pump_receive(self, block_seconds: float = 0.0) -> None:
        """Receive events and snapshots."""
        for channel in self.channels:
            self._receive(channel, block_seconds)

    def _receive(self, channel: Channel, block_seconds: float) -> None:
        """Receive from one shard. Look for newcomers here too, because heartbeats are less frequent."""
        channel.inbox.pump(block_seconds)
        if channel.shard == 0:
            self._offer_help()

    def pump_heartbeat(self) -> None:
        """Send the heartbeat to all shards. Send the notes, read the operator's request, and renew leases."""
        for channel in self.channels[1:]:
            self._tell(channel)
        self._beat_primary()

    def _tell(self, channel: Channel) -> None:
        """Tell the merger of a further shard that this island lives. A shard that is away misses it."""
        beat = self.heartbeat
        if beat is not None and not (self.is_replaced or self._is_stalled):
            try:
                channel.transport.island.heartbeat(beat)
            except BrokerError as error:
                log.debug("shard %s did not take the heartbeat: %s", channel.shard, error.what)
        self._note_told(channel.shard, beat)

    def _beat_primary(self) -> None:
        """Send shard 0 the heartbeat and the notes. Read the operator's request, renew leases, look for newcomers."""
        beat = self.heartbeat
        if beat is None:
            return
        if not self._holds_name():
            self._send_notes()
            self._note_told(0, beat)
            return
        require_same_run(self.transport.reader, self.manifest)
        if self._has_stalled(beat):
            return
        began = self.clock()
        requests = self.transport.island.heartbeat(beat)
        self.uplink.answered(self.clock() - began)
        self._set_run_steps(requests)
        self.serving.look(is_over=self._is_over)
        request = requests.get(island_field(self.name), "")
        if request in (DRAIN, EXPEL):  # this request is final: the island leaves even if it is withdrawn
            self.operator_request = request
        self._send_notes()
        self._note_told(0, beat)
        if beat.state in ("joining", "training"):
            self.leases.pump()
        self._offer_help()

    def _has_stalled(self, beat: Heartbeat) -> bool:
        """Return whether the loop has stopped preparing heartbeats, and say so once."""
        silent = self.clock() - self._alive_at
        was_stalled, self._is_stalled = self._is_stalled, beat.state == "training" and silent > self.stall_seconds
        if self._is_stalled and not was_stalled:
            log.warning(
                "the training loop has not synced for %.0f s, so the run goes on without this island until it does",
                silent, extra={"code": "island.stalled"},
            )  # fmt: skip
        return self._is_stalled

    @property
    def _is_over(self) -> bool:
        """Whether all steps of the run are made, as far as this island knows."""
        return max(channel.inbox.snapshots.step for channel in self.channels) >= self.run_steps

    def _set_run_steps(self, requests: Mapping[str, str]) -> None:
        self.run_steps = run_steps(self.manifest.config, requests, self.run_steps)
        for channel in self.channels:
            channel.inbox.snapshots.run_steps = self.run_steps

    def _holds_name(self) -> bool:
        """Return whether the island still holds its name. Nothing may be written under it otherwise."""
        if self._claim is not None and not self.is_replaced:
            newest = self.transport.island.confirm_name(self.name, self._claim)
            self.is_replaced = newest != self._claim
        return not self.is_replaced

    def _note_told(self, shard: int, beat: Heartbeat | None) -> None:
        with self._changed:
            self._told[shard] = beat
            self._changed.notify_all()

    def pump_handovers(self) -> None:
        """Hand inner optimiser state over to the newcomers who asked for it."""
        while self._handovers:
            state = self._handovers[0]
            self.transport.island.hand_over(state.who, *recovery.encode(state, self.who))
            self._handovers.popleft()

    def pump(self) -> None:
        """Run each pump once in the calling thread."""
        self.pumps.run_once()

    def _send_notes(self) -> None:
        """Write the queued notes. A note that the broker refuses is dropped, so that it does not block other work."""
        while self._notes:
            try:
                self.transport.reader.note(self._notes[0])
            except UnreachableError:
                raise  # the note stays queued until the outage is over
            except BrokerError as error:
                log.warning("a note is lost (%s): %s", error.what, self._notes[0].text)
            self._notes.popleft()

    def _offer_help(self) -> None:
        if not self.gives_state or self.is_replaced or self._is_stalled:
            return
        if self.heartbeat is None or self.heartbeat.state != "training":
            return
        room = HANDOVERS_AT_ONCE - len(self._asked_by) - len(self._handovers)
        if room <= 0:
            return
        found = self.transport.island.open_requests(self.who)
        for who in islice((who for who in found if who != self.who and who not in self._answered), room):
            if self.transport.island.promise_answer(who, self.who):
                self._answered[who] = None
                self._asked_by.append(who)
        while len(self._answered) > ANSWERED_KEPT:
            del self._answered[next(iter(self._answered))]

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
        self._await(lambda: not self.channels.undecided, seconds)
        return self.channels.undecided

    def _await(self, holds: Callable[[], bool], seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: holds() or self.pumps.failure is not None, seconds)

    @property
    def _is_drained(self) -> bool:
        return (self.is_replaced or not self.channels.backlog) and all(beat is self.heartbeat for beat in self._told)


def _named(what: str, channel: Channel) -> str:
    return f"{what}-{channel.shard}" if channel.shard else what
