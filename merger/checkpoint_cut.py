"""How the mergers of a run's shards take one checkpoint together.

The merger of shard 0 decides when. It cuts its shard and announces a marker with the number of the checkpoint. The
merger of every other shard reads that announcement, cuts its shard for the same number, and announces it, too. An
island takes its part at the first marker that it hears of. A checkpoint is complete when the parts of all shards are
written. Only such a one is restored.

The parts belong together, as in the algorithm of Lai and Yang (1987): no part holds what an island sent after its own
part, because a merger looks for markers before it accepts what it has read, and a marker is written before any island
hears of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from archipelago.broker.commits import START
from archipelago.broker.errors import ArchipelagoError, BrokerError
from archipelago.broker.messages import Marker
from archipelago.broker.transport import ReaderClient

EVENTS_AT_ONCE = 256
#: How long shard 0 is left alone after it could not be read. It may lie on a server of its own.
RETRY_SECONDS = 5.0
#: How long shard 0 waits for the parts of a checkpoint before it begins another one, in seconds between checkpoints.
PATIENCE = 4
#: How often it looks for them meanwhile. They may be in a bucket.
LOOK_SECONDS = 1.0

log = logging.getLogger(__name__)


class Following:
    """The markers of shard 0, as the merger of another shard reads them.

    A marker that was missed stays missed: the shard may have merged since then what its part must not hold.
    """

    def __init__(self, primary: ReaderClient) -> None:
        self._primary = primary
        self._after = ""  # the last announcement that was read; empty while that is unknown
        self._retry_at = float("-inf")

    def start(self) -> None:
        """Skip all earlier markers, because the merger has loaded its shard and does not know what it holds."""
        self._after, self._retry_at = "", float("-inf")

    def newest(self, now: float) -> int | None:
        """Return the number of the newest checkpoint that was announced since the last call; None if there is none."""
        if now < self._retry_at:
            return None
        try:
            if not self._after:
                self._after = self._primary.last_event()
            self._after, marker = _newest_marker(self._primary, self._after)
            return marker.number if marker else None
        except BrokerError as error:
            log.debug("no checkpoint is taken with shard 0, which cannot be read: %s", error)
            self._after, self._retry_at = "", now + RETRY_SECONDS
            return None


def _newest_marker(reader: ReaderClient, after: str, marker: Marker | None = None) -> tuple[str, Marker | None]:
    """Return the last announcement after that one, and the newest marker among them, or else that one."""
    while found := reader.events(after, 0.0, EVENTS_AT_ONCE):
        after = found[-1][0]
        marker = next((event for _, event in reversed(found) if isinstance(event, Marker)), marker)
        if len(found) < EVENTS_AT_ONCE:
            break
    return after, marker


class Parts:
    """The parts of the run's newest checkpoint, as the merger of any shard sees them.

    It knows them from what each shard has announced. So a merger that takes a shard over knows what the one before had
    done. A shard has ended only with all others: shard 0 may take one more checkpoint, which needs a part of it.

    Args:
        readers: One for each shard.
        missing: Returns the shards without a part of the checkpoint of that number.
    """

    def __init__(self, readers: Sequence[ReaderClient], missing: Callable[[int], Sequence[int]]) -> None:
        self._readers, self._missing = readers, missing
        self._whole = 0  # the last checkpoint that was complete
        self.start()

    def start(self) -> None:
        """Forget what was announced, because the merger has loaded its shard, maybe from another Redis."""
        self._read: list[tuple[str, Marker | None]] = [(START, None)] * len(self._readers)

    def lacks(self) -> bool:
        """Return whether the newest checkpoint lacks a part, or rounds of a shard.

        Raises:
            ArchipelagoError: That cannot be found out now.
        """
        self._read = [_newest_marker(reader, *read) for reader, read in zip(self._readers, self._read, strict=True)]
        rounds = [max((entry.round for entry in reader.tape(1)), default=0) for reader in self._readers]
        markers = [marker for _, marker in self._read]
        number = markers[0].number if markers[0] else 0
        return any(rounds) and (markers != [Marker(number, last) for last in rounds] or bool(self.missing(number)))

    def missing(self, number: int) -> Sequence[int]:
        """Return the shards without a part of that checkpoint. One that was complete is not looked at again."""
        missing = () if self._whole == number else self._missing(number)
        self._whole = self._whole if missing else number
        return missing

    def has_backlog(self) -> bool:
        """Return whether a shard still has contributions to merge, or cannot be read."""
        try:
            return any(reader.backlog() for reader in self._readers)
        except BrokerError:
            return True


class Leading:
    """When the merger of shard 0 begins a checkpoint, and how long it waits for the parts of the last one.

    Attributes:
        announced: The newest checkpoint that was announced. Its number is not used again: it may have failed here, and
            other shards have parts of it.
    """

    def __init__(self, primary: ReaderClient, parts: Parts) -> None:
        self.announced = 0
        self._primary, self._parts = primary, parts
        self._number = 0  # the last checkpoint that this merger has begun since it has loaded
        self._has_warned = False
        self._began_at: float | None = None  # while parts of it may be missing
        self._look_at = float("-inf")

    def start(self) -> None:
        """Learn what other processes have announced, after the merger has loaded its shard. Raises BrokerError."""
        self._began_at, self._number = None, 0  # another process may have deleted it, for newer ones
        newest = _newest_marker(self._primary, START)[1]
        self.announced = max(self.announced, newest.number if newest else 0)

    def is_waiting(self, now: float, every_seconds: float) -> bool:
        """Return whether parts of the last checkpoint are still being written, so that no other one should begin.

        A merger that still writes cannot take part in the next one. If two of them took turns at that, no checkpoint
        would ever be complete. A shard that is away, or whose disk fails, cannot be told from a slow one, so the wait
        ends.
        """
        if self._began_at is None or now >= self._began_at + PATIENCE * every_seconds:
            return False
        if now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            if self._missing() == []:
                self._began_at = None
        return self._began_at is not None

    def gave_up(self) -> None:
        """Note that this merger has not written its own part, so that there is nothing to wait for."""
        self._began_at = None

    def begin(self, number: int, now: float) -> None:
        """Note that a checkpoint begins. Call this before it is announced."""
        missing = self._missing() if self._number else []
        if missing and not self._has_warned:
            log.warning(
                "checkpoint %s lacks the parts of shards %s, and cannot be restored. Does a merger serve each of "
                "them, and can it write? Mergers on several machines need one folder (--folder) or bucket (--bucket).",
                self._number,
                ", ".join(map(str, missing)),
                extra={"code": "checkpoint.incomplete"},
            )
        self._has_warned = self._has_warned if missing is None else bool(missing)
        self._began_at, self._look_at = now, float("-inf")
        self._number = self.announced = number

    def _missing(self) -> list[int] | None:
        """Return the shards without a part of the last checkpoint, or None if that cannot be seen now."""
        try:
            return list(self._parts.missing(self._number))
        except ArchipelagoError as error:
            log.debug("cannot see the parts of checkpoint %s: %s", self._number, error)
            return None
