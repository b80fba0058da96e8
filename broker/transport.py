"""The broker's interface, as three protocols, one for each role.

| protocol | used by |
| --- | --- |
| `IslandClient` | islands: contributions, heartbeats, leases of text, optimiser state for newcomers |
| `MergerClient` | mergers: the lease, the updates streams, commits |
| `ReaderClient` | every process that reads a run, and operators, who steer it |

A `Transport` is one connection to one run and has a client of each role. `broker.memory` implements it in dictionaries
(for tests and virtual time), and `broker.redis` for Redis, Valkey and fakeredis. `tests/contract` runs the same suite
over all of them.

Every method may raise UnreachableError. The caller then does not know whether a write happened, and repeats it with
the same identity. No method retries.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from archipelago.broker.entries import sender_of
from archipelago.broker.errors import WireError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import (
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
from archipelago.broker.ranges import NameClaim, ReadPosition

#: How many differences of each fragment the broker keeps. An island that missed more downloads the full snapshot, and
#: the differences after it. So a fragment's newest full snapshot is never more versions old than this.
DIFFERENCES_KEPT = 32
#: How many notes the broker keeps.
NOTES_KEPT = 1000
#: How many of the newest events are searched for refusals. Dashboards ask often, and the stream is long.
REFUSALS_AMONG = 2048
#: Islands do not publish while the broker uses more than this share of its memory limit.
MEMORY_SHARE_MAX = 0.8
#: A standby without a sign of life for this long is not listed.
STANDBY_SECONDS = 10.0
#: The id before the first event of a run.
START = "0-0"


def never_gone(holder: str) -> bool:
    """Return False, for who cannot tell whether another merger has ended."""
    return False


#: Called with a payload as far as it has arrived, which is how far it can be decoded.
Arrived = Callable[[memoryview], None]


def unwatched(payload: memoryview) -> None:
    """Take no notice of what has arrived of a payload."""


@dataclass(frozen=True)
class Delivery:
    """One entry of an updates stream.

    Attributes:
        entry: The name of the entry, as `NAME/ID`.
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

    @property
    def sender(self) -> str:
        """The island whose stream holds the entry."""
        return sender_of(self.entry)

    def with_payload(self) -> Delivery:
        """Return the delivery with its payload, or with the fault that the download found."""
        if self.download is None:
            return self
        try:
            return replace(self, payload=self.download(), download=None)
        except WireError as error:
            return replace(self, fault=error.reason, download=None)


@dataclass(frozen=True)
class Compaction:
    """The full state of a fragment at one version. A merger that loads the run merges later rounds again.

    Attributes:
        snapshot: The version.
        payload: The published parameters, as a full snapshot.
        outer: The exact parameters and outer optimiser state, which only mergers read; empty for version 0.
    """

    snapshot: Snapshot
    payload: bytes
    outer: bytes


@dataclass(frozen=True)
class Commit:
    """All changes of one closed round. The broker applies them in one transaction.

    Attributes:
        snapshot: The fragment's new version.
        payload: The payload of the snapshot; empty unless the commit carries the fragment's full state (`Compaction`).
        outer: The fragment's exact parameters and outer optimiser state; empty unless there is a payload.
        state: The merger's other state, as JSON.
        tape: The round's entry on the tape.
        entries: Entries of the updates streams that this commit merges.
        tokens: Tokens of the merged contributions.
        trim: Entries to delete, merged by this commit or an earlier one.
        cursors: The new resume position (pass, sequences read) of each range of text that advanced.
        difference: The payload that leads islands from the previous version to this one. It expires.
        after_round: The last closed round that the merger knows. If the broker restarted without its newest writes,
            its last round or its instance (`ReaderClient.instance`) differs from that of the lease, and it refuses the
            commit. None skips the check.
        log: All that a merger needs to merge this round again, besides the contributions. The broker keeps it until a
            compaction covers the round.
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
    log: str = ""

    @property
    def compaction(self) -> Compaction | None:
        """The fragment's full state after the round, if the commit carries it."""
        return Compaction(self.snapshot, self.payload, self.outer) if self.payload else None


