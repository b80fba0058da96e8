"""Checkpoints in the background: a cut is taken between two rounds, and another thread writes it to disk.

A cut costs only references, because the arrays never change. A finished checkpoint covers its rounds, whose entries may
then be deleted. If the run keeps a record (`--record`), they are written to it first.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from archipelago.broker.buckets.copier import Copier
from archipelago.broker.commits import Image
from archipelago.broker.control import CHECKPOINT
from archipelago.broker.errors import ArchipelagoError, BrokerError, ConfigError, UnreachableError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import UNSAVED, Counters, Snapshot, TapeEntry
from archipelago.broker.observe.progress import progress
from archipelago.broker.shards.reader import Spawn
from archipelago.broker.transport import MergerTransport
from archipelago.broker.wire import digest_of, is_digest
from archipelago.merger.checkpoint import CheckpointStore
from archipelago.merger.checkpoint_cut import LOOK_SECONDS, Following, Leading, Parts
from archipelago.merger.committing import full_state
from archipelago.merger.record import Recorder
from archipelago.merger.state import FragmentState, RunState

#: How many of the newest rounds of the tape a checkpoint holds. A restored run shows them.
TAPE_IN_IMAGE = 256
#: Seconds until a failed checkpoint is tried again.
RETRY_SECONDS = 10.0
#: How long shard 0 begins no checkpoint by the clock after it has loaded. Mergers of other shards may load, too, and
#: would miss it.
OTHERS_SECONDS = 10.0
#: How often, and at which distance, a shard that ends looks for the last checkpoint of shard 0.
MARKER_TRIES, MARKER_SECONDS = 40, 0.05

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointCut:
    """The run between two rounds, with a copy of its state and the entries of contributions that wait."""

    number: int
    state: RunState
    fragments: Mapping[int, FragmentState]
    snapshots: Mapping[int, Snapshot]
    waiting: Sequence[str]


class Checkpointer:
    """Takes a run's checkpoints every `every_seconds` and on request, and writes its record if there is a recorder.

    A checkpoint on disk covers its rounds. A copier then also copies it to a bucket, at the bucket's own pace.

    Args:
        copies: Whether the copier works in the background once this merger serves.

    Attributes:
        parts: In a run with several shards, what is known of all of them.
        leading: In shard 0 of such a run, when it begins a checkpoint.
        following: In any other shard, the announcements of shard 0, which decides when a checkpoint is taken.
        cut: `cut(number, asked)` returns the run as it is now, for checkpoint `number`, and announces that. `asked` is
            the operator's request that the checkpoint answers. The merger sets it.
        manifest: The run or the shard, once it is loaded.
    """

    cut: Callable[[int, str], CheckpointCut]
    manifest: Manifest

    def __init__(
        self,
        transport: MergerTransport,
        store: CheckpointStore,
        recorder: Recorder | None,
        every_seconds: float,
        spawn: Spawn,
        copier: Copier | None = None,
        parts: Parts | None = None,
        leading: Leading | None = None,
        following: Following | None = None,
        *,
        copies: bool = False,
    ) -> None:
        self.transport, self.store, self.recorder, self.copier = transport, store, recorder, copier
        self.parts, self.leading, self.following = parts, leading, following
        self.every_seconds = every_seconds
        self._spawn = spawn
        self._job: Future[CheckpointCut] | None = None
        self._asked = ""  # the operator's request that the checkpoint in progress answers
        self._due_at: float | None = None
        self._has_loaded = False  # since the last look at what is due
        self._urgent_at = self._look_at = float("-inf")  # when an urgent checkpoint may be taken; see `has_all`
        self._copies = copies
        #: The last failure without its digits. A repeat of the same failure is logged at debug level.
        self._trouble = ""
        self._news: list[tuple[str, str]] = []

    def load(self, manifest: Manifest, closed: int) -> None:
        """Begin with a loaded run. A checkpoint in progress is ignored: it may hold rounds that never happened."""
        self.manifest, self._job, self._asked = manifest, None, ""
        if self._copies and self.copier is not None:  # not before: a standby may share the folder of this merger
            self._copies, newest = False, None
            with suppress(ConfigError):  # the next checkpoint reports it
                newest = max(self.store.numbers(), default=None)
            self.copier.start(newest)
        elif self.copier is not None:
            self.copier.say_again()
        for each in (self.parts, self.following, self.leading):
            if each is not None:
                each.start()
        self._has_loaded = True
        if self.recorder is None:
            return
        if closed == 0:
            reader = self.transport.reader
            self.recorder.begin(manifest, [reader.fragment(p) for p in manifest.own_fragments])
        self.recorder.go_back(closed)  # a Redis that died may have lost the rounds after that one

    # -- when one is taken --------------------------------------------------------------------------------------------

    def take_if_due(self, state: RunState, asked: str, now: float, *, is_last: bool, is_crowded: bool) -> None:
        """Take a checkpoint if one is due or urgent. Shard 0 decides that for the others (`follow`).

        An urgent one is due at once, unless a recent one has failed. None is due while one is in progress, or while
        shard 0 waits for the parts of other shards.

        Args:
            asked: The operator's request for a checkpoint that was not taken yet, if there is one.
            is_last: The run is finished.
            is_crowded: Much in Redis waits for a checkpoint.
        """
        if self.following is not None:
            return
        is_asked = asked not in ("", self._asked)  # a request whose checkpoint failed is not urgent again
        is_end = is_last and not (self.parts and self.parts.has_backlog())
        if not self.is_due(now, urgent=is_end or is_crowded or is_asked):
            return
        try:
            is_needed = self._lacks(state)
        except ArchipelagoError as error:
            if is_last and isinstance(
                error, UnreachableError
            ):  # then the next turn asks again, and not for another one
                return
            is_needed = True  # the attempt to take one reports the fault
        if is_needed:
            self._asked = asked
            self.take(state, now)
        elif asked:
            state.control[CHECKPOINT] = asked
            self._news.append(("checkpoint", f"the newest checkpoint is up to date with round {state.closed}"))

    def is_due(self, now: float, *, urgent: bool = False) -> bool:
        """Return whether a checkpoint may be taken now, by the clock."""
        if self._due_at is None:
            self._due_at = now + self.every_seconds
        if self._has_loaded and self.leading is not None:
            self._due_at = max(self._due_at, now + OTHERS_SECONDS)
        self._has_loaded = False
        if self._job is not None or now < (self._urgent_at if urgent else self._due_at):
            return False
        return self.leading is None or not self.leading.is_waiting(now, self.every_seconds)

    def has_all(self, state: RunState, now: float) -> bool:
        """Return whether a checkpoint holds all rounds of all shards, and none of them has anything left to merge.

        Other shards are looked at every LOOK_SECONDS only.
        """
        if self.parts is not None:
            if now < self._look_at:
                return False
            self._look_at = now + LOOK_SECONDS
            if self.parts.has_backlog():
                return False
        return not self.lacks(state)

    def lacks(self, state: RunState) -> bool:
        """Return whether a closed round is missing from all checkpoints, for example after the folder was emptied."""
        try:
            return self._lacks(state)
        except ArchipelagoError:
            return True

    def _lacks(self, state: RunState) -> bool:
        if self.parts is not None:
            return self.parts.lacks()
        return state.closed > state.covered or (state.closed > 0 and not self.store.numbers())

    def take(self, state: RunState, now: float) -> None:
        """Cut the run, tell the islands, and start writing the checkpoint."""
        try:
            number = self.store.next_number()
        except ArchipelagoError as error:
            self._failed(error, now)
            return
        copied = self.copier.newest if self.copier else -1
        announced = self.leading.announced if self.leading else 0
        # The number is at least the round. Mergers with separate folders then cannot reuse the number of an island's
        # checkpoint for another round.
        self._begin(max(number, copied + 1, announced + 1, state.closed), now)

    def follow(self, asked: str, now: float) -> None:
        """Cut this shard for the checkpoint that the merger of shard 0 has announced since the last call, if any.

        Call this after contributions were read, and before any of them is accepted. An island that has taken its part
        of the checkpoint has heard of the announcement. So if any of these was sent after that, we hear of it now, too.
        """
        number = self.following.newest(now) if self.following else None
        if number is not None and self._job is not None:
            log.debug("shard without a part of checkpoint %s: the last one is still being written", number)
        elif number is not None:
            self._asked = asked
            self._begin(number, now)

    def _begin(self, number: int, now: float) -> None:
        if self.leading is not None:
            self.leading.begin(number, now)
        cut = self.cut(number, self._asked)
        self._due_at = now + self.every_seconds
        self._job = self._spawn(lambda: self._keep(cut))

    def finished(self, state: RunState, now: float, *, wait: bool = False) -> bool:
        """Return whether a checkpoint has been finished, once: then `state` says which rounds it covers.

        A failed one is tried again soon. With `wait`, first wait for the one in progress.
        """
        if self._job is None or not (wait or self._job.done()):
            return False
        job, self._job = self._job, None
        try:
            found = job.result()
        except (ArchipelagoError, OSError) as error:
            self._failed(error, now)
            return False
        closed = found.state.closed
        state.covered = max(state.covered, closed)
        if self._asked:
            state.control[CHECKPOINT], self._asked = self._asked, ""
            if self.following is None:
                what = "shard 0" if self.leading else "the run"
                self._news.append(("checkpoint", f"checkpoint {found.number} holds {what} up to round {closed}"))
        if self._trouble:
            self._trouble = ""
            what = f"checkpoints are written again: {found.number}"
            log.info(what, extra={"round": closed, "code": "checkpoint.recovered"})
            self._news.append(("checkpoint", what))
        return True

    def take_last(
        self, state: RunState, asked: str, clock: Callable[[], float], pause: Callable[[float], None]
    ) -> None:
        """Take a last checkpoint, so that the run can continue from disk alone. `pause` waits that many seconds.

        A merger of another shard follows that of shard 0, which may be ending at the same moment.
        """
        if not self.lacks(state):
            return
        if self.following is None:
            self.take(state, clock())
            return
        for _ in range(MARKER_TRIES):
            self.follow(asked, clock())
            if self._job is not None or not self.lacks(state):
                return
            pause(MARKER_SECONDS)

    # -- news and copies ----------------------------------------------------------------------------------------------

    def news(self) -> list[tuple[str, str]]:
        """Return what operators should read, once: the kind of each note and its text."""
        own, self._news = self._news, []
        return own + (self.copier.news() if self.copier else [])

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
        closed, covered = cut.state.closed, cut.state.covered
        rounds = self.manifest.own_rounds.between(covered, closed)
        newest = self.transport.reader.tape(rounds + 2 * TAPE_IN_IMAGE)
        tape = [entry for entry in newest if entry.round <= closed]
        _require_same(cut, tape)
        if self.recorder is not None:
            covered = max(covered, self.recorder.last_round())
            found = [entry for entry in tape if entry.round > covered]
            if lost := self.manifest.own_rounds.between(covered, closed) - len(found):
                what = "the record lacks %s rounds after round %s, because they are not on the tape in Redis any more"
                log.warning(what, lost, covered, extra={"code": "record.gone"})
            self._record(self.recorder, found)
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
            manifest=self.manifest,
            number=cut.number,
            fragments=tuple(full_state(snapshot, cut.fragments[p]) for p, snapshot in cut.snapshots.items()),
            state=cut.state.to_json(),
            counters=Counters(**cut.state.counts()),
            cursors=cut.state.cursors,
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
    newest, closed = {entry.fragment: entry for entry in tape}, cut.state.closed
    is_same = not closed or (bool(tape) and tape[-1].round == closed)
    for p, fragment in cut.fragments.items():
        is_same &= p not in newest or digest_of(np.asarray(fragment.published_N)) == newest[p].digest
    if not is_same:
        raise BrokerError(f"the Redis has lost rounds that checkpoint {cut.number} would hold")
