"""Checkpoints in the background: a cut is taken between two rounds, and another thread writes it to disk.

A cut costs only references, because the arrays never change. A finished checkpoint covers its rounds, whose entries may
then be deleted. If the run keeps a record (`--record`), they are written to it first.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from archipelago.broker.buckets.copier import Copier
from archipelago.broker.commits import Image
from archipelago.broker.errors import ArchipelagoError, BrokerError, ConfigError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import UNSAVED, Counters, Snapshot, TapeEntry
from archipelago.broker.observe.progress import progress
from archipelago.broker.transport import MergerTransport
from archipelago.broker.wire import digest_of, is_digest
from archipelago.merger.checkpoint import CheckpointStore
from archipelago.merger.checkpoint_cut import Following, Leading
from archipelago.merger.committing import full_state
from archipelago.merger.executor import Spawn
from archipelago.merger.record import Recorder
from archipelago.merger.state import FragmentState

#: How many of the newest rounds of the tape a checkpoint holds. A restored run shows them.
TAPE_IN_IMAGE = 256
#: Seconds until a failed checkpoint is tried again.
RETRY_SECONDS = 10.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointCut:
    """The run between two rounds.

    Attributes:
        number: The number of the checkpoint.
        round: The last closed round.
        covered: The last round that an earlier checkpoint covers.
        waiting: Entries of contributions that were not merged yet.
    """

    manifest: Manifest
    number: int
    round: int
    covered: int
    state: str
    fragments: Mapping[int, FragmentState]
    snapshots: Mapping[int, Snapshot]
    cursors: dict[str, tuple[int, int]]
    counters: Counters
    waiting: Sequence[str]


class Checkpointer:
    """Writes a run's checkpoints every `every_seconds`, and its record if there is a recorder.

    A checkpoint on disk covers its rounds. A copier then also copies it to a bucket, at the bucket's own pace.

    Attributes:
        leading: In shard 0 of a run with several, what is known of the others.
        following: In any other shard, the announcements of shard 0, which decides when a checkpoint is taken.
    """

    def __init__(
        self,
        transport: MergerTransport,
        store: CheckpointStore,
        recorder: Recorder | None,
        every_seconds: float,
        spawn: Spawn,
        copier: Copier | None = None,
        leading: Leading | None = None,
        following: Following | None = None,
    ) -> None:
        self.transport, self.store, self.recorder, self.copier = transport, store, recorder, copier
        self.leading, self.following = leading, following
        self.every_seconds = every_seconds
        self._spawn = spawn
        self._job: Future[CheckpointCut] | None = None
        self._due_at: float | None = None
        self._urgent_at = float("-inf")  # when an urgent checkpoint may be taken
        self._may_copy = False
        #: The last failure without its digits. A repeat of the same failure is logged at debug level.
        self._trouble = ""
        self._news: list[tuple[str, str]] = []

    def is_due(self, now: float, *, urgent: bool = False) -> bool:
        """Return whether a checkpoint should be taken now.

        A checkpoint is due after `every_seconds`. An urgent one is due at once, unless a recent one has failed. None is
        due while one is in progress, or while shard 0 waits for the parts of other shards.
        """
        if self._due_at is None:
            self._due_at = now + self.every_seconds
        self._start_copier()
        if self._job is not None or now < (self._urgent_at if urgent else self._due_at):
            return False
        return self.leading is None or not self.leading.is_waiting(now, self.every_seconds)

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is in progress."""
        return self._job is not None

    def lacks(self, closed: int, covered: int) -> bool:
        """Return whether a closed round is missing from all checkpoints, for example after the folder was emptied."""
        try:
            is_missed = self.leading is not None and self.leading.lacks(closed)
            return is_missed or closed > covered or (closed > 0 and not self.store.numbers())
        except ArchipelagoError:
            return True  # the attempt to take one reports the fault

    def next_number(self, now: float) -> int | None:
        """Return the next checkpoint's number, or None if the folder cannot be read now."""
        try:
            newest = self.copier.newest if self.copier else -1
            announced = self.leading.announced if self.leading else 0
            return max(self.store.next_number(), newest + 1, announced + 1)
        except ArchipelagoError as error:
            self._failed(error, now)
            return None

    def load(self, manifest: Manifest, closed: int) -> None:
        """Begin with a loaded run. A checkpoint in progress is ignored: it may hold rounds that never happened."""
        self._job = None
        if self.following is not None:
            self.following.start()
        if self.leading is not None:
            self.leading.start()
        if self.recorder is None:
            return
        if closed == 0:
            reader = self.transport.reader
            self.recorder.begin(manifest, [reader.fragment(p) for p in manifest.own_fragments])
        self.recorder.go_back(closed)  # a Redis that died may have lost the rounds after that one

    def begin(self, cut: CheckpointCut, now: float) -> None:
        """Start writing a cut to disk."""
        self._start_copier()
        self._due_at = now + self.every_seconds
        self._job = self._spawn(lambda: self._keep(cut))

    def finished(self, now: float, *, wait: bool = False) -> CheckpointCut | None:
        """Return the cut of the last checkpoint, once, when it is on disk. A failed one is tried again soon."""
        if self._job is None or not (wait or self._job.done()):
            return None
        job, self._job = self._job, None
        try:
            covered = job.result()
        except (ArchipelagoError, OSError) as error:
            self._failed(error, now)
            return None
        if self._trouble:
            self._trouble = ""
            what = f"checkpoints are written again: {covered.number}"
            log.info(what, extra={"round": covered.round, "code": "checkpoint.recovered"})
            self._news.append(("checkpoint", what))
        return covered

    def news(self) -> list[tuple[str, str]]:
        """Return what operators should read, once: the kind of each note and its text."""
        own, self._news = self._news, []
        return own + [("bucket", text) for text in (self.copier.news() if self.copier else ())]

    def start(self) -> None:
        """Allow copies to the bucket once this merger serves. A standby may share the folder of the one that serves."""
        self._may_copy = True

    def _start_copier(self) -> None:
        """Begin to copy, if that is allowed. Only the merger that serves calls this."""
        if self._may_copy and self.copier is not None:
            self._may_copy = False
            newest = None
            with suppress(ConfigError):  # the next checkpoint reports it
                newest = max(self.store.numbers(), default=None)
            self.copier.start(newest)

    def close(self) -> None:
        """Wait for the copy of the last checkpoint, for some time."""
        if self.copier is not None:
            with progress(f"copying the last checkpoint to {self.copier.bundles.folder}"):
                self.copier.close()

    def _failed(self, error: Exception, now: float) -> None:
        if self.leading is not None:
            self.leading.gave_up()
        self._due_at = self._urgent_at = now + RETRY_SECONDS
        trouble = re.sub(r"\d+", "", str(error))  # each try has another number
        again = trouble == self._trouble
        self._trouble = trouble
        what = f"no checkpoint was written, training continues: {error}"
        log.log(logging.DEBUG if again else logging.WARNING, what, extra={"code": "checkpoint.failed"})
        if not again:
            self._news.append((UNSAVED, what))

    def _keep(self, cut: CheckpointCut) -> CheckpointCut:
        rounds = cut.manifest.own_rounds.between(cut.covered, cut.round)
        newest = self.transport.reader.tape(rounds + 2 * TAPE_IN_IMAGE)
        tape = [entry for entry in newest if entry.round <= cut.round]
        _require_same(cut, tape)
        if self.recorder is not None:
            covered = max(cut.covered, self.recorder.last_round())
            self._record(self.recorder, [entry for entry in tape if entry.round > covered])
        self.store.save(self._image(cut, tape[-TAPE_IN_IMAGE:]))
        if self.copier is not None:
            self.copier.offer(cut.number)
        return cut

    def _record(self, recorder: Recorder, tape: Sequence[TapeEntry]) -> None:
        rounds = []
        for entry in tape:
            members = self.transport.merger.read([member.entry for member in entry.members])
            if any(delivery.contribution is None for delivery in members):
                what = "the record lacks round %s, because its contributions are gone"
                log.warning(what, entry.round, extra={"round": entry.round, "code": "record.gone"})
                continue
            rounds.append((entry, tuple(members)))
        recorder.append(rounds)

    def _image(self, cut: CheckpointCut, tape: Sequence[TapeEntry]) -> Image:
        return Image(
            manifest=cut.manifest,
            number=cut.number,
            fragments=tuple(full_state(snapshot, cut.fragments[p]) for p, snapshot in cut.snapshots.items()),
            state=cut.state,
            counters=cut.counters,
            cursors=cut.cursors,
            tape=tuple(tape),
            evaluations=tuple(self.transport.reader.evaluations()),
            pending=tuple(
                (d.contribution, d.payload)
                for d in self.transport.merger.read(cut.waiting)
                if d.contribution is not None and is_digest(d.contribution.digest, d.payload)
            ),
        )


def _require_same(cut: CheckpointCut, tape: Sequence[TapeEntry]) -> None:
    """Raise BrokerError if the broker has lost rounds of the cut, even if it has reused their numbers."""
    newest = {entry.fragment: entry for entry in tape}
    is_same = not cut.round or (bool(tape) and tape[-1].round == cut.round)
    for p, fragment in cut.fragments.items():
        is_same &= p not in newest or digest_of(np.asarray(fragment.published_N)) == newest[p].digest
    if not is_same:
        raise BrokerError(f"the Redis has lost rounds that checkpoint {cut.number} would hold")
