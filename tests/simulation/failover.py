"""A primary whose replica was promoted, and that some processes still use."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

from archipelago.broker.memory.state import MemoryRun

if TYPE_CHECKING:
    from tests.simulation.processes import Process


class OldPrimary:
    """Answers its users until they find the new primary. What they write in the meantime is lost.

    Ids of entries and events derive from the time, so the two primaries never give the same one.

    Attributes:
        acknowledged: The contributions that it has acknowledged, by identity.

    Args:
        shard: The shard that it held.
        key: The name under which the broker keeps that shard.
        run: What it holds.
        acknowledged: As above, until now.
        since: When the new primary became its replica for the last time. Later writes are lost.
        users: The processes that still use it.
        until: When they find the new one.
    """

    def __init__(
        self,
        shard: int,
        key: str,
        run: MemoryRun,
        acknowledged: Iterable[str],
        since: float,
        users: Collection[Process],
        until: float,
    ) -> None:
        self.shard, self._key, self._run = shard, key, run
        self.acknowledged, self.since = set(acknowledged), since
        self.users, self.until = users, until

    def call(self, runs: dict[str, MemoryRun], method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Let it execute a call."""
        new, old = runs[self._key], self._run
        _advance(old, new)
        runs[self._key] = old
        try:
            return method(*args, **kwargs)
        finally:
            runs[self._key] = new
            _advance(new, old)


def _advance(run: MemoryRun, other: MemoryRun) -> None:
    run.next_event, run.next_update = other.next_event, other.next_update
