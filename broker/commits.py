"""What mergers read and write: entries of the updates streams, commits, compactions and checkpoints.

Each island has a stream of its own, so the name of an entry, `NAME/ID`, says who sent it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from archipelago.broker.errors import WireError
from archipelago.broker.full_state import Compaction, FullState
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import (
    Call,
    Contribution,
    Counters,
    Evaluation,
    Marker,
    Refusal,
    Resume,
    Snapshot,
    TapeEntry,
)
from archipelago.broker.presence import Presence

_ENTRY = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,63})/([0-9]{1,20})-([0-9]{1,20})")
#: A tape of few islands has this many entries. Of larger entries, it has no more than TAPE_BYTES.
TAPE_KEPT = 4096
TAPE_BYTES = 64 << 20
#: The largest number of an entry within its millisecond.
NUMBER_MAX = (1 << 64) - 1
#: How many differences of each fragment the broker keeps. An island that missed more downloads the full snapshot, and
#: the differences after it. So a fragment's newest full snapshot is never more versions old than this.
DIFFERENCES_KEPT = 32
#: The id before the first event of a run.
START = "0-0"


def entry_name(sender: str, entry_id: str) -> str:
    """Return the name of an entry of the stream of `sender`."""
    return f"{sender}/{entry_id}"


def parse_entry(entry: str) -> tuple[str, str]:
    """Return the sender of an entry, and its id in the sender's stream. Raises WireError."""
    found = _ENTRY.fullmatch(entry)
    if not found:
        raise WireError(f"{entry[:40]!r} is not the name of an entry", code="wire.message")
    return found[1], f"{found[2]}-{found[3]}"


def sender_of(entry: str) -> str:
    """Return the island whose stream holds the entry."""
    return entry.partition("/")[0]


def entry_id(entry: str) -> tuple[int, int]:
    """Return the id of a stream entry as two numbers, which sort as Redis sorts ids."""
    milliseconds, _, number = entry.partition("-")
    return int(milliseconds), int(number or 0)


def is_last(entry: str) -> bool:
    """Return whether no entry of a stream can follow that one. A client that appends chooses the ids."""
    return entry_id(entry) == (NUMBER_MAX, NUMBER_MAX)


def next_id(entry: str) -> str:
    """Return the smallest id that is greater than that one, which must not be the last."""
    milliseconds, number = entry_id(entry)
    return f"{milliseconds}-{number + 1}" if number < NUMBER_MAX else f"{milliseconds + 1}-0"


