"""The merger service: it reads contributions, closes rounds and commits them while it holds the lease.

Its memory is a copy of what Redis holds. After any failed write it forgets everything and loads again, so a restart, a
takeover and a lost connection all follow the same path.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from archipelago.broker.commits import Commit, Delivery, Renewal, Seen, never_gone
from archipelago.broker.control import CHECKPOINT, Control, changes_text
from archipelago.broker.errors import BrokerError, FencedError, UnknownRunError, WithdrawnError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Marker, Resume, Snapshot, TapeEntry
from archipelago.broker.presence import Presence
from archipelago.broker.transport import MergerTransport, ReaderTransport
from archipelago.broker.wire import payload_bytes_max
from archipelago.merger import claims
from archipelago.merger.admission import AHEAD, Inbox
from archipelago.merger.checkpointer import CheckpointCut, Checkpointer
from archipelago.merger.committing import KEPT_BYTES_MAX, RESTART_SECONDS, Compactor, build_commit
from archipelago.merger.executor import NewExecutor, at_once, awaited, beside
from archipelago.merger.restore import load
from archipelago.merger.round_merge import RoundMerge
from archipelago.merger.rounds import Close, Liveness, Rounds
from archipelago.merger.spectra import Power, Spectra, by_fastest
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
OnRound = Callable[[TapeEntry], None]


class UnderWay(NamedTuple):
    """A commit under way: its job, which returns the commit and when it ended, and the round before."""

    job: Future[tuple[Commit, float]]
    closed_at: float
    before: RunState


class Merger:
    """One merger of one run. Call `load` once and then `turn` repeatedly. Both raise FencedError after a takeover.

    Args:
        holder: A name for the lease; by default a random one.
        live_poll_seconds: How often heartbeats are read.
        linger_seconds: How long after the last contribution rounds close when no island is live. Islands that leave
            together send their last contributions over some time, and one round should merge all of them.
        checkpointer: Writes checkpoints. Without it none are written, and merged entries are deleted once
            compactions cover them.
        lease_seconds: How long the lease lasts unless it is renewed.
        wall: Seconds of the wall clock, for the tape and for notes.
        on_round: Called with the tape entry after each commit.
        faster: Returns what changes the spectra of large matrices (`Spectra`).
        restart_seconds: How long a restart may take to merge rounds again (`merger.committing`).
        is_gone: Returns whether another merger has ended, given its name, so that its lease need not expire first.
        executor: Runs what is done beside the rounds; by default there are no threads, as in virtual time.
        primary: The connection to shard 0, if this merger serves a further shard.
        manifest: That of the run or of the shard, if it was read already: the shard's server may be away.
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
        on_round: OnRound = lambda entry: None,
        faster: Callable[[], Power | None] = by_fastest,
        restart_seconds: float = RESTART_SECONDS,
        is_gone: Callable[[str], bool] = never_gone,
        executor: NewExecutor = lambda kind, threads: at_once,
        primary: ReaderTransport | None = None,
        manifest: Manifest | None = None,
    ) -> None:
        self.transport, self._primary = transport, primary
        self.clock, self.wall = clock, wall
        self.holder = holder or uuid.uuid4().hex[:12]
        self.live_poll_seconds = live_poll_seconds
        self.linger_seconds = linger_seconds
        self.lease_seconds, self._is_gone = lease_seconds, is_gone
        self.manifest = manifest or transport.reader.manifest()
        self.config = self.manifest.config
        self.epoch = 0
        self.state = RunState()
        self.fragments: dict[int, FragmentState] = {}
        self.snapshots: dict[int, Snapshot] = {}
        self.live: frozenset[str] = frozenset()
        self.spectra = Spectra(clock, faster)
        self.rules = RoundMerge.of(self.manifest, self.spectra)
        self.controls = OperatorControls(transport, self.manifest, wall)
        self.liveness = Liveness()
        self.inbox = Inbox(transport, self.rules, executor("download", AHEAD), self._renew)
        uploads, has_checkpoints = executor("compaction", 1), checkpointer is not None
        self.compactor = Compactor(
            transport, self.manifest, uploads, restart_seconds, takes_checkpoints=has_checkpoints
        )
        self.checkpointer = checkpointer
        if checkpointer is not None:
            checkpointer.cut = self._cut
        self.rounds = Rounds(self.manifest, self.state)
        self.on_round = on_round
        largest = max(payload_bytes_max(self.manifest.sizes[p]) for p in self.manifest.own_fragments)
        self._read_count = max(1, min(READ_COUNT_MAX, READ_BYTES // largest))
        self._live_at = self._renewed_at = self._heard_at = float("-inf")
        self._has_islands = True  # when heartbeats were read last
        self._finished_at: float | None = None
        self.has_served = False
        #: How long this merger has worked since the last round, without the turn in which it works since `_began_at`.
        self._busy_seconds = self._began_at = 0.0
        self._merges, self._commits = executor("merge", 1), executor("commit", 1)
        self._under_way: UnderWay | None = None

    # -- beginning --------------------------------------------------------------------------------------------------

    def acquire(self) -> bool:
        """Take the lease if it is free. Nothing may be written without it. Raises UnreachableError."""
        if self._primary is not None:  # without an answer of shard 0, this merger could not load its shard
            self._primary.reader.uid()
        epoch = self.transport.merger.acquire(self.holder, self.lease_seconds, self._is_gone)
        if epoch is not None:
            self.epoch, self._renewed_at = epoch, self.clock()
        return epoch is not None

    def load(self) -> None:
        """Forget everything, and load the run as its last commit left it. Raises UnknownRunError if it is gone."""
        # A run is restored shard by shard, shard 0 last. A merger that changed another shard meanwhile would keep
        # everybody from restoring the rest. So none loads a shard while the server of shard 0 cannot be asked.
        if self._primary is not None and self._primary.reader.uid() is None:
            raise UnknownRunError(
                f"shard 0 of the run {self._primary.run!r} is lost",
                "Start its mergers again with --resume, which restores the run from a checkpoint.",
            )
        self._busy_seconds, epoch = 0.0, self.epoch
        self._under_way = None  # of an earlier epoch, so that Redis refuses it unless it is in what we load
        store = self.checkpointer.store if self.checkpointer else None

        def go_on() -> None:
            if self.epoch != epoch:  # this load was given up
                raise FencedError(f"epoch {epoch} of this merger has ended")

        reading = partial(load, self.transport, self.rules, store, go_on, self._require_lease)
        found = beside(self._commits, reading, self._renew)  # it may take longer than the lease
        if found.rewrite is not None:
            beside(self._commits, partial(self.transport.merger.rewrite, epoch, found.rewrite), self._renew)
            last = self.manifest.described(found.state.closed)
            self.controls.note("restored", f"Redis had lost a part of the run, which goes on after {last}")
        self.state, self.fragments, self.snapshots = found.state, found.fragments, found.snapshots
        if self.checkpointer is not None:
            self.checkpointer.load(self.manifest, self.state.closed)
        self.rounds, now = Rounds(self.manifest, self.state), self.clock()
        self.liveness = Liveness(self.state.accounts, now, self.rounds.count, self.manifest.stride)
        self.inbox.clear()
        self.compactor.load(found.full, found.snapshots, found.tape, self.state, self.epoch, now)
        self._live_at, self._has_islands, self._finished_at = float("-inf"), True, None
        self.controls.control, self.controls.fields = Control.of(self.state.control), None  # noted before
        # Before the first contribution, which may come from an expelled island.
        self._follow_controls(self.transport.reader.control())
        self.transport.merger.rewind()
        left = self.transport.reader.backlog()  # islands may send faster than we read
        while left > 0 and (waiting := self.transport.merger.updates(0.0, self._read_count)):
            self._receive(waiting, self.clock())
            left -= len(waiting)
        self.has_served = True
        self.controls.note("served", f"epoch {self.epoch} begins after {self.manifest.described(self.state.closed)}")
        resume = Resume(self.state.closed, self.epoch)
        self.transport.merger.take_up(self.epoch, resume, self.state.cursors, self.state.counts())

    # -- one turn ---------------------------------------------------------------------------------------------------

    def turn(self, block_seconds: float = BLOCK_SECONDS) -> bool:
        """Read what has arrived, then call and close the rounds that are due. Return whether one was closed."""
        seen = self._look(block_seconds)
        now = self._began_at = self.clock()
        if seen.control is not None:
            self._follow_controls(seen.control)
        if seen.presences is not None:
            self._note_presences(seen.presences, now)
        self._release(now)  # first, because the next commit stores which rounds are covered
        self.compactor.write(self.epoch, self.state, self.fragments, self.snapshots, now)
        self._receive(seen.deliveries, now)
        lingers, close = not self.live and now - self._heard_at < self.linger_seconds, None
        if not lingers:
            close = self.rounds.close(now, self.live, self.inbox.waiting_fragments())
        closed = close is not None
        if calls := self.rounds.calls(close, self.live):
            self.transport.merger.announce(self.epoch, *calls)
        if not lingers:
            while close is not None:
                now = self._close(close)
                close = self.rounds.close(now, self.live, self.inbox.waiting_fragments())
            now = self._settle() or now
            self._finished_at = (self._finished_at or now) if self._is_finished() else None
            self._take_checkpoint(now)
        self._busy_seconds += self.clock() - self._began_at
        return closed

    def _is_finished(self) -> bool:
        """Return whether the run has made all its steps, no island is live, and nothing waits to be merged."""
        is_done = self.state.closed > 0 and self.state.step >= self.controls.next_config.inner.steps
        return is_done and not self._has_islands and self.transport.reader.backlog() == 0

    @property
    def is_finished(self) -> bool:
        """Whether this shard of the run is finished, as of the last turn."""
        return self._finished_at is not None

    def is_over(self) -> bool:
        """Return whether this merger has nothing left to do: the run is finished and in a checkpoint.

        An extension of the run by an operator, an island that comes back and a failing disk all keep it serving.
        """
        now = self.clock()
        if self._finished_at is None or now - self._finished_at < FINISHED_SECONDS:
            return False
        return self.checkpointer is None or self.checkpointer.has_all(self.state, now)

    def _look(self, block_seconds: float) -> Seen:
        """Wait for contributions, and renew the lease and read what is around if it is time, in one round trip."""
        now, deadline = self.clock(), self.rounds.deadline()
        must_renew = bool(self.epoch) and now - self._renewed_at >= self.lease_seconds / 4
        renewal = Renewal(self.epoch, self.holder, self.lease_seconds) if must_renew else None
        around = now - self._live_at >= self.live_poll_seconds
        patience = block_seconds if deadline is None else min(block_seconds, max(0.0, deadline - now))
        seen = self.transport.merger.look(patience, self._read_count, renewal, around=around)
        self._renewed_at = now if renewal else self._renewed_at
        self._live_at = now if around else self._live_at
        return seen

    def _renew(self) -> None:
        if self.epoch and self.clock() - self._renewed_at >= self.lease_seconds / 4:
            self._require_lease()

    def _require_lease(self) -> None:
        """Renew the lease. Raises FencedError if another merger has taken it."""
        self.transport.merger.renew(self.epoch, self.holder, self.lease_seconds)
        self._renewed_at = self.clock()

    def _note_presences(self, every: Sequence[Presence], now: float) -> None:
        self.transport.merger.forget(self.epoch, every)
        presences = [presence for presence in every if presence.heartbeat.island not in self.inbox.barred]
        live = [presence for presence in presences if presence.is_live]
        self._has_islands, before = bool(live), self.liveness.idle
        self.live = self.liveness.look(presences, now, self.rounds.count, self.rounds.waits_since)
        if self.liveness.idle - before:
            self.controls.tell_of_idle(self.liveness.idle)
        if unreadable := [presence.unreadable for presence in live if presence.heartbeat.unreadable]:
            self.compactor.want(set.union(*unreadable), now)

    def _follow_controls(self, requests: Mapping[str, str]) -> None:
        """Apply the operator's requests if they have changed."""
        if requests == self.controls.fields:
            return
        self.controls.hear(requests, self.state)
        control, config = self.controls.control, self.controls.next_config
        self.rounds.config, self.rounds.is_paused, self.inbox.config = config.sync, control.is_paused, config
        self.rounds.forget(control.expelled)
        self.inbox.expel(control.expelled, self.state)

    def _receive(self, deliveries: Iterable[Delivery], now: float) -> None:
        if self.checkpointer is not None:
            self.checkpointer.follow(self._wanted_checkpoint, now)
        for contribution in self.inbox.receive(deliveries, self.state, self.epoch):
            island, self._heard_at = contribution.island, now
            self.liveness.heard(island, now, self.rounds.count)
            self.rounds.answer(contribution, now)
            # Sending counts as a heartbeat. Else a round could close with a first contribution alone between two polls.
            if (island in self.live) == contribution.farewell:
                self.live = self.live ^ {island}

    # -- closing ----------------------------------------------------------------------------------------------------

    def _close(self, close: Close) -> float:
        """Merge a round, and begin to commit it. Return the time after that."""
        began, p, spectra_seconds = self.clock(), close.fragment, self.spectra.seconds
        before, after = self.state, self.state.copy()
        settings = self.controls.settings
        steered = "" if after.steered == settings else changes_text(self.config, after.steered, settings)
        after.steered = settings
        addends = self.inbox.take(p)
        merging = partial(self.rules.close, self.fragments[p], after, addends, len(self.live), close)
        merged = beside(self._merges, merging, self._renew)  # it may take longer than the lease
        merged_at, spectra_seconds = self.clock(), self.spectra.seconds - spectra_seconds
        self._settle()  # the round before, whose commit was under way meanwhile
        after.timing = before.timing.after_quorum(close.quorum_seconds, self.rounds.config.smoothing)
        contributions = [addend.contribution for addend in addends]
        # A step that no member can have reached is lowered.
        others = claims.global_steps(before.accounts, before.closed)
        step = claims.next_step(before.step, contributions, others, self.manifest.stride, self.live)
        merged.advance(after, close, step, contributions)
        tape = TapeEntry(
            round=close.round,
            fragment=p,
            version=close.version,
            epoch=self.epoch,
            step=step,
            gain=merged.gain,
            quorum_seconds=close.quorum_seconds,
            grace_seconds=close.grace_seconds,
            open_seconds=close.open_seconds,
            live=len(self.live),
            bytes_up=sum(c.bytes for c in contributions),
            loss=math.nan,
            digest="",
            members=merged.members,
            unix_seconds=self.wall(),
            merge_seconds=merged_at - began,
            spectra_seconds=spectra_seconds,
            busy_seconds=self._busy_seconds + merged_at - self._began_at,
            steered=steered,
        )
        self._busy_seconds, self._began_at = 0.0, merged_at
        kept = self.compactor.closing(tape, after.covered)

        def commit() -> tuple[Commit, float]:
            made = build_commit(self.manifest, tape, merged, before, after, kept)
            self.transport.merger.commit(tape.epoch, made)
            return made, self.clock()

        self._under_way = UnderWay(self._commits(commit), began, before)
        self.state, self.fragments[p] = after, merged.state
        self.rounds.advance(after, close)
        return merged_at

    def _settle(self) -> float | None:
        """Wait for the commit that is under way, if there is one, and return its end. Raise its error if it has failed.

        Rounds that are due together overlap: while one is committed, the next one is merged. Until a commit
        has settled, nothing else is written but renewals of the lease. After one that failed, the merger loads again.
        """
        if self._under_way is None:
            return None
        (job, closed_at, before), self._under_way = self._under_way, None
        try:
            commit, now = awaited(job, self._renew)
        except WithdrawnError as error:
            self.inbox.note_withdrawn(error.island)
            raise
        tape, snapshot = commit.tape, commit.snapshot
        self.compactor.committed(commit, now)
        self.snapshots[snapshot.fragment] = snapshot
        # The next commit stores how long this one took.
        self.state.timing = self.state.timing.after_sync(now - closed_at, self.rounds.config.smoothing)
        if (scores := before.scores) != self.state.scores:
            self.controls.tell_of_scores(scores, self.state.scores)
        if tape.steered:
            log.info("steered from round %s on: %s", tape.round, tape.steered)
            self.controls.note("steered", f"{tape.steered} from round {tape.round} on")
        self.on_round(tape)
        return now

    # -- checkpoints ------------------------------------------------------------------------------------------------

    @property
    def _wanted_checkpoint(self) -> str:
        """The operator's request for a checkpoint that was not taken yet; empty when there is none."""
        asked = self.controls.control.checkpoint
        return "" if asked == self.state.control.get(CHECKPOINT) else asked

    def _cut(self, number: int, asked: str) -> CheckpointCut:
        """Return the run as it is now, and tell the islands that this is checkpoint `number`."""
        state = self.state.copy()
        if asked:  # so that a restored run does not take the requested checkpoint again
            state.control[CHECKPOINT] = asked
        self.transport.merger.announce(self.epoch, Marker(number, state.closed))
        return CheckpointCut(number, state, dict(self.fragments), dict(self.snapshots), tuple(self.inbox.entries()))

    def _release(self, now: float, *, wait: bool = False) -> None:
        """Trim the entries that a finished checkpoint covers. With `wait`, first wait for the one in progress."""
        if self.checkpointer is None:
            return
        if self.checkpointer.finished(self.state, now, wait=wait):
            self.compactor.trim(self.epoch, self.state)
        self._tell(self.checkpointer.news())

    def _take_checkpoint(self, now: float) -> None:
        asked = self._wanted_checkpoint
        if self.checkpointer is not None:
            is_crowded = self.compactor.waiting_bytes() > KEPT_BYTES_MAX / 2
            self.checkpointer.take_if_due(self.state, asked, now, is_last=self.is_finished, is_crowded=is_crowded)
        elif asked:
            self.state.control[CHECKPOINT] = asked
            self.controls.note("checkpoint", "this merger takes no checkpoints (--checkpoint-every 0)")

    def finish(self, pause: Callable[[float], None]) -> None:
        """Take a last checkpoint and wait for it. `pause` waits that many seconds."""
        if self.checkpointer is not None:
            self._release(self.clock(), wait=True)
            self.checkpointer.take_last(self.state, self._wanted_checkpoint, self.clock, pause)
            self._release(self.clock(), wait=True)

    def lacks_checkpoint(self) -> bool:
        """Return whether this merger writes checkpoints, and none that it knows of holds its newest rounds."""
        return self.checkpointer is not None and self.state.closed > self.state.covered

    def close(self) -> None:
        """Wait for the copy of the last checkpoint, for some time, and let operators know if there is none."""
        if self.checkpointer is not None:
            self.checkpointer.close()
            with suppress(BrokerError):
                news = self.checkpointer.news()
                reader = self.transport.reader
                # Not of a run that was deleted, nor of one whose next merger copies newer ones.
                if news and reader.uid() is not None and not reader.is_served():
                    self._tell(news)

    def _tell(self, news: Iterable[tuple[str, str]]) -> None:
        for kind, text in news:
            self.controls.note(kind, text)
