"""An island: it trains and never waits. Between two inner steps it adopts snapshots and sends contributions."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import platform
import time
import uuid
from collections.abc import Callable, Sequence

import jax
import numpy as np

from archipelago.broker import machine
from archipelago.broker.codecs import codec
from archipelago.broker.control import DRAIN, EXPEL, IN_WORDS
from archipelago.broker.errors import DivergedError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Heartbeat, Marker, Resume
from archipelago.islands.data.batches import Batches
from archipelago.islands.inner import InnerSteps, begin
from archipelago.islands.memory_use import MemoryMeter
from archipelago.islands.progress import SMOOTHING, Losses, Speed, Totals
from archipelago.islands.step_throttle import Pacer
from archipelago.islands.sync.actions import (
    ActionLog,
    Adopt,
    BeginPass,
    ForgetShards,
    Join,
    Length,
    Send,
    Steps,
    TakeMoments,
)
from archipelago.islands.sync.arrays import device_copy
from archipelago.islands.sync.ledger import Ledger
from archipelago.islands.sync.link import Link
from archipelago.islands.sync.outbox import ContributionHeader, Draft
from archipelago.islands.sync.recovery import Received, StateForPeer
from archipelago.islands.sync.replica import Replica
from archipelago.islands.sync.snapshots import Arrival
from archipelago.islands.sync.uplink import averaged
from archipelago.islands.turn_log import TurnLog

FLUSH_SECONDS = 10.0
FAREWELL_SECONDS = 2.0
#: An island leaves after this many contributions in a row whose loss was not finite.
DIVERGED_MAX = 3

log = logging.getLogger(__name__)


class Island:
    """One island of one run. The caller runs the loop: `boundary` and `advance` in turn, then `leave`.

    Attributes:
        moments: The origin of the inner optimiser's state, in words.
        stretch: The steps of a contribution as a share of the run's interval (a moving average).
        sequence: The number of contributions that this incarnation has sent.
    """

    def __init__(
        self,
        name: str,
        manifest: Manifest,
        steps: InnerSteps,
        batches: Batches,
        link: Link,
        arrivals: Sequence[Arrival],
        clock: Callable[[], float] = time.monotonic,
        incarnation: str = "",
        scan_steps: int = 1,
        on_marker: Callable[[Island, int], None] | None = None,
    ) -> None:
        """Begin from published snapshots with fresh inner optimiser state.

        Args:
            name: The island's name.
            manifest: The run.
            steps: The compiled inner steps.
            batches: The supply of training data.
            link: The connection to the broker.
            arrivals: One snapshot of every fragment.
            clock: Monotonic seconds.
            incarnation: Distinguishes this process from earlier ones of the same name; random by default.
            scan_steps: Inner steps between two boundaries.
            on_marker: Called between two inner steps for each checkpoint of the merger, with its number.
        """
        config = manifest.config
        self.name = name
        self.manifest = manifest
        self.config = config
        self.steps = steps
        self.link = link
        self.batches = batches
        self.clock = clock
        self.incarnation = incarnation or uuid.uuid4().hex[:8]
        self.scan_steps = scan_steps
        self.replica = Replica(manifest)
        self.ledger = Ledger(name, self.incarnation, len(manifest.fragments), config.sync.interval, config.sync.window)
        self.device = jax.devices()[0].device_kind[:200]
        self.memory = MemoryMeter(clock)
        self.speed = Speed()
        self.losses = Losses()
        self.pacer = Pacer()
        self.totals = Totals()
        self.action_log = ActionLog(name, self.incarnation, config.record)
        self.inner = begin(config.inner, self.replica.begin([arrival.params_N for arrival in arrivals]))
        for arrival in arrivals:
            self.ledger.adopted(arrival.snapshot, keeps_progress=False)
        self.action_log.add(Join(tuple(arrival.snapshot.version for arrival in arrivals)))
        self.moments = "fresh"
        self.stretch = 0.0
        wire = config.wire  # the bytes of all fragments, by codec
        self._bytes = {
            name: sum(codec(name).encoded_size(size) for size in manifest.sizes)
            for name in {wire.up, wire.thin, wire.down} - {""}
        }
        self.sequence = 0
        #: The length of the run for the learning rate's schedule. It follows the operator's at the next boundary.
        self.run_steps = config.inner.steps
        self._on_marker = on_marker
        self._has_joined = False
        self._in_flight: jax.Array | None = None
        self._stepped_at = clock()

    def warm_up(self, *, has_stepped: bool = False) -> None:
        """Compile everything that the loop runs, on copies, so that no peer waits for a compilation later.

        Args:
            has_stepped: The inner steps were compiled and run already. On a slow device, one step takes many seconds.
        """
        self.beat("joining")
        if has_stepped:
            self.replica.warm_up(self.inner.params)
            self._stepped_at = self.clock()
            return
        shape = (self.scan_steps, self.config.data.batch_size, self.config.data.sequence_length + 1)
        batch = jax.device_put(np.zeros(shape, self.batches.dtype))
        length = self.length_argument(self.link.run_steps)
        after, losses_n = self.steps(device_copy(self.inner), batch, jax.device_put(np.int32(0)), *length)
        self.replica.warm_up(after.params)
        losses_n.block_until_ready()
        self._stepped_at = self.clock()

    @property
    def finished(self) -> bool:
        """True if the run is at its end. An island that no merger serves does not end the run alone."""
        steps = self.link.run_steps
        is_served = self.link.is_served is not False
        return self.ledger.merged_step >= steps or (is_served and self.ledger.global_step >= steps)

    @property
    def must_leave(self) -> bool:
        """True if the operator has asked the island to leave, or a newer process has taken its name over."""
        return bool(self.link.operator_request) or self.link.is_replaced

    # -- the two halves of the loop -----------------------------------------------------------------------------------

    def boundary(self) -> None:
        """Process received events, adopt snapshots and send contributions, without waiting for anything.

        Raises:
            DivergedError: The loss has not been finite for several contributions.
        """
        if self.link.failure is not None:
            raise self.link.failure
        self._require_finite_loss()
        if self.link.run_steps != self.run_steps:
            self.run_steps = self.link.run_steps
            self.action_log.add(Length(self.run_steps))
        news = self.link.take()
        arrivals = news.arrivals
        for event in news.events:
            match event:
                case Resume():
                    self.ledger.resumed(event.round, self.link.outbox.unresolved_rounds())
                case Marker():
                    before = [arrival for arrival in arrivals if arrival.snapshot.round <= event.round]
                    arrivals = [arrival for arrival in arrivals if arrival.snapshot.round > event.round]
                    self._adopt_all(before)
                    # An island that joined after that round is not in the checkpoint.
                    if self._on_marker is not None and self.ledger.closed <= event.round:
                        self._on_marker(self, event.number)
                case _:
                    self.ledger.heard(event)
        self._adopt_all(arrivals)
        if news.lost_shards:
            self.batches.forget(news.lost_shards)
            self.action_log.add(ForgetShards(tuple(sorted(news.lost_shards))))
        for who in news.asked_by:
            self._hand_over(who)
        if self.link.backlog < self.config.sync.window:  # a longer backlog stretches the interval
            while (number := self.ledger.due()) is not None:
                self._send(number, farewell=False)
        self.link.leases.hold(self.batches.held())
        self.beat("training")

    def _require_finite_loss(self) -> None:
        if self.losses.diverged >= DIVERGED_MAX:
            raise DivergedError(
                f"The loss of {self.name} was not finite in its last {self.losses.diverged} contributions",
                "Start the island again: it takes the run's parameters and fresh optimiser state. If all islands end "
                "this way, lower --inner.learning-rate in a new run.",
            )

    def advance(self) -> None:
        """Dispatch `scan_steps` inner steps. The device works on them during the next boundary."""
        n = self.scan_steps
        batch = jax.device_put(self.batches.next(n))  # `jnp.asarray` would compile a program for the transfer
        for point in self.batches.take_begun():
            self.action_log.add(BeginPass(point))
        is_held = self.ledger.is_held(is_served=self.link.is_served is not False, stretch=self.stretch)
        self.action_log.add(Steps(n, is_held))
        # This is noted first, because on a CPU the call below may do the arithmetic itself.
        self.pacer.dispatched(n, self.clock())
        schedule_step = jax.device_put(np.int32(min(self.ledger.global_step, self.run_steps)))  # constant from then on
        self.inner, losses_n = self.steps(self.inner, batch, schedule_step, *self.length_argument(self.run_steps))
        tokens = n * self.config.tokens_per_step
        self.ledger.stepped(n, tokens, is_held=is_held)
        self.totals.steps += n
        self.totals.tokens += tokens
        # One call may be in flight. This keeps the device busy, and still measures the time of steps.
        if self._in_flight is not None:
            self.losses.add(self._in_flight.block_until_ready())
            if delay := self.pacer.delay_seconds(self.clock()):
                time.sleep(delay)
        self._in_flight = losses_n
        now = self.clock()
        self.speed.stepped(n, now - self._stepped_at)
        self._stepped_at = now

    # -- leaving ------------------------------------------------------------------------------------------------------

    def leave(self, state: str = "left", flush_seconds: float = FLUSH_SECONDS) -> bool:
        """Send all progress and announce the departure. Return whether the broker received everything.

        An island whose name was taken over only writes a note, because its heartbeats are those of another process.
        """
        if self.link.is_replaced:
            return self._leave_the_name(flush_seconds)
        self.beat("leaving")
        for number in self.ledger.farewells():
            self._send(number, farewell=True)
        is_sent = self.link.drain(flush_seconds)
        kind, reason = self.leave_reason()
        self.link.note(kind, f"after {self.totals.steps:,} steps: {reason}")
        self.beat(state)
        return self.link.drain(min(FAREWELL_SECONDS, flush_seconds)) and is_sent

    def _leave_the_name(self, flush_seconds: float) -> bool:
        kind, reason = self.leave_reason()
        self.link.note(kind, f"after {self.totals.steps:,} steps: {reason}")
        self.beat("left")  # wakes the thread that sends the note
        return self.link.drain(min(FAREWELL_SECONDS, flush_seconds))

    def leave_reason(self) -> tuple[str, str]:
        """Return why the island leaves, as a note's kind and text."""
        if self.link.is_replaced:
            return "replaced", "a newer process has this island's name"
        if self.finished:
            return "left", "the run is at its end"
        kinds = {DRAIN: "drained", EXPEL: "expelled"}
        request = self.link.operator_request
        return (kinds[request], IN_WORDS[request]) if request in kinds else ("left", "it was stopped")

    def give_up(self, error: DivergedError) -> None:
        """Announce the departure without sending any progress."""
        self.link.note("diverged", f"after {self.totals.steps:,} steps: {error.what}")
        self.beat("left")
        self.link.drain(FAREWELL_SECONDS)

    # -- parts --------------------------------------------------------------------------------------------------------

    def adopt(self, arrival: Arrival) -> None:
        """Adopt a snapshot between two inner steps, unless the island holds this version already.

        An older version is adopted too, because a broker that lost its data has lost the newer version.
        """
        snapshot = arrival.snapshot
        if snapshot.version == self.ledger.counts[snapshot.fragment].version:
            return
        params = self.replica.adopt(snapshot.fragment, self.inner.params, arrival.params_N)
        self.inner = self.inner._replace(params=params)
        self.ledger.adopted(snapshot, self.replica.rule.keeps_progress)
        self.action_log.add(Adopt(snapshot.fragment, snapshot.version))

    def length_argument(self, steps: int) -> tuple[jax.Array, ...]:
        """Return the further argument of the inner steps for a run of that length, if it is not the config's."""
        return () if steps == self.config.inner.steps else (jax.device_put(np.int32(steps)),)

    @property
    def learning_rate(self) -> float:
        """The present inner learning rate."""
        return dataclasses.replace(self.config.inner, steps=self.run_steps).rate_at(self.ledger.global_step)

    def _adopt_all(self, arrivals: Sequence[Arrival]) -> None:
        for arrival in arrivals:
            self.adopt(arrival)

    def use_state_of_peer(self, received: Received) -> None:
        """Use a peer's inner optimiser state instead of fresh moments."""
        handover = received.handover
        self.inner = self.inner._replace(optimizer=received.optimizer)
        self.moments = f"peer {handover.giver}"
        self.action_log.add(TakeMoments(f"{handover.giver}/{handover.incarnation}", handover.index))

    def _hand_over(self, who: str) -> None:
        moments, done = device_copy(self.inner.optimizer), self.action_log.done
        self.link.hand_over(StateForPeer(who, moments, done, self.ledger.global_step, self.action_log.peek()))

    def _send(self, number: int, farewell: bool) -> None:
        p = self.manifest.fragment_of(number)
        count = self.ledger.counts[p]
        name = self._codec(p)
        self.stretch = averaged(self.stretch, count.steps / self.config.sync.interval, SMOOTHING)
        header = ContributionHeader(
            island=self.name,
            incarnation=self.incarnation,
            sequence=self.sequence,
            round=number,
            fragment=p,
            base=count.version,
            tokens=count.tokens,
            steps=count.steps,
            global_step=self.ledger.global_step,
            loss=self.losses.take_mean(),
            step_seconds=self.speed.step_seconds,
            farewell=farewell,
            codec=name,
            data=" ".join(map(str, self.batches.places())),
        )
        self.action_log.add(Send(number, "" if name == self.config.wire.up else name))
        parts = self.replica.measure(p, self.inner.params, name)
        self.link.send(Draft(header, parts, self.manifest.sizes[p], self.action_log.take()))
        self.sequence += 1
        self.ledger.sent(number)

    def _codec(self, p: int) -> str:
        """Return the run's codec, or the thin one if a payload of the run's would take longer than a stride to send."""
        wire, sync = self.config.wire, self.config.sync
        stride_seconds = self.speed.step_seconds * sync.interval / len(self.manifest.fragments)
        size = codec(wire.up).encoded_size(self.manifest.sizes[p])
        return wire.up if not wire.thin or self.link.uplink.fits(size, stride_seconds) else wire.thin

    @property
    def link_share(self) -> float:
        """The share of the run's interval that transfers take at the measured speeds."""
        wire, uplink = self.config.wire, self.link.uplink
        up = self._bytes[wire.thin if uplink.thin and wire.thin else wire.up]
        return uplink.busy_share(up, self._bytes[wire.down], self.speed.step_seconds * self.config.sync.interval)

    def beat(self, state: str) -> None:
        """Update the next heartbeat."""
        if state == "training" and not self._has_joined:
            self._has_joined = True
            where = f"after round {self.ledger.closed} on {self.device}"
            self.link.note("joined", f"{where}, optimiser state: {self.moments}")
        self.link.beat(_heartbeat(self, state))


