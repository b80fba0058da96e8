"""What a merger writes: the commit of each round, and from time to time a fragment's full state.

A round commits only what it changes: the difference, the merger's small state, and the tape entry, which says all that
is needed to merge the round again. The full state of a fragment is far larger, and is written beside the rounds as a
compaction. Until one covers a round, a merger that starts merges that round again. So a compaction is due once as many
bytes were written in contributions and differences as it has itself, and once merging again would take long
(`restart_seconds`) or twice as many bytes were written. Never do more bytes go into compactions than into contributions
and differences, except that a run that stands still gets one compaction of each fragment. Islands that cannot read a
difference could not go on otherwise, and no round would close.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from dataclasses import dataclass

import jax
import numpy as np

from archipelago.broker.codecs import codec
from archipelago.broker.commits import DIFFERENCES_KEPT, Commit, Placed
from archipelago.broker.errors import ArchipelagoError, ConfigError, WireError
from archipelago.broker.footprint import REDIS_LOG
from archipelago.broker.full_state import FullState
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import RoundMember, Snapshot, TapeEntry
from archipelago.broker.transport import MergerTransport
from archipelago.broker.wire import digest_of, pack_body
from archipelago.merger import outer
from archipelago.merger.executor import Spawn
from archipelago.merger.round_merge import Addend, MergedRound
from archipelago.merger.rounds import Close
from archipelago.merger.state import FragmentState, RunState

#: Larger losses count as this one in a mean, which must stay finite whatever an island claims.
LOSS_MAX = 1e9
#: How long a restart may take to merge again what compactions do not cover.
RESTART_SECONDS = 5.0
#: Seconds until a compaction that failed is tried again.
RETRY_SECONDS = 5.0
#: A run in which no round has closed for this long stands still.
IDLE_SECONDS = 10.0
#: Beyond this many times the bytes of a compaction, it is due in any case, so that Redis keeps no more contributions.
MOST = REDIS_LOG

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RoundRecord:
    """Facts about a round that its tape entry records besides the merge.

    Attributes:
        close: The decision to close it.
        epoch: The epoch of the merger that closed it.
        live: How many islands were live.
        steered: The settings that an operator changed with it.
        unix_seconds: When it was committed.
        merge_seconds: How long the arithmetic took.
        spectra_seconds: How long spectra took, a part of it.
        busy_seconds: How long the merger has worked since the previous round.
    """

    close: Close
    epoch: int
    live: int
    steered: str
    unix_seconds: float
    merge_seconds: float
    spectra_seconds: float
    busy_seconds: float


def build_commit(
    manifest: Manifest,
    record: RoundRecord,
    merged: MergedRound,
    addends: Sequence[Addend],
    before: RunState,
    after: RunState,
    trim: Sequence[str],
    is_full: bool,
    uncovered: int,
) -> Commit:
    """Return the commit of a round.

    Args:
        manifest: The run.
        record: What the tape notes about the round.
        merged: The merged round.
        addends: The contributions that it merged.
        before: The run's state before the round.
        after: The run's state after it.
        trim: Merged entries that the commit deletes.
        is_full: Whether the commit carries the fragment's full state.
        uncovered: How many of the newest rounds some compaction does not cover.
    """
    wire, held_N = manifest.config.wire, merged.state.published_N
    difference = (
        pack_body(merged.difference, wire.down, held_N.size, wire.zstd_level) if wire.sends_differences else b""
    )
    snapshot = snapshot_of(manifest, after.closed, after.step, held_N, merged.members, len(difference))
    full = full_state(snapshot, merged.state).packed(wire) if is_full else None
    tape = _tape_entry(manifest, record, merged, addends, before, after, snapshot.held)
    return Commit(
        full.snapshot if full else snapshot,
        full,
        after.to_json(),
        tape,
        [addend.entry for addend in addends],
        trim=trim,
        cursors={s: c for s, c in after.cursors.items() if before.cursors.get(s) != c},
        after_round=before.closed,
        difference=difference,
        uncovered=uncovered,
        counts=after.counts(),
    )


def full_state(snapshot: Snapshot, state: FragmentState) -> FullState:
    """Return the full state of a fragment at the version of `snapshot`. No array is copied."""
    own = outer.named(state.params_N, state.outer) if snapshot.version else {}
    return FullState(snapshot, np.asarray(state.published_N), own)


def snapshot_of(
    manifest: Manifest, number: int, step: int, held_N: jax.Array, members: Sequence[RoundMember], difference_bytes: int
) -> Snapshot:
    """Return the header of the version after a round, before its full snapshot is made: its size is the largest one."""
    wire, held = manifest.config.wire, digest_of(np.asarray(held_N))
    by_weight = sorted(members, key=lambda member: -member.weight)
    return Snapshot(
        round=number,
        fragment=manifest.fragment_of(number),
        version=manifest.version_after(number),
        step=step,
        codec=wire.full,
        bytes=codec(wire.full).encoded_size(held_N.size),
        digest=held,
        merged=" ".join(member.identity_text for member in by_weight),
        held=held,
        difference_bytes=difference_bytes,
    )


def _tape_entry(
    manifest: Manifest,
    record: RoundRecord,
    merged: MergedRound,
    addends: Sequence[Addend],
    before: RunState,
    after: RunState,
    held: str,
) -> TapeEntry:
    p, islands = manifest.fragment_of(after.closed), {member.island for member in merged.members}
    needed = RunState(
        closed=before.closed,
        step=before.step,
        staleness=before.staleness,
        norms={p: before.norms[p]} if p in before.norms else {},
        usual_batch=before.usual_batch,
        accounts={island: account.for_merge() for island, account in before.accounts.items() if island in islands},
        steered=before.steered,
    )
    return TapeEntry(
        round=after.closed,
        fragment=p,
        version=manifest.version_after(after.closed),
        epoch=record.epoch,
        step=after.step,
        gain=merged.gain,
        quorum_seconds=record.close.quorum_seconds,
        grace_seconds=record.close.grace_seconds,
        open_seconds=record.close.open_seconds,
        live=record.live,
        bytes_up=sum(addend.contribution.bytes for addend in addends),
        loss=mean_loss(merged.members),
        digest=held,
        members=merged.members,
        unix_seconds=record.unix_seconds,
        merge_seconds=max(0.0, record.merge_seconds),
        spectra_seconds=max(0.0, record.spectra_seconds),
        busy_seconds=max(0.0, record.busy_seconds),
        steered=record.steered,
        before=needed.to_json(),
    )


def state_before(tape: TapeEntry) -> RunState:
    """Return the run's state before a round on the tape, as far as its merge depends on it. Raises WireError."""
    try:
        if not tape.before:
            raise WireError(f"the tape does not say how round {tape.round} was merged")
        return RunState.from_json(tape.before)
    except ConfigError as error:
        raise WireError(f"the tape's entry of round {tape.round} cannot be read ({error.what})") from None


