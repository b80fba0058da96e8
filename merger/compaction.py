"""When and how the full state of a fragment is written to Redis: as a compaction, beside the rounds.

A round commits only what it changes. Until a compaction covers it, a merger that starts merges the round again, from
its contributions and its log. So a compaction is due once as many bytes were written in contributions and differences
as it has itself, and once merging again would take long (`restart_seconds`) or twice as many bytes were written. Never
do more bytes go into compactions than into contributions and differences, except that a run that stands still gets one
compaction of each fragment. Islands that cannot read a difference could not go on otherwise, and no round would close.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import jax

from archipelago.broker.commits import DIFFERENCES_KEPT, Placed
from archipelago.broker.errors import ArchipelagoError
from archipelago.broker.footprint import REDIS_LOG
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Snapshot, TapeEntry
from archipelago.broker.transport import MergerTransport
from archipelago.merger.beside import Spawn
from archipelago.merger.committing import compaction_of
from archipelago.merger.state import FragmentState

#: How long a restart may take to merge again what compactions do not cover.
RESTART_SECONDS = 5.0
#: Seconds until a compaction that failed is tried again.
RETRY_SECONDS = 5.0
#: A run in which no round has closed for this long stands still.
IDLE_SECONDS = 10.0
#: Beyond this many times the bytes of a compaction, it is due in any case, so that Redis keeps no more contributions.
MOST = REDIS_LOG

log = logging.getLogger(__name__)


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
        self._not_before = float("-inf")
        self._committed_at = clock()
        self.fragments = [Uncovered() for _ in manifest.fragments]

    def load(self, full: Sequence[Snapshot], uncovered: Sequence[TapeEntry], newest: Sequence[Snapshot]) -> None:
        """Begin with a loaded run: the newest full snapshots, the rounds that they do not cover, and the heads.

        An upload in progress is forgotten, because it may be of rounds that Redis has lost.
        """
        self._job, self._committed_at = None, self.clock()
        self.fragments = [Uncovered(snapshot.round, snapshot.version) for snapshot in full]
        for tape in uncovered:
            self.fragments[tape.fragment].add(tape, newest[tape.fragment].difference_bytes)

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

    def covered(self, snapshot: Snapshot) -> None:
        """Note that Redis holds the full state of a fragment at this version, or will with the next write.

        If that write fails, the merger loads the run again.
        """
        self.covered_by(snapshot.round, snapshot.version)

    def covered_by(self, number: int, version: int) -> None:
        """The same, for the version of a round."""
        self.fragments[self.manifest.fragment_of(number)] = Uncovered(number, version)

    def is_compacted(self, number: int) -> bool:
        """Return whether the full state in Redis includes that round."""
        return number <= self.fragments[self.manifest.fragment_of(number)].round

    def placed(self) -> Placed | None:
        """Return a compaction whose upload has ended, once. One that failed is tried again later.

        One that is no longer newer than the full state in Redis is dropped.
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
        return placed if placed.snapshot.version > self.fragments[placed.snapshot.fragment].version else None

    def begin(self, epoch: int, fragments: Sequence[FragmentState], snapshots: Sequence[Snapshot]) -> None:
        """Begin to upload the compaction that is due most, if one is. The arrays never change, so nothing is copied."""
        if self._job is not None or self.clock() < self._not_before:
            return
        due = [p for p, snapshot in enumerate(snapshots) if self._is_due(p, fragments[p], snapshot)]
        if due:
            p = max(due, key=lambda each: snapshots[each].version - self.fragments[each].version)
            fragment, snapshot, place = fragments[p], snapshots[p], self.transport.merger.place
            self._job = self._spawn(lambda: place(epoch, compaction_of(self.manifest, snapshot, fragment)))

    def _is_due(self, p: int, fragment: FragmentState, snapshot: Snapshot) -> bool:
        since, size = self.fragments[p], state_bytes(fragment)
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
