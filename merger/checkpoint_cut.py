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
#: How long shard 0 waits for the parts of a checkpoint before it begins another one, in seconds between checkpoints. A
#: checkpoint that stays incomplete doubles the wait.
PATIENCE, PATIENCE_MAX = 2, 8
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
            self._after, number = _newest_marker(self._primary, self._after)
            return number
        except BrokerError as error:
            log.debug("no checkpoint is taken with shard 0, which cannot be read: %s", error)
            self._after, self._retry_at = "", now + RETRY_SECONDS
            return None


def _newest_marker(reader: ReaderClient, after: str) -> tuple[str, int | None]:
    """Return the last announcement after that one, and the number of the newest checkpoint among them."""
    number = None
    while found := reader.events(after, 0.0, EVENTS_AT_ONCE):
        after = found[-1][0]
        number = max((event.number for _, event in found if isinstance(event, Marker)), default=number)
        if len(found) < EVENTS_AT_ONCE:
            break
    return after, number


class Leading:
    """What the merger of shard 0 knows of the other shards and their parts.

    Attributes:
        announced: The newest checkpoint that was announced. Its number is not used again: it may have failed here, and
            other shards have parts of it.

    Args:
        missing: Returns the shards without a part of the checkpoint of that number.
    """

    def __init__(
        self, primary: ReaderClient, others: Sequence[ReaderClient], missing: Callable[[int], Sequence[int]]
    ) -> None:
        self.announced = 0
        self._primary, self._others, self._missing = primary, others, missing
        self._number, self._whole = 0, -1  # the last checkpoint that this merger has begun, and the last complete one
        self._rounds: list[int] | None = None  # of the other shards, before that
        self._has_warned = False
        self._began_at: float | None = None  # while parts of it may be missing
        self._patience, self._look_at = PATIENCE, float("-inf")

    def start(self) -> None:
        """Learn what other processes have announced, after the merger has loaded its shard. Raises BrokerError."""
        self._began_at = None
        self.announced = max(self.announced, _newest_marker(self._primary, START)[1] or 0)

    def is_waiting(self, now: float, every_seconds: float) -> bool:
        """Return whether parts of the last checkpoint are still being written, so that no other one should begin.

        A merger that still writes cannot take part in the next one. If two of them took turns at that, no checkpoint
        would ever be complete. A shard that is away, or whose disk fails, cannot be told from a slow one. So the wait
        ends, and grows until it is long enough for a slow one.
        """
        if self._began_at is None or now >= self._began_at + self._patience * every_seconds:
            return False
        if now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            try:
                if not self._missing_parts():
                    self._began_at = None
            except ArchipelagoError as error:
                log.debug("cannot see the parts of checkpoint %s: %s", self._number, error)
        return self._began_at is not None

    def gave_up(self) -> None:
        """Note that this merger has not written its own part, so that there is nothing to wait for."""
        self._began_at = None

    def begin(self, number: int, now: float) -> None:
        """Note that a checkpoint begins. Call this before it is announced."""
        if not self._number or not self._misses_parts():
            self._patience = PATIENCE
        elif self._began_at is not None:
            self._patience = min(2 * self._patience, PATIENCE_MAX)
        self._began_at, self._look_at = now, float("-inf")
        self._number = self.announced = number
        try:
            self._rounds = self._last_rounds()
        except BrokerError:
            self._rounds = None  # another checkpoint will be needed

    def lacks(self, closed: int) -> bool:
        """Return whether the last checkpoint lacks a part, or may lack rounds of another shard.

        Args:
            closed: The last closed round of shard 0.

        Raises:
            ArchipelagoError: That cannot be found out now.
        """
        rounds = self._last_rounds()
        is_empty = not closed and not any(rounds)
        return not is_empty and (rounds != self._rounds or bool(self._missing_parts()))

    def has_backlog(self) -> bool:
        """Return whether another shard still has contributions to merge, or cannot be read."""
        try:
            return any(reader.backlog() for reader in self._others)
        except BrokerError:
            return True

    def _missing_parts(self) -> Sequence[int]:
        """Return the shards without a part of the last checkpoint. One that was complete is not looked at again."""
        missing = () if self._whole == self._number else self._missing(self._number)
        self._whole = self._whole if missing else self._number
        return missing

    def _last_rounds(self) -> list[int]:
        return [max((entry.round for entry in reader.tape(1)), default=0) for reader in self._others]

    def _misses_parts(self) -> bool:
        """Return whether the last checkpoint is not complete. Log that, once until one is."""
        try:
            missing = self._missing_parts()
        except ArchipelagoError as error:
            log.debug("cannot see the parts of checkpoint %s: %s", self._number, error)
            return True
        if missing and not self._has_warned:
            log.warning(
                "checkpoint %s lacks the parts of shards %s, and cannot be restored. Does a merger serve each of "
                "them, and can it write? Mergers on several machines need one folder (--folder) or bucket (--bucket).",
                self._number,
                ", ".join(map(str, missing)),
                extra={"code": "checkpoint.incomplete"},
            )
        self._has_warned = bool(missing)
        return self._has_warned
