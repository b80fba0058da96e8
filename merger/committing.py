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
from collections import deque
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from dataclasses import dataclass, replace

import jax
import numpy as np

from archipelago.broker.codecs import codec
from archipelago.broker.commits import DIFFERENCES_KEPT, Commit, Placed
from archipelago.broker.errors import ArchipelagoError, ConfigError, WireError
from archipelago.broker.footprint import REDIS_LOG
from archipelago.broker.full_state import FullState
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import RoundMember, Snapshot, TapeEntry
from archipelago.broker.shards.reader import Spawn
from archipelago.broker.transport import MergerTransport
from archipelago.broker.wire import digest_of, pack_body
from archipelago.merger import outer
from archipelago.merger.round_merge import MergedRound
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
#: The most bytes in Redis of merged contributions that are kept for a checkpoint alone. Beyond it, the oldest are
#: deleted, although no checkpoint covers them.
KEPT_BYTES_MAX = 256 << 20
#: Bytes that an entry takes in Redis besides its payload, at most.
ENTRY_BYTES = 2 << 10
#: About how many entries one write deletes. A server takes about a million words, and does nothing else meanwhile.
TRIMMED_MAX = 10_000

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kept:
    """What Redis keeps after a round.

    Attributes:
        is_full: Whether the commit carries the fragment's full state.
        trim: Merged entries that the commit deletes.
        uncovered: How many of the newest rounds some compaction does not cover.
    """

    is_full: bool
    trim: Sequence[str]
    uncovered: int


def build_commit(
    manifest: Manifest, tape: TapeEntry, merged: MergedRound, before: RunState, after: RunState, kept: Kept
) -> Commit:
    """Return the commit of a round. Its `tape` entry still lacks the digest and the state before the round."""
    wire, held_N = manifest.config.wire, merged.state.published_N
    difference = (
        pack_body(merged.difference, wire.down, held_N.size, wire.zstd_level) if wire.sends_differences else b""
    )
    snapshot = snapshot_of(manifest, tape, held_N, len(difference))
    full = full_state(snapshot, merged.state).packed(wire) if kept.is_full else None
    needed = before.needed_by(tape.fragment, {member.island for member in tape.members}).to_json()
    return Commit(
        full.snapshot if full else snapshot,
        full,
        after.to_json(),
        replace(tape, digest=snapshot.held, loss=mean_loss(tape.members), before=needed),
        [member.entry for member in tape.members],
        trim=kept.trim,
        cursors={s: c for s, c in after.cursors.items() if before.cursors.get(s) != c},
        after_round=before.closed,
        difference=difference,
        uncovered=kept.uncovered,
        counts=after.counts(),
    )


def full_state(snapshot: Snapshot, state: FragmentState) -> FullState:
    """Return the full state of a fragment at the version of `snapshot`. No array is copied."""
    own = outer.named(state.params_N, state.outer) if snapshot.version else {}
    return FullState(snapshot, np.asarray(state.published_N), own)


