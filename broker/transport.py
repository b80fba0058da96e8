"""`Transport`: everything that islands, mergers and operators say to each other, as one small interface.

Two implementations keep it: `broker.memory` (dictionaries; tests and virtual time) and `broker.redis_transport`
(Redis, Valkey, and fakeredis for tests). `tests/contract` runs the same suite over all of them.

Methods may raise UnreachableError at any time; then nothing is known about whether the write happened, and the caller
says it again with the same identity. Nothing here retries by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from broker.manifest import Manifest
from broker.messages import (
    Books,
    Call,
    Contribution,
    Evaluation,
    Event,
    Heartbeat,
    Presence,
    Refusal,
    Resume,
    Snapshot,
    TapeEntry,
)

START = "0-0"
"""The id before the first event of a run."""


@dataclass(frozen=True)
class Delivery:
    """One entry of the updates stream. Where `fault` is set the entry is unreadable, and says why."""

    entry: str
    contribution: Contribution | None
    payload: bytes
    fault: str = ""


@dataclass(frozen=True)
class Commit:
    """Everything that closing one round changes, so that it can change at once."""

    snapshot: Snapshot
    payload: bytes
    outer: bytes
    """the merger's own state of the fragment"""
    state: str
    """the merger's state beside the fragments, as JSON"""
    tape: TapeEntry
    entries: Sequence[str]
    """entries of the updates stream that are merged by this commit"""
    tokens: int
    """of the merged contributions"""


class Transport(Protocol):
    """A connection to one run. `run` need not exist yet."""

    run: str

    # the run
    def runs(self) -> list[str]:
        """Names of the runs that live here."""
        ...

    def create(self, manifest: Manifest, snapshots: Sequence[tuple[Snapshot, bytes]]) -> None:
        """Makes the run, whole or not at all, with version 0 of every fragment. Raises RunExistsError."""
        ...

    def manifest(self) -> Manifest:
        """Raises UnknownRunError."""
        ...

    # islands
    def publish(self, contribution: Contribution, payload: bytes) -> str:
        """Its entry, once the broker has it. Saying it twice makes two entries; the merger merges one."""
        ...

    def holds(self, entry: str) -> bool:
        """Whether a published entry is still there: not merged, not refused, not lost with a broker that died."""
        ...

    def heartbeat(self, heartbeat: Heartbeat) -> None:
        """Replaces the island's last one."""
        ...

    def claim_shard(self) -> int:
        """The next ordinal of the run's sequence of shards; nobody else gets the same one."""
        ...

    # anyone
    def last_event(self) -> str:
        """The id of the newest event, START where there is none."""
        ...

    def events(self, after: str, block_seconds: float, count: int = 256) -> list[tuple[str, Event]]:
        """Events after that id, oldest first; waits up to `block_seconds` for the first one (0 does not wait)."""
        ...

    def fragment(self, fragment: int, *, account: bool = False) -> tuple[Snapshot, bytes]:
        """The newest full snapshot, never torn. `account` adds its bytes to the books as sent down."""
        ...

    def presences(self) -> list[Presence]:
        """Every island that was heard of in the last day, by name."""
        ...

    def books(self) -> Books: ...

    def backlog(self) -> int:
        """Contributions that are published and neither merged nor refused."""
        ...

    def tape(self, count: int) -> list[TapeEntry]:
        """The newest `count` entries, oldest first."""
        ...

    def evaluations(self) -> list[Evaluation]:
        """Oldest first."""
        ...

    def evaluated(self, evaluation: Evaluation) -> None: ...

    # the merger
    def acquire(self, holder: str, seconds: float) -> int | None:
        """A new epoch when the lease is free (or `holder`'s own), else None."""
        ...

    def renew(self, epoch: int, holder: str, seconds: float) -> None:
        """Raises FencedError when a newer epoch exists; so do the writes below."""
        ...

    def release(self, epoch: int) -> None:
        """Gives the lease back, so that another merger need not wait for it to expire."""
        ...

    def updates(self, block_seconds: float, count: int = 64) -> list[Delivery]:
        """Entries that no merger has read yet, oldest first."""
        ...

    def unacknowledged(self) -> list[Delivery]:
        """Entries that a merger has read but neither merged nor refused, oldest first: what a restart begins with."""
        ...

    def merger_state(self) -> str:
        """The state of the last commit as JSON, empty where there was none."""
        ...

    def outer(self, fragment: int) -> bytes:
        """The merger's own state of the fragment at the last commit, empty where there was none."""
        ...

    def announce(self, epoch: int, event: Call | Resume) -> None: ...

    def refuse(self, epoch: int, refusals: Sequence[tuple[str, Refusal]]) -> None:
        """Ends entries of the updates stream, each with its reason, and tells the islands."""
        ...

    def commit(self, epoch: int, commit: Commit) -> None:
        """Closes a round: all of it, or none."""
        ...

    def close(self) -> None: ...
