"""A reader of a whole run for people, which goes on while further shards cannot be reached."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from archipelago.broker.errors import UnreachableError
from archipelago.broker.manifest import Manifest
from archipelago.broker.shards.reader import ShardedReader
from archipelago.broker.transport import ReaderClient

#: Time between two attempts to reach a shard that is away.
RETRY_SECONDS = 5.0
#: How long a call waits for further shards that do not answer. A server that is alive may be slow for a second or two.
PATIENCE_SECONDS = 3.0

T = TypeVar("T")


@dataclass
class _Absence:
    """A shard that is away.

    Attributes:
        why: The error of the call that it did not answer.
        due: When to ask it again, in seconds of the reader's clock.
        is_asked: Whether it has not answered the last call yet.
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

    A call asks all shards at the same time, each further one on a thread of its own, because a shard that hangs keeps
    its thread for as long as a socket waits. The call that finds a shard away waits for it, but not that long. The next
    calls leave it out at once, until it has answered.

    Args:
        readers: The reader of each shard.
        manifest: The manifest of the run.
        clock: Monotonic seconds.
        aside: Runs an attempt beside the calls.
        patience_seconds: How long a call waits for further shards.
    """

    def __init__(
        self,
        readers: Sequence[ReaderClient],
        manifest: Manifest,
        clock: Callable[[], float] = time.monotonic,
        aside: Callable[[Callable[[], None]], None] = lambda attempt: threading.Thread(
            target=attempt, daemon=True
        ).start(),
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        super().__init__(readers, manifest)
        self._clock, self._aside, self._patience_seconds = clock, aside, patience_seconds
        self._absences: dict[int, _Absence] = {}

    @property
    def away(self) -> Mapping[int, str]:
        return {shard: absence.why for shard, absence in self._absences.items()}

    def _each(self, read: Callable[[ReaderClient], T]) -> dict[int, T]:
        further = [shard for shard in range(1, len(self._readers)) if not self._is_away(shard)]
        answers = {shard: self._ask(shard, read) for shard in further}
        found = {0: read(self._home)}
        until = self._clock() + self._patience_seconds
        for shard, answer in answers.items():
            try:
                found[shard] = answer.result(max(0.0, until - self._clock()))
            except UnreachableError as error:
                self._absences[shard] = _Absence(error.what, self._clock() + RETRY_SECONDS)
            except TimeoutError:
                why = f"its server has not answered for {self._patience_seconds:g} s"
                absence = self._absences[shard] = _Absence(why, self._clock(), is_asked=True)
                answer.add_done_callback(partial(self._answered, absence))
        return found

    def _ask(self, shard: int, read: Callable[[ReaderClient], T]) -> Future[T]:
        """Begin to read from a shard, beside this call."""
        answer: Future[T] = Future()

        def attempt() -> None:
            try:
                answer.set_result(read(self._readers[shard]))
            except Exception as error:  # noqa: BLE001 - whoever takes the answer raises it
                answer.set_exception(error)

        self._aside(attempt)
        return answer

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
            self._ask(shard, lambda reader: reader.is_served()).add_done_callback(partial(self._answered, absence))
        return True

    def _answered(self, absence: _Absence, answer: Future[Any]) -> None:
        """Note how a call to a shard that is away has ended."""
        error = answer.exception()
        if isinstance(error, UnreachableError):
            absence.why, absence.due = error.what, self._clock() + RETRY_SECONDS
        else:  # it answers. If something is wrong, the next call raises it.
            absence.is_over = True
        absence.is_asked = False
