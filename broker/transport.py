"""`Transport`: everything that islands, mergers and operators say to each other, as one small interface.

Two implementations keep it: `broker.memory` (dictionaries; tests and virtual time) and `broker.redis_transport`
(Redis, Valkey, and fakeredis for tests). `tests/contract` runs the same suite over all of them.

Methods may raise UnreachableError at any time; then nothing is known about whether the write happened, and the caller
says it again with the same identity. Nothing here retries by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from archipelago.broker.corpus_shards import Place
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import (
    Actions,
    Books,
    Call,
    Contribution,
    Evaluation,
    Event,
    Handover,
    Heartbeat,
    Marker,
    Note,
    Pending,
    Presence,
    Refusal,
    Resume,
    Snapshot,
    TapeEntry,
)

DIFFERENCES_KEPT = 32
"""of each fragment: whoever missed more takes the full snapshot"""
NOTES_KEPT = 1000
"""the newest"""
REFUSALS_AMONG = 2048
"""events, the newest, that refusals are looked for in: a dashboard asks often, and the stream is long"""
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
    trim: Sequence[str] = ()
    """entries, merged by this commit or before, that need not be kept any longer"""
    cursors: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """shards of the data that move on: from which pass and sequence they are to be read"""
    difference: bytes = b""
    """payload that leads islands from the version before to this one; kept for a while"""
    after_round: int | None = None
    """the round that the merger knows as closed last: a broker that died may have forgotten it, and refuses then"""


@dataclass(frozen=True)
class Image:
    """A run as a checkpoint holds it: all that a Redis that lost everything must be given."""

    manifest: Manifest
    number: int
    """of the checkpoint"""
    snapshots: Sequence[tuple[Snapshot, bytes]]
    outers: Sequence[bytes]
    """the merger's own state of each fragment, empty where no round has closed"""
    state: str
    books: Books
    cursors: Mapping[str, tuple[int, int]]
    tape: Sequence[TapeEntry]
    """the newest entries, for whoever looks"""
    evaluations: Sequence[Evaluation]
    pending: Sequence[tuple[Contribution, bytes]]
    """contributions that were on their way to the merger"""

    @property
    def round(self) -> int:
        """The last round in it."""
        return max(snapshot.round for snapshot, _ in self.snapshots)

    @property
    def balanced_books(self) -> Books:
        """The books once what it holds as pending has been published again, and all else that waited is gone."""
        old = self.books
        return replace(
            old,
            kept=0,
            published=old.merged + old.refused + len(self.pending),
            published_tokens=old.merged_tokens + old.refused_tokens + sum(c.tokens for c, _ in self.pending),
        )


@dataclass(frozen=True)
class Memory:
    """What the broker's data takes, in bytes; a limit of 0 is none, or none that is known."""

    used: int
    limit: int