def tape_kept(entry_bytes: int, needed: int) -> int:
    """Return how many entries the tape keeps, so that its bytes are bounded, too.

    Args:
        entry_bytes: The size of its newest entry.
        needed: How many of the newest rounds a merger that starts may have to merge again.
    """
    return max(needed, min(TAPE_KEPT, TAPE_BYTES // max(1, entry_bytes)))


def arrival(entry: str) -> tuple[int, str, int]:
    """Return a key that sorts entries of several streams by the time at which they arrived. Raises WireError.

    Entries of one millisecond are sorted by the names of their islands, because each stream numbers its own.
    """
    sender, entry_id = parse_entry(entry)
    milliseconds, _, number = entry_id.partition("-")
    return int(milliseconds), sender, int(number)


def nothing() -> None:
    """Do nothing between two parts of a long call."""


def never_gone(holder: str) -> bool:
    """Return False, for who cannot tell whether another merger has ended."""
    return False


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
class Commit:
    """All changes of one closed round. The broker applies them in one step.

    Attributes:
        snapshot: The fragment's new version.
        compaction: The fragment's full state after the round; None unless the commit carries it.
        state: The merger's other state, as JSON.
        tape: The round's entry on the tape.
        entries: Entries of the updates streams that this commit merges, and which the broker keeps elsewhere from then
            on. If one is gone, the commit is refused as if the broker had lost the last round.
        trim: Merged entries that are no longer needed, of this commit or an earlier one.
        cursors: The new resume position (pass, sequences read) of each range of text that advanced.
        difference: The payload that leads islands from the previous version to this one.
        after_round: The last closed round that the merger knows. The broker refuses the commit if it holds another one,
            as after a restart without its newest writes. None skips this check.
        uncovered: How many of the newest rounds some compaction does not cover yet. The tape keeps these.
        counts: The run's counters after the round (`RunState.counts`).
    """

    snapshot: Snapshot
    compaction: Compaction | None
    state: str
    tape: TapeEntry
    entries: Sequence[str]
    trim: Sequence[str] = ()
    cursors: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    difference: bytes = b""
    after_round: int | None = None
    uncovered: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Rewrite:
    """All that mergers keep of a shard, restored from a checkpoint, in place of what the broker holds.

    Attributes:
        state: The merger's other state, as JSON.
        compactions: The full state of each fragment.
        tape: The newest rounds, the last one of which is that of the state; None if the tape stays.
    """

    state: str
    compactions: Sequence[Compaction]
    tape: Sequence[TapeEntry] | None


@dataclass(frozen=True)
class Image:
    """The contents of a checkpoint: all data that an empty Redis needs to continue the run.

    Attributes:
        number: The number of the checkpoint.
        fragments: The full state of each fragment at its newest version.
        state: The merger's other state, as JSON.
        cursors: The resume position of each started range of text.
        tape: The newest rounds, for display only.
        pending: Contributions that were published but not yet merged, with their payloads.
    """

    manifest: Manifest
    number: int
    fragments: Sequence[FullState]
    state: str
    counters: Counters
    cursors: Mapping[str, tuple[int, int]]
    tape: Sequence[TapeEntry]
    evaluations: Sequence[Evaluation]
    pending: Sequence[tuple[Contribution, bytes]]

    @property
    def round(self) -> int:
        """The last round in the checkpoint."""
        return max(full.snapshot.round for full in self.fragments)

    @property
    def step(self) -> int:
        """The furthest global step in the checkpoint."""
        return max(full.snapshot.step for full in self.fragments)


class Renewal(NamedTuple):
    """What extends a lease: the epoch and the name of the merger that holds it, and for how long."""

    epoch: int
    holder: str
    seconds: float


@dataclass(frozen=True)
class Seen:
    """What a merger sees when it looks at its shard.

    Attributes:
        deliveries: Entries that have arrived.
        control: The operator's requests; None unless they were asked for.
        presences: The heartbeats of the islands; None unless they were asked for.
    """

    deliveries: Sequence[Delivery]
    control: Mapping[str, str] | None = None
    presences: Sequence[Presence] | None = None


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

    def renew(self, epoch: int, holder: str, seconds: float) -> None:
        """Extend the lease."""

    def release(self, epoch: int) -> None:
        """Release the lease, so that another merger need not wait until it expires."""

    def stand_by(self, name: str) -> None:
        """Register a merger that waits for the lease. It is listed for STANDBY_SECONDS."""

    def stand_down(self, name: str) -> None:
        """Remove a merger from the standbys."""

    def forget(self, epoch: int, presences: Iterable[Presence]) -> None:
        """Delete what is left of islands that have no entries and fell silent a day ago, given all heartbeats.

        Of many silent islands, those that were silent for longer are forgotten earlier.
        """

    def updates(self, block_seconds: float, count: int = 64) -> list[Delivery]:
        """Return entries that this client has not returned since `rewind`, oldest first: at most `count` of an island.

        Waits at most `block_seconds` for the first one. An entry that names another island than the one in whose stream
        it lies has a fault and no contribution. Large payloads are not downloaded yet, so that a merger can refuse a
        contribution by its header.
        """

    def look(
        self, block_seconds: float, count: int = 64, renewal: Renewal | None = None, *, around: bool = False
    ) -> Seen:
        """Do in one round trip what a turn without work needs.

        Args:
            renewal: Extend this lease, as `renew` does, and raise what that raises.
            around: Read the operator's requests and the heartbeats, too.
        """

    def rewind(self) -> None:
        """Let `updates` begin anew with the oldest entry that waits."""

    def read(self, entries: Sequence[str]) -> list[Delivery]:
        """Return contributions with their payloads, whether they wait or were merged. A missing one has a fault."""

    def kept(self) -> list[str]:
        """Return the merged entries that the broker keeps."""

    def outer(self, fragment: int, version: int) -> bytes:
        """Return the newest compaction's `outer`. Raises WireError if it is missing, damaged, or of another version."""

    def place(self, epoch: int, compaction: Compaction) -> Placed:
        """Upload a compaction, beside the rounds and on any thread. Nothing points to it before `compact`."""

    def compact(self, epoch: int, placed: Placed, after_round: int, trim: Sequence[str] = ()) -> None:
        """Replace the fragment's full state by a placed one, and delete `trim` and what else it covers.

        Args:
            placed: What `place` returned.
            after_round: The last closed round, as in `Commit`. A broker without it may have lost the compaction's
                round, too.
            trim: Merged entries that are no longer needed.

        Raises:
            BrokerError: The last closed round is another one. The merger must reload its state.
        """

    def take_up(
        self, epoch: int, resume: Resume, cursors: Mapping[str, tuple[int, int]], counts: Mapping[str, int]
    ) -> None:
        """Begin to serve: write the cursors and the counters of the loaded state, and announce `resume`.

        This event ends everything that an earlier merger has announced.
        """

    def rewrite(self, epoch: int, rewrite: Rewrite) -> None:
        """Replace what mergers keep of the shard."""

    def announce(self, epoch: int, *events: Call | Resume | Marker) -> None:
        """Append events."""

    def refuse(
        self,
        epoch: int,
        refusals: Sequence[tuple[str, Refusal]],
        state: str,
        counts: Mapping[str, int],
        quiet: Container[str] = (),
    ) -> None:
        """Delete entries of the updates streams, and announce the reasons, except those of the entries in `quiet`.

        `state` and `counts` are the merger's state and counters, in which these are refused.
        """

    def commit(self, epoch: int, commit: Commit) -> None:
        """Close a round in one step. Raises BrokerError as `compact`, if the last one is not `commit.after_round`."""

    def trim(self, epoch: int, entries: Sequence[str], after_round: int | None = None) -> None:
        """Delete merged entries that are no longer needed. `after_round` is as in `Commit`, errors as in `commit`."""
