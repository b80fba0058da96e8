"""The background link: everything that an island says to the broker and hears from it, beside the training loop.

The training thread only touches queues in memory. Three pumps do the rest, each on a thread and a connection of its
own: sending, receiving, heartbeats. A pump that meets an outage notes it, waits, and tries again for ever. In virtual
time nothing is started, and the owner calls `pump` instead.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

from archipelago.broker.codecs import Parts, Vector, body_of, codec
from archipelago.broker.control import DRAIN, EXPEL, require_welcome
from archipelago.broker.corpus_shards import Place
from archipelago.broker.errors import BrokerError, UnreachableError, WireError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import (
    NOTE_MAX,
    Actions,
    Contribution,
    Event,
    Heartbeat,
    Marker,
    Note,
    Refusal,
    Resume,
    Snapshot,
)
from archipelago.broker.transport import START, IslandTransport
from archipelago.broker.wire import digest, digest_of, pack_body, unpack
from archipelago.islands.data.sharding import shard_order
from archipelago.islands.sync import recovery
from archipelago.islands.sync.recovery import Gift
from archipelago.islands.sync.uplink import Uplink

BLOCK_SECONDS = 1.0
HEARTBEAT_SECONDS = 1.0
RETRY_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0)
EVENTS_AT_ONCE = 256
MEMORY_SHARE_MAX = 0.8
"""Of the broker's memory limit: beyond it nothing more is sent, so that the merger has room to merge and to delete."""

LOST = "lost"
"""stands for the entry of what a broker that lost everything had"""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Draft:
    """A contribution as the training thread knows it: `parts` are the codec's arrays, still on the device.

    Bytes and digest follow when the link packs them.
    """

    contribution: Contribution
    parts: Parts
    elements: int
    actions: Actions | None = None

    def encoded(self, zstd_level: int) -> tuple[Contribution, bytes]:
        """The message and its payload."""
        payload = pack_body(body_of(self.parts), self.contribution.codec, self.elements, zstd_level)
        return replace(self.contribution, bytes=len(payload), digest=digest(payload)), payload


@dataclass(frozen=True)
class Published:
    """A contribution that the broker has or may have, kept until the merger has decided about it."""

    contribution: Contribution
    payload: bytes
    entry: str
    """empty until the broker has acknowledged it; LOST for one that must be sent again"""


@dataclass(frozen=True)
class Arrival:
    """A snapshot that is here, decoded: float32, N elements."""

    snapshot: Snapshot
    params_N: Vector


@dataclass(frozen=True)
class News:
    """What has come since the last step boundary."""

    events: list[Event]
    """in order"""
    arrivals: list[Arrival]
    """the newest snapshot of each fragment"""
    lost_shards: frozenset[str]
    """shards of which we hold the lease no longer: their pass was merged to its end, or another has them"""
    asked_by: list[str]
    """newcomers who were promised our inner optimiser state"""


