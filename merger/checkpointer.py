"""Checkpoints beside the merging: a cut is taken between two rounds, and goes to disk on a thread of its own.

A cut costs the merger nothing but references: its arrays never change. What a finished checkpoint covers need not
stay in the stream; with a record (`--record`) it goes there first.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from archipelago.broker.errors import ArchipelagoError, BrokerError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Actions, Books, Snapshot, TapeEntry
from archipelago.broker.transport import START, Image, MergerTransport
from archipelago.broker.wire import digest, digest_of, pack
from archipelago.merger import outer
from archipelago.merger.checkpoint import CheckpointStore
from archipelago.merger.record import Recorder, Segment
from archipelago.merger.state import FragmentState

TAPE_IN_IMAGE = 256
"""rounds of the tape that a checkpoint holds, for whoever looks at a run that was restored"""
RETRY_SECONDS = 10.0

log = logging.getLogger(__name__)
Spawn = Callable[[Callable[[], "Covered"]], "Future[Covered]"]


@dataclass(frozen=True)
class CheckpointCut:
    """What the merger knew between two rounds."""

    manifest: Manifest
    number: int
    """of the checkpoint"""
    round: int
    covered: int
    """the last round that an earlier checkpoint covers"""
    state: str
    fragments: Sequence[FragmentState]
    snapshots: Sequence[Snapshot]
    cursors: dict[str, tuple[int, int]]
    books: Books
    waiting: Sequence[str]
    """entries of contributions that were not merged yet"""


@dataclass(frozen=True)
class Covered:
    """A checkpoint is on disk: rounds up to `round` and actions up to `actions_until` need not be kept elsewhere."""

    number: int
    round: int
    actions_until: str


def in_background() -> Spawn:
    """Jobs on one thread, one after the other."""
    pool = ThreadPoolExecutor(1, "checkpoint")
    return pool.submit


def at_once(job: Callable[[], Covered]) -> Future[Covered]:
    """Does the job before it returns: for virtual time."""
    future: Future[Covered] = Future()
    try:
        future.set_result(job())
    except (ArchipelagoError, OSError) as error:
        future.set_exception(error)
    return future


class Checkpointer:
    """Takes a run's checkpoints into `store`, every so many seconds; with a recorder, its record too."""

    def __init__(
        self,
        transport: MergerTransport,
        store: CheckpointStore,
        recorder: Recorder | None,
        every_seconds: float,
        spawn: Spawn,
    ) -> None:
        self.transport, self.store, self.recorder = transport, store, recorder
        self.every_seconds = every_seconds
        self._spawn = spawn
        self._job: Future[Covered] | None = None
        self._due_at: float | None = None
        self._failed_until = float("-inf")
        self._trouble = ""
        """what went wrong last; said once, until it is something else or over"""

    def is_due(self, now: float, *, urgent: bool = False) -> bool:
        """Whether it is time for a checkpoint, or one is `urgent`; not before the last one is done."""
        if self._due_at is None:
            self._due_at = now + self.every_seconds
        return self._job is None and now >= (self._failed_until if urgent else self._due_at)

    def lacks(self, closed: int, covered: int) -> bool:
        """Whether rounds have closed that no checkpoint holds; also when somebody has emptied the folder."""
        try:
            return closed > covered or (closed > 0 and not self.store.numbers())
        except ArchipelagoError:
            return True  # taking one says what is wrong

    def next_number(self, now: float) -> int | None:
        """Of the next checkpoint; None where the folder cannot be read, which is tried again soon."""
        try:
            return self.store.next_number()
        except ArchipelagoError as error:
            self._failed(error, now)
            return None

    def forget(self) -> None:
        """The run was taken up anew: what is under way may hold rounds that never happened, and covers none."""
        self._job = None

    def begin(self, cut: CheckpointCut, now: float) -> None:
        """Sends a cut to disk."""
        self._due_at = now + self.every_seconds
        self._job = self._spawn(lambda: self._keep(cut))

    def finished(self, now: float, *, wait: bool = False) -> Covered | None:
        """What the last checkpoint covers, once, when it is on disk. One that failed is tried again soon."""
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
            log.info("checkpoints are written again: %s", covered.number, extra={"round": covered.round})
        return covered

    def _failed(self, error: Exception, now: float) -> None:
        self._due_at = self._failed_until = now + RETRY_SECONDS
        trouble = re.sub(r"\d+", "", str(error))  # each try has a number of its own
        again = trouble == self._trouble
        self._trouble = trouble
        log.log(logging.DEBUG if again else logging.WARNING, "no checkpoint, training goes on: %s", error)

    def _keep(self, cut: CheckpointCut) -> Covered:
        newest = self.transport.reader.tape(cut.round - cut.covered + 2 * TAPE_IN_IMAGE)
        tape = [entry for entry in newest if entry.round <= cut.round]
        _require_same(cut, tape)
        actions_until = START
        if self.recorder is not None:
            actions_until, logged = self._actions()
            covered = max(cut.covered, self.recorder.last_round())
            self._record(self.recorder, [entry for entry in tape if entry.round > covered], logged)
        self.store.save(self._image(cut, tape[-TAPE_IN_IMAGE:]))
        return Covered(cut.number, cut.round, actions_until)

    def _actions(self) -> tuple[str, list[Actions]]:
        after, out = START, []
        while found := self.transport.merger.actions(after):
            after = found[-1][0]
            out += [actions for _, actions in found]
        return after, out

    def _record(self, recorder: Recorder, tape: Sequence[TapeEntry], logged: Sequence[Actions]) -> None:
        rounds = []
        for entry in tape:
            members = self.transport.merger.read([member.entry for member in entry.members])
            if any(delivery.contribution is None for delivery in members):
                what = "round %s goes without its contributions into the record: they are gone"
                log.warning(what, entry.round, extra={"round": entry.round})
                continue
            rounds.append((entry, tuple(members)))
        recorder.append(Segment(rounds, logged))

    def _image(self, cut: CheckpointCut, tape: Sequence[TapeEntry]) -> Image:
        wire = cut.manifest.config.wire
        outers, snapshots = [], []
        for fragment, snapshot in zip(cut.fragments, cut.snapshots, strict=True):
            payload = pack(np.asarray(fragment.published_N), wire.full, wire.full_zstd_level)
            snapshots.append((replace(snapshot, bytes=len(payload), digest=digest(payload)), payload))
            outers.append(outer.dump(fragment.params_N, fragment.outer) if snapshot.version else b"")
        return Image(
            manifest=cut.manifest,
            number=cut.number,
            snapshots=tuple(snapshots),
            outers=tuple(outers),
            state=cut.state,
            books=cut.books,
            cursors=cut.cursors,
            tape=tuple(tape),
            evaluations=tuple(self.transport.reader.evaluations()),
            pending=tuple(
                (d.contribution, d.payload)
                for d in self.transport.merger.read(cut.waiting)
                if d.contribution is not None
            ),
        )


def _require_same(cut: CheckpointCut, tape: Sequence[TapeEntry]) -> None:
    """Raises BrokerError for a cut whose rounds the broker has lost since: others bear their numbers now."""
    newest = {entry.fragment: entry for entry in tape}
    for p, fragment in enumerate(cut.fragments):
        if p in newest and digest_of(np.asarray(fragment.published_N)) != newest[p].digest:
            raise BrokerError(f"the Redis has lost rounds that checkpoint {cut.number} would hold")
