"""The inbox of an island: announcements of the merger in order, and the snapshots that they announce.

An announcement is only a hint: a damaged or forged one must neither end an island nor make it ignore the honest ones
that follow. `fault_in` compares it with the manifest. `judged` compares its round with the rounds before it. Rounds
close in order, so an island believes the next round at once. It believes any other round only as far as the hashes of
the fragments confirm it, which a merger writes in the same step as the announcement.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from archipelago.broker.codecs import Vector
from archipelago.broker.commits import START
from archipelago.broker.errors import BrokerError, UnreachableError, WireError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Call, Event, Marker, Refusal, Resume, Snapshot
from archipelago.broker.transport import IslandTransport
from archipelago.islands.sync.connection.outbox import Outbox
from archipelago.islands.sync.connection.snapshots import Arrival, Heads, Snapshots, snapshot_fault
from archipelago.islands.sync.connection.uplink import Uplink
from archipelago.islands.sync.connection.watch import require_same_run

EVENTS_AT_ONCE = 256
#: How often an island looks whether what it waits for still lies in its stream. Someone may have deleted it there.
LOST_SECONDS = 10.0
#: No more events are read while the training thread has as many as this to take. The broker keeps the later ones.
EVENTS_KEPT = 4096
#: How often an island looks whether another server answers.
INSTANCE_SECONDS = 2.0

log = logging.getLogger(__name__)


class Announcements:
    """Announcements and snapshots of one island, received by one thread and taken by the training thread.

    A snapshot is handed over only after the announcements of all rounds up to its own. Announcements that no merger
    of this run can have sent are ignored.
    """

    def __init__(
        self, transport: IslandTransport, manifest: Manifest, outbox: Outbox, uplink: Uplink, clock: Callable[[], float]
    ) -> None:
        """Create an inbox without a position in the stream, which `join` sets.

        Args:
            transport: Where events and fragments are read.
            manifest: The run or the shard.
            outbox: Forgets each contribution that was merged or refused.
            uplink: Records the measured download rate.
            clock: Monotonic seconds.
        """
        self._transport = transport
        self._manifest = manifest
        self._fragments = manifest.own_fragments
        self._outbox = outbox
        self._clock = clock
        self.snapshots = Snapshots(transport, manifest, uplink, clock, self.listen)
        #: Brings an arrived fragment to the island's device, in this thread, so that the training thread does not wait.
        self.prepare: Callable[[int, Vector], Any] = lambda p, params_N: params_N
        #: When the last snapshot arrived.
        self.arrived_at = -math.inf
        #: The last closed round that this thread knows of. The ledger's own `closed` follows it, one step boundary
        #: later, when the training thread takes the same events.
        self.heard_round = 0
        #: How many announcements were ignored.
        self.ignored = 0
        self._faults: set[str] = set()
        #: The fragments whose newest version could not be read, which heartbeats tell the merger.
        self.unreadable: set[int] = set()
        self._heads: Heads | None = None
        self._after = START
        self._events: deque[Event] = deque()
        self._arrivals: dict[int, Arrival] = {}
        self._wanted: set[int] = set()
        self._early: dict[int, Arrival] = {}
        self._must_resend, self._resent_at = False, clock()
        self._instance = ""
        self._looked_at = -math.inf
        self._lock = threading.Lock()
        self._taken = threading.Event()

    def join(self) -> list[Arrival]:
        """Fetch all fragments, and set the position in the stream so that no newer event is missed.

        Raises:
            WireError: Some fragments cannot be read (`wire.fragment`). Another call fetches only these.
        """
        if not self._early:
            self._instance = self._transport.reader.instance()
            self._after = self._transport.reader.last_event()
        fault: WireError | None = None
        for p in (p for p in self._fragments if p not in self._early):
            try:
                self._early[p] = self.snapshots.fetch(p)
                self.unreadable.discard(p)
            except WireError as error:
                self.unreadable.add(p)
                fault = fault or WireError(f"fragment {p} cannot be read ({error.reason})", code="wire.fragment")
        if fault is not None:
            raise fault
        arrivals, self._early = [self._early[p] for p in self._fragments], {}
        self.heard_round = max(arrival.snapshot.round for arrival in arrivals)
        return arrivals

    def take(self) -> tuple[list[Event], list[Arrival]]:
        """Return the events since the last call in order, and the newest snapshot of each fragment."""
        with self._lock:
            taken = list(self._events), list(self._arrivals.values())
            self._events, self._arrivals = deque(), {}
        self._taken.set()
        return taken

    def pump(self, block_seconds: float = 0.0) -> None:
        """Read events, and download the fragments that they announce.

        On a thin link a download takes longer than a round. We therefore keep reading events during downloads, because
        an island that does not know of rounds sends nothing.

        Raises:
            UnreachableError: The broker cannot be reached.
            BrokerError, WireError: A fragment cannot be read. All others were downloaded.
        """
        self._follow_primary()
        self.listen(0.0 if self._wanted - self._early.keys() else block_seconds)
        faults: list[BrokerError | WireError] = []
        for p in sorted(self._wanted):
            try:
                self._fetch(p)
                self.unreadable.discard(p)
            except UnreachableError:
                raise
            except (BrokerError, WireError) as error:
                faults.append(error)
                self.unreadable.add(p)
        if faults:
            raise faults[0]

    def _fetch(self, p: int) -> None:
        """Download a fragment that was announced, and hand it over unless earlier events have to come first."""
        newest = self.snapshots.newest(p)
        arrival = self._early.pop(p, None) or self.snapshots.download(p, self._fresh_heads)
        if arrival is None:  # the version that was announced does not exist
            self._wanted.discard(p)
            self._return_to_last_round()
            return
        if arrival.snapshot.round > self.heard_round:
            self._early[p] = arrival  # held until all earlier events are processed
            return
        self.arrived_at = self._clock()
        prepared = replace(arrival, params_N=self.prepare(p, arrival.params_N))
        with self._lock:
            self._arrivals[p] = prepared
        if self.snapshots.newest(p) <= max(newest, arrival.snapshot.version):
            self._wanted.discard(p)  # otherwise a newer version was announced meanwhile
        self.listen()

    def listen(self, block_seconds: float = 0.0) -> None:
        """Read new events, and ignore those that no merger of this run can have sent.

        A training loop that does not sync takes no events, so at some number they are left in the stream.
        """
        self._taken.clear()
        if len(self._events) >= EVENTS_KEPT and not self._taken.wait(block_seconds):
            return
        self._read(block_seconds)
        if self._must_resend or self._clock() - self._resent_at >= LOST_SECONDS:
            lost, self._must_resend, self._resent_at = self._outbox.lost(), False, -math.inf
            if not lost or self._read():  # a decision takes a contribution away and is announced in one step
                self._outbox.resend(lost)
                self._resent_at = self._clock()

    def _read(self, block_seconds: float = 0.0) -> bool:
        """Read new events. Return whether these are all."""
        news = self._transport.reader.events(self._after, block_seconds, EVENTS_AT_ONCE)
        self._heads = None  # headers are read at most once for these events
        for entry, event in news:
            self._judge(event)
            self._after = entry  # last, so that an event whose handling failed is read again
        return len(news) < EVENTS_AT_ONCE

    def _judge(self, event: Event) -> None:
        fault = fault_in(event, self._manifest)
        events: tuple[Event, ...] = ()
        if not fault:
            window = self._manifest.window_after(self.heard_round)
            events, fault = judged(event, self.heard_round, window, self._known_heads)
        if fault:
            self._ignore(fault)
        for each in events:
            self._hear(each)
            # The training thread needs no identities, and may take these events much later.
            kept = replace(each, merged="") if isinstance(each, Snapshot) else each
            with self._lock:
                self._events.append(kept)

    def _ignore(self, fault: str) -> None:
        """Count an event that is ignored, and log the first one with this fault."""
        self.ignored += 1
        if fault not in self._faults:
            log.warning("ignoring announcements: %s", fault)
        self._faults.add(fault)

    def _known_heads(self) -> Heads:
        """Return headers of the fragments that are newer than the events in hand."""
        self._heads = self._heads or self._transport.reader.heads()
        return self._heads

    def _fresh_heads(self) -> Heads:
        self._heads = self._transport.reader.heads()
        return self._heads

    def _follow_primary(self) -> None:
        """Go back to the last stored round if another server answers than before.

        It may lack what the other one has acknowledged and announced. Its merger says so, too, but this island misses
        that if it has read later announcements of the other one.
        """
        if self._clock() - self._looked_at < INSTANCE_SECONDS:
            return
        instance = self._transport.reader.instance()
        if self._instance not in ("", instance):
            stored = last_round(self._fresh_heads())
            if stored is not None:
                self._return_to(stored)
        self._instance, self._looked_at = instance, self._clock()

    def _return_to_last_round(self) -> None:
        """Go back to the last round whose snapshot is stored, if this island believed in a later one."""
        self.listen()
        stored = last_round(self._fresh_heads())
        if stored is not None and stored < self.heard_round:
            self._ignore("a snapshot that is not stored")
            self._return_to(stored)

    def _return_to(self, number: int) -> None:
        resume = Resume(number, 0)
        self._hear(resume)
        with self._lock:
            self._events.append(resume)

    def _hear(self, event: Event) -> None:
        match event:
            case Snapshot():
                self.heard_round = max(self.heard_round, event.round)
                self._wanted.add(event.fragment)
                early = self._early.get(event.fragment)
                if early is not None and early.snapshot.round < event.round:
                    del self._early[event.fragment]
                    self.snapshots.drop(event.fragment)
                self.snapshots.announce(replace(event, merged=""))
                self._outbox.resolve(event.identities, event.round)
            case Refusal(repeat=False) | Refusal(decided=True):  # a broker that died may have lost the first refusal
                self._outbox.resolve({event.identity_text})
            case Resume(round=number):
                require_same_run(self._transport.reader, self._manifest)
                tape = self._tape_since(self._outbox.first_merged_round, number)
                self._must_resend = True
                self._outbox.undo(number, tape)
                if number != self.heard_round:
                    self._go_back(number)
                self.heard_round = number
            case _:
                pass

    def _tape_since(self, first_round: int | None, closed: int) -> dict[int, set[str]]:
        """Return the identities of the contributions that the tape names from that round on, by round.

        Numbers of rounds alone would not do. A primary that was replaced may have closed other rounds of the same
        numbers.
        """
        if first_round is None:
            return {}
        newest = max(closed, last_round(self._known_heads()) or 0)  # more may have closed since
        rounds = max(0, self._manifest.own_rounds.between(first_round - 1, newest))
        tape = self._transport.reader.tape(rounds + self._manifest.config.sync.window)
        return {entry.round: {member.identity_text for member in entry.members} for entry in tape}

    def _go_back(self, number: int) -> None:
        """Go back to a round, and fetch each fragment again that differs from what has arrived.

        The broker has lost rounds or announcements, or this island believed in rounds that have not closed.
        """
        heads = self._known_heads()  # first, because nothing may be forgotten if this fails
        self.snapshots.announced.clear()  # the run went back, and their numbers will be used again
        current = {p for p in self._fragments if self.snapshots.is_current(p, heads)}
        with self._lock:
            later = {p for p, arrival in self._arrivals.items() if arrival.snapshot.round > number}
            changed = set(self._fragments) - current | later | self._early.keys()
            for p in changed:
                self._arrivals.pop(p, None)
        self._early.clear()
        for p in changed:
            self.snapshots.forget(p)
        self._wanted |= changed


def fault_in(event: Event, manifest: Manifest) -> str:
    """Return why no merger of this run can have sent this event; empty if one can."""
    match event:
        case Call(round=number, fragment=p):
            is_own = p == manifest.fragment_of(number) and p in manifest.own_fragments
            return "" if is_own else "a call of a fragment that its round does not sync"
        case Snapshot():
            return snapshot_fault(event, manifest)
        case _:
            return ""


def last_round(heads: Heads) -> int | None:
    """Return the last round whose snapshot is stored; None if no header can be read."""
    return max((head.round for head in heads if head is not None), default=None)


def judged(
    event: Event, heard: int, window: Sequence[int], read_heads: Callable[[], Heads]
) -> tuple[tuple[Event, ...], str]:
    """Return what an island does about an event without a fault, after it has heard of round `heard`.

    Args:
        event: The event.
        heard: The last closed round that the island believes in.
        window: The rounds after it that can be open, in order.
        read_heads: Returns headers of the fragments that were read after the event. Called only if the round is not
            the expected one.

    Returns:
        The events to process in its place, in order, and why it is ignored, or an empty text.
    """
    match event:
        case Snapshot(round=number) if number > window[0]:
            head = read_heads()[event.fragment]
            is_stored = head is not None and head.round >= number
            return ((event,), "") if is_stored else ((), "a snapshot of a round that has not closed")
        case Snapshot(round=number) if number <= heard:
            stored = last_round(read_heads())
            if stored is None or stored >= heard:
                return (event,), ""
            # The island believed in rounds that have not closed. It goes back to the last one that has.
            found = (event,) if number <= stored else ()
            return (Resume(stored, 0), *found), ""
        case Call(round=number) if number > window[-1]:
            return (), "a call of a round that cannot be open"
        case Resume(round=number) if number != heard:
            stored = last_round(read_heads())
            is_possible = number <= (heard if stored is None else stored)
            return ((event,), "") if is_possible else ((), "a return to a round that has not closed")
        case Marker(round=number) if number > heard:
            return (), "a checkpoint of a round that has not closed"
        case _:
            return (event,), ""
