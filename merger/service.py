"""The merger's shell: reads contributions, closes rounds, commits; holds a lease, and leaves when it is fenced.

Its memory is a copy of what Redis holds. After any broken write it forgets everything and loads again, so that a
restart, a takeover and a lost connection all go the same way.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from archipelago.broker.errors import BrokerError, FencedError, UnknownRunError, UnreachableError, WireError
from archipelago.broker.messages import Call, Marker, Refusal, Resume, Snapshot, TapeEntry
from archipelago.broker.transport import START, Commit, Delivery, MergerTransport
from archipelago.broker.wire import digest, digest_of, encoded, pack, pack_body, payload_bytes_max
from archipelago.merger import outer
from archipelago.merger.admission import Rejected, admit
from archipelago.merger.checkpointer import CheckpointCut, Checkpointer
from archipelago.merger.closing import Closed, Gathering, Waiting, mean_loss, new_state
from archipelago.merger.outer import Round
from archipelago.merger.record import Recorder
from archipelago.merger.replay import Rules
from archipelago.merger.restore import load
from archipelago.merger.rounds import Close, Rounds
from archipelago.merger.snapshot_codec import sent_down
from archipelago.merger.state import FragmentState, RunState
from archipelago.merger.steering import EXPELLED, OperatorControls

LEASE_SECONDS = 5.0
LIVE_POLL_SECONDS = 0.5
BLOCK_SECONDS = 0.25
READ_BYTES = 64 << 20
"""of payloads that are read at once: each is decoded into its round's sum and forgotten, so memory stays bounded"""

KEPT_BYTES_MAX = 256 << 20
"""of merged contributions that lie in the stream until a checkpoint covers them"""

log = logging.getLogger(__name__)
Clock = Callable[[], float]


@dataclass(frozen=True)
class Kept:
    """The entries that a round merged, which lie in the stream until a checkpoint covers them."""

    round: int
    entries: tuple[str, ...]
    bytes: int