def _heartbeat(island: Island, state: str) -> Heartbeat:
    link, ledger, seconds = island.link, island.ledger, island.speed.step_seconds
    memory = island.memory.newest()
    return Heartbeat(
        island=island.name,
        incarnation=island.incarnation,
        state=state,
        host=platform.node()[:200],
        pid=os.getpid(),
        device=island.device,
        steps=island.totals.steps,
        global_step=ledger.global_step,
        tokens=island.totals.tokens,
        tokens_per_second=island.config.tokens_per_step / seconds if seconds else 0.0,
        step_seconds=seconds,
        loss=island.losses.mean,
        staleness=ledger.staleness,
        backlog=link.backlog,
        sent=link.outbox.sent,
        refused=ledger.refused,
        last_refusal=ledger.last_refusal,
        bytes_up=link.outbox.bytes_up,
        bytes_down=link.bytes_down,
        link=link.trouble or link.unserved or link.uplink.in_words(island.stretch, island.link_share) or "ok",
        data=" ".join(map(str, island.batches.places())),
        moments=island.moments,
        uplink_bytes_per_second=_rate(link.uplink.seconds_a_byte),
        downlink_bytes_per_second=_rate(link.uplink.down_seconds_a_byte),
        ignored=link.inbox.ignored,
        tokens_unsent=(ledger.unsent_tokens + link.outbox.queued_tokens) // len(ledger.counts),
        machine=machine.describe(),
        memory_bytes=memory.process,
        host_memory_bytes=memory.host,
        host_memory_limit_bytes=memory.host_limit,
        device_memory_bytes=memory.device,
        device_memory_limit_bytes=memory.device_limit,
    )


