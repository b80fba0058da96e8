"""What processes say to each other through the broker, as three protocols, one for each role.

| protocol | used by |
| --- | --- |
| `IslandClient` | islands: contributions, heartbeats, shard leases, optimiser state for newcomers |
| `MergerClient` | mergers: the lease, the updates stream, commits |
| `ReaderClient` | every process that reads a run, and operators, who steer it |

A `Transport` is one connection to one run and has a client of each role. `broker.memory` implements it in dictionaries
(for tests and virtual time), and `broker.redis` for Redis, Valkey and fakeredis. `tests/contract` runs the same suite
over all of them.

Every method may raise UnreachableError. Whether a write happened is then unknown, and the caller repeats it with the
same identity. Nothing here retries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from archipelago.broker.corpus_shards import Place
from archipelago.broker.errors import WireError
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

#: Differences of each fragment. An island that missed more of them downloads the full snapshot.
DIFFERENCES_KEPT = 32
#: The newest notes.
NOTES_KEPT = 1000
#: How many of the newest events are searched for refusals. Dashboards ask often, and the stream is long.
REFUSALS_AMONG = 2048
#: Above this share of the broker's memory limit, islands publish nothing.
MEMORY_SHARE_MAX = 0.8
#: The id before the first event of a run.
START = "0-0"


@dataclass(frozen=True)
class Delivery:
    """One entry of the updates stream.

    Attributes:
        entry: The id of the entry.
        contribution: The header; None if it cannot be read.
        payload: The payload, once it has been downloaded.
        fault: Why the entry cannot be merged; empty if nothing is known to be wrong.
        download: Returns the payload, if it has not been downloaded yet. Raises WireError.
    """

    entry: str
    contribution: Contribution | None
    payload: bytes = b""
    fault: str = ""
    download: Callable[[], bytes] | None = field(default=None, compare=False, repr=False)

    def with_payload(self) -> Delivery:
        """Return the delivery with its payload, or with the fault that the download found."""
        if self.download is None:
            return self
        try:
            return replace(self, payload=self.download(), download=None)
        except WireError as error:
            return replace(self, fault=error.reason, download=None)


@dataclass(frozen=True)
class Commit:
    """Everything that closing one round changes, so that it can change in one transaction.

    Attributes:
        snapshot: The fragment's new version.
        payload: The payload of the snapshot.
        outer: The merger's own state of the fragment.
        state: The merger's other state, as JSON.
        tape: The round's entry on the tape.
        entries: Entries of the updates stream that this commit merges.
        tokens: Tokens of the merged contributions.
        trim: Entries, merged by this commit or before, that are deleted.
        cursors: Shards whose resume position moves, with the new pass and sequence.
        difference: Payload that leads islands from the previous version to this one; kept for a while.
        after_round: The round that the merger knows as the last closed one. A broker that restarted without its newest
            writes holds another, and refuses the commit. None skips the check.
    """

    snapshot: Snapshot
    payload: bytes
    outer: bytes
    state: str
    tape: TapeEntry
    entries: Sequence[str]
    tokens: int
    trim: Sequence[str] = ()
    cursors: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    difference: bytes = b""
    after_round: int | None = None


@dataclass(frozen=True)
class Image:
    """A run as a checkpoint holds it: everything that a Redis without data needs to continue the run.

    Attributes:
        manifest: The run's manifest.
        number: The number of the checkpoint.
        snapshots: The newest snapshot of each fragment, with its payload.
        outers: The merger's own state of each fragment; empty where no round has closed.
        state: The merger's other state, as JSON.
        books: The run's counters.
        cursors: The resume position of each started shard.
        tape: The newest rounds, for display only.
        evaluations: All evaluations.
        pending: Contributions that were published but not yet merged, with their payloads.
    """

    manifest: Manifest
    number: int
    snapshots: Sequence[tuple[Snapshot, bytes]]
    outers: Sequence[bytes]
    state: str
    books: Books
    cursors: Mapping[str, tuple[int, int]]
    tape: Sequence[TapeEntry]
    evaluations: Sequence[Evaluation]
    pending: Sequence[tuple[Contribution, bytes]]

    @property
    def round(self) -> int:
        """The last round in the checkpoint."""
        return max(snapshot.round for snapshot, _ in self.snapshots)

    @property
    def balanced_books(self) -> Books:
        """The books after only the pending contributions were published again."""
        old = self.books
        return replace(
            old,
            kept=0,
            published=old.merged + old.refused + len(self.pending),
            published_tokens=old.merged_tokens + old.refused_tokens + sum(c.tokens for c, _ in self.pending),
        )


@dataclass(frozen=True)
class Memory:
    """Memory of the broker's data in bytes. A limit of 0 means that there is none, or that it is unknown."""

    used: int
    limit: int


