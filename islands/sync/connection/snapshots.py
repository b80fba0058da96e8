"""Downloads of fragments: as differences against what the island holds, or in full."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from archipelago.broker.codecs import Vector
from archipelago.broker.errors import BrokerError, UnreachableError, WireError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Snapshot, TapeEntry
from archipelago.broker.transport import IslandTransport
from archipelago.broker.wire import digest_of, newest, onto, payload_bytes_max
from archipelago.islands.sync.connection.uplink import Uplink

#: The newest header of each fragment; None for one that cannot be read.
Heads = Sequence[Snapshot | None]
#: A snapshot's global step may exceed the one before it by this many sync intervals without a confirmation.
STEP_INTERVALS = 4
#: How many of the newest rounds on the tape may confirm a step, so that one unreadable entry hides nothing.
TAPE_ENTRIES = 4

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Arrival:
    """A snapshot that was downloaded and decoded: float32, N elements, or what a replica has prepared of it."""

    snapshot: Snapshot
    params_N: Vector


class Snapshots:
    """The version that one island holds of each fragment, and the versions announced since."""

    def __init__(
        self,
        transport: IslandTransport,
        manifest: Manifest,
        uplink: Uplink,
        clock: Callable[[], float],
        listen: Callable[[], None],
    ) -> None:
        """Start without any fragment.

        Args:
            transport: Where fragments and differences are fetched.
            manifest: The run.
            uplink: Records the measured download rate.
            clock: Monotonic seconds.
            listen: Called between two downloads to read new announcements.
        """
        self._transport = transport
        self._manifest = manifest
        self._uplink = uplink
        self._clock = clock
        self._listen = listen
        self.bytes_down = 0
        self.held: dict[int, Arrival] = {}
        #: The length of the run in steps. No step beyond it is believed.
        self.run_steps = manifest.config.inner.steps
        #: The largest global step that this island believes in.
        self.step = 0
        self.announced: dict[int, dict[int, Snapshot]] = {}
        self._known: dict[int, tuple[int, str]] = {}  # version and digest of each fragment that arrived last

    def announce(self, snapshot: Snapshot) -> None:
        """Note a version that the merger announced, unless an equal or newer one has arrived."""
        p, version = snapshot.fragment, snapshot.version
        if version > self._known.get(p, (-1, ""))[0]:
            self.announced.setdefault(p, {})[version] = snapshot

    def newest(self, p: int) -> int:
        """Return the newest announced version of a fragment that was not downloaded, or 0."""
        return max(self.announced.get(p, {}), default=0)

    def forget(self, p: int) -> None:
        """Forget a fragment, so that its newest version is downloaded in full even if it has arrived before."""
        self.held.pop(p, None)
        self._known.pop(p, None)
        self.announced.pop(p, None)

    def drop(self, p: int) -> None:
        """Note that the last arrival of a fragment was not handed over. Differences may still build on it."""
        self._known.pop(p, None)

    def is_current(self, p: int, heads: Heads) -> bool:
        """Return whether the newest version of a fragment has arrived already."""
        head = heads[p]
        return head is not None and self._known.get(p) == (head.version, head.digest)

    def download(self, p: int, read_heads: Callable[[], Heads]) -> Arrival | None:
        """Download the newest version of a fragment. Returns None if it has arrived before.

        Args:
            p: The fragment.
            read_heads: Returns the newest headers of all fragments. Called only before a download in full.
        """
        arrival = self._by_differences(p)
        if arrival is None and p in self._known and self.is_current(p, read_heads()):
            self.announced.pop(p, None)
            return None
        return arrival or self.fetch(p)

    def fetch(self, p: int) -> Arrival:
        """Download the newest full snapshot of a fragment and the differences after it.

        Raises:
            WireError: A payload is missing, or was not announced.
        """
        began = self._clock()
        found = newest(self._transport.reader, self._manifest, p)
        self._uplink.received(found.bytes, began, self._clock())
        if fault := snapshot_fault(found.snapshot, self._manifest):
            raise WireError(f"the hash of fragment {p} holds {fault}", code="wire.snapshot")
        self.bytes_down += found.bytes
        return self._hold(p, Arrival(found.snapshot, found.params_N))

    def _hold(self, p: int, arrival: Arrival) -> Arrival:
        """Remember an arrival if differences build on it, and forget the announcements up to it."""
        arrival = replace(arrival, snapshot=self._with_believable_step(arrival.snapshot))
        if self._manifest.config.wire.sends_differences:
            self.held[p] = arrival
        self._known[p] = (arrival.snapshot.version, arrival.snapshot.digest)
        announced = self.announced.get(p, {})
        self.announced[p] = {version: s for version, s in announced.items() if version > arrival.snapshot.version}
        return arrival

    def _with_believable_step(self, snapshot: Snapshot) -> Snapshot:
        interval = self._manifest.config.sync.interval
        step = believable_step(snapshot, self.step, self.run_steps, interval, self._newest_rounds)
        if step < min(snapshot.step, self.run_steps):
            log.warning("ignoring step %s of fragment %s, which the tape does not confirm", snapshot.step,
                        snapshot.fragment)  # fmt: skip
        self.step = max(self.step, step)
        return replace(snapshot, step=step)

    def _newest_rounds(self) -> Sequence[TapeEntry]:
        try:
            return self._transport.reader.tape(TAPE_ENTRIES)
        except UnreachableError:
            raise
        except (BrokerError, WireError) as error:
            log.warning("the tape cannot be read: %s", error.what)
            return []

    def _by_differences(self, p: int) -> Arrival | None:
        """Build the newest announced version from the held one and all differences since.

        Returns None if the full snapshot is smaller, if a difference is missing, or if the result is not what the
        other islands hold.
        """
        held = self.held.get(p)
        chain = self._chain(p, held.snapshot.version) if held is not None else []
        if held is None or not chain:
            return None
        vector_N = held.params_N
        for snapshot in chain:
            found_N = self._after_difference(p, snapshot, vector_N)
            if found_N is None:
                return None
            vector_N = found_N
            self._listen()
            if self.held.get(p) is not held:
                return None  # the run went back meanwhile
        if digest_of(vector_N) != chain[-1].held:
            log.warning("the differences of fragment %s lead to other parameters: fetching it in full", p)
            return None
        return self._hold(p, Arrival(chain[-1], vector_N))

    def _chain(self, p: int, version: int) -> list[Snapshot]:
        """Return the announced versions after `version` if all have a difference and these are worth downloading."""
        announced = self.announced.get(p, {})
        newest = max(announced, default=0)
        chain = [announced.get(each) for each in range(version + 1, newest + 1)]
        known = [snapshot for snapshot in chain if snapshot is not None and snapshot.difference_bytes]
        if not known or len(known) < len(chain) or sum(s.difference_bytes for s in known) >= known[-1].bytes:
            return []
        return known

    def _after_difference(self, p: int, snapshot: Snapshot, before_N: Vector) -> Vector | None:
        unpacking = onto(self._manifest, p, before_N)
        began = self._clock()
        payload = self._transport.reader.difference(p, snapshot.version, unpacking.arrived)
        if payload is None or len(payload) != snapshot.difference_bytes:
            return None
        self.bytes_down += len(payload)
        self._uplink.received(len(payload), began, self._clock())
        try:
            return unpacking.finish(payload)
        except WireError as error:
            log.warning("a difference of fragment %s is damaged (%s): fetching it in full", p, error.reason)
            return None


def snapshot_fault(snapshot: Snapshot, manifest: Manifest) -> str:
    """Return why no merger of this run can have published this snapshot; empty if one can."""
    number, p = snapshot.round, snapshot.fragment
    if p not in manifest.own_fragments:
        return "a snapshot of a fragment that the run or shard does not have"
    is_first = number == 0 and snapshot.version == 0
    if not is_first and (number == 0 or p != manifest.fragment_of(number)):
        return "a snapshot of a fragment that its round does not sync"
    if not is_first and snapshot.version != manifest.version_after(number):
        return "a snapshot of a version that its round does not give"
    if max(snapshot.bytes, snapshot.difference_bytes) > payload_bytes_max(manifest.sizes[p]):
        return "a snapshot that is larger than its fragment"
    return ""


def believable_step(
    snapshot: Snapshot, known: int, steps: int, interval: int, newest_rounds: Callable[[], Sequence[TapeEntry]]
) -> int:
    """Return a snapshot's global step as far as it can be believed.

    One damaged number must not end the training of an island, so a step at the end of the run, or far ahead of the
    one before it, must be on the tape too.

    Args:
        snapshot: The snapshot.
        known: The largest step that the island believes in.
        steps: The length of the run in steps.
        interval: The steps between two syncs of a fragment.
        newest_rounds: Returns the newest entries of the tape. Called only for a step that needs it.
    """
    step = min(snapshot.step, steps)
    if step < steps and step <= known + STEP_INTERVALS * interval:
        return step
    confirmed = max((entry.step for entry in newest_rounds()), default=0)
    return min(step, max(known, confirmed))
