"""The inbox of an island: announcements of one shard's merger in order, and snapshots, as differences or in full."""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from archipelago.broker.codecs import Vector
from archipelago.broker.commits import START, entry_id
from archipelago.broker.errors import BrokerError, UnreachableError, WireError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Event, Refusal, Resume, Snapshot
from archipelago.broker.transport import IslandTransport
from archipelago.broker.wire import after_difference, digest_of, newest
from archipelago.islands.sync.connection.downloads import (
    Arrival,
    Heads,
    believable_step,
    differences_after,
    fault_in,
    judged,
    last_round,
    require_same_run,
)
from archipelago.islands.sync.connection.outbox import Outbox
from archipelago.islands.sync.measures import Uplink

EVENTS_AT_ONCE = 256
#: How often an island looks whether what it waits for still lies in its stream. Someone may have deleted it there.
LOST_SECONDS = 10.0
#: No more events are read while the training thread has as many as this to take. The broker keeps the later ones.
EVENTS_KEPT = 4096
#: No more arrivals than this wait on the device for the training thread. The others wait in the memory of the host.
PREPARED_MAX = 2
#: How often an island looks whether another server answers.
INSTANCE_SECONDS = 2.0
#: How many of the newest rounds on the tape may confirm a step, so that one unreadable entry hides nothing.
TAPE_ENTRIES = 4

log = logging.getLogger(__name__)


