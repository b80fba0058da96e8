"""An island trains on its own and never waits. Between two inner steps it adopts what came and sends what it owes."""

from __future__ import annotations

import logging
import math
import os
import platform
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from archipelago.broker.codecs import codec
from archipelago.broker.control import DRAIN, EXPEL, IN_WORDS
from archipelago.broker.errors import DivergedError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Contribution, Heartbeat, Marker, Resume
from archipelago.islands.data.batches import Batches
from archipelago.islands.inner import InnerSteps, begin
from archipelago.islands.step_throttle import Pacer
from archipelago.islands.sync.actions import ActionLog
from archipelago.islands.sync.arrays import device_copy
from archipelago.islands.sync.ledger import Ledger
from archipelago.islands.sync.link import Arrival, Draft, Link
from archipelago.islands.sync.recovery import Gift, Received
from archipelago.islands.sync.replica import Replica
from archipelago.islands.sync.uplink import averaged
from archipelago.islands.turn_log import TurnLog

FLUSH_SECONDS = 10.0
FAREWELL_SECONDS = 2.0
SMOOTHING = 0.9
DIVERGED_MAX = 3
LOSSES_KEPT = 256
"""an island that hears nothing sends nothing, and its losses pile up"""

log = logging.getLogger(__name__)


@dataclass
class Speed:
    """Moving averages of what an inner step takes, and the loss that it reached."""

    step_seconds: float = 0.0
    loss: float = math.nan

    def stepped(self, steps: int, seconds: float) -> None:
        """So many steps took so many seconds."""
        self.step_seconds = averaged(self.step_seconds, seconds / steps, SMOOTHING)


@dataclass
class Totals:
    """Of this island, over its returns."""

    steps: int = 0
    tokens: int = 0