@dataclass(frozen=True)
class Repair:
    """Parts of a run that a merger has rebuilt. Those that are None or missing stay as they are.

    Attributes:
        state: The merger's other state, as JSON.
        compactions: Full states of fragments at their newest versions.
        heads: Headers of newest versions whose full state is an older one.
        cursors: The resume positions of all started ranges of text.
        books: Counters by name.
    """

    state: str | None = None
    compactions: Sequence[Compaction] = ()
    heads: Sequence[Snapshot] = ()
    cursors: Mapping[str, tuple[int, int]] | None = None
    books: Mapping[str, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether there is anything to write."""
        return self != Repair()


@dataclass(frozen=True)
class Image:
    """The contents of a checkpoint: all data that an empty Redis needs to continue the run.

    Attributes:
        manifest: The run's manifest.
        number: The number of the checkpoint.
        snapshots: The newest snapshot of each fragment, with its payload.
        outers: The exact parameters and outer optimiser state of each fragment; empty if none of its rounds has closed.
        state: The merger's other state, as JSON.
        books: The run's counters.
        cursors: The resume position of each started range of text.
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
        """The books of the restored run, which publishes only the pending contributions again."""
        old = self.books
        return replace(
            old,
            kept=0,
            published=old.merged + old.refused + len(self.pending),
            published_tokens=old.merged_tokens + old.refused_tokens + sum(c.tokens for c, _ in self.pending),
        )


@dataclass(frozen=True)
class Memory:
    """The memory of the broker's data in bytes.

    Attributes:
        used: What the server uses.
        limit: What it may use; 0 if there is no limit, or if it is unknown.
        machine: The memory of its machine; 0 if it is unknown.
    """

    used: int
    limit: int
    machine: int = 0

    @property
    def most(self) -> int:
        """What it can use at most: its limit or its machine's memory; 0 if both are unknown."""
        return min((size for size in (self.limit, self.machine) if size > 0), default=0)


@dataclass(frozen=True)
class MergerStatus:
    """The merger that serves a run, and the time since it last merged something, by the server's clock."""

    #: The merger that holds the lease; empty when the lease is free.
    holder: str = ""
    #: The epoch of that merger, or of the last one.
    epoch: int = 0
    #: Time left until the lease expires, unless it is renewed.
    lease_seconds: float = 0.0
    #: Time since the last round closed, or since the first contribution arrived if none has closed; 0 before that.
    still_seconds: float = 0.0
    #: The same for each shard, in a run with several.
    shards: tuple[MergerStatus, ...] = ()
    #: Whether the shard cannot be reached, so nothing else is known of it (`broker.shards.reader`).
    is_away: bool = False

    @property
    def unserved(self) -> tuple[int, ...]:
        """The shards that can be reached and that no merger serves, in a run with several."""
        return tuple(shard for shard, status in enumerate(self.shards) if not status.holder and not status.is_away)

    @property
    def unreachable(self) -> tuple[int, ...]:
        """The shards that cannot be reached, in a run with several."""
        return tuple(shard for shard, status in enumerate(self.shards) if status.is_away)

    @property
    def holders(self) -> dict[str, list[int]]:
        """The mergers that serve, each with its shards. That of a run with one shard serves the shard 0."""
        out: dict[str, list[int]] = {}
        for shard, status in enumerate(self.shards or (self,)):
            if status.holder:
                out.setdefault(status.holder, []).append(shard)
        return out


@dataclass(frozen=True)
class Standby:
    """A merger that waits for the lease, and the time since its last sign of life."""

    name: str
    age_seconds: float


class ReaderClient(Protocol):
    """The client of a process that reads a run, and of operators, who can also write requests."""

    def instance(self) -> str:
        """Return an id that changes when the broker restarts and may have lost recent writes; it may be empty."""
        ...

    def runs(self) -> list[str]:
        """Return the names of all runs of this broker."""
        ...

    def manifest(self) -> Manifest:
        """Return the manifest. Raises UnknownRunError."""
        ...

    def uid(self) -> str | None:
        """Return the uid in the run's manifest; None if there is no manifest, or it cannot be read."""
        ...

    def last_event(self) -> str:
        """Return the id of the newest event, or START if there is none."""
        ...

    def events(self, after: str, block_seconds: float, count: int = 256) -> list[tuple[str, Event]]:
        """Return events after that id, oldest first. Waits at most `block_seconds` for the first one."""
        ...

    def fragment(self, fragment: int, arrived: Arrived = unwatched) -> tuple[Snapshot, bytes]:
        """Return the newest full snapshot, never torn. Newer versions may exist: see `broker.published`."""
        ...

    def heads(self) -> list[Snapshot | None]:
        """Return the header of each fragment's newest version; None for one that cannot be read."""
        ...

    def difference(self, fragment: int, version: int, arrived: Arrived = unwatched) -> bytes | None:
        """Return the payload that leads from the previous version to this one; None if it is gone."""
        ...

    def presences(self) -> list[Presence]:
        """Return every island that sent a heartbeat during the last day, by name."""
        ...

    def unreadable(self) -> dict[str, str]:
        """Return the records that this connection could not read and skipped, each with the reason."""
        ...

    def books(self) -> Books:
        """Return the run's counters. One that cannot be read is 0."""
        ...

    def backlog(self) -> int:
        """Return how many published contributions are neither merged nor refused."""
        ...

    def pending(self) -> Pending:
        """Return the number and the tokens of these contributions, counted entry by entry."""
        ...

    def cursors(self) -> dict[str, tuple[int, int]]:
        """Return the resume position (pass, sequences read) of each started range of text."""
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

    def is_served(self) -> bool | None:
        """Return whether a merger holds the lease of the run; None if this user may not know."""
        ...

    def merger_status(self) -> MergerStatus | None:
        """Return which merger serves the run now; None from a broker that does not record it, as in virtual time."""
        ...

    def standbys(self) -> list[Standby]:
        """Return the mergers that wait for the lease, by name."""
        ...


class IslandClient(Protocol):
    """The client of an island."""

    def publish(self, contribution: Contribution, payload: bytes) -> str:
        """Publish a contribution, and return its entry once the broker has stored it.

        Publishing twice creates two entries, of which the merger merges one.
        """
        ...

    def holds(self, entry: str) -> bool:
        """Return whether the broker still has a published entry: it was not refused, trimmed or lost in a crash."""
        ...

    def heartbeat(self, heartbeat: Heartbeat) -> dict[str, str]:
        """Replace the island's last heartbeat. Returns the operator's requests that concern it (`control.heard_by`).

        What earlier incarnations of the island have downloaded is added to `bytes_down`.
        """
        ...

    def claim_name(self, island: str, incarnation: str) -> NameClaim:
        """Claim the name of an island, which ends the claim of any earlier process. Return the claim."""
        ...

    def confirm_name(self, island: str, claim: NameClaim) -> NameClaim:
        """Return the newest claim to the name. If the broker has lost `claim`, it is written again."""
        ...

    def lease_range(self, ranges: Sequence[str], me: str) -> ReadPosition | None:
        """Lease a range for `me` (island/incarnation), as `ranges.choose` selects it; None if all are leased.

        A lease ends when its holder has sent no heartbeat for LIVE_SECONDS, has left, or is expelled. It does not end
        while a contribution of the holder waits to be merged, because that may still move the cursor. An expelled
        island gets no lease.
        """
        ...

    def leased(self, ranges: Sequence[str], me: str) -> frozenset[str]:
        """Return the ranges that `me` still holds. It loses a range when the pass ends or another island leases it."""
        ...

    def lease_evaluation(self, me: str, seconds: float) -> bool:
        """Take or extend the lease on evaluating the run, for `me` (island/incarnation). 0 seconds ends it.

        Returns:
            Whether `me` holds it now. At most one island does, until its lease expires.
        """
        ...

    def register_corpus(self, name: str, digest: str) -> str:
        """Return the digest that the run has stored for this corpus. For a new name it stores this digest."""
        ...

    def claim_checkpoint(self, island: str) -> tuple[int, int] | None:
        """Return the number and last round of the checkpoint from which the run was restored, once for each island.

        Returns None to an island that has claimed it before, and for a run that was not restored.
        """
        ...

    def request_state(self, who: str) -> None:
        """Ask the other islands for inner optimiser state, for `who` (island/incarnation)."""
        ...

    def open_requests(self) -> list[str]:
        """Return the live islands (island/incarnation) whose request no other island has promised to answer."""
        ...

    def promise_answer(self, who: str, giver: str) -> bool:
        """Promise that `giver` answers the request of `who`. Returns False if another island has promised it."""
        ...

    def hand_over(self, who: str, handover: Handover, payload: bytes) -> None:
        """Send the answer to `who`. The broker keeps it for some minutes."""
        ...

    def handed_over(self, who: str) -> tuple[Handover, bytes] | None:
        """Return the answer to `who` if it has arrived. Raises WireError if it is damaged."""
        ...

    def withdraw_request(self, who: str) -> None:
        """Delete the request of `who` and its answer."""
        ...


class Placed(Protocol):
    """A compaction that lies in the broker without a pointer to it."""

    @property
    def snapshot(self) -> Snapshot: ...


class MergerClient(Protocol):
    """The client of a merger. A write with an epoch that is not the newest raises FencedError."""

    def acquire(self, holder: str, seconds: float, is_gone: Callable[[str], bool] = never_gone) -> int | None:
        """Take the lease if it is free, already held by `holder`, or held by a merger of which `is_gone` is true.

        Returns a new epoch, or None.
        """
        ...

    def renew(self, epoch: int, holder: str, seconds: float) -> None:
        """Extend the lease."""
        ...

    def release(self, epoch: int) -> None:
        """Release the lease, so that another merger need not wait until it expires."""
        ...

    def stand_by(self, name: str) -> None:
        """Register a merger that waits for the lease. It is listed for STANDBY_SECONDS."""
        ...

    def stand_down(self, name: str) -> None:
        """Remove a merger from the standbys."""
        ...

    def updates(self, block_seconds: float, count: int = 64) -> list[Delivery]:
        """Return entries that no merger has read yet, oldest first: at most `count` of each island.

        Waits at most `block_seconds` for the first one. An entry that names another island than the one in whose stream
        it lies has a fault and no contribution. Large payloads are not downloaded yet, so that a merger can refuse a
        contribution by its header.
        """
        ...

    def unacknowledged(self, after: str = START, count: int = 1 << 16) -> list[Delivery]:
        """Return entries after `after` that a merger has read but neither merged nor refused, oldest first.

        A merger begins with them after a restart.
        """
        ...

    def read(self, entries: Sequence[str]) -> list[Delivery]:
        """Return these entries of the updates streams with their payloads, merged or not. A missing one has a fault."""
        ...

    def outer(self, fragment: int, version: int | None = None) -> bytes:
        """Return the `outer` of the fragment's newest compaction; empty before the first one.

        Raises:
            WireError: It is damaged, or of another version than the given one.
        """
        ...

    def log(self, fragment: int, version: int) -> str:
        """Return the `log` of the commit of that version; empty if a compaction covers it, or if it is lost."""
        ...

    def place(self, epoch: int, compaction: Compaction) -> Placed:
        """Upload a compaction, beside the rounds and on any thread. Nothing points to it before `compact`."""
        ...

    def compact(self, epoch: int, placed: Placed, after_round: int, trim: Sequence[str] = ()) -> None:
        """Replace the fragment's full state by a placed one, and delete `trim` and what else it covers.

        Args:
            epoch: The merger's epoch.
            placed: What `place` returned.
            after_round: The last closed round, as in `Commit`. A broker without it may have lost the compaction's
                round, too.
            trim: Merged entries that are no longer needed.

        Raises:
            BrokerError: The last closed round is another one. The merger must reload its state.
        """
        ...

    def put_aside(self, epoch: int, manifest: Manifest) -> list[str]:
        """Move keys aside that hold another type of value than the run's, and write a lost manifest again.

        Returns:
            The names of the damaged keys, without the run's.

        Raises:
            UnknownRunError: The run was deleted, or another one has taken its name (`broker.other-run`).
        """
        ...

    def lost(self, closed: int) -> list[str]:
        """Return the names of keys that must exist after round `closed` and do not.

        A difference or a log counts as lost if the full state of its fragment is older.
        """
        ...

    def write_back(self, epoch: int, repair: Repair) -> None:
        """Write parts of the run that this merger has rebuilt."""
        ...

    def announce(self, epoch: int, *events: Call | Resume | Marker) -> None:
        """Append events."""
        ...

    def refuse(self, epoch: int, refusals: Sequence[tuple[str, Refusal]], quiet: Container[str] = ()) -> None:
        """Delete entries of the updates streams, and announce the reasons, except those of the entries in `quiet`."""
        ...

    def commit(self, epoch: int, commit: Commit) -> None:
        """Close a round in one transaction. Merged entries stay in the stream, acknowledged, until they are trimmed.

        Raises:
            BrokerError: The last closed round is not `commit.after_round`. The merger must reload its state.
        """
        ...

    def settled(self) -> list[Delivery]:
        """Return the acknowledged entries that are still in the streams, without their payloads."""
        ...

    def acknowledge(self, epoch: int, entries: Sequence[str]) -> None:
        """Keep merged entries that were delivered again, because the consumer group was lost, as merged ones."""
        ...

    def redeliver(self, epoch: int, entries: Sequence[str]) -> None:
        """Take back the acknowledgement of entries, so that `unacknowledged` returns them."""
        ...

    def trim(self, epoch: int, entries: Sequence[str], after_round: int | None = None) -> None:
        """Delete merged entries that are no longer needed. `after_round` is as in `Commit`.

        Raises:
            BrokerError: The last closed round is another one. The merger must reload its state.
        """
        ...


class ReaderTransport(Protocol):
    """The part of a connection that readers and operators use."""

    @property
    def run(self) -> str: ...
    @property
    def reader(self) -> ReaderClient: ...


class IslandTransport(ReaderTransport, Protocol):
    """The part of a connection that an island uses."""

    @property
    def island(self) -> IslandClient: ...


class MergerTransport(ReaderTransport, Protocol):
    """The part of a connection that a merger uses."""

    @property
    def merger(self) -> MergerClient: ...


class Transport(IslandTransport, MergerTransport, Protocol):
    """A connection to one run, or to one shard of it (see `broker.shards`). The run need not exist yet."""

    def create(self, manifest: Manifest, snapshots: Sequence[tuple[Snapshot, bytes]]) -> None:
        """Create the run, with version 0 of every fragment, in one transaction. Raises RunExistsError."""
        ...

    def restore(self, image: Image) -> None:
        """Create the run from a checkpoint, in one transaction. Raises RunExistsError.

        Contributions that were pending are published again, and the books balance.
        """
        ...

    def mend_manifest(self, manifest: Manifest) -> bool:
        """Write the manifest of a run that has lost only its manifest. Return False if the run is not there at all."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...
