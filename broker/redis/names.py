"""The names of a run's islands: which ones are read, and which ones a merger forgets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from archipelago.broker.presence import LIVE_SECONDS, Presence
from archipelago.broker.redis.connection import RedisConnection
from archipelago.broker.redis.replies import names_in
from archipelago.broker.redis.script import Write

#: The most islands whose streams are read. Other programs may have added any number of names to the set of islands.
ISLANDS_MAX = 2048
#: About how many names of the set of islands are read at a time, with a lookup for each new one.
NAMES_READ = 1024
#: How long the heartbeat of a silent island is kept.
REMEMBER_SECONDS = 24 * 3600
#: The heartbeats of more silent islands than this are not kept that long. User loops may get a new name at each start.
SILENT_KEPT = 128
#: How often a process looks whether the islands that it knows still have keys, and a merger deletes those of others.
FORGET_SECONDS = 10.0
#: About how many names a merger looks at each time.
FORGET_NAMES = 4096
#: How many evaluations of an island that is gone a merger moves each time, and how many the run keeps.
MOVED_EVALUATIONS, EVALUATIONS_KEPT = 500, 20_000


class IslandNames:
    """Knows the islands that have keys of their own in one shard of a run.

    Args:
        connection: The connection to the run, or to one of its shards.
        invited: Returns the names of the invited islands; None if anyone may join.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        connection: RedisConnection,
        invited: Callable[[], Iterable[str] | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection, self._invited, self._clock = connection, invited, clock
        self._redis, self._keys = connection.redis, connection.keys
        self._names: set[str] = set()
        self._cursor = self._forget_cursor = 0
        self._looked_at = self._forgot_at = clock()

    def all(self) -> list[str]:
        """Return the names of the islands that have a key of their own, sorted; ISLANDS_MAX at most.

        Every island can add any number of names to the set, so a name alone counts for nothing, and the names that
        were found stay until their keys are gone. If the set is very long, the next call goes on where this one has
        stopped. In a run with invitations, only the names of invited islands are looked for, and the set is not read.
        """
        if self._clock() - self._looked_at >= FORGET_SECONDS:
            self._looked_at = self._clock()
            with self._connection.translated():
                self._names.intersection_update(self._existing(sorted(self._names)))
        if (invited := self._invited()) is not None:
            with self._connection.translated():
                self._names.update(self._existing([name for name in invited if name not in self._names]))
            return sorted(self._names)
        with self._connection.forgiving(self._keys.islands, "a set"):
            self.found(self._redis.sscan(self._keys.islands, self._cursor, count=NAMES_READ))
        return sorted(self._names)

    def ask(self, pipe: Any) -> bool:
        """Queue what `all` reads, if that takes a command. The answer is for `found`."""
        if is_asked := self._invited() is None and self._clock() - self._looked_at < FORGET_SECONDS:
            pipe.sscan(self._keys.islands, self._cursor, count=NAMES_READ)
        return is_asked

    def found(self, answer: Any) -> None:
        """Take a part of the set of names."""
        if isinstance(answer, Exception):  # another type of value
            return
        self._cursor, some = answer
        if new := [name for name in names_in(some) if name not in self._names]:
            with self._connection.translated():
                self._names.update(self._existing(new)[: ISLANDS_MAX - len(self._names)])

    @property
    def known(self) -> list[str]:
        """The names that were found, sorted."""
        return sorted(self._names)

    def _existing(self, names: Sequence[str]) -> list[str]:
        """Return those of the islands that have a key of their own."""
        if not names:
            return []
        with self._redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.exists(*self._keys.of_island(name))
            answers = pipe.execute()
        return [name for name, found in zip(names, answers, strict=True) if found]

    def forget(self, write: Write, presences: Iterable[Presence]) -> bool:
        """Add the deletion of what is left of islands that are gone; see `MergerClient.forget`.

        Each time it looks at a part of the names.

        Args:
            write: The write of the merger.
            presences: The heartbeats that were read last.

        Returns:
            Whether anything was added.
        """
        if self._clock() - self._forgot_at < FORGET_SECONDS:
            return False
        self._forgot_at, self._looked_at = self._clock(), float("-inf")
        silent = sorted(p.age_seconds for p in presences if p.age_seconds > 2 * LIVE_SECONDS)
        kept = silent[SILENT_KEPT] if len(silent) > SILENT_KEPT else REMEMBER_SECONDS
        limits = [round(1000 * (REMEMBER_SECONDS - kept)), 1000 * REMEMBER_SECONDS]
        some: Sequence[str | bytes] = sorted(self._names)
        if self._invited() is None:
            with self._connection.forgiving(self._keys.islands, "a set"):
                self._forget_cursor, some = self._redis.sscan(
                    self._keys.islands, self._forget_cursor, count=FORGET_NAMES
                )
        for name in some:
            own = self._keys.of_island(name.decode("utf-8", "replace") if isinstance(name, bytes) else name)
            keys = [*own, self._keys.islands, self._keys.evaluations]
            write.gone(keys, name, *limits, MOVED_EVALUATIONS, EVALUATIONS_KEPT)
        return bool(some)