def _rate(seconds_a_byte: float) -> float:
    """Return bytes per second; NaN before the first measurement."""
    return 1.0 / seconds_a_byte if seconds_a_byte > 0.0 else math.nan


def train(island: Island, stopped: Callable[[], bool], turn_log: TurnLog | None = None) -> str:
    """Train until the end of the run, a signal or the operator's request, then leave.

    Args:
        island: The island.
        stopped: Whether a signal has arrived.
        turn_log: Receives one line for each turn of the loop.

    Returns:
        `done` at the end of the run, `replaced` if a newer process has the island's name, else `left`.

    Raises:
        DivergedError: The loss is no longer finite. The island has announced its departure by then.
    """
    steps_before = island.totals.steps
    while not (stopped() or island.finished or island.must_leave):
        began = island.clock()
        try:
            island.boundary()
        except DivergedError as error:
            island.give_up(error)
            raise
        between_seconds = island.clock() - began
        island.advance()
        if turn_log is not None:
            versions = sum(count.version for count in island.ledger.counts)
            steps = island.totals.steps - steps_before
            turn_log.turned(island.clock(), steps, versions, between_seconds, island.pacer.idle_seconds)
    state = "done" if island.finished else "left"
    if state == "left" and island.must_leave:
        log.warning("leaves: %s", island.leave_reason()[1])
    if island.link.is_replaced:
        state = "replaced"
    if not island.leave(state):
        log.warning("the broker did not take %s contributions", island.link.backlog)
    return state