class Inbox:
    """Announcements and snapshots of one island, received by one thread and taken by the training thread.

    A snapshot is handed over only after the announcements of all rounds up to its own. Announcements that no merger
    of this run can have sent are ignored.

    Attributes:
        held: The version of each fragment that differences are added to.
        heard_round: The last closed round that this thread knows of. The ledger's own `closed` follows it, one step
            boundary later, when the training thread takes the same events.
        step: The largest global step that this island believes in.
        run_steps: The length of the run in steps. No step beyond it is believed.
        unreadable: The fragments whose newest version could not be read, which heartbeats tell the merger.
    """

    def __init__(
        self, transport: IslandTransport, manifest: Manifest, outbox: Outbox, uplink: Uplink, clock: Callable[[], float]
    ) -> None:
        """Create an inbox without a position in the stream, which `join` sets.

        The manifest is that of the run or of a shard. The outbox is told which contributions were merged or refused.
        """
        self._reader, self._manifest, self._outbox = transport.reader, manifest, outbox
        self._uplink, self._clock = uplink, clock
        self._fragments, self._interval = manifest.own_fragments, manifest.config.sync.interval
        self._rounds, self._open = manifest.own_rounds, min(manifest.config.sync.window, len(self._fragments))
        self._sends_differences = manifest.config.wire.sends_differences
        #: Brings an arrived fragment to the island's device, in this thread, so that the training thread does not wait.
        self.prepare: Callable[[int, Vector], Any] = lambda p, params_N: params_N
        #: Called with each version of a fragment that was built, the oldest first. Listeners need all of them.
        self.built: Callable[[Arrival], object] = lambda arrival: None
        #: Called with each fragment whose built versions may not be those of the run, which went back.
        self.forgotten: Callable[[int], object] = lambda p: None
        self.held: dict[int, Arrival] = {}
        self.step, self.run_steps = 0, manifest.config.inner.steps
        self.unreadable: set[int] = set()
        self._faults: set[str] = set()
        self._heads: Heads | None = None
        self._after = START
        self._events: deque[Event] = deque()
        self._arrivals: dict[int, Arrival] = {}
        self._announced: dict[int, dict[int, Snapshot]] = {}  # newer versions of each fragment
        self._known: dict[int, tuple[int, str]] = {}  # version and digest of each fragment that arrived last
        self._wanted: set[int] = set()
        self._early: dict[int, Arrival] = {}  # those whose announcements have not come
        self._must_resend, self._resent_at = False, clock()
        self._instance, self._looked_at = "", -math.inf
        self._lock, self._taken = threading.Lock(), threading.Event()
        self._taped = partial(self._reader.tape, TAPE_ENTRIES)
        self.hear_of(0)

    def hear_of(self, number: int) -> None:
        """Believe that this round was closed last."""
        self.heard_round, self._window = number, self._rounds.following(number, self._open)

    def join(self) -> list[Arrival]:
        """Fetch all fragments, and set the position in the stream so that no newer event is missed.

        Raises:
            WireError: Some fragments cannot be read (`wire.fragment`). Another call fetches only these.
        """
        if not self._early:
            self._instance, self._after = self._reader.instance(), self._reader.last_event()
        fault: WireError | None = None
        for p in (p for p in self._fragments if p not in self._early):
            try:
                self._early[p] = self._fetched_whole(p)
                self.unreadable.discard(p)
            except WireError as error:
                self.unreadable.add(p)
                fault = fault or WireError(f"fragment {p} cannot be read ({error.reason})", code="wire.fragment")
        if fault is not None:
            raise fault
        arrivals, self._early = [self._early[p] for p in self._fragments], {}
        self.hear_of(max(arrival.snapshot.round for arrival in arrivals))
        return arrivals

    def take(self) -> tuple[list[Event], list[Arrival]]:
        """Return the events since the last call in order, and the newest snapshot of each fragment."""
        with self._lock:
            taken = list(self._events), list(self._arrivals.values())
            self._events, self._arrivals = deque(), {}
        self._taken.set()
        return taken

    # -- events -------------------------------------------------------------------------------------------------------

    def pump(self, block_seconds: float = 0.0) -> None:
        """Read events, send again what was lost, and download the fragments that were announced.

        On a thin link a download takes longer than a round. We therefore keep reading events during downloads, because
        an island that does not know of rounds sends nothing.

        Raises:
            UnreachableError: The broker cannot be reached.
            BrokerError, WireError: A fragment cannot be read. All others were downloaded.
        """
        now = self._clock()
        self._follow_primary(now)
        self.listen(0.0 if self._wanted - self._early.keys() else block_seconds)
        if self._must_resend or now - self._resent_at >= LOST_SECONDS:
            self._resend(now)
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

    def listen(self, block_seconds: float = 0.0) -> None:
        """Read new events, and ignore those that no merger of this run can have sent.

        A training loop that does not sync takes no events, so at some number they are left in the stream.
        """
        self._taken.clear()
        if len(self._events) >= EVENTS_KEPT and not self._taken.wait(block_seconds):
            return
        self._read(block_seconds)

    def _resend(self, now: float) -> None:
        """Send again what the broker has lost."""
        lost, self._must_resend, self._resent_at = self._outbox.lost(), False, -math.inf
        if not lost or self._read():  # a decision takes a contribution away and is announced in one step
            self._outbox.resend(lost)
            self._resent_at = now

    def _read(self, block_seconds: float = 0.0) -> bool:
        """Read new events. Return whether these are all."""
        news = self._reader.events(self._after, block_seconds, EVENTS_AT_ONCE)
        self._heads = None  # headers are read at most once for these events
        for entry, event in news:
            events, fault = judged(event, self._manifest, self.heard_round, self._window, self._known_heads)
            if fault:
                self._ignore(fault)
            for each in events:
                self._hear(each)
                # The training thread needs no identities, and may take these events much later.
                self._hand_over(self._believed(replace(each, merged="")) if isinstance(each, Snapshot) else each)
            self._after = entry  # last, so that an event whose handling failed is read again
        return len(news) < EVENTS_AT_ONCE

    def _hand_over(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)

    def _ignore(self, fault: str) -> None:
        """Count an event that is ignored, and log the first one with this fault."""
        self._uplink.ignored += 1
        if fault not in self._faults:
            log.warning("ignoring announcements: %s", fault)
        self._faults.add(fault)

    def _hear(self, event: Event) -> None:
        match event:
            case Snapshot(fragment=p, version=version, round=number):
                if number > self.heard_round:
                    self.hear_of(number)
                self._wanted.add(p)
                if p in self._early and self._early[p].snapshot.round < number:
                    del self._early[p]
                    self._known.pop(p, None)  # it was not handed over, but differences may still build on it
                if version > self._known.get(p, (-1, ""))[0]:
                    self._announced.setdefault(p, {})[version] = replace(event, merged="")
                self._outbox.merged(event.identities, number)
            case Refusal(repeat=False) | Refusal(decided=True):  # a broker that died may have lost the first refusal
                self._outbox.refused(event.identity_text)
            case Resume(round=number):
                if self._reader.uid() not in (None, self._manifest.uid):
                    require_same_run(self._reader, self._manifest)
                tape = self._tape_since(self._outbox.first_merged_round, number)
                self._must_resend = True
                self._outbox.undo(number, tape)
                if number != self.heard_round:
                    self._go_back(number)
                self.hear_of(number)
            case _:
                pass

    def _known_heads(self) -> Heads:
        """Return headers of the fragments that are newer than the events in hand."""
        return self._heads or self._fresh_heads()

    def _fresh_heads(self) -> Heads:
        self._heads = self._reader.heads()
        return self._heads

    # -- going back ---------------------------------------------------------------------------------------------------

    def _follow_primary(self, now: float) -> None:
        """Go back to the last stored round if another server answers than before.

        It may lack what the other one has acknowledged and announced. Its merger says so, too, but this island misses
        that if it has read later announcements of the other one.
        """
        if now - self._looked_at < INSTANCE_SECONDS:
            return
        instance = self._reader.instance()
        if self._instance not in ("", instance):
            # First, so that no later event is missed: this server's clock may be behind, and ids of events follow it.
            self._after = min(self._after, self._reader.last_event(), key=entry_id)
            stored = last_round(self._fresh_heads())
            if stored is not None:
                self._return_to(stored)
        self._instance, self._looked_at = instance, now

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
        self._hand_over(resume)

    def _tape_since(self, first_round: int | None, closed: int) -> dict[int, set[str]]:
        """Return the identities of the contributions that the tape names from that round on, by round.

        Numbers of rounds alone would not do. A primary that was replaced may have closed other rounds of the same
        numbers.
        """
        if first_round is None:
            return {}
        newest = max(closed, last_round(self._known_heads()) or 0)  # more may have closed since
        rounds = max(0, self._manifest.own_rounds.between(first_round - 1, newest))
        tape = self._reader.tape(rounds + self._manifest.config.sync.window)
        return {entry.round: {member.identity_text for member in entry.members} for entry in tape}

    def _go_back(self, number: int) -> None:
        """Go back to a round, and fetch each fragment again that differs from what has arrived.

        The broker has lost rounds or announcements, or this island believed in rounds that have not closed.
        """
        heads = self._known_heads()  # first, because nothing may be forgotten if this fails
        self._announced.clear()  # the run went back, and their numbers will be used again
        self.step = 0
        current = {p for p in self._fragments if self._is_current(p, heads)}
        with self._lock:
            later = {p for p, arrival in self._arrivals.items() if arrival.snapshot.round > number}
            changed = set(self._fragments) - current | later | self._early.keys()
            for p in changed:
                self._arrivals.pop(p, None)
        self._early.clear()
        for p in changed:  # they are downloaded in full
            self.held.pop(p, None)
            self._known.pop(p, None)
            self.forgotten(p)
        self._wanted |= changed

    def _is_current(self, p: int, heads: Heads) -> bool:
        """Return whether the newest version of a fragment has arrived already."""
        head = heads[p]
        return head is not None and self._known.get(p) == (head.version, head.digest)

    # -- snapshots ----------------------------------------------------------------------------------------------------

    def _fetch(self, p: int) -> None:
        """Download a fragment that was announced, and hand it over unless earlier events have to come first."""
        newest = max(self._announced.get(p, {}), default=0)
        arrival = self._early.pop(p, None) or self._by_differences(p)
        if arrival is None and p in self._known and self._is_current(p, self._fresh_heads()):
            self._announced.pop(p, None)  # the version that was announced does not exist
            self._wanted.discard(p)
            self._return_to_last_round()
            return
        is_whole = arrival is None
        arrival = arrival or self._fetched_whole(p)
        if arrival.snapshot.round > self.heard_round:
            self._early[p] = arrival  # held until all earlier events are processed
            return
        prepared = self._prepared(arrival) if len(self._arrivals) < PREPARED_MAX else arrival
        with self._lock:
            self._arrivals[p] = prepared
        if max(self._announced.get(p, {}), default=0) <= max(newest, arrival.snapshot.version):
            self._wanted.discard(p)  # otherwise a newer version was announced meanwhile
        if is_whole or self._wanted - self._early.keys():
            self.listen()

    def _prepared(self, arrival: Arrival) -> Arrival:
        """Return an arrival on the island's device, or as it is if the device does not take it."""
        try:
            return replace(arrival, params_N=self.prepare(arrival.snapshot.fragment, arrival.params_N))
        except Exception as error:  # noqa: BLE001 - a device may have no room now, and `adopt` takes either
            log.debug("fragment %s waits in the memory of the host: %s", arrival.snapshot.fragment, error)
            return arrival

    def _fetched_whole(self, p: int) -> Arrival:
        """Download the newest full snapshot of a fragment and the differences after it.

        Raises WireError if a payload is missing, or was not announced.
        """
        found = newest(self._reader, self._manifest, p)
        self._uplink.bytes_down += found.bytes
        if fault := fault_in(found.snapshot, self._manifest):
            raise WireError(f"the hash of fragment {p} holds {fault}", code="wire.snapshot")
        if found.before_N is not None:
            version = found.snapshot.version - 1
            before = replace(found.snapshot, version=version, round=self._manifest.round_of(version, p), step=0)
            self.built(Arrival(before, found.before_N))
        return self._hold(Arrival(found.snapshot, found.params_N))

    def _by_differences(self, p: int) -> Arrival | None:
        """Build the newest announced version of a fragment from the held one and all differences since.

        Return None if it must be downloaded in full: that is smaller, a difference is missing, the run went back
        meanwhile, or the result is not what the other islands hold.
        """
        if (held := self.held.get(p)) is None:
            return None
        arrival = held
        for snapshot in differences_after(held.snapshot.version, self._announced.get(p, {})):
            if arrival is not held:
                self.listen()
                if self.held.get(p) is not held:
                    return None
                self.built(arrival)
            if (next_N := self._after_difference(snapshot, arrival.params_N)) is None:
                return None
            arrival = Arrival(snapshot, next_N)
        return None if arrival is held else self._hold(arrival)

    def _after_difference(self, snapshot: Snapshot, before_N: Vector) -> Vector | None:
        p = snapshot.fragment
        try:
            found = after_difference(self._reader, self._manifest, p, snapshot.version, before_N)
        except WireError as error:
            log.warning("a difference of fragment %s is damaged (%s): fetching it in full", p, error.reason)
            return None
        if found is None or found[1] != snapshot.difference_bytes:
            return None
        self._uplink.bytes_down += found[1]
        if digest_of(found[0]) != snapshot.held:
            log.warning("the differences of fragment %s lead to other parameters: fetching it in full", p)
            return None
        return found[0]

    def _hold(self, arrival: Arrival) -> Arrival:
        """Remember an arrival if differences build on it, and forget the announcements up to it."""
        snapshot = self._believed(arrival.snapshot)
        p, version = snapshot.fragment, snapshot.version
        arrival = Arrival(snapshot, arrival.params_N)
        if self._sends_differences:
            self.held[p] = arrival
        self._known[p] = (version, snapshot.digest)
        self._announced[p] = {number: s for number, s in self._announced.get(p, {}).items() if number > version}
        self.built(arrival)
        return arrival

    def _believed(self, snapshot: Snapshot) -> Snapshot:
        """Return a snapshot with its global step as far as it can be believed."""
        step = believable_step(snapshot, self.step, self.run_steps, self._interval, self._taped)
        if step < min(snapshot.step, self.run_steps):
            what = "ignoring step %s of fragment %s, which the tape does not confirm"
            log.warning(what, snapshot.step, snapshot.fragment)
        self.step = max(self.step, step)
        return replace(snapshot, step=step)