@dataclass(frozen=True)
class Standing:
    """Which merger serves a run, and how long ago it last merged something. All times are of the server's clock."""

    #: The merger that holds the lease; empty when the lease is free.
    holder: str = ""
    #: The epoch of that merger, or of the last one.
    epoch: int = 0
    #: Time left until the lease expires, unless it is renewed.
    lease_seconds: float = 0.0
    #: Time since the last round closed, or since the first contribution arrived if none has closed; 0 before that.
    still_seconds: float = 0.0


class ReaderClient(Protocol):
    """What every process may read of a run, and what operators write."""

    def instance(self) -> str:
        """Return an id that changes when the broker restarts and may have lost recent writes; it may be empty."""
        ...

    def runs(self) -> list[str]:
        """Return the names of all runs of this broker."""
        ...

    def manifest(self) -> Manifest:
        """Return the manifest. Raises UnknownRunError."""
        ...

    def last_event(self) -> str:
        """Return the id of the newest event; START where there is none."""
        ...

    def events(self, after: str, block_seconds: float, count: int = 256) -> list[tuple[str, Event]]:
        """Return events after that id, oldest first. Waits at most `block_seconds` for the first one."""
        ...

    def fragment(self, fragment: int, *, account: bool = False) -> tuple[Snapshot, bytes]:
        """Return the newest full snapshot, never torn. `account` adds its size to the downloaded bytes in the books."""
        ...

    def presences(self) -> list[Presence]:
        """Return every island that sent a heartbeat during the last day, by name."""
        ...

    def books(self) -> Books:
        """Return the run's counters."""
        ...

    def backlog(self) -> int:
        """Return how many published contributions are neither merged nor refused."""
        ...

    def pending(self) -> Pending:
        """Return the same with their tokens, counted entry by entry."""
        ...

    def cursors(self) -> dict[str, tuple[int, int]]:
        """Return the resume position (pass, sequences read) of each started shard."""
        ...

    def tape(self, count: int) -> list[TapeEntry]:
        """Return the newest `count` rounds, oldest first."""
        ...

    def evaluations(self) -> list[Evaluation]:
        """Return all evaluations, oldest first."""
        ...

    def record_evaluation(self, evaluation: Evaluation) -> None:
        """Append an evaluation."""
        ...

    def refusals(self, count: int) -> list[tuple[float, Refusal]]:
        """Return the newest `count` refusals among the newest REFUSALS_AMONG events, oldest first.

        Each comes with its time in seconds of the broker's clock.
        """
        ...

    def control(self) -> dict[str, str]:
        """Return the operator's requests as they were written; `broker.control` parses them."""
        ...

    def steer(self, changes: Mapping[str, str]) -> None:
        """Change the operator's requests in one step. An empty value removes a field."""
        ...

    def note(self, note: Note) -> None:
        """Append a note. The newest NOTES_KEPT remain."""
        ...

    def notes(self, count: int) -> list[Note]:
        """Return the newest `count` notes, oldest first."""
        ...

    def memory(self) -> Memory:
        """Return how much memory the broker uses."""
        ...

    def merger_state(self) -> str:
        """Return the merger's state at the last commit as JSON; empty before the first one."""
        ...

    def standing(self) -> Standing | None:
        """Return which merger serves the run now; None for a broker that does not know, as in virtual time."""
        ...


