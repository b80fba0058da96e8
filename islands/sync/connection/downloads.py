"""Downloads of a shard's fragments: whole, or by the differences after a version that is held."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from archipelago.broker.codecs import Vector
from archipelago.broker.errors import WireError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Snapshot
from archipelago.broker.transport import ReaderClient
from archipelago.broker.wire import after_difference, digest_of, newest
from archipelago.islands.sync.connection import checks
from archipelago.islands.sync.measures import Uplink

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Arrival:
    """A snapshot that was downloaded and decoded: float32, N elements, or what a replica has prepared of it."""

    snapshot: Snapshot
    params_N: Vector


class Downloads:
    """Reads fragments of a run or shard, and measures how long that takes.

    Attributes:
        built: Called with each version of a fragment that was built, the oldest first. Listeners need all of them.
    """

    def __init__(self, reader: ReaderClient, manifest: Manifest, uplink: Uplink, clock: Callable[[], float]) -> None:
        self._reader, self._manifest, self._uplink, self._clock = reader, manifest, uplink, clock
        self.built: Callable[[Arrival], object] = lambda arrival: None

    def whole(self, p: int) -> Arrival:
        """Download the newest full snapshot of a fragment and the differences after it.

        Raises:
            WireError: A payload is missing, or was not announced.
        """
        began = self._clock()
        found = newest(self._reader, self._manifest, p)
        self._uplink.received(found.bytes, began, self._clock())
        if fault := checks.fault_in(found.snapshot, self._manifest):
            raise WireError(f"the hash of fragment {p} holds {fault}", code="wire.snapshot")
        if found.before_N is not None:
            version = found.snapshot.version - 1
            before = replace(found.snapshot, version=version, round=self._manifest.round_of(version, p), step=0)
            self.built(Arrival(before, found.before_N))
        return Arrival(found.snapshot, found.params_N)

    def by_differences(
        self, held: Arrival, announced: Mapping[int, Snapshot], goes_on: Callable[[], bool]
    ) -> Arrival | None:
        """Build the newest announced version from a held one and all differences since.

        Args:
            held: The version to begin with.
            announced: The newer versions.
            goes_on: Called between two downloads. It returns False if the run went back meanwhile.

        Returns:
            The newest version; None if the full snapshot is smaller, if a difference is missing, or if the result is
            not what the other islands hold.
        """
        chain = checks.differences_after(held.snapshot.version, announced)
        arrival = held
        for snapshot in chain:
            if arrival is not held:
                if not goes_on():
                    return None
                self.built(arrival)
            found = self._after_difference(snapshot, arrival.params_N)
            if found is None:
                return None
            arrival = found
        return arrival if chain else None

    def _after_difference(self, snapshot: Snapshot, before_N: Vector) -> Arrival | None:
        p, began = snapshot.fragment, self._clock()
        try:
            found = after_difference(self._reader, self._manifest, p, snapshot.version, before_N)
        except WireError as error:
            log.warning("a difference of fragment %s is damaged (%s): fetching it in full", p, error.reason)
            return None
        if found is None or found[1] != snapshot.difference_bytes:
            return None
        self._uplink.received(found[1], began, self._clock())
        if digest_of(found[0]) != snapshot.held:
            log.warning("the differences of fragment %s lead to other parameters: fetching it in full", p)
            return None
        return Arrival(snapshot, found[0])