def mean_loss(members: Sequence[RoundMember]) -> float:
    """Return the mean of the members' losses weighted by tokens, or NaN when no member measured one."""
    known = [(max(-LOSS_MAX, min(m.loss, LOSS_MAX)), m.tokens) for m in members if not math.isnan(m.loss)]
    return statistics.fmean([v for v, _ in known], [n for _, n in known]) if known else math.nan


# -- compactions -----------------------------------------------------------------------------------------------------


@dataclass
class Uncovered:
    """What a fragment's rounds since its newest compaction have cost.

    Attributes:
        round: The round of that compaction; 0 for version 0.
        version: The version of that compaction.
        bytes: Bytes of contributions and differences since then.
        seconds: How long the merger took to merge them.
    """

    round: int = 0
    version: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def add(self, tape: TapeEntry, difference_bytes: int) -> None:
        """Add a merged round."""
        self.bytes += tape.bytes_up + difference_bytes
        self.seconds += tape.merge_seconds


class Compactor:
    """Writes compactions of one run, one at a time.

    Args:
        transport: The connection to the run.
        manifest: The run.
        clock: Monotonic seconds.
        spawn: Runs an upload beside the rounds.
        restart_seconds: How long a restart may take to merge rounds again.
    """

    def __init__(
        self,
        transport: MergerTransport,
        manifest: Manifest,
        clock: Callable[[], float],
        spawn: Spawn,
        restart_seconds: float,
    ) -> None:
        self.transport, self.manifest, self.clock = transport, manifest, clock
        self.restart_seconds = restart_seconds
        self._spawn = spawn
        self._job: Future[Placed] | None = None
        self._wanted: set[int] = set()  # fragments of which an island could not read the newest version
        self._wanted_at = float("-inf")
        self._not_before = float("-inf")
        self._committed_at = clock()
        self.fragments = {p: Uncovered() for p in manifest.own_fragments}

    def load(
        self, full: Mapping[int, Snapshot], uncovered: Sequence[TapeEntry], newest: Mapping[int, Snapshot]
    ) -> None:
        """Begin with a loaded run: the newest full snapshots, the rounds that they do not cover, and the heads.

        An upload in progress is forgotten, because it may be of rounds that Redis has lost.
        """
        self._job, self._committed_at = None, self.clock()
        self._wanted.clear()
        self.fragments = {p: Uncovered(snapshot.round, snapshot.version) for p, snapshot in full.items()}
        for tape in uncovered:
            self.fragments[tape.fragment].add(tape, newest[tape.fragment].difference_bytes)

    def want(self, fragments: AbstractSet[int]) -> None:
        """Write the full state of these fragments again, because a part of it cannot be read. Not too often."""
        if fragments and self.clock() - self._wanted_at >= IDLE_SECONDS:
            self._wanted_at = self.clock()
            self._wanted |= fragments

    def carries_full(self, p: int, version: int) -> bool:
        """Return whether the commit of this version must carry the fragment's full state.

        So it must in runs without differences, whose islands need the full snapshot. In other runs it must if no
        compaction could be written for long, because the oldest difference is deleted next.
        """
        has_differences = self.manifest.config.wire.sends_differences
        return not has_differences or version - self.fragments[p].version >= DIFFERENCES_KEPT

    def committed(self, tape: TapeEntry, snapshot: Snapshot, *, is_full: bool) -> None:
        """Note a committed round."""
        self._committed_at = self.clock()
        if not is_full:
            self.fragments[tape.fragment].add(tape, snapshot.difference_bytes)

    def covered(self, p: int, number: int, version: int) -> None:
        """Note that Redis holds the full state of a fragment at this round and version, or will with the next write.

        If that write fails, the merger loads the run again.
        """
        self.fragments[p] = Uncovered(number, version)

    @property
    def oldest(self) -> int:
        """The round of the oldest compaction that is a fragment's newest."""
        return min(fragment.round for fragment in self.fragments.values())

    def is_compacted(self, p: int, number: int) -> bool:
        """Return whether the full state of a fragment in Redis includes that round of it."""
        return number <= self.fragments[p].round

    def placed(self) -> Placed | None:
        """Return a compaction whose upload has ended, once. One that failed is tried again later.

        One that is older than the full state in Redis is dropped.
        """
        if self._job is None or not self._job.done():
            return None
        job, self._job = self._job, None
        try:
            placed = job.result()
        except ArchipelagoError as error:
            self._not_before = self.clock() + RETRY_SECONDS
            log.warning("a compaction could not be uploaded: %s", error, extra={"code": "compaction.failed"})
            return None
        return placed if placed.snapshot.version >= self.fragments[placed.snapshot.fragment].version else None

    def begin(self, epoch: int, fragments: Mapping[int, FragmentState], snapshots: Mapping[int, Snapshot]) -> None:
        """Begin to upload the compaction that is due most, if one is. The arrays never change, so nothing is copied."""
        if self._job is not None or self.clock() < self._not_before:
            return
        due = [p for p, snapshot in snapshots.items() if self._is_due(p, fragments[p], snapshot)]
        if due:
            p = max(due, key=lambda each: snapshots[each].version - self.fragments[each].version)
            fragment, snapshot, wire = fragments[p], snapshots[p], self.manifest.config.wire
            place = self.transport.merger.place
            self._wanted.discard(p)
            self._job = self._spawn(lambda: place(epoch, full_state(snapshot, fragment).packed(wire)))

    def _is_due(self, p: int, fragment: FragmentState, snapshot: Snapshot) -> bool:
        since, size = self.fragments[p], state_bytes(fragment)
        if p in self._wanted:
            return True
        if snapshot.version <= since.version:
            return False
        if self.clock() - self._committed_at >= IDLE_SECONDS:
            return True
        if since.bytes < size:
            return False
        is_slow = since.seconds >= self.restart_seconds / len(self.fragments)
        is_long = snapshot.version - since.version >= DIFFERENCES_KEPT // 2
        return is_slow or is_long or since.bytes >= MOST * size


def state_bytes(fragment: FragmentState) -> int:
    """Return the size of a fragment's compaction, without headers: all of it is stored as it is."""
    leaves = jax.tree.leaves((fragment.params_N, fragment.published_N, fragment.outer))
    return sum(int(leaf.nbytes) for leaf in leaves)
