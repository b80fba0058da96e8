"""The merger service: it reads contributions, closes rounds and commits them while it holds the lease.

Its memory is a copy of what Redis holds. After any failed write it forgets everything and loads again, so a restart, a
takeover and a lost connection all follow the same path.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future

from archipelago.broker.commits import Commit, Delivery, Renewal, Seen, never_gone
from archipelago.broker.errors import WithdrawnError
from archipelago.broker.messages import Call, Contribution, Counters, Resume, Snapshot, TapeEntry
from archipelago.broker.presence import Presence
from archipelago.broker.transport import MergerTransport
from archipelago.broker.wire import payload_bytes_max
from archipelago.merger import claims
from archipelago.merger.admission import AHEAD, Inbox
from archipelago.merger.checkpointer import CheckpointCut, Checkpointer
from archipelago.merger.committing import RESTART_SECONDS, Compactor, RoundRecord, build_commit
from archipelago.merger.executor import BusyTime, NewExecutor, awaited, in_virtual_time
from archipelago.merger.restore import load
from archipelago.merger.retention import MergedEntries, Retention
from archipelago.merger.round_merge import RoundMerge
from archipelago.merger.rounds import Close, Liveness, Rounds
from archipelago.merger.spectra import Spectra
from archipelago.merger.state import FragmentState, RunState
from archipelago.merger.steering import OperatorControls

LEASE_SECONDS = 5.0
LIVE_POLL_SECONDS = 0.5
BLOCK_SECONDS = 0.25
#: A turn reads no more contributions of an island than fit in this many payload bytes, but one in any case, so that due
#: rounds close soon. It does not bound the memory: bodies wait until their rounds close.
READ_BYTES = 64 << 20
READ_COUNT_MAX = 64
#: A merger ends when its run has been finished, without live islands and without anything to merge, for this long.
FINISHED_SECONDS = 3.0

log = logging.getLogger(__name__)
Clock = Callable[[], float]
OnRound = Callable[[TapeEntry, Snapshot], None]


class Merger:
    """One merger of one run. Call `load` once and then `turn` repeatedly. Both raise FencedError after a takeover.

    Args:
        transport: The connection to the run.
        clock: Seconds of a monotonic clock.
        holder: A name for the lease; by default a random one.
        live_poll_seconds: How often heartbeats are read.
        linger_seconds: How long after the last contribution rounds close when no island is live. Islands that leave
            together send their last contributions over some time, and one round should merge all of them.
        checkpointer: Writes checkpoints. Without it none are written, and merged entries are deleted once
            compactions cover them.
        lease_seconds: How long the lease lasts unless it is renewed.
        wall: Seconds of the wall clock, for the tape and for notes.
        on_round: Called with the tape entry and the snapshot after each commit.
        threads: The threads that change spectra; 0 for the default (`merger.spectra`).
        restart_seconds: How long a restart may take to merge rounds again (`merger.committing`).
        is_gone: Returns whether another merger has ended, given its name, so that its lease need not expire first.
        executor: Runs what is done beside the rounds; by default there are no threads, as in virtual time.
    """

    def __init__(
        self,
        transport: MergerTransport,
        clock: Clock = time.monotonic,
        holder: str = "",
        live_poll_seconds: float = LIVE_POLL_SECONDS,
        linger_seconds: float = 0.0,
        checkpointer: Checkpointer | None = None,
        lease_seconds: float = LEASE_SECONDS,
        wall: Clock = time.time,
        on_round: OnRound = lambda entry, snapshot: None,
        threads: int = 0,
        restart_seconds: float = RESTART_SECONDS,
        is_gone: Callable[[str], bool] = never_gone,
        executor: NewExecutor = in_virtual_time,
    ) -> None:
        self.transport = transport
        self.clock, self.wall = clock, wall
        self.holder = holder or uuid.uuid4().hex[:12]
        self.live_poll_seconds = live_poll_seconds
        self.linger_seconds = linger_seconds
        self.lease_seconds, self._is_gone = lease_seconds, is_gone
        self.manifest = transport.reader.manifest()
        self.config = self.manifest.config
        self.epoch = 0
        self.state = RunState()
        self.fragments: dict[int, FragmentState] = {}
        self.snapshots: dict[int, Snapshot] = {}
        self.live: frozenset[str] = frozenset()
        self.busy = BusyTime(clock)
        self.spectra = Spectra(self._renew, clock, threads)
        self.rules = RoundMerge.of(self.manifest, self.spectra)
        self.controls = OperatorControls(transport, self.manifest, wall)
        self.liveness = Liveness()
        download = executor("download", AHEAD)
        self.inbox = Inbox(transport, self.rules, self.controls.refuses, download, self._renew)
        self.compactor = Compactor(transport, self.manifest, clock, executor("compaction"), restart_seconds)
        self.retention = Retention(
            transport, checkpointer, self.controls, clock, self._cut, self.compactor.is_compacted
        )
        self.rounds = Rounds(self.manifest, self.state)
        self.on_round = on_round
        largest = max(payload_bytes_max(self.manifest.sizes[p]) for p in self.manifest.own_fragments)
        self._read_count = max(1, min(READ_COUNT_MAX, READ_BYTES // largest))
        self._live_at = self._renewed_at = self._heard_at = float("-inf")
        #: Whether an island was live when heartbeats were read last.
        self._has_islands = True
        self._finished_at: float | None = None
        self._commits = executor("commit")
        #: The commit under way and the seconds from the close of its round to its end, and the state before the round.
        self._under_way: Future[tuple[Commit, float]] | None = None
        self._before = RunState()

    # -- beginning --------------------------------------------------------------------------------------------------

    def acquire(self) -> bool:
        """Take the lease if it is free. Nothing may be written without it."""
        epoch = self.transport.merger.acquire(self.holder, self.lease_seconds, self._is_gone)
        if epoch is not None:
            self.epoch = epoch
            self._renewed_at = self.clock()
        return epoch is not None

    def load(self) -> None:
        """Forget everything, and load the run as its last commit left it."""
        self.busy.take()
        self._under_way = None  # of an earlier epoch, so that Redis refuses it unless it is in what we load
        checkpointer = self.retention.checkpointer
        store = checkpointer.store if checkpointer else None
        found = load(self.transport, self.rules, store, self._renew, self._require_lease)
        if found.rewrite is not None:
            self.transport.merger.rewrite(self.epoch, found.rewrite)
            last = self.manifest.described(found.state.closed)
            self.controls.note("restored", f"Redis had lost a part of the run, which goes on after {last}")
        self.state, self.fragments, self.snapshots = found.state, found.fragments, found.snapshots
        if checkpointer is not None:
            checkpointer.load(self.manifest, self.state.closed)
        self.liveness.load(self.state.accounts, self.clock(), self._closed_count)
        self.rounds = Rounds(self.manifest, self.state)
        self.inbox.clear()
        self.compactor.load(found.full, found.uncovered, found.snapshots)
        self.retention.load(self.state, self.epoch, found.tape)
        self._live_at = float("-inf")
        self._has_islands, self._finished_at = True, None
        self.controls.resume_from(self.state)
        self._follow_controls(
            self.transport.reader.control()
        )  # before the first contribution, which may come from an expelled island
        self.transport.merger.rewind()
        left = self.transport.reader.backlog()  # islands may send faster than we read
        while left > 0 and (waiting := self.transport.merger.updates(0.0, self._read_count)):
            self.retention.follow(self.state, self.epoch)
            self._receive(waiting)
            left -= len(waiting)
        self.controls.note("served", f"epoch {self.epoch} begins after {self.manifest.described(self.state.closed)}")
        resume = Resume(self.state.closed, self.epoch)
        self.transport.merger.take_up(self.epoch, resume, self.state.cursors, self.state.counts())

    # -- one turn ---------------------------------------------------------------------------------------------------

    def turn(self, block_seconds: float = BLOCK_SECONDS) -> bool:
        """Read what has arrived, then call and close the rounds that are due. Return whether one was closed."""
        with self.busy.working():
            return self._turn(block_seconds)

    def _turn(self, block_seconds: float) -> bool:
        seen = self._look(block_seconds)
        if seen.control is not None:
            self._follow_controls(seen.control)
        if seen.presences is not None:
            self._note_presences(seen.presences)
        self.retention.release(
            self.state, self.epoch, wait=False
        )  # first, because the next commit stores which rounds are covered
        self._compact()
        self.retention.follow(self.state, self.epoch)
        self._receive(seen.deliveries)
        if calls := [Call(number, self.manifest.fragment_of(number)) for number in self.rounds.calls()]:
            self.transport.merger.announce(self.epoch, *calls)
        if not self.live and self.clock() - self._heard_at < self.linger_seconds:
            return False
        closed = False
        while (close := self.rounds.close(self.clock(), self.live, self.inbox.waiting_fragments())) is not None:
            self._close(close)
            closed = True
        self._settle()
        self._finished_at = (self._finished_at or self.clock()) if self._is_finished() else None
        self.retention.checkpoint_if_due(self.state, self.epoch, is_last=self._finished_at is not None)
        return closed

    def _compact(self) -> None:
        """Point to the compaction whose upload has ended, if there is one, and begin with the next that is due."""
        placed = self.compactor.placed()
        if placed is not None:
            snapshot = placed.snapshot
            self.compactor.covered(snapshot.fragment, snapshot.round, snapshot.version)
            trim = self.retention.not_needed(self.state)
            self.transport.merger.compact(self.epoch, placed, self.state.closed, trim)
        self.compactor.begin(self.epoch, self.fragments, self.snapshots)

    def _is_finished(self) -> bool:
        """Return whether the run has made all its steps, its islands have left, and nothing waits to be merged."""
        is_done = self.state.closed > 0 and self.state.step >= self.controls.next_config(self.state).inner.steps
        return is_done and not self._has_islands and self.transport.reader.backlog() == 0

    def is_over(self) -> bool:
        """Return whether this merger has nothing left to do: the run is finished and in a checkpoint.

        An extension of the run by an operator, an island that comes back and a failing disk all keep it serving.
        """
        if self._finished_at is None or self.clock() - self._finished_at < FINISHED_SECONDS:
            return False
        return self.retention.is_covered(self.state)

    def _patience(self, block_seconds: float) -> float:
        deadline = self.rounds.deadline()
        if deadline is None:
            return block_seconds
        return min(block_seconds, max(0.0, deadline - self.clock()))

    def _look(self, block_seconds: float) -> Seen:
        """Wait for contributions, and renew the lease and read what is around if it is time, in one round trip."""
        now = self.clock()
        renewal = Renewal(self.epoch, self.holder, self.lease_seconds) if self._must_renew() else None
        around = now - self._live_at >= self.live_poll_seconds
        patience = self._patience(block_seconds)
        with self.busy.waiting():
            seen = self.transport.merger.look(patience, self._read_count, renewal, around=around)
        self._renewed_at = now if renewal else self._renewed_at
        self._live_at = now if around else self._live_at
        return seen

    def _must_renew(self) -> bool:
        return bool(self.epoch) and self.clock() - self._renewed_at >= self.lease_seconds / 4

    def _renew(self) -> None:
        """Renew the lease if it is held and it is time."""
        if self._must_renew():
            self._require_lease()

    def _require_lease(self) -> None:
        """Renew the lease. Raises FencedError if another merger has taken it."""
        self.transport.merger.renew(self.epoch, self.holder, self.lease_seconds)
        self._renewed_at = self.clock()

    def _note_presences(self, every: Sequence[Presence]) -> None:
        self.transport.merger.forget(self.epoch, every)
        refused = (self.controls.refuses, self.inbox.is_fickle)
        presences = [p for p in every if not any(refuses(p.heartbeat.island) for refuses in refused)]
        self.live = self.liveness.look(presences, self.clock(), self._closed_count)
        self._has_islands = any(presence.is_live for presence in presences)
        unreadable = {number for presence in presences if presence.is_live for number in presence.unreadable}
        self.compactor.want(unreadable & set(self.manifest.own_fragments))
        self.controls.tell_of_idle(self.liveness.idle)

    @property
    def _closed_count(self) -> int:
        """How many rounds of this run or shard have closed."""
        return self.manifest.own_rounds.until(self.state.closed)

    def _follow_controls(self, requests: Mapping[str, str]) -> None:
        """Apply the operator's requests if they have changed."""
        if not self.controls.hear(requests, self.state):
            return
        control = self.controls.control
        self.rounds.config, self.rounds.is_paused = self.controls.next_config(self.state).sync, control.is_paused
        self.rounds.forget(control.expelled)
        self.inbox.refuse_expelled(self.state, self.epoch)

    def _receive(self, deliveries: Iterable[Delivery]) -> None:
        for contribution in self.inbox.receive(deliveries, self.state, self.epoch):
            island, now = contribution.island, self.clock()
            self.liveness.heard(island, now, self._closed_count)
            self.rounds.answer(contribution, now)
            self._heard_at = now
            # Sending counts as a heartbeat. Else a round could close with a first contribution alone between two polls.
            if (island in self.live) == contribution.farewell:
                self.live = self.live ^ {island}

    # -- closing ----------------------------------------------------------------------------------------------------

    def _close(self, close: Close) -> None:
        began, spectra_seconds = self.clock(), self.spectra.seconds
        p = self.manifest.fragment_of(close.round)
        after = self.state.copy()
        steered = self.controls.apply_settings(after)
        addends = self.inbox.take(p)
        merged = self.rules.close(self.fragments[p], after, addends, len(self.live))
        merge_seconds, spectra_seconds = self.clock() - began, self.spectra.seconds - spectra_seconds
        self._settle()  # the round before, whose commit was under way meanwhile
        after.timing = self.rounds.timing.after_quorum(close.quorum_seconds, self.rounds.config.smoothing)
        step = self._next_step([addend.contribution for addend in addends])
        self.rules.advance(after, close.round, step, merged, addends)
        entries = tuple(addend.entry for addend in addends)
        size = sum(addend.contribution.bytes for addend in addends)
        snapshot_version = self.manifest.version_after(close.round)
        is_full = self.compactor.carries_full(p, snapshot_version)
        if is_full:
            self.compactor.covered(p, close.round, snapshot_version)
        self.retention.kept.append(MergedEntries(close.round, p, entries, size))
        trim = self.retention.not_needed(self.state)
        record = RoundRecord(
            close, self.epoch, len(self.live), steered, self.wall(), merge_seconds, spectra_seconds, self.busy.take()
        )
        before, epoch = self.state, self.epoch
        uncovered = self.manifest.own_rounds.between(self.compactor.oldest, close.round)

        def commit() -> tuple[Commit, float]:
            made = build_commit(self.manifest, record, merged, addends, before, after, trim, is_full, uncovered)
            self.transport.merger.commit(epoch, made)
            return made, self.clock() - began

        self._under_way = self._commits(commit)
        self._before, self.state, self.fragments[p] = before, after, merged.state
        self.rounds.advance(after)

    def _settle(self) -> None:
        """Wait for the commit that is under way, if there is one. Raise its error if it has failed.

        Rounds that are due together overlap: while one is committed, the next one is merged. Until a commit
        has settled, nothing else is written but renewals of the lease. After one that failed, the merger loads again.
        """
        if self._under_way is None:
            return
        under_way, self._under_way = self._under_way, None
        try:
            commit, seconds = awaited(under_way, self._renew)
        except WithdrawnError as error:
            self.inbox.withdrawn[error.island] += 1
            raise
        tape, snapshot = commit.tape, commit.snapshot
        self.compactor.committed(tape, snapshot, is_full=commit.compaction is not None)
        self.snapshots[snapshot.fragment] = snapshot
        self.rounds.committed(seconds)
        self.controls.tell_of_scores(self._before.scores, self.state.scores)
        if tape.steered:
            log.info("steered from round %s on: %s", tape.round, tape.steered)
            self.controls.note("steered", f"{tape.steered} from round {tape.round} on")
        self.on_round(tape, snapshot)

    def _next_step(self, members: Sequence[Contribution]) -> int:
        """Return the run's step after this round. A step that no member can have reached is lowered (`claims`)."""
        others = claims.global_steps(self.state.accounts, self.state.closed)
        return claims.next_step(self.state.step, members, others, self.manifest.stride, self.live)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def _cut(self, number: int, asked: str) -> CheckpointCut:
        state = self.state.copy()
        self.controls.took_checkpoint(
            state, asked
        )  # so that a restored run does not take the requested checkpoint again
        return CheckpointCut(
            manifest=self.manifest,
            number=number,
            round=state.closed,
            covered=state.covered,
            state=state.to_json(),
            fragments=dict(self.fragments),
            snapshots=dict(self.snapshots),
            cursors=dict(state.cursors),
            counters=Counters(**state.counts()),
            waiting=tuple(self.inbox.entries()),
        )
