"""Stamps order the signed messages of one signer, so that readers recognise a message that was replayed.

A stamp is `EPOCH-NUMBER`. The epoch is that of the merger's lease, and 0 for islands. The number grows with each
message, also over restarts, because it starts at the wall clock in microseconds. Where a clock was set back, a newer
epoch or another incarnation decides.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from archipelago.broker.messages import Presence
from archipelago.broker.signing import STAMP, Raw, SignatureError

Stamp = tuple[int, int]
#: The stamp that is earlier than every other one.
FIRST: Stamp = (-1, 0)
#: A restored run begins this many epochs later, so that no epoch that was lost with the server is used again.
EPOCHS_SKIPPED = 1000
#: How many incarnations of each island are remembered.
INCARNATIONS = 8
_STAMP = re.compile(rb"([0-9]{1,19})-([0-9]{1,19})")


class Stamps:
    """Makes the stamps of one process.

    Args:
        wall: The wall clock in seconds.
    """

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._number = 0

    def next(self, epoch: int = 0) -> str:
        """Return a stamp that is greater than all earlier ones of this epoch."""
        self._number = max(self._number + 1, int(self._wall() * 1e6))
        return f"{epoch}-{self._number}"


def stamp_of(raw: Raw) -> Stamp:
    """Return the stamp of a message. Raises SignatureError."""
    found = _STAMP.fullmatch(raw.get(STAMP.encode(), b""))
    if not found:
        raise SignatureError("it has no stamp", code="signature.stamp")
    return int(found[1]), int(found[2])


class EventOrder:
    """The order of the events that one process reads: stamps grow along the stream.

    The process may read from any position again. So the newest stamp is remembered for each entry of the last batch.

    Attributes:
        is_begun: Whether the process reads events at all.
    """

    def __init__(self) -> None:
        self._stamps: dict[str, Stamp] = {}
        self.is_begun = False

    def begin(self, entry: str, stamp: Stamp) -> None:
        """Remember the newest stamp at an entry of the stream."""
        self._stamps = {entry: stamp}
        self.is_begun = True

    def accept(self, after: str, entry: str, stamp: Stamp) -> None:
        """Remember the stamp of the event that follows the entry `after`. Raises SignatureError for a replayed one."""
        if stamp <= self._stamps.get(after, FIRST):
            raise SignatureError("it is older than the events before it", code="signature.replayed")
        self._stamps[entry] = stamp

    def keep(self, after: str) -> None:
        """Forget all entries but that one, from which the next batch is read."""
        self._stamps = {entry: stamp for entry, stamp in self._stamps.items() if entry == after}


class FragmentOrder:
    """The newest stamp of each fragment that one process has read since the last resume."""

    def __init__(self) -> None:
        self._stamps: dict[int, Stamp] = {}

    def accept(self, fragment: int, stamp: Stamp) -> None:
        """Remember the stamp. Raises SignatureError for a snapshot that is older than one that was read before."""
        if stamp < self._stamps.get(fragment, FIRST):
            raise SignatureError(f"fragment {fragment} is older than before", code="signature.replayed")
        self._stamps[fragment] = stamp

    def forget(self) -> None:
        """Accept any snapshot next, because a merger has gone back to what Redis holds."""
        self._stamps.clear()


class HeartbeatOrder:
    """The newest heartbeat of each island, and when this process saw it first.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: dict[str, dict[str, tuple[Stamp, float]]] = {}
        self._newest: dict[str, tuple[Presence, float]] = {}

    def accept(self, presence: Presence, stamp: Stamp) -> Presence:
        """Return the presence with an age that no one else can lower. Raises SignatureError for a replayed heartbeat.

        The age that Redis reports follows from the key's time to live, which others may extend.
        """
        beat, now = presence.heartbeat, self._clock()
        incarnations = self._seen.setdefault(beat.island, {})
        newest, since = incarnations.pop(beat.incarnation, (FIRST, now))
        if stamp > newest:
            newest, since = stamp, now
        incarnations[beat.incarnation] = newest, since
        while len(incarnations) > INCARNATIONS:
            del incarnations[next(iter(incarnations))]
        if stamp < newest:
            raise SignatureError(f"the heartbeat of {beat.island} is older than before", code="signature.replayed")
        accepted = Presence(beat, max(presence.age_seconds, now - since))
        self._newest[beat.island] = accepted, now
        return accepted

    def newest(self, island: str) -> Presence | None:
        """Return the last accepted heartbeat, for use when someone has overwritten it."""
        if island not in self._newest:
            return None
        presence, at = self._newest[island]
        return Presence(presence.heartbeat, presence.age_seconds + self._clock() - at)