class Island:
    """One island of one run, without a loop of its own: `boundary` and `advance` in turn, then `leave`."""

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
    ) -> None:
        """Begins from `arrivals`, one snapshot of every fragment, with fresh inner optimiser state."""
        config = manifest.config
        self.name = name
        self.manifest = manifest
        self.config = config
        self.link = link
        self.batches = batches
        self.clock = clock
        self.incarnation = incarnation or uuid.uuid4().hex[:8]
        self.scan_steps = scan_steps
        self.replica = Replica(manifest)
        self.ledger = Ledger(name, self.incarnation, len(manifest.fragments), config.sync.interval, config.sync.window)
        self.device = jax.devices()[0].device_kind[:200]
        self.speed = Speed()
        self.pacer = Pacer()
        self.totals = Totals()
        self.action_log = ActionLog(name, self.incarnation, config.record)
        self.inner = begin(config.inner, self.replica.begin([arrival.params_N for arrival in arrivals]))
        for arrival in arrivals:
            self.ledger.adopted(arrival.snapshot, keeps_progress=False)
        self.action_log.did("join:" + ",".join(str(arrival.snapshot.version) for arrival in arrivals))
        batches.on_begin = lambda text: self.action_log.did(f"d{text}")
        self.moments = "fresh"
        self.stretch = 0.0
        """steps that a contribution goes over, as a share of the run's interval; moving average"""
        self.on_marker: Callable[[Island, int], None] = lambda island, number: None
        """called between two inner steps for each checkpoint that the merger takes, with its number"""
        self.steps = steps
        self.sequence = 0
        self._diverged = 0
        self._has_joined = False
        self._in_flight: jax.Array | None = None
        self._losses: deque[jax.Array] = deque(maxlen=LOSSES_KEPT)
        self._stepped_at = clock()

    def warm_up(self) -> None:
        """Compiles whatever the loop runs, on copies, so that nothing compiles while others wait for this island."""
        self.beat("joining")
        shape = (self.scan_steps, self.config.data.batch_size, self.config.data.sequence_length + 1)
        batch = jax.device_put(np.zeros(shape, self.batches.dtype))
        after, losses_n = self.steps(device_copy(self.inner), batch, jax.device_put(np.int32(0)))
        self.replica.warm_up(after.params)
        losses_n.block_until_ready()
        self._stepped_at = self.clock()

    @property
    def finished(self) -> bool:
        """Whether the global step has reached the run's end."""
        return self.ledger.global_step >= self.config.inner.steps

    @property
    def is_sent_away(self) -> bool:
        """Whether the operator wants it to leave."""
        return bool(self.link.wish)

    # -- the loop's two halves --------------------------------------------------------------------------------------

    def boundary(self) -> None:
        """Between two inner steps: hears, adopts, sends. Waits for nobody."""
        if self.link.failure is not None:
            raise self.link.failure
        if self._diverged >= DIVERGED_MAX:
            raise DivergedError(
                f"the loss of {self.name} was no number in its last {self._diverged} contributions",
                "Start it again: it takes the run's parameters and fresh optimiser state. If all islands end like "
                "this, lower --inner.learning-rate in a new run.",
            )
        news = self.link.take()
        arrivals = news.arrivals
        for event in news.events:
            match event:
                case Resume():
                    self.ledger.resumed(event.round, self.link.unresolved_rounds())
                case Marker():
                    before = [arrival for arrival in arrivals if arrival.snapshot.round <= event.round]
                    arrivals = [arrival for arrival in arrivals if arrival.snapshot.round > event.round]
                    self._adopt_all(before)
                    if self.ledger.closed <= event.round:  # who joined after that round cannot be part of it
                        self.on_marker(self, event.number)
                case _:
                    self.ledger.heard(event)
        self._adopt_all(arrivals)
        if news.lost_shards:
            self.batches.forget(news.lost_shards)
            self.action_log.did("f" + ",".join(sorted(news.lost_shards)))
        for who in news.asked_by:
            self._give(who)
        if self.link.backlog < self.config.sync.window:  # else the interval stretches, whoever calls rounds meanwhile
            while (number := self.ledger.due()) is not None:
                self._send(number, farewell=False)
        self.link.hold(self.batches.held())
        self.beat("training")

    def advance(self) -> None:
        """`scan_steps` inner steps. The device works on them while the next boundary passes."""
        n = self.scan_steps
        # Not `jnp.asarray`: that compiles a program for what it takes to the device.
        batch = jax.device_put(self.batches.next(n))
        self.action_log.did(f"n{n}")
        self.pacer.dispatched(n, self.clock())  # first: on a CPU the call may do the arithmetic itself
        self.inner, losses_n = self.steps(self.inner, batch, jax.device_put(np.int32(self.ledger.global_step)))
        tokens = n * self.config.tokens_per_step
        self.ledger.stepped(n, tokens)
        self.totals.steps += n
        self.totals.tokens += tokens
        # One stretch of steps may be in flight: enough to keep the device busy, and the clock honest.
        if self._in_flight is not None:
            self._losses.append(self._in_flight.block_until_ready())
            if nap := self.pacer.nap_seconds(self.clock()):
                time.sleep(nap)
        self._in_flight = losses_n
        now = self.clock()
        self.speed.stepped(n, now - self._stepped_at)
        self._stepped_at = now

    def leave(self, state: str = "left", flush_seconds: float = FLUSH_SECONDS) -> bool:
        """Sends what it has of every fragment, and says goodbye; whether all of it got through."""
        self.beat("leaving")
        for number in self.ledger.farewells():
            self._send(number, farewell=True)
        through = self.link.drain(flush_seconds)
        kind, why = self.last_words()
        self.link.note(kind, f"after {self.totals.steps:,} steps: {why}")
        self.beat(state)
        return self.link.drain(min(FAREWELL_SECONDS, flush_seconds)) and through

    def last_words(self) -> tuple[str, str]:
        """Why it leaves, as a note's kind and text."""
        if self.finished:
            return "left", "the run is at its end"
        kinds = {DRAIN: "drained", EXPEL: "expelled"}
        wish = self.link.wish
        return (kinds[wish], IN_WORDS[wish]) if wish in kinds else ("left", "it was stopped")

    def give_up(self, error: DivergedError) -> None:
        """Says goodbye with nothing to send."""
        self.link.note("diverged", f"after {self.totals.steps:,} steps: {error.what}")
        self.beat("left")
        self.link.drain(FAREWELL_SECONDS)

    # -- parts ------------------------------------------------------------------------------------------------------

    def adopt(self, arrival: Arrival) -> None:
        """Takes a snapshot in between two inner steps, unless it is the one that is held."""
        snapshot = arrival.snapshot
        if snapshot.version == self.ledger.counts[snapshot.fragment].version:
            return  # an older one is news too: a broker that died took the newer with it
        params = self.replica.adopt(snapshot.fragment, self.inner.params, arrival.params_N)
        self.inner = self.inner._replace(params=params)
        self.ledger.adopted(snapshot, self.replica.rule.keeps_progress)
        self.action_log.did(f"a{snapshot.fragment}:{snapshot.version}")

    def _adopt_all(self, arrivals: Sequence[Arrival]) -> None:
        for arrival in arrivals:
            self.adopt(arrival)

    def take_over(self, received: Received) -> None:
        """Begins with a peer's inner optimiser state instead of fresh moments."""
        handover = received.handover
        self.inner = self.inner._replace(optimizer=received.optimizer)
        self.moments = f"peer {handover.giver}"
        self.action_log.did(f"moments:{handover.giver}/{handover.incarnation}@{handover.index}")

    def _give(self, who: str) -> None:
        moments, done = device_copy(self.inner.optimizer), self.action_log.done
        self.link.give(Gift(who, moments, done, self.ledger.global_step, self.action_log.peek()))

    def _send(self, number: int, farewell: bool) -> None:
        p = self.manifest.fragment_of(number)
        count = self.ledger.counts[p]
        name = self._codec(p)
        self._stretch(count.steps)
        contribution = Contribution(
            island=self.name,
            incarnation=self.incarnation,
            sequence=self.sequence,
            round=number,
            fragment=p,
            base=count.version,
            tokens=count.tokens,
            steps=count.steps,
            global_step=self.ledger.global_step,
            loss=self._mean_loss(),
            step_seconds=self.speed.step_seconds,
            farewell=farewell,
            codec=name,
            bytes=0,
            digest="",
            data=" ".join(map(str, self.batches.places())),
        )
        self.action_log.did(f"s{number}" if name == self.config.wire.up else f"s{number}:{name}")
        parts = self.replica.measure(p, self.inner.params, name)
        self.link.send(Draft(contribution, parts, self.manifest.sizes[p], self.action_log.take()))
        self.sequence += 1
        self.ledger.sent(number)

    def _codec(self, p: int) -> str:
        """The run's codec, or the one for thin links when a payload of the other would not be through in a stride."""
        wire, sync = self.config.wire, self.config.sync
        stride_seconds = self.speed.step_seconds * sync.interval / len(self.manifest.fragments)
        size = codec(wire.up).encoded_size(self.manifest.sizes[p])
        return wire.up if not wire.thin or self.link.uplink.fits(size, stride_seconds) else wire.thin

    def _stretch(self, steps: int) -> None:
        """Notes over how many steps a contribution goes, of those that the run's interval would have."""
        self.stretch = averaged(self.stretch, steps / self.config.sync.interval, SMOOTHING)

    def _mean_loss(self) -> float:
        """Mean loss of the steps since it was asked last; the last known where there were none."""
        if self._losses:
            mean = float(np.mean([np.mean(np.asarray(losses_n)) for losses_n in self._losses]))
            self.speed.loss = mean if math.isfinite(mean) else math.nan  # no message carries an infinite number
            self._diverged = 0 if math.isfinite(mean) else self._diverged + 1
            self._losses.clear()
        return self.speed.loss

    def beat(self, state: str) -> None:
        """Renews what the next heartbeat says."""
        seconds = self.speed.step_seconds
        if state == "training" and not self._has_joined:
            self._has_joined = True
            where = f"after round {self.ledger.closed} on {self.device}"
            self.link.note("joined", f"{where}, optimiser state: {self.moments}")
        self.link.beat(
            Heartbeat(
                island=self.name,
                incarnation=self.incarnation,
                state=state,
                host=platform.node()[:200],
                pid=os.getpid(),
                device=self.device,
                steps=self.totals.steps,
                global_step=self.ledger.global_step,
                tokens=self.totals.tokens,
                tokens_per_second=self.config.tokens_per_step / seconds if seconds else 0.0,
                step_seconds=seconds,
                loss=self.speed.loss,
                staleness=self.ledger.staleness,
                backlog=self.link.backlog,
                sent=self.link.sent,
                refused=self.ledger.refused,
                last_refusal=self.ledger.last_refusal,
                bytes_up=self.link.bytes_up,
                bytes_down=self.link.bytes_down,
                link=self.link.trouble or self.link.uplink.in_words(self.stretch) or "ok",
                data=" ".join(map(str, self.batches.places())),
                moments=self.moments,
                uplink_bytes_per_second=_rate(self.link.uplink.seconds_a_byte),
                downlink_bytes_per_second=_rate(self.link.uplink.down_seconds_a_byte),
            )
        )


def _rate(seconds_a_byte: float) -> float:
    """Bytes per second; NaN where nothing was measured yet."""
    return 1.0 / seconds_a_byte if seconds_a_byte > 0.0 else math.nan


def train(island: Island, stopped: Callable[[], bool], turn_log: TurnLog | None = None) -> str:
    """Trains until the run's end, `stopped`, or the operator's wish; then leaves. Returns how: `done` or `left`.

    Raises DivergedError, once it has said so.
    """
    steps_before = island.totals.steps
    while not (stopped() or island.finished or island.is_sent_away):
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
    if state == "left" and island.is_sent_away:
        log.warning("leaves: %s", island.last_words()[1])
    if not island.leave(state):
        log.warning("the broker did not take everything: %s contributions stay behind", island.link.backlog)
    return state
