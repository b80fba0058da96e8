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

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from archipelago.broker.commits import Image, MergerClient
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import (
    REFUSED,
    Contribution,
    Counters,
    Evaluation,
    Event,
    Handover,
    Note,
    Refusal,
    Snapshot,
    TapeEntry,
)
from archipelago.broker.presence import Heartbeat, NameClaim, Presence
from archipelago.broker.ranges import ReadPosition

#: The newest notes among which a merger's refusal is looked for.
NOTES_READ = 50
#: How many notes the broker keeps, and how many of one island, so that none can push out those of all others.
NOTES_KEPT, NOTES_EACH = 1000, 16
#: How many of the newest events are searched for refusals. Dashboards ask often, and the stream is long.
REFUSALS_AMONG = 2048
#: Islands do not publish while the broker uses more than this share of its memory limit.
MEMORY_SHARE_MAX = 0.8
#: A standby without a sign of life for this long is not listed.
STANDBY_SECONDS = 10.0


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


class Around(NamedTuple):
    """What an island looks for before each heartbeat.

    Attributes:
        claim: The newest claim to its name; None if it has none.
        uid: The uid in the run's manifest; None if there is no manifest, or it cannot be read.
        requests: The operator's requests that concern the island (`control.heard_by`).
    """

    claim: NameClaim | None
    uid: str | None
    requests: Mapping[str, str]


class ReaderClient(Protocol):
    """The client of a process that reads a run, and of operators, who can also write requests."""

    def instance(self) -> str:
        """Return an id that changes when the broker restarts and may have lost recent writes; it may be empty."""

    def runs(self) -> list[str]:
        """Return the names of all runs of this broker."""

    def manifest(self) -> Manifest:
        """Return the manifest. Raises UnknownRunError."""

    def uid(self) -> str | None:
        """Return the uid in the run's manifest; None if there is no manifest, or it cannot be read."""

    def last_event(self) -> str:
        """Return the id of the newest event, or START if there is none."""

    def events(self, after: str, block_seconds: float, count: int = 256) -> list[tuple[str, Event]]:
        """Return events after that id, oldest first. Waits at most `block_seconds` for the first one."""

    def fragment(self, fragment: int) -> tuple[Snapshot, bytes]:
        """Return the newest full snapshot, never torn. Newer versions may exist: see `broker.wire`."""

    def heads(self) -> list[Snapshot | None]:
        """Return the header of each fragment's newest version; None for one that cannot be read."""

    def difference(self, fragment: int, version: int) -> bytes | None:
        """Return the payload that leads from the previous version to this one; None if it is gone."""

    def presences(self) -> list[Presence]:
        """Return every island that sent a heartbeat during the last day, by name; of many silent ones, the newest."""

    def unreadable(self) -> dict[str, str]:
        """Return the records that this connection could not read and skipped, each with the reason."""

    def counters(self) -> Counters:
        """Return the run's counters. One that cannot be read is 0."""

    def backlog(self) -> int:
        """Return how many published contributions are neither merged nor refused."""

    def cursors(self) -> dict[str, tuple[int, int]]:
        """Return the resume position (pass, sequences read) of each started range of text."""

    def tape(self, count: int) -> list[TapeEntry]:
        """Return the newest `count` rounds, oldest first."""

    def evaluations(self) -> list[Evaluation]:
        """Return all evaluations, oldest first."""

    def record_evaluation(self, evaluation: Evaluation) -> None:
        """Append an evaluation."""

    def refusals(self, count: int) -> list[tuple[float, Refusal]]:
        """Return the newest `count` refusals among the newest REFUSALS_AMONG events, oldest first.

        Each comes with its time in seconds of the broker's clock.
        """

    def control(self) -> dict[str, str]:
        """Return the operator's requests as they were written; `broker.control` parses them."""

    def steer(self, changes: Mapping[str, str]) -> None:
        """Change the operator's requests in one step. An empty value removes a field."""

    def note(self, note: Note) -> None:
        """Append a note. The newest NOTES_KEPT remain, and of each island the newest NOTES_EACH."""

    def notes(self, count: int) -> list[Note]:
        """Return the newest `count` notes, oldest first."""

    def memory(self) -> Memory:
        """Return how much memory the broker uses."""

    def refuses_writes(self) -> tuple[str, ...]:
        """Return by which code and why the broker refuses writes, and what to do; empty if it takes them."""

    def merger_state(self) -> str:
        """Return the merger's state at the last commit as JSON; empty before the first one."""

    def is_served(self) -> bool:
        """Return whether a merger holds the lease of the run."""

    def clock_ahead(self) -> float:
        """Return by how many seconds the broker's clock is ahead of this machine's; 0 if they are about the same.

        Notes, evaluations and the tape have the times of the broker's clock, because those of machines may be wrong.
        """

    def merger_status(self) -> MergerStatus:
        """Return which merger serves the run now."""

    def standbys(self) -> list[Standby]:
        """Return the mergers that wait for the lease, by name."""