class IslandClient(Protocol):
    """What an island sends, and what is sent to it alone."""

    def publish(self, contribution: Contribution, payload: bytes, actions: Actions | None = None) -> str:
        """Return the contribution's entry once the broker has it.

        Publishing twice makes two entries, of which the merger merges one.
        """
        ...

    def holds(self, entry: str) -> bool:
        """Whether a published entry is still there: neither refused nor lost with a broker that died."""
        ...

    def record_actions(self, actions: Actions) -> None:
        """Record what an island did, without a contribution."""
        ...

    def heartbeat(self, heartbeat: Heartbeat) -> str:
        """Replace the island's last heartbeat. Returns the operator's request to this island, or an empty string."""
        ...

    def difference(self, fragment: int, version: int) -> bytes | None:
        """Return the payload that leads from the previous version to this one; None if it is gone.

        Its size is added to the downloaded bytes in the books.
        """
        ...

    def lease_shard(self, shards: Sequence[str], me: str) -> Place | None:
        """Lease a shard for `me` (island/incarnation), see `corpus_shards.choose`; None when all are held.

        A lease ends when its holder sent no heartbeat for LIVE_SECONDS, left, or is expelled. It does not end while a
        contribution of the holder waits to be merged, because that may still move the cursor. Expelled islands get no
        lease.
        """
        ...

    def leased(self, shards: Sequence[str], me: str) -> frozenset[str]:
        """Return which of these shards `me` still holds. Its pass may have ended, or another island has it."""
        ...

    def register_corpus(self, name: str, digest: str) -> str:
        """Return the digest that the run knows for the corpus of that name; an unknown name gets this digest."""
        ...

    def claim_checkpoint(self, island: str) -> tuple[int, int] | None:
        """Return number and last round of the checkpoint that the run was restored from, once for each island."""
        ...

    def request_state(self, who: str) -> None:
        """Ask the other islands for inner optimiser state, for `who` (island/incarnation)."""
        ...

    def open_requests(self) -> list[str]:
        """Return which live islands have asked and were not yet promised an answer."""
        ...

    def promise_answer(self, who: str, giver: str) -> bool:
        """Whether `giver` is the first to offer an answer to `who`, and should send it."""
        ...

    def hand_over(self, who: str, handover: Handover, payload: bytes) -> None:
        """Send the answer. It is kept for some minutes."""
        ...

    def handed_over(self, who: str) -> tuple[Handover, bytes] | None:
        """Return the answer if it has arrived. Raises WireError for a damaged one."""
        ...

    def withdraw_request(self, who: str) -> None:
        """Delete the question of `who` and its answer."""
        ...


class MergerClient(Protocol):
    """What a merger reads and writes. A write with an epoch that is not the newest raises FencedError."""

    def acquire(self, holder: str, seconds: float) -> int | None:
        """Take the lease if it is free or already held by `holder`. Returns a new epoch, or None."""
        ...

    def renew(self, epoch: int, holder: str, seconds: float) -> None:
        """Extend the lease."""
        ...

    def release(self, epoch: int) -> None:
        """Give the lease back, so that another merger need not wait until it expires."""
        ...

    def updates(self, block_seconds: float, count: int = 64) -> list[Delivery]:
        """Return entries that no merger has read yet, oldest first. Waits at most `block_seconds` for the first one.

        Large payloads are not downloaded yet, so that a merger can refuse a contribution by its header.
        """
        ...

    def unacknowledged(self, after: str = START, count: int = 1 << 16) -> list[Delivery]:
        """Return entries after `after` that a merger has read but neither merged nor refused, oldest first.

        A merger begins with them after a restart.
        """
        ...

    def read(self, entries: Sequence[str]) -> list[Delivery]:
        """Return these entries of the updates stream with their payloads, merged or not. A missing one has a fault."""
        ...

    def outer(self, fragment: int) -> bytes:
        """Return the merger's own state of the fragment at the last commit; empty before the first one."""
        ...

    def announce(self, epoch: int, event: Call | Resume | Marker) -> None:
        """Append an event."""
        ...

    def refuse(self, epoch: int, refusals: Sequence[tuple[str, Refusal]]) -> None:
        """Delete entries of the updates stream, and announce why."""
        ...

    def commit(self, epoch: int, commit: Commit) -> None:
        """Close a round in one transaction. Merged entries stay in the stream, acknowledged, until they are trimmed.

        Raises:
            BrokerError: The last closed round is not `commit.after_round`. The merger must reload its state.
        """
        ...

    def trim(self, epoch: int, entries: Sequence[str], actions_until: str = START) -> None:
        """Delete merged entries that a checkpoint covers, and actions up to that id."""
        ...

    def actions(self, after: str, count: int = 1024) -> list[tuple[str, Actions]]:
        """Return what islands did, oldest first, with ids."""
        ...


class ReaderTransport(Protocol):
    """What readers and operators use of a connection."""

    @property
    def run(self) -> str: ...
    @property
    def reader(self) -> ReaderClient: ...


class IslandTransport(ReaderTransport, Protocol):
    """What an island uses of a connection."""

    @property
    def island(self) -> IslandClient: ...


class MergerTransport(ReaderTransport, Protocol):
    """What a merger uses of a connection."""

    @property
    def merger(self) -> MergerClient: ...


class Transport(IslandTransport, MergerTransport, Protocol):
    """A connection to one run. The run need not exist yet."""

    def create(self, manifest: Manifest, snapshots: Sequence[tuple[Snapshot, bytes]]) -> None:
        """Make the run, with version 0 of every fragment, whole or not at all. Raises RunExistsError."""
        ...

    def restore(self, image: Image) -> None:
        """Make the run from a checkpoint, whole or not at all. Raises RunExistsError.

        Contributions that were pending are published again, and the books balance.
        """
        ...

    def close(self) -> None:
        """Close the connection."""
        ...
