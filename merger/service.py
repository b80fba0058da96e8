"""The merger's shell: reads contributions, closes rounds, commits; holds a lease, and leaves when it is fenced.

Its memory is a copy of what Redis holds. After any broken write it forgets everything and loads again, so that a
restart, a takeover and a lost connection all go the same way.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable

import jax
import numpy as np

from broker.errors import BrokerError, FencedError, UnknownRunError, WireError
from broker.messages import Call, Refusal, Resume, Snapshot, TapeEntry
from broker.transport import Commit, Delivery, Transport
from broker.wire import digest, digest_of, pack, unpack
from merger import merge_rules, outer
from merger.admission import Rejected, admit
from merger.clip import NormWindow
from merger.closing import Waiting, close_fragment, mean_loss, new_state
from merger.rounds import Close, Rounds
from merger.state import FragmentState, RunState

LEASE_SECONDS = 10.0
LIVE_POLL_SECONDS = 0.5
BLOCK_SECONDS = 0.25
NORM_MAX = 1e18
"""A contribution of a larger norm could overflow float32 in the merge or in the momentum: no training makes one."""

log = logging.getLogger(__name__)
Clock = Callable[[], float]


class Merger:
    """One merger of one run. Call `load` once, then `turn` again and again; both raise FencedError when overtaken."""

    def __init__(
        self,
        transport: Transport,
        clock: Clock = time.monotonic,
        holder: str = "",
        live_poll_seconds: float = LIVE_POLL_SECONDS,
        linger_seconds: float = 0.0,
    ) -> None:
        """`linger_seconds`: how long after the last contribution rounds close when nobody is live to be waited for."""
        self.transport = transport
        self.clock = clock
        self.holder = holder or uuid.uuid4().hex[:12]
        self.live_poll_seconds = live_poll_seconds
        self.linger_seconds = linger_seconds
        self.manifest = transport.manifest()
        self.config = self.manifest.config
        self.outer = outer.build(self.config.outer)
        self.groups = [merge_rules.groups(rows, self.config.merge) for rows in self.manifest.layout]
        self.epoch = 0
        self.state = RunState()
        self.fragments: list[FragmentState] = []
        self.rounds = Rounds(self.config.sync, len(self.manifest.fragments), 0, self.state.pace)
        self.waiting: dict[int, list[Waiting]] = {}
        self.live: frozenset[str] = frozenset()
        self._live_at = self._renewed_at = self._heard_at = float("-inf")

    # -- beginning --------------------------------------------------------------------------------------------------

    def acquire(self) -> bool:
        """Takes the lease if it is free; nothing may be written without it."""
        epoch = self.transport.acquire(self.holder, LEASE_SECONDS)
        if epoch is not None:
            self.epoch = epoch
            self._renewed_at = self.clock()
        return epoch is not None

    def load(self) -> None:
        """Forgets everything, and takes up the run where its last commit left it."""
        self.state = RunState.from_json(self.transport.merger_state())
        self.fragments = [self._load_fragment(p) for p in range(len(self.manifest.fragments))]
        self.rounds = Rounds(self.config.sync, len(self.fragments), self.state.closed, self.state.pace)
        self.waiting = {}
        self._live_at = float("-inf")
        for delivery in self.transport.unacknowledged():
            self._receive(delivery)
        self.transport.announce(self.epoch, Resume(self.state.closed, self.epoch))

    def _load_fragment(self, p: int) -> FragmentState:
        size = self.manifest.sizes[p]
        kept = self.transport.outer(p)
        if not kept:
            _, payload = self.transport.fragment(p)
            return new_state(unpack(payload, size), self.outer)
        template = self.outer.init(jax.numpy.zeros(size, np.float32))
        params_N, state = outer.load(template, kept, size)
        return FragmentState(params_N, state, self.state.norms.get(p, NormWindow()))

    def warm_up(self) -> None:
        """Compiles closing a round of every fragment and changes nothing: the first rounds are as quick as the rest."""
        for p, fragment in enumerate(self.fragments):
            zeros_N = np.zeros(self.manifest.sizes[p], np.float32)
            merged_N = merge_rules.merge([zeros_N, zeros_N], [0.5, 0.5], self.groups[p])
            self.outer.step(fragment.params_N, fragment.outer, merged_N, 1.0)

    # -- one turn ---------------------------------------------------------------------------------------------------

    def turn(self, block_seconds: float = BLOCK_SECONDS) -> bool:
        """Reads what has come, calls and closes what is due. True if a round was closed."""
        self._keep_lease()
        self._look_around()
        for delivery in self.transport.updates(self._patience(block_seconds)) or self._orphans():
            self._receive(delivery)
        for number in self.rounds.calls():
            self.transport.announce(self.epoch, Call(number, self.manifest.fragment_of(number)))
        if not self.live and self.clock() - self._heard_at < self.linger_seconds:
            return False  # islands that leave together send their last over some time: one round is to have it all
        closed = False
        while (close := self.rounds.close(self.clock(), self.live, self._waiting_fragments())) is not None:
            self._close(close)
            closed = True
        return closed

    def _patience(self, block_seconds: float) -> float:
        deadline = self.rounds.deadline()
        if deadline is None:
            return block_seconds
        return min(block_seconds, max(0.0, deadline - self.clock()))

    def _orphans(self) -> list[Delivery]:
        """What a merger that we overtook read after we had loaded: nobody but us can end it."""
        known = {w.entry for waiting in self.waiting.values() for w in waiting}
        if self.transport.backlog() <= len(known):
            return []
        return [delivery for delivery in self.transport.unacknowledged() if delivery.entry not in known]

    def _keep_lease(self) -> None:
        if self.clock() - self._renewed_at >= LEASE_SECONDS / 4:
            self.transport.renew(self.epoch, self.holder, LEASE_SECONDS)
            self._renewed_at = self.clock()

    def _look_around(self) -> None:
        if self.clock() - self._live_at >= self.live_poll_seconds:
            self.live = frozenset(p.heartbeat.island for p in self.transport.presences() if p.is_training)
            self._live_at = self.clock()

    def _waiting_fragments(self) -> set[int]:
        return {p for p, waiting in self.waiting.items() if waiting}

    def _receive(self, delivery: Delivery) -> None:
        contribution = delivery.contribution
        if contribution is None or delivery.fault:
            self._refuse(delivery, delivery.fault)
            return
        if self.state.has_seen(contribution.identity) or self._is_waiting(contribution.identity):
            self._refuse(delivery, "a repeat of a contribution that was taken already", repeat=True)
            return
        p = contribution.fragment
        try:
            if digest(delivery.payload) != contribution.digest:
                raise WireError("the payload's digest is not the announced one")
            version = self._version(p)
            verdict = admit(contribution, self.manifest, self.rounds.closed, version)
            if isinstance(verdict, Rejected):
                raise WireError(verdict.reason)
            delta_N = unpack(delivery.payload, self.manifest.sizes[p])
            norm = float(np.linalg.norm(delta_N.astype(np.float64)))
            if norm > NORM_MAX:
                raise WireError(f"a norm of {norm:.1e} is over the most that can be merged, {NORM_MAX:.0e}")
        except WireError as error:
            self._refuse(delivery, error.reason)
            self.state.see(contribution.identity)
            return
        self.waiting.setdefault(p, []).append(Waiting(delivery.entry, contribution, delta_N, norm))
        self.rounds.answer(contribution, self.clock())
        self._heard_at = self.clock()
        # Who sends, lives: between two looks at the heartbeats, a first contribution is not merged all alone.
        self.live = self.live - {contribution.island} if contribution.farewell else self.live | {contribution.island}

    def _is_waiting(self, identity: tuple[str, str, int]) -> bool:
        return any(w.contribution.identity == identity for kept in self.waiting.values() for w in kept)

    def _version(self, p: int) -> int:
        """How many rounds of a fragment have closed."""
        fragments = len(self.fragments)
        return (self.rounds.closed - p - 1) // fragments + 1 if p < fragments else 0

    def _refuse(self, delivery: Delivery, reason: str, repeat: bool = False) -> None:
        c = delivery.contribution
        refusal = (
            Refusal("?", "?", 0, 0, 0, 0, reason[:500], repeat)
            if c is None
            else Refusal(c.island, c.incarnation, c.sequence, c.round, c.fragment, c.tokens, reason[:500], repeat)
        )
        log.warning("refused a contribution of %s to round %s: %s", refusal.island, refusal.round, reason)
        self.transport.refuse(self.epoch, [(delivery.entry, refusal)])

    # -- closing ----------------------------------------------------------------------------------------------------

    def _close(self, close: Close) -> None:
        began = self.clock()
        p = self.manifest.fragment_of(close.round)
        waiting = self.waiting.pop(p, [])
        version = self.manifest.version_after(close.round)
        closed = close_fragment(
            self.fragments[p],
            self.state.staleness,
            waiting,
            version=version - 1,
            live=len(self.live),
            groups=self.groups[p],
            config=self.config.merge,
            outer=self.outer,
        )
        published_N = np.asarray(closed.published_N)
        payload = pack(published_N, self.config.wire.down, self.config.wire.zstd_level)
        self._note(close, p, waiting, closed.state)
        self.state.staleness = closed.staleness
        by_weight = sorted(closed.members, key=lambda m: -m.weight)
        snapshot = Snapshot(
            round=close.round,
            fragment=p,
            version=version,
            step=self.state.step,
            codec=self.config.wire.down,
            bytes=len(payload),
            digest=digest(payload),
            merged=" ".join(m.identity_text for m in by_weight),
        )
        tape = TapeEntry(
            round=close.round,
            fragment=p,
            version=version,
            epoch=self.epoch,
            step=self.state.step,
            gain=closed.gain,
            quorum_seconds=close.quorum_seconds,
            grace_seconds=close.grace_seconds,
            open_seconds=close.open_seconds,
            live=len(self.live),
            bytes_up=sum(w.contribution.bytes for w in waiting),
            loss=mean_loss(closed.members),
            digest=digest_of(published_N),
            members=closed.members,
        )
        self.transport.commit(
            self.epoch,
            Commit(
                snapshot,
                payload,
                outer.dump(closed.state.params_N, closed.state.outer),
                self.state.to_json(),
                tape,
                [w.entry for w in waiting],
                sum(w.contribution.tokens for w in waiting),
            ),
        )
        self.fragments[p] = closed.state
        self.rounds.closed_round(close, self.clock() - began)

    def _note(self, close: Close, p: int, waiting: list[Waiting], fragment: FragmentState) -> None:
        """Brings the run's state up to the round; the commit carries it, and a failed commit throws it away."""
        self.state.closed = close.round
        self.state.pace = self.rounds.pace_after(close)
        self.state.norms[p] = fragment.norms
        self.state.step = max([self.state.step, *(w.contribution.global_step for w in waiting)])
        self.state.tokens += sum(w.contribution.tokens for w in waiting)
        for w in waiting:
            self.state.see(w.contribution.identity)


def serve(merger: Merger, stopped: Callable[[], bool], pause: Callable[[float], None] = time.sleep) -> None:
    """Serves until `stopped`, through outages; as a standby while another merger holds the lease.

    Returns when it is stopped or fenced. `pause` waits that many seconds between two tries.
    """
    loaded = False
    while not stopped():
        try:
            if not merger.epoch and not merger.acquire():
                pause(0.5)
                continue
            if not loaded:
                merger.load()
                merger.warm_up()
                loaded = True
                log.info("serving from round %s, epoch %s", merger.rounds.closed, merger.epoch)
            merger.turn()
        except FencedError as error:
            log.warning("%s", error)
            return
        except UnknownRunError:
            raise
        except BrokerError as error:  # an outage, or memory that is full: both end by themselves
            log.warning("%s", error.what)
            loaded = False  # nobody knows which writes arrived: begin from what Redis holds
            pause(0.5)
    if merger.epoch:
        _release(merger)


def _release(merger: Merger) -> None:
    try:
        merger.transport.release(merger.epoch)
    except BrokerError as error:
        log.info("the lease runs out by itself: %s", error.what)