class Merger:
    """One merger of one run. Call `load` once, then `turn` again and again; both raise FencedError when overtaken."""

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
    ) -> None:
        """`linger_seconds`: how long after the last contribution rounds close when nobody is live to be waited for.

        `wall` gives the wall clock's seconds, for the tape and for notes; all else goes by `clock`.
        Without a `checkpointer` no checkpoint is written, and merged entries leave the stream with their commit.
        """
        self.transport = transport
        self.clock, self.wall = clock, wall
        self.holder = holder or uuid.uuid4().hex[:12]
        self.live_poll_seconds = live_poll_seconds
        self.linger_seconds = linger_seconds
        self.lease_seconds = lease_seconds
        self.checkpointer = checkpointer
        self.manifest = transport.reader.manifest()
        self.config = self.manifest.config
        self.rules = Rules.of(self.manifest)
        self.controls = OperatorControls(transport, self.config, wall)
        self.epoch = 0
        self.state = RunState()
        self.fragments: list[FragmentState] = []
        self.snapshots: list[Snapshot] = []
        self.rounds = Rounds(self.config.sync, len(self.manifest.fragments), 0, self.state.pace, {})
        self.gathered: dict[int, Gathering] = {}
        largest = max((payload_bytes_max(size) for size in self.manifest.sizes), default=1)
        self._read_count = max(1, min(64, READ_BYTES // largest))
        self.live: frozenset[str] = frozenset()
        self.kept: deque[Kept] = deque()
        self.refused = 0
        """contributions, by this process"""
        self.on_round: Callable[[TapeEntry, Snapshot], None] = lambda entry, snapshot: None
        """called after each commit, for who looks"""
        self._live_at = self._renewed_at = self._heard_at = float("-inf")
        self._instance = ""
        self._asked = ""
        """the text with which the operator asked for the checkpoint that is under way"""

    # -- beginning --------------------------------------------------------------------------------------------------

    def acquire(self) -> bool:
        """Takes the lease if it is free; nothing may be written without it."""
        epoch = self.transport.merger.acquire(self.holder, self.lease_seconds)
        if epoch is not None:
            self.epoch = epoch
            self._renewed_at = self.clock()
        return epoch is not None

    def load(self) -> None:
        """Forgets everything, and takes up the run where its last commit left it."""
        self._instance = self.transport.reader.instance()  # first: if it dies while we read, we read again
        store = self.checkpointer.store if self.checkpointer else None
        found = load(self.transport, self.rules, store, self._keep_lease)
        self.state, self.fragments, self.snapshots = found.state, found.fragments, found.snapshots
        if self.checkpointer is not None:
            self.checkpointer.forget()
            self._take_up_record(self.checkpointer.recorder)
        self.rounds = Rounds(
            self.config.sync, len(self.fragments), self.state.closed, self.state.pace, self.state.step_seconds
        )
        self.gathered = {}
        self._asked = ""
        self._load_kept()
        self._live_at = float("-inf")
        self.controls.take_over(self.state)
        self._follow()  # before the first contribution: it may be one to refuse
        for delivery in self._unacknowledged():
            self._receive(delivery)
        self.controls.note("served", f"epoch {self.epoch} begins after round {self.state.closed}")
        self.transport.merger.announce(
            self.epoch, Resume(self.state.closed, self.epoch)
        )  # last: what was overtaken ends here

    def _take_up_record(self, recorder: Recorder | None) -> None:
        if recorder is None:
            return
        if self.state.closed == 0:
            recorder.begin(self.manifest, [self.transport.reader.fragment(p) for p in range(len(self.fragments))])
        recorder.go_back(self.state.closed)  # a Redis that died may have lost the rounds after that

    def _load_kept(self) -> None:
        """What was merged and still lies in the stream: where nothing covers it, that is all right."""
        self.kept.clear()
        if self.transport.reader.books().kept:
            for entry in self.transport.reader.tape(1 << 20):
                if entry.round > self.state.covered:
                    self.kept.append(Kept(entry.round, tuple(m.entry for m in entry.members), entry.bytes_up))

    def warm_up(self) -> None:
        """Compiles closing a round of every fragment and changes nothing: the first rounds are as quick as the rest."""
        for p, size in enumerate(self.manifest.sizes):
            zeros_N = np.zeros(size, np.float32)
            fragment = new_state(zeros_N, self.rules.outer)
            gathered = self.rules.gather(p, fragment, 0)
            for codec in {self.config.wire.up, self.config.wire.thin} - {""}:
                gathered.warm_up(encoded(zeros_N, codec))
            params_N, _ = self.rules.outer.step(fragment.params_N, fragment.outer, gathered.merged(1.0), Round())
            sent_down(self.config.wire, fragment.published_N, params_N)

    # -- one turn ---------------------------------------------------------------------------------------------------

    def turn(self, block_seconds: float = BLOCK_SECONDS) -> bool:
        """Reads what has come, calls and closes what is due. True if a round was closed."""
        self._keep_lease()
        self._look_around()
        self._let_go(wait=False)  # first: the next commit keeps that a checkpoint holds so much
        for delivery in (
            self.transport.merger.updates(self._patience(block_seconds), self._read_count) or self._orphans()
        ):
            self._receive(delivery)
        for number in self.rounds.calls():
            self.transport.merger.announce(self.epoch, Call(number, self.manifest.fragment_of(number)))
        if not self.live and self.clock() - self._heard_at < self.linger_seconds:
            return False  # islands that leave together send their last over some time: one round is to have it all
        closed = False
        while (close := self.rounds.close(self.clock(), self.live, self._waiting_fragments())) is not None:
            self._close(close)
            closed = True
        self._tend_checkpoints()
        return closed

    def _patience(self, block_seconds: float) -> float:
        deadline = self.rounds.deadline()
        if deadline is None:
            return block_seconds
        return min(block_seconds, max(0.0, deadline - self.clock()))

    def _unacknowledged(self) -> Iterator[Delivery]:
        after = START
        while found := self.transport.merger.unacknowledged(after, self._read_count):
            yield from found
            after = found[-1].entry

    def _orphans(self) -> Iterator[Delivery]:
        """What a merger that we overtook read after we had loaded: nobody but us can end it."""
        known = {w.entry for w in self._all_waiting()}
        if self.transport.reader.backlog() > len(known):
            yield from (delivery for delivery in self._unacknowledged() if delivery.entry not in known)

    def _keep_lease(self) -> None:
        if self.clock() - self._renewed_at >= self.lease_seconds / 4:
            self.transport.merger.renew(self.epoch, self.holder, self.lease_seconds)
            self._renewed_at = self.clock()
            self._require_same_broker()

    def _require_same_broker(self) -> None:
        """A broker that died and came back between two calls looks as before, and may have lost what it had."""
        if self.transport.reader.instance() != self._instance:
            raise UnreachableError("the Redis was started again, and may have lost its newest writes")

    def _look_around(self) -> None:
        if self.clock() - self._live_at >= self.live_poll_seconds:
            self._follow()
            training = (p.heartbeat.island for p in self.transport.reader.presences() if p.is_training)
            self.live = frozenset(island for island in training if not self.controls.refuses(island))
            self._live_at = self.clock()

    def _follow(self) -> None:
        """Does what the operator wishes."""
        if self.controls.look(self.state):
            self.rounds.config, self.rounds.is_paused = self.controls.sync(self.state), self.controls.control.is_paused
            self._turn_out()

    def _turn_out(self) -> None:
        """Refuses what waits of expelled islands, as a merger that takes over does: sums cannot give it back, so what
        waits for the same fragments is read again.
        """
        self.rounds.forget(self.controls.control.expelled)
        mixed = [
            p
            for p, each in self.gathered.items()
            if any(self.controls.refuses(w.contribution.island) for w in each.waiting)
        ]
        for p in mixed:
            del self.gathered[p]
        for delivery in self._orphans() if mixed else ():
            self._receive(delivery)

    def _waiting_fragments(self) -> set[int]:
        return {p for p, gathered in self.gathered.items() if gathered.waiting}

    def _receive(self, delivery: Delivery) -> None:
        contribution = delivery.contribution
        if contribution is None or delivery.fault:
            self._refuse(delivery, delivery.fault)
            return
        if any(w.entry == delivery.entry for w in self._all_waiting()):
            return  # given again by a group that was made anew; it is to be merged, and cannot be refused as well
        if self.state.has_seen(contribution.identity) or self._is_waiting(contribution.identity):
            self._refuse(delivery, "a repeat of a contribution that was taken already", repeat=True)
            return
        p = contribution.fragment
        try:
            if self.controls.refuses(contribution.island):
                raise WireError(EXPELLED)
            verdict = admit(contribution, self.manifest, self.rounds.closed, self._version(p))
            if isinstance(verdict, Rejected):
                raise WireError(verdict.reason)
            self.rules.take(self._gathering(p), delivery)
        except WireError as error:
            self._refuse(delivery, error.reason)
            self.state.see(contribution.identity)
            return
        self.rounds.answer(contribution, self.clock())
        self._heard_at = self.clock()
        # Who sends, lives: between two looks at the heartbeats, a first contribution is not merged all alone.
        self.live = self.live - {contribution.island} if contribution.farewell else self.live | {contribution.island}

    def _gathering(self, p: int) -> Gathering:
        if p not in self.gathered:
            self.gathered[p] = self.rules.gather(p, self.fragments[p], self._version(p))
        return self.gathered[p]

    def _is_waiting(self, identity: tuple[str, str, int]) -> bool:
        return any(w.contribution.identity == identity for w in self._all_waiting())

    def _all_waiting(self) -> Iterator[Waiting]:
        return chain.from_iterable(gathered.waiting for gathered in self.gathered.values())

    def _version(self, p: int) -> int:
        """How many rounds of a fragment have closed."""
        fragments = len(self.fragments)
        return (self.rounds.closed - p - 1) // fragments + 1 if p < fragments else 0

    def _refuse(self, delivery: Delivery, reason: str, repeat: bool = False) -> None:
        c, why = delivery.contribution, reason[:500]
        decided = repeat and c is not None and self.state.has_seen(c.identity)
        refusal = (
            Refusal("?", "?", 0, 0, 0, 0, why, repeat)
            if c is None
            else Refusal(c.island, c.incarnation, c.sequence, c.round, c.fragment, c.tokens, why, repeat, decided)
        )
        about = {"round": refusal.round}
        log.warning("refused a contribution of %s to round %s: %s", refusal.island, refusal.round, reason, extra=about)
        self.transport.merger.refuse(self.epoch, [(delivery.entry, refusal)])
        self.refused += 1

    # -- closing ----------------------------------------------------------------------------------------------------

    def _close(self, close: Close) -> None:
        began = self.clock()
        p = self.manifest.fragment_of(close.round)
        gathered = self._gathering(p)
        del self.gathered[p]
        steered = self.controls.take_up(self.state)
        closed = self.rules.close(close.round, self.fragments[p], self.state, gathered, len(self.live))
        merge_seconds = self.clock() - began
        before = dict(self.state.cursors)
        self.state.pace = self.rounds.pace_after(close)
        self.rules.take_in(close.round, closed, self.state, gathered)
        difference = self._difference(closed)
        snapshot, payload = self._snapshot(close.round, closed, difference)
        tape = replace(
            self._tape_entry(close, closed, gathered.waiting, snapshot.held),
            unix_seconds=self.wall(),
            merge_seconds=max(0.0, merge_seconds),
            steered=steered,
        )
        kept = Kept(close.round, tuple(w.entry for w in gathered.waiting), tape.bytes_up)
        self.transport.merger.commit(
            self.epoch,
            Commit(
                snapshot,
                payload,
                outer.dump(closed.state.params_N, closed.state.outer),
                self.state.to_json(),
                tape,
                kept.entries,
                sum(w.contribution.tokens for w in gathered.waiting),
                trim=self._no_longer_kept(kept),
                cursors={s: c for s, c in self.state.cursors.items() if before.get(s) != c},
                after_round=close.round - 1,
                difference=difference,
            ),
        )
        self.fragments[p], self.snapshots[p] = closed.state, snapshot
        self.rounds.closed_round(close, self.clock() - began)
        if steered:
            log.info("steered from round %s on: %s", close.round, steered)
            self.controls.note("steered", f"{steered} from round {close.round} on")
        self.on_round(tape, snapshot)

    def _difference(self, closed: Closed) -> bytes:
        wire, held_N = self.config.wire, closed.state.published_N
        return pack_body(closed.difference, wire.down, held_N.size, wire.zstd_level) if wire.sends_differences else b""

    def _snapshot(self, number: int, closed: Closed, difference: bytes) -> tuple[Snapshot, bytes]:
        held_N = np.asarray(closed.state.published_N)
        payload = pack(held_N, self.config.wire.full, self.config.wire.full_zstd_level)
        by_weight = sorted(closed.members, key=lambda m: -m.weight)
        snapshot = Snapshot(
            round=number,
            fragment=self.manifest.fragment_of(number),
            version=self.manifest.version_after(number),
            step=self.state.step,
            codec=self.config.wire.full,
            bytes=len(payload),
            digest=digest(payload),
            merged=" ".join(m.identity_text for m in by_weight),
            held=digest_of(held_N),
            difference_bytes=len(difference),
        )
        return snapshot, payload

    def _tape_entry(self, close: Close, closed: Closed, waiting: list[Waiting], held: str) -> TapeEntry:
        return TapeEntry(
            round=close.round,
            fragment=self.manifest.fragment_of(close.round),
            version=self.manifest.version_after(close.round),
            epoch=self.epoch,
            step=self.state.step,
            gain=closed.gain,
            quorum_seconds=close.quorum_seconds,
            grace_seconds=close.grace_seconds,
            open_seconds=close.open_seconds,
            live=len(self.live),
            bytes_up=sum(w.contribution.bytes for w in waiting),
            loss=mean_loss(closed.members),
            digest=held,
            members=closed.members,
        )

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def _no_longer_kept(self, new: Kept) -> list[str]:
        """Merged entries to let go of: all where nobody takes checkpoints, else the oldest once there are too many."""
        self.kept.append(new)
        most = KEPT_BYTES_MAX if self.checkpointer is not None else 0
        size = sum(kept.bytes for kept in self.kept)
        gone: list[str] = []
        while self.kept and (size > most or self.checkpointer is None):
            oldest = self.kept.popleft()
            size -= oldest.bytes
            gone += oldest.entries
        if gone and self.checkpointer is not None:
            log.warning("checkpoints are too slow or fail: until the next one, Redis alone can bring this run back")
        return gone

    def _tend_checkpoints(self) -> None:
        asked = self.controls.wanted_checkpoint(self.state)
        if self.checkpointer is None:
            if asked:
                self.controls.took_checkpoint(self.state, asked)
                self.controls.note("checkpoint", "none is taken: this merger keeps none (--checkpoint-every 0)")
            return
        crowded = sum(kept.bytes for kept in self.kept) > KEPT_BYTES_MAX / 2
        urgent = crowded or asked not in ("", self._asked)  # one that failed is made up for without haste
        if not self.checkpointer.is_due(self.clock(), urgent=urgent):
            return
        if self.checkpointer.lacks(self.state.closed, self.state.covered):
            self._asked = asked
            self.checkpoint()
        elif asked:
            self.controls.took_checkpoint(self.state, asked)
            self.controls.note("checkpoint", f"the last one holds all that there is, round {self.state.closed}")

    def checkpoint(self) -> None:
        """Takes a cut, tells the islands, and sends it to disk."""
        assert self.checkpointer is not None  # noqa: S101
        number = self.checkpointer.next_number(self.clock())
        if number is None:
            return
        knowing = replace(self.state, control=dict(self.state.control))  # that it is the one that was asked for
        self.controls.took_checkpoint(knowing, self._asked)
        cut = CheckpointCut(
            # The round's, so that an island's checkpoint fits it whichever merger's folder it lies in.
            number=max(number, self.state.closed),
            round=self.state.closed,
            covered=self.state.covered,
            state=knowing.to_json(),
            fragments=tuple(self.fragments),
            snapshots=tuple(self.snapshots),
            cursors=dict(self.state.cursors),
            books=self.transport.reader.books(),
            waiting=tuple(w.entry for w in self._all_waiting()),
        )
        self.transport.merger.announce(self.epoch, Marker(cut.number, cut.round))
        self.checkpointer.begin(cut, self.manifest, self.clock())

    def _let_go(self, wait: bool) -> None:
        """Trims what a checkpoint that has finished covers."""
        covered = self.checkpointer.finished(self.clock(), wait=wait) if self.checkpointer is not None else None
        if covered is None:
            return
        entries: list[str] = []
        while self.kept and self.kept[0].round <= covered.round:
            entries += self.kept.popleft().entries
        self.transport.merger.trim(self.epoch, entries, covered.actions_until)
        self.state.covered = max(self.state.covered, covered.round)
        if self._asked:
            self.controls.took_checkpoint(self.state, self._asked)
            self._asked = ""
            self.controls.note("checkpoint", f"checkpoint {covered.number} holds the run up to round {covered.round}")

    def finish(self) -> None:
        """A last checkpoint, so that nothing but the disk is needed to go on; waits for it."""
        if self.checkpointer is not None and self.fragments:
            self._let_go(wait=True)
            if self.checkpointer.lacks(self.state.closed, self.state.covered):
                self.checkpoint()
                self._let_go(wait=True)


def serve(merger: Merger, stopped: Callable[[], bool], pause: Callable[[float], None] = time.sleep) -> None:
    """Serves until `stopped`, through outages; as a standby while another merger holds the lease.

    Returns when it is stopped or fenced. `pause` waits that many seconds between two tries.
    """
    merger.warm_up()  # before it takes the lease: a standby is ready when it is needed
    loaded, trouble = False, ""
    while not stopped():
        try:
            if not merger.epoch and not merger.acquire():
                pause(min(0.5, merger.lease_seconds / 4))
                continue
            if not loaded:
                merger.load()
                loaded, trouble = True, ""
                closed = merger.rounds.closed
                log.info("serving from round %s, epoch %s", closed, merger.epoch, extra={"round": closed})
            merger.turn()
        except FencedError as error:
            log.warning("%s", error)
            merger.controls.note("left", "another merger serves")
            return
        except UnknownRunError:
            raise
        except BrokerError as error:  # an outage, or memory that is full: both end by themselves
            if error.what != trouble:  # once, however long it lasts
                log.warning("%s", error)
            trouble = error.what
            # Nobody knows which writes arrived: begin from what Redis holds, in an epoch that fences what is under way.
            loaded, merger.epoch = False, 0
            pause(0.5)
    if merger.epoch:
        _leave(merger, loaded)


def _leave(merger: Merger, loaded: bool) -> None:
    try:
        if loaded:
            merger.finish()
        merger.transport.merger.release(merger.epoch)
        merger.controls.note("left", f"it was stopped after round {merger.rounds.closed}")
    except BrokerError as error:
        log.info("the lease runs out by itself: %s", error.what)