class Link:
    """The queues between an island and its broker. `who` is the island's name and incarnation, `shards` what it reads.

    `shards` come in the order in which the island likes to lease them.
    """

    def __init__(
        self,
        transport: IslandTransport,
        manifest: Manifest,
        who: str = "",
        shards: Sequence[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`wall` gives the wall clock's seconds, for notes."""
        self.transport = transport
        self.manifest = manifest
        self.who = who
        config = manifest.config
        self.clock, self.wall = clock, wall
        self.uplink = Uplink()
        self.shards = shard_order(config.data.shards, config.seed) if shards is None else list(shards)
        self.bytes_up = self.bytes_down = self.sent = 0
        self._troubles: dict[str, str] = {}  # by pump: one that works says nothing of another that does not
        self.arrived_at = -math.inf
        """when a snapshot came last"""
        self.failure: Exception | None = None
        """an error that no retry mends; the island stops on it"""
        self.wish = ""
        """what the operator wishes of the island: `drain`, `expel`, or nothing"""
        self._notes: deque[Note] = deque()
        self._outbox: deque[Draft] = deque()
        self._unresolved: dict[str, Published] = {}
        self._tried = ""
        self._ready: tuple[Draft, Contribution, bytes] | None = None
        self._events: deque[Event] = deque()
        self._arrivals: dict[int, Arrival] = {}
        self._wanted: set[int] = set()
        self._early: dict[int, Arrival] = {}
        self._held: dict[int, Arrival] = {}
        self._announced: dict[int, dict[int, Snapshot]] = {}
        self._after = START
        self._closed = 0
        self._leases: deque[Place] = deque()
        self._reading: frozenset[str] = frozenset()
        self._lost: frozenset[str] = frozenset()
        self._asked_by: list[str] = []
        self._gifts: deque[Gift] = deque()
        self._at_marker: dict[int, list[Published]] = {}
        self._resuming = self._resumed = False
        self._beat: Heartbeat | None = None
        self._said: Heartbeat | None = None
        self._lock = threading.Lock()
        self._emptied = threading.Condition()
        self._work = threading.Event()
        self._giving = threading.Event()
        self._beating = threading.Event()
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    # -- the training thread's side: nothing here waits for anyone ---------------------------------------------------

    def send(self, draft: Draft) -> None:
        """Queues a contribution. The window bounds the queue: an island that hears nothing owes nothing more."""
        for part in draft.parts:
            part.copy_to_host_async()  # only what travels leaves the device
        self._outbox.append(draft)
        self._work.set()

    def take(self) -> News:
        """What has come since the last time."""
        with self._lock:
            news = News(list(self._events), list(self._arrivals.values()), self._lost, self._asked_by)
            self._events, self._arrivals, self._lost, self._asked_by = deque(), {}, frozenset(), []
        return news

    def give(self, gift: Gift) -> None:
        """Queues inner optimiser state for a newcomer."""
        self._gifts.append(gift)
        self._giving.set()

    def in_flight(self, marker: int = 0) -> tuple[list[Published], list[Draft]]:
        """What was sent and not decided about when the merger took that checkpoint, as we know it; and the queue."""
        drafts = list(self._outbox)  # first: they move from here to there
        with self._lock:
            known = {p.contribution.identity_text: p for p in self._at_marker.pop(marker, [])} | self._unresolved
        return list(known.values()), drafts

    def resume(self, in_flight: Sequence[Published]) -> None:
        """Takes over what an earlier incarnation had sent: it is sent again, and merged once."""
        with self._lock:
            self._unresolved |= {p.contribution.identity_text: replace(p, entry=LOST) for p in in_flight}
        self._resuming = bool(in_flight)
        self._work.set()  # at once: an island whose window is full of them sends nothing else

    def unresolved_rounds(self) -> set[int]:
        """Rounds of the contributions that are sent or queued, and neither merged nor refused as far as we heard."""
        queued = {draft.contribution.round for draft in list(self._outbox)}  # first: they move from here to there
        with self._lock:
            return queued | {published.contribution.round for published in self._unresolved.values()}

    def lease(self) -> Place | None:
        """The next shard to read if one is at hand, else None; another one is on its way."""
        with self._lock:
            if not self._leases:
                return None
            place = self._leases.popleft()
            self._reading |= {place.shard}
        self._beating.set()
        return place

    def hold(self, shards: Sequence[str]) -> None:
        """Says which shards the island reads, or has read and not seen merged."""
        with self._lock:
            self._reading = frozenset(shards)
            self._lost &= self._reading  # what was told already is not told again
            self._leases = deque(place for place in self._leases if place.shard not in self._reading)

    def beat(self, heartbeat: Heartbeat) -> None:
        """Replaces the heartbeat that goes out next; a change of state goes out at once."""
        changed = self._beat is None or self._beat.state != heartbeat.state
        self._beat = heartbeat
        if changed:
            self._beating.set()

    @property
    def heartbeat(self) -> Heartbeat | None:
        """What the next heartbeat says."""
        return self._beat

    def note(self, kind: str, text: str) -> None:
        """Queues a note on the island, which goes out with the next heartbeat."""
        self._notes.append(Note(self.wall(), self.name, kind, text[:NOTE_MAX]))

    @property
    def name(self) -> str:
        """The island's."""
        return self.who.partition("/")[0]

    @property
    def trouble(self) -> str:
        """What a pump met last, empty when all is well."""
        return next(iter(list(self._troubles.values())), "")

    @property
    def backlog(self) -> int:
        """Contributions not yet taken by the broker."""
        return len(self._outbox)

    # -- joining ----------------------------------------------------------------------------------------------------

    def join(self) -> list[Arrival]:
        """All fragments as they are now, and a place in the stream from which nothing newer is missed. May raise.

        Raises ConfigError where the operator does not want the island.
        """
        require_welcome(self.transport.reader.control(), self.name, self.manifest.run)
        self._after = self.transport.reader.last_event()
        arrivals = [self._fetch(p) for p in range(len(self.manifest.fragments))]
        self._closed = max(arrival.snapshot.round for arrival in arrivals)
        return arrivals

    # -- pumps ------------------------------------------------------------------------------------------------------

    def pump_send(self) -> None:
        """Encodes and publishes what is queued, oldest first; what fails stays queued."""
        if self._resuming:
            self._say_again()
            self._resuming = False
        while self._outbox:
            self.send_oldest()

    def send_oldest(self) -> None:
        """Encodes and publishes the first that is queued; where that fails, it stays so."""
        draft = self._outbox[0]
        self._require_room()
        if self._ready is None or self._ready[0] is not draft:
            self._ready = (draft, *self._encoded(draft))
        _, contribution, payload = self._ready  # once: what is said again must be the same, to the byte
        if self._may_be_new(contribution, payload):
            began = self.clock()
            entry = self.transport.island.publish(contribution, payload, draft.actions)
            self.uplink.sent(len(payload), self.clock() - began)
            self._note_entry(contribution.identity_text, entry)
        self.bytes_up += len(payload)
        self.sent += 1
        with self._emptied:
            self._outbox.popleft()
            self._emptied.notify_all()

    def _encoded(self, draft: Draft) -> tuple[Contribution, bytes]:
        """As a payload, compressed where that pays on this link."""
        level = self.manifest.config.wire.zstd_level if self.uplink.should_pack() else 0
        began = self.clock()
        contribution, payload = draft.encoded(level)
        if level:
            before = codec(contribution.codec).encoded_size(draft.elements)
            self.uplink.packed(before, len(payload), self.clock() - began)
        return contribution, payload

    def _require_room(self) -> None:
        memory = self.transport.reader.memory()
        if memory.limit and memory.used > MEMORY_SHARE_MAX * memory.limit:
            raise BrokerError(
                f"the Redis is nearly full ({memory.used >> 20} of {memory.limit >> 20} MiB), nothing more is sent",
                "It goes on when the merger has merged what waits there; or raise the server's maxmemory.",
            )

    def _may_be_new(self, contribution: Contribution, payload: bytes) -> bool:
        """Whether to publish it: not when it got through in spite of an error, and was decided about since."""
        identity = contribution.identity_text
        with self._lock:  # noted before it is published: the decision may be here before the acknowledgement
            if self._tried == identity and identity not in self._unresolved:
                return False
            self._unresolved[identity] = Published(contribution, payload, entry="")
            self._tried = identity
            return True

    def _note_entry(self, identity: str, entry: str) -> None:
        with self._lock:
            if identity in self._unresolved:
                self._unresolved[identity] = replace(self._unresolved[identity], entry=entry)

    def pump_receive(self, block_seconds: float = 0.0) -> None:
        """Hears events, and fetches the fragments they announce.

        Goes on hearing meanwhile: on a thin link a snapshot takes longer than rounds do, and an island that does not
        hear of those sends nothing.
        """
        self._listen(0.0 if self._wanted - self._early.keys() else block_seconds)
        for p in sorted(self._wanted):
            newest = self._newest(p)
            arrival = self._early.pop(p, None) or self._arrived(p)
            if arrival.snapshot.round > self._closed:
                # Newer than all that we have heard: nobody may know it before what was said before it.
                self._early[p] = arrival
                continue
            self.arrived_at = self.clock()
            with self._lock:
                self._arrivals[p] = arrival
            if self._newest(p) <= max(newest, arrival.snapshot.version):  # else a newer one was announced meanwhile
                self._wanted.discard(p)
            self._listen()
        self._offer_help()  # as well as with each heartbeat: a newcomer waits, and news come more often

    def _newest(self, p: int) -> int:
        """The newest version of a fragment that was announced and is not here."""
        return max(self._announced.get(p, {}), default=0)

    def _listen(self, block_seconds: float = 0.0) -> None:
        """Hears what has been announced."""
        news = self.transport.reader.events(self._after, block_seconds, EVENTS_AT_ONCE)
        for entry, event in news:
            self._hear(event)
            with self._lock:
                self._events.append(event)
            self._after = entry  # last: an event whose consequences failed is heard again
        if self._resumed and len(news) < EVENTS_AT_ONCE:  # what was decided before that is heard by now
            self._say_again()
            self._resumed = False

    def _hear(self, event: Event) -> None:
        match event:
            case Snapshot():
                self._closed = max(self._closed, event.round)
                self._wanted.add(event.fragment)
                self._announced.setdefault(event.fragment, {})[event.version] = event
                early = self._early.get(event.fragment)
                if early is not None and early.snapshot.round < event.round:
                    del self._early[event.fragment]
                self._resolve(event.identities)
            case Marker(number=number):
                with self._lock:
                    self._at_marker = {number: list(self._unresolved.values())}
            case Refusal(repeat=False) | Refusal(decided=True):  # a broker that died may have told us of it in vain
                self._resolve({event.identity_text})
            case Resume():
                self._resumed = True
                if event.round != self._closed:  # the broker lost rounds that we had heard of, or what it said of them
                    self._wanted.update(range(len(self.manifest.fragments)))
                    self._early.clear()
                    self._held.clear()
                    self._announced.clear()
                    with self._lock:
                        self._arrivals.clear()
                self._closed = event.round
            case _:
                pass

    def _resolve(self, identities: Set[str]) -> None:
        with self._lock:
            for identity in self._unresolved.keys() & identities:
                del self._unresolved[identity]

    def _say_again(self) -> None:
        """A broker that died may have lost what it had acknowledged: what nobody merged or refused is sent again."""
        with self._lock:
            acknowledged = {identity: p for identity, p in self._unresolved.items() if p.entry}
        for identity, published in acknowledged.items():
            if published.entry == LOST or not self.transport.island.holds(published.entry):
                entry = self.transport.island.publish(published.contribution, published.payload)
                self._note_entry(identity, entry)

    def pump_heartbeat(self) -> None:
        """Says that the island lives, hears what is wished of it and who needs help, and keeps a shard at hand."""
        beat = self._beat
        if beat is None:
            return
        began = self.clock()
        wish = self.transport.island.heartbeat(beat)
        self.uplink.answered(self.clock() - began)
        if wish in (DRAIN, EXPEL):  # and it stays so: who was told to leave, leaves
            self.wish = wish
        self._say_notes()
        with self._emptied:
            self._said = beat
            self._emptied.notify_all()
        if beat.state in ("joining", "training"):
            self._keep_leases()
        self._offer_help()

    def _say_notes(self) -> None:
        """Writes the notes that wait. One that the broker does not take is lost: nothing else may wait for it."""
        while self._notes:
            try:
                self.transport.reader.note(self._notes[0])
            except UnreachableError:
                raise  # an outage ends
            except BrokerError as error:
                log.warning("a note is lost (%s): %s", error.what, self._notes[0].text)
            self._notes.popleft()

    def pump_gifts(self) -> None:
        """Hands inner optimiser state over to newcomers who asked for it."""
        while self._gifts:
            gift = self._gifts[0]
            if gift.actions is not None:
                self.transport.island.record_actions(gift.actions)
            self.transport.island.hand_over(gift.who, *recovery.encode(gift, self.who))
            self._gifts.popleft()

    def pump(self) -> None:
        """All of them, without waiting; trouble is noted and nothing is lost."""
        for action in (self.pump_send, self.pump_receive, self.pump_heartbeat, self.pump_gifts):
            self._attempt(action)

    def _keep_leases(self) -> None:
        with self._lock:
            watched = sorted({place.shard for place in self._leases} | self._reading)
        lost = frozenset(watched) - self.transport.island.leased(watched, self.who) if watched else frozenset()
        with self._lock:
            self._leases = deque(place for place in self._leases if place.shard not in lost)
            self._lost |= lost & self._reading
            free = [] if self._leases else [shard for shard in self.shards if shard not in self._reading]
        if free and (place := self.transport.island.lease_shard(free, self.who)) is not None:
            with self._lock:
                if place.shard not in self._reading:  # an island that returned may have taken it up again meanwhile
                    self._leases.append(place)

    def _offer_help(self) -> None:
        if self._beat is None or self._beat.state != "training":
            return
        for who in self.transport.island.asks():
            if who != self.who and self.transport.island.promise(who, self.who):
                with self._lock:
                    self._asked_by.append(who)

    def _arrived(self, p: int) -> Arrival:
        began, before = self.clock(), self.bytes_down
        arrival = self._by_differences(p) or self._fetch(p)
        self.uplink.received(self.bytes_down - before, self.clock() - began)
        return arrival

    def _fetch(self, p: int) -> Arrival:
        snapshot, payload = self.transport.reader.fragment(p, account=True)
        if digest(payload) != snapshot.digest or snapshot.fragment != p:
            raise WireError(f"the snapshot of fragment {p} is not the announced one")
        self.bytes_down += len(payload)
        arrival = Arrival(snapshot, unpack(payload, self.manifest.sizes[p]))
        self._hold(p, arrival)
        return arrival

    def _hold(self, p: int, arrival: Arrival) -> None:
        """Remembers what we hold of a fragment, where differences come down, and no longer what leads there."""
        if self.manifest.config.wire.sends_differences:
            self._held[p] = arrival
        steps = self._announced.get(p, {})
        self._announced[p] = {version: s for version, s in steps.items() if version > arrival.snapshot.version}

    def _by_differences(self, p: int) -> Arrival | None:
        """The newest snapshot that we heard of, from what we hold and all differences since; None where the full one
        is smaller, or where a difference is gone or does not lead to the parameters that all others hold.
        """
        held, steps = self._held.get(p), self._announced.get(p, {})
        newest = max(steps, default=0)
        if held is None or newest <= held.snapshot.version:
            return None
        chain = [steps.get(version) for version in range(held.snapshot.version + 1, newest + 1)]
        known = [snapshot for snapshot in chain if snapshot is not None and snapshot.difference_bytes]
        if len(known) < len(chain) or sum(s.difference_bytes for s in known) >= known[-1].bytes:
            return None
        vector_N = held.params_N
        for snapshot in known:
            payload = self.transport.island.difference(p, snapshot.version)
            if payload is None or len(payload) != snapshot.difference_bytes:
                return None
            self.bytes_down += len(payload)
            try:
                step_N = unpack(payload, self.manifest.sizes[p], self.manifest.config.wire.down)
            except WireError as error:
                log.warning("a difference of fragment %s is damaged (%s): taking it whole", p, error.reason)
                return None
            with np.errstate(over="ignore"):  # a hostile one: the digest will tell
                vector_N = vector_N + step_N
            self._listen()
            if self._held.get(p) is not held:
                return None  # the run went back meanwhile
        if digest_of(vector_N) != known[-1].held:
            log.warning("the differences of fragment %s lead elsewhere: taking it whole", p)
            return None
        arrival = Arrival(known[-1], vector_N)
        self._hold(p, arrival)
        return arrival

    # -- threads ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the pumps' threads."""
        pumps: list[tuple[str, Callable[[], None], Callable[[], None]]] = [
            ("send", self.pump_send, self._await_work),
            ("receive", self._pump_receive_patiently, lambda: None),
            ("heartbeat", self.pump_heartbeat, self._await_beat),
            ("gifts", self.pump_gifts, self._await_gift),
        ]
        for name, pump, wait in pumps:
            thread = threading.Thread(target=self._keep_pumping, args=(pump, wait), name=f"link-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def drain(self, seconds: float) -> bool:
        """Waits up to `seconds` until everything queued and the last heartbeat are sent; whether they were."""
        self._beating.set()
        with self._emptied:
            self._emptied.wait_for(lambda: self._is_drained or self.failure is not None, timeout=seconds)
            return self._is_drained

    @property
    def _is_drained(self) -> bool:
        return not self._outbox and self._said is self._beat

    def stop(self, seconds: float = 2.0) -> None:
        """Ends the threads; one that hangs in a call is left behind, and ends with the process."""
        self._stopping.set()
        self._work.set()
        self._giving.set()
        self._beating.set()
        for thread in self._threads:
            thread.join(seconds / max(1, len(self._threads)))

    def _pump_receive_patiently(self) -> None:
        self.pump_receive(BLOCK_SECONDS)

    def _await_work(self) -> None:
        self._work.wait()
        self._work.clear()

    def _await_gift(self) -> None:
        self._giving.wait()
        self._giving.clear()

    def _await_beat(self) -> None:
        self._beating.wait(HEARTBEAT_SECONDS)
        self._beating.clear()

    def _keep_pumping(self, pump: Callable[[], None], wait: Callable[[], None]) -> None:
        failures = 0
        while not self._stopping.is_set():
            if self._attempt(pump):
                failures = 0
                wait()
            else:
                self._stopping.wait(RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)])
                failures += 1

    def _attempt(self, action: Callable[[], None]) -> bool:
        try:
            action()
        except (BrokerError, WireError) as error:
            if not self._troubles:
                log.warning("the link is down, training goes on: %s", error.what)
            self._troubles[action.__name__] = error.what[:500]
            return False
        except Exception as error:  # noqa: BLE001 - a thread must not die unseen: the island raises it
            self.failure = error
            self._stopping.set()
            with self._emptied:
                self._emptied.notify_all()
            return False
        if self._troubles.pop(action.__name__, None) and not self._troubles:
            log.info("the link is up again")
        return True