class IslandClient(Protocol):
    """The client of an island."""

    def publish(self, contribution: Contribution, payload: bytes) -> str:
        """Publish a contribution, and return its entry once the broker has stored it.

        Publishing twice creates two entries, of which the merger merges one.
        """

    def holds(self, entry: str) -> bool:
        """Return whether a published entry still waits: it was not merged, refused or lost in a crash."""

    def look_around(self, island: str, claim: NameClaim | None) -> Around:
        """Return what an island must know before it writes. If the broker has lost its claim, it is written again."""

    def heartbeat(self, heartbeat: Heartbeat) -> bool:
        """Replace the island's last heartbeat. Return whether a merger serves the run."""

    def claim_name(self, island: str, incarnation: str) -> NameClaim:
        """Claim the name of an island, which ends the claim of any earlier process. Return the claim."""

    def lease_range(self, ranges: Sequence[str], me: str, reading: Collection[str] = ()) -> ReadPosition | None:
        """Lease another range for `me` (island/incarnation), as `ranges.choose` selects it; None if all are leased.

        A lease ends when its holder has sent no heartbeat for LIVE_SECONDS, has left, or is expelled. It does not end
        while a contribution of the holder waits to be merged, because that may still move the cursor. An expelled
        island gets no lease.
        """

    def leased(self, ranges: Sequence[str], me: str) -> frozenset[str]:
        """Return the ranges that `me` still holds. It loses a range when the pass ends or another island leases it."""

    def lease_evaluation(self, me: str, seconds: float) -> bool:
        """Take or extend the lease on evaluating the run, for `me` (island/incarnation). 0 seconds ends it.

        Return whether `me` holds it now. At most one island does, until its lease expires.
        """

    def register_corpus(self, name: str, digest: str) -> str:
        """Return the digest that the run has stored for this corpus. For a new name it stores this digest."""

    def request_state(self, who: str) -> None:
        """Ask the other islands for inner optimiser state, for `who` (island/incarnation)."""

    def open_requests(self, me: str = "") -> list[str]:
        """Return the live islands (island/incarnation) whose request no other island than `me` promised to answer.

        Of very many requests, it reads a part, and the next call goes on with others.
        """

    def promise_answer(self, who: str, giver: str) -> bool:
        """Promise that `giver` answers the request of `who`. Returns False if another island has promised it.

        A giver that missed the reply promises again.
        """

    def hand_over(self, who: str, handover: Handover, payload: bytes) -> None:
        """Send the answer to `who`. The broker keeps it for some minutes."""

    def handed_over(self, who: str) -> tuple[Handover, bytes] | None:
        """Return the answer to `who` if it has arrived. Raises WireError if it is damaged."""

    def withdraw_request(self, who: str) -> None:
        """Delete the request of `who` and its answer."""


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

    def restore(self, image: Image) -> None:
        """Create the run from a checkpoint, in one transaction. Raises RunExistsError.

        Contributions that were pending are published again, and the counters balance.
        """

    def close(self) -> None:
        """Close the connection."""


def refusal(
    reader: ReaderClient, kind: str = REFUSED, ends: Collection[str] = ("served",), notes: Sequence[Note] | None = None
) -> str:
    """Return why a merger did not serve the run, if no merger has served it since; else empty.

    Args:
        kind: Another kind of merger's note, to return the newest of.
        ends: The kinds of notes after which it no longer holds.
        notes: The newest notes, if they were read already.
    """
    notes = reader.notes(NOTES_READ) if notes is None else notes[-NOTES_READ:]
    said = [note for note in notes if note.who == "merger" and note.kind in (kind, *ends)]
    return said[-1].text if said and said[-1].kind == kind else ""