class Transport(Protocol):
    """A connection to one run. `run` need not exist yet."""

    run: str

    # the broker
    def instance(self) -> str:
        """Another text once the broker was started again, and may have lost what it was told last; may be empty."""
        ...

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

    def restore(self, image: Image) -> None:
        """Makes the run as a checkpoint holds it, whole or not at all. Raises RunExistsError.

        What the image holds as pending is published again; the books balance.
        """
        ...

    # islands
    def publish(self, contribution: Contribution, payload: bytes, actions: Actions | None = None) -> str:
        """Its entry, once the broker has it. Saying it twice makes two entries; the merger merges one."""
        ...

    def holds(self, entry: str) -> bool:
        """Whether a published entry is still there: not refused, not lost with a broker that died."""
        ...

    def record_actions(self, actions: Actions) -> None:
        """Puts down what an island did, without a contribution."""
        ...

    def heartbeat(self, heartbeat: Heartbeat) -> str:
        """Replaces the island's last one; what the operator wishes of it (`broker.control`), empty for nothing."""
        ...

    def lease_shard(self, shards: Sequence[str], me: str) -> Place | None:
        """A shard for `me` (island/incarnation) by `broker.data.choose`, and where to read on; None when all are held.

        A holder is gone when no heartbeat of that incarnation came for LIVE_SECONDS, or it left, or it is expelled; but
        not while a contribution of it waits to be merged, which may yet move the cursor. Who is expelled gets none.
        """
        ...

    def leased(self, shards: Sequence[str], me: str) -> frozenset[str]:
        """Which of these shards `me` still holds: not those whose pass ended, or that went to another."""
        ...

    def register_corpus(self, name: str, digest: str) -> str:
        """The digest of the text of that name that is known to the run: the one given, if none was."""
        ...

    def claim_return(self, island: str) -> tuple[int, int] | None:
        """Number and last round of the checkpoint that the run was restored from, for the first to ask in that name."""
        ...

    def memory(self) -> Memory: ...

    # between islands: a newcomer gets inner optimiser state from a healthy peer
    def ask(self, who: str) -> None:
        """`who` (island/incarnation) asks its peers for inner optimiser state."""
        ...

    def asks(self) -> list[str]:
        """Who asked, is alive, and was not promised an answer yet."""
        ...

    def promise(self, who: str, giver: str) -> bool:
        """Whether `giver` is the one to answer: the first that offers."""
        ...

    def hand_over(self, who: str, handover: Handover, payload: bytes) -> None:
        """The answer. It waits some minutes."""
        ...

    def handed_over(self, who: str) -> tuple[Handover, bytes] | None:
        """The answer if it is here. Raises WireError for one that is damaged."""
        ...

    def withdraw(self, who: str) -> None:
        """`who` needs no answer, or has it: question and answer go."""
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

    def difference(self, fragment: int, version: int) -> bytes | None:
        """What leads from the version before to that one; None where it is gone. The books count it as sent down."""
        ...

    def presences(self) -> list[Presence]:
        """Every island that was heard of in the last day, by name."""
        ...

    def books(self) -> Books: ...

    def backlog(self) -> int:
        """Contributions that are published and neither merged nor refused."""
        ...

    def pending(self) -> Pending:
        """The same with their tokens, counted entry by entry."""
        ...

    def cursors(self) -> dict[str, tuple[int, int]]:
        """Where each shard that was begun is to be read on."""
        ...

    def tape(self, count: int) -> list[TapeEntry]:
        """The newest `count` entries, oldest first."""
        ...

    def evaluations(self) -> list[Evaluation]:
        """Oldest first."""
        ...

    def evaluated(self, evaluation: Evaluation) -> None: ...

    def refusals(self, count: int) -> list[tuple[float, Refusal]]:
        """The newest `count` among the newest REFUSALS_AMONG events, oldest first, each with the broker's seconds."""
        ...

    def control(self) -> dict[str, str]:
        """What the operator wishes, as it was written: `broker.control` reads it."""
        ...

    def steer(self, changes: Mapping[str, str]) -> None:
        """Changes what the operator wishes, all of it at once; an empty value removes a field."""
        ...

    def note(self, note: Note) -> None:
        """Puts down what happened. The newest NOTES_KEPT stay."""
        ...

    def notes(self, count: int) -> list[Note]:
        """The newest `count`, oldest first."""
        ...

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

    def unacknowledged(self, after: str = START, count: int = 1 << 16) -> list[Delivery]:
        """Entries beyond `after` that a merger has read but neither merged nor refused, oldest first: what a restart
        begins with.
        """
        ...

    def merger_state(self) -> str:
        """The state of the last commit as JSON, empty where there was none."""
        ...

    def outer(self, fragment: int) -> bytes:
        """The merger's own state of the fragment at the last commit, empty where there was none."""
        ...

    def announce(self, epoch: int, event: Call | Resume | Marker) -> None: ...

    def refuse(self, epoch: int, refusals: Sequence[tuple[str, Refusal]]) -> None:
        """Ends entries of the updates stream, each with its reason, and tells the islands."""
        ...

    def commit(self, epoch: int, commit: Commit) -> None:
        """Closes a round: all of it, or none. Merged entries stay in the stream, acknowledged, until trimmed.

        Raises BrokerError when another round than `after_round` was closed last: the merger has to begin from there.
        """
        ...

    def read(self, entries: Sequence[str]) -> list[Delivery]:
        """Those entries of the updates stream, merged or not; one that is gone has a fault."""
        ...

    def trim(self, epoch: int, entries: Sequence[str], actions_until: str = START) -> None:
        """Lets go of merged entries that a checkpoint covers, and of actions up to that id."""
        ...

    def actions(self, after: str, count: int = 1024) -> list[tuple[str, Actions]]:
        """What islands did, oldest first, with ids."""
        ...

    def close(self) -> None: ...