def snapshot_of(manifest: Manifest, tape: TapeEntry, held_N: jax.Array, difference_bytes: int) -> Snapshot:
    """Return the header of the version after a round, before its full snapshot is made: its size is the largest one."""
    wire, held = manifest.config.wire, digest_of(np.asarray(held_N))
    return Snapshot(
        round=tape.round,
        fragment=tape.fragment,
        version=tape.version,
        step=tape.step,
        codec=wire.full,
        bytes=codec(wire.full).encoded_size(held_N.size),
        digest=held,
        merged=" ".join(member.identity_text for member in tape.members),
        held=held,
        difference_bytes=difference_bytes,
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
        self.bytes += tape.bytes_up + difference_bytes
        self.seconds += tape.merge_seconds


class Compactor:
    """Writes compactions of one run, one at a time, and keeps merged entries in Redis until nothing needs them.

    A merger that starts needs the entries that no compaction covers. If Redis loses the run's state, a merger needs
    those that no checkpoint covers.

    Args:
        spawn: Runs an upload beside the rounds.
        restart_seconds: How long a restart may take to merge rounds again.
        takes_checkpoints: Whether this merger takes checkpoints.
    """

    def __init__(
        self,
        transport: MergerTransport,
        manifest: Manifest,
        spawn: Spawn,
        restart_seconds: float = RESTART_SECONDS,
        *,
        takes_checkpoints: bool = False,
    ) -> None:
        self.transport, self.manifest = transport, manifest
        self.restart_seconds, self.takes_checkpoints = restart_seconds, takes_checkpoints
        #: The rounds whose merged entries Redis still keeps, in order.
        self.kept: deque[TapeEntry] = deque()
        self.fragments = {p: Uncovered() for p in manifest.own_fragments}
        self._spawn = spawn
        self._job: Future[Placed] | None = None
        self._wanted: set[int] = set()  # fragments of which an island could not read the newest version
        self._wanted_at = self._not_before = float("-inf")
        self._committed_at = 0.0

    def load(
        self,
        full: Mapping[int, Snapshot],
        newest: Mapping[int, Snapshot],
        tape: Sequence[TapeEntry],
        state: RunState,
        epoch: int,
        now: float,
    ) -> None:
        """Begin with a loaded run: the newest full snapshots, the heads, and the rounds that need their entries.

        An upload in progress is forgotten, because it may be of rounds that Redis has lost. Entries of other rounds
        are of no use: the tape has lost these, or the run went back to a checkpoint.
        """
        self._job, self._committed_at = None, now
        self.fragments = {p: Uncovered(snapshot.round, snapshot.version) for p, snapshot in full.items()}
        for entry in tape:
            if not self._is_compacted(entry):
                self.fragments[entry.fragment].add(entry, newest[entry.fragment].difference_bytes)
        self.kept = deque(e for e in tape if not self._is_compacted(e) or self._awaits_checkpoint(e, state.covered))
        named = {member.entry for entry in self.kept for member in entry.members}
        strays = [entry for entry in self.transport.merger.kept() if entry not in named]
        for start in range(0, len(strays), TRIMMED_MAX):
            self.transport.merger.trim(epoch, strays[start : start + TRIMMED_MAX], state.closed)

    def want(self, fragments: AbstractSet[int], now: float) -> None:
        """Write the full state of these fragments again, because a part of it cannot be read. Not too often."""
        if (own := fragments & self.fragments.keys()) and now - self._wanted_at >= IDLE_SECONDS:
            self._wanted_at = now
            self._wanted |= own

    def closing(self, tape: TapeEntry, covered: int) -> Kept:
        """Note a round whose commit is built next, and return what Redis keeps after it.

        The commit carries the full state in runs without differences, whose islands need the full snapshot. In other
        runs it does if no compaction could be written for long, because the oldest difference is deleted next. If the
        commit fails, the merger loads the run again.
        """
        own = self.fragments[tape.fragment]
        has_differences = self.manifest.config.wire.sends_differences
        is_full = not has_differences or tape.version - own.version >= DIFFERENCES_KEPT
        if is_full:
            self.fragments[tape.fragment] = Uncovered(tape.round, tape.version)
        self.kept.append(tape)
        oldest = min(fragment.round for fragment in self.fragments.values())
        return Kept(is_full, self.not_needed(covered), self.manifest.own_rounds.between(oldest, tape.round))

    def committed(self, commit: Commit, now: float) -> None:
        self._committed_at = now
        if commit.compaction is None:
            self.fragments[commit.tape.fragment].add(commit.tape, commit.snapshot.difference_bytes)

    def not_needed(self, covered: int) -> list[str]:
        """Return the entries that may be deleted now, once: about TRIMMED_MAX of them, and the others later.

        Compactions cover them. So does a checkpoint, unless there are none, or these are the oldest ones beyond
        KEPT_BYTES_MAX.
        """
        size, was_behind = self.waiting_bytes(), False
        kept: deque[TapeEntry] = deque()
        gone: list[str] = []
        for entry in self.kept:
            is_wanted = self._awaits_checkpoint(entry, covered)
            is_needed = not self._is_compacted(entry) or (is_wanted and size <= KEPT_BYTES_MAX)
            if is_needed or len(gone) >= TRIMMED_MAX:
                kept.append(entry)
                continue
            was_behind |= is_wanted
            size -= _stored_bytes(entry)
            gone += [member.entry for member in entry.members]
        self.kept = kept
        if was_behind:
            log.warning(
                "checkpoints are too slow or fail: until the next one, only Redis can restore this run. Look at the "
                "space and the speed of the disk",
                extra={"code": "checkpoint.behind"},
            )
        return gone

    def trim(self, epoch: int, state: RunState) -> None:
        """Delete the entries that are not needed."""
        while gone := self.not_needed(state.covered):
            self.transport.merger.trim(epoch, gone, state.closed)

    def waiting_bytes(self) -> int:
        """Return the bytes in Redis of the entries that compactions cover, and that wait for a checkpoint."""
        return sum(_stored_bytes(entry) for entry in self.kept if self._is_compacted(entry))

    def _is_compacted(self, entry: TapeEntry) -> bool:
        """Return whether the full state of the fragment in Redis, or in the next write, includes that round of it."""
        return entry.round <= self.fragments[entry.fragment].round

    def _awaits_checkpoint(self, entry: TapeEntry, covered: int) -> bool:
        return self.takes_checkpoints and entry.round > covered

    # -- uploads ------------------------------------------------------------------------------------------------------

    def write(
        self,
        epoch: int,
        state: RunState,
        fragments: Mapping[int, FragmentState],
        snapshots: Mapping[int, Snapshot],
        now: float,
    ) -> None:
        """Point to the compaction whose upload has ended, if there is one, and begin with the next that is due.

        The arrays never change, so nothing is copied.
        """
        if self._job is not None:
            if not self._job.done():
                return
            self._point(epoch, state, self._job, now)
            self._job = None
        due = [p for p, snapshot in snapshots.items() if self._is_due(p, fragments[p], snapshot.version, now)]
        if due and now >= self._not_before:
            p = max(due, key=lambda each: snapshots[each].version - self.fragments[each].version)
            fragment, snapshot, wire = fragments[p], snapshots[p], self.manifest.config.wire
            place = self.transport.merger.place
            self._wanted.discard(p)
            self._job = self._spawn(lambda: place(epoch, full_state(snapshot, fragment).packed(wire)))

    def _point(self, epoch: int, state: RunState, job: Future[Placed], now: float) -> None:
        """Let Redis point to an uploaded compaction. One that failed, or is older than that in Redis, is dropped."""
        try:
            placed = job.result()
        except ArchipelagoError as error:
            self._not_before = now + RETRY_SECONDS
            what = "a compaction could not be uploaded, and is tried again later: %s"
            log.warning(what, error, extra={"code": "compaction.failed"})
            return
        new = placed.snapshot
        if new.version >= self.fragments[new.fragment].version:
            self.fragments[new.fragment] = Uncovered(new.round, new.version)
            self.transport.merger.compact(epoch, placed, state.closed, self.not_needed(state.covered))

    def _is_due(self, p: int, fragment: FragmentState, version: int, now: float) -> bool:
        since, size = self.fragments[p], state_bytes(fragment)
        if p in self._wanted:
            return True
        if version <= since.version:
            return False
        if now - self._committed_at >= IDLE_SECONDS:
            return True
        if since.bytes < size:
            return False
        is_slow = since.seconds >= self.restart_seconds / len(self.fragments)
        is_long = version - since.version >= DIFFERENCES_KEPT // 2
        return is_slow or is_long or since.bytes >= MOST * size


def _stored_bytes(entry: TapeEntry) -> int:
    """Return about how many bytes the merged entries of a round take in Redis."""
    return entry.bytes_up + ENTRY_BYTES * len(entry.members)


def state_bytes(fragment: FragmentState) -> int:
    """Return the size of a fragment's compaction, without headers: all of it is stored as it is."""
    leaves = jax.tree.leaves((fragment.params_N, fragment.published_N, fragment.outer))
    return sum(int(leaf.nbytes) for leaf in leaves)
