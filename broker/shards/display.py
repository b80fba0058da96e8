"""A reader of a whole run for people, which goes on while further shards cannot be reached."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from archipelago.broker.errors import ArchipelagoError, UnreachableError
from archipelago.broker.manifest import Manifest
from archipelago.broker.shards.reader import ShardedReader
from archipelago.broker.transport import ReaderClient

#: Time between two attempts to reach a shard that is away.
RETRY_SECONDS = 5.0

T = TypeVar("T")


@dataclass
class _Absence:
    """A shard that is away.

    Attributes:
        why: The error of the call that it did not answer.
        due: When to ask it again, in seconds of the reader's clock.
        is_asked: Whether it is being asked now.
        is_over: Whether it has answered since.
    """

    why: str
    due: float
    is_asked: bool = False
    is_over: bool = False


class DisplayReader(ShardedReader):
    """A `ShardedReader` that leaves out further shards that cannot be reached. Its values are those of the others.

    It is for showing a run. What islands, mergers and operators decide needs all shards, so writes and parameters still
    raise UnreachableError. So does every call if shard 0 cannot be reached, which has what belongs to the run.

    An attempt to reach a shard may last as long as a socket waits. So only the call that finds a shard away waits. The
    next calls leave it out at once, until it has answered an attempt on another thread.

    Args:
        readers: The reader of each shard.
        manifest: The manifest of the run.
        clock: Monotonic seconds.
        aside: Runs an attempt beside the calls.
    """

    def __init__(
        self,
        readers: Sequence[ReaderClient],
        manifest: Manifest,
        clock: Callable[[], float] = time.monotonic,
        aside: Callable[[Callable[[], None]], None] = lambda attempt: threading.Thread(
            target=attempt, daemon=True
        ).start(),
    ) -> None:
        super().__init__(readers, manifest)
        self._clock, self._aside = clock, aside
        self._absences: dict[int, _Absence] = {}

    @property
    def away(self) -> Mapping[int, str]:
        return {shard: absence.why for shard, absence in self._absences.items()}

    def _each(self, read: Callable[[ReaderClient], T]) -> dict[int, T]:
        found = {}
        for shard, reader in enumerate(self._readers):
            if self._is_away(shard):
                continue
            try:
                found[shard] = read(reader)
            except UnreachableError as error:
                if shard == 0:
                    raise
                self._absences[shard] = _Absence(error.what, self._clock() + RETRY_SECONDS)
        return found

    def _is_away(self, shard: int) -> bool:
        """Return whether a shard is away. If it is time for that, begin another attempt to reach it."""
        absence = self._absences.get(shard)
        if absence is None:
            return False
        if absence.is_over:
            del self._absences[shard]
            return False
        if not absence.is_asked and self._clock() >= absence.due:
            absence.is_asked = True
            self._aside(lambda: self._ask_again(shard, absence))
        return True

    def _ask_again(self, shard: int, absence: _Absence) -> None:
        try:
            self._readers[shard].is_served()
        except UnreachableError as error:
            absence.why, absence.due = error.what, self._clock() + RETRY_SECONDS
        except ArchipelagoError:  # it answers, and the next call raises what is wrong
            absence.is_over = True
        else:
            absence.is_over = True
        finally:
            absence.is_asked = False
