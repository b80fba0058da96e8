"""One island of one run, for any training loop: what the loop does between two steps.

It knows the island's ledger, link and replica, and no model, no data and no optimiser. It does not import JAX: the
parameters, and the replica that measures and adopts them, belong to the framework of the loop.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from archipelago.broker.codecs import codec
from archipelago.broker.control import DRAIN, EXPEL
from archipelago.broker.errors import DivergedError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Contribution, Event, Marker, Resume
from archipelago.broker.presence import Heartbeat
from archipelago.islands.sync.adoption import KEEPS_PROGRESS, AnyReplica, Parameters, not_finite
from archipelago.islands.sync.connection.downloads import Arrival
from archipelago.islands.sync.connection.heartbeats import Channel
from archipelago.islands.sync.connection.link import Link
from archipelago.islands.sync.connection.outbox import Draft
from archipelago.islands.sync.ledger import Ledger
from archipelago.islands.sync.measures import Losses, Speed, Totals, averaged
from archipelago.islands.sync.recovery import OptimizerAccess, StateForPeer

if TYPE_CHECKING:
    from archipelago.islands.data.batches import Supply

#: An island that no merger serves leaves after as many steps as the run has, and no sooner than after this time.
STRANDED_SECONDS = 60.0
#: Why an island stops that an operator has asked to.
_ASKED = {DRAIN: "drained", EXPEL: "expelled"}

log = logging.getLogger(__name__)


class Participant:
    """One island of one run. The loop calls `turn` after its steps, and leaves at the end (`leaving`).

    Attributes:
        optimizer_origin: The origin of the inner optimiser's state, in words.
        stretch: The steps of a contribution as a share of the run's interval (a moving average).
        tokens_per_step: The tokens of an inner step, for display.
        run_steps: The length of the run for the learning rate's schedule. It follows the operator's at the next
            boundary.
        unserved_steps: The steps that the island has made since it knows of no merger.
    """

    def __init__(
        self,
        name: str,
        manifest: Manifest,
        link: Link,
        replica: AnyReplica,
        parameters: Parameters,
        arrivals: Sequence[Arrival],
        device: str,
        optimizer: OptimizerAccess | None = None,
        clock: Callable[[], float] = time.monotonic,
        incarnation: str = "",
        *,
        ranges: Supply | None = None,
        on_marker: Callable[[Participant], object] | None = None,
        diverged_max: int = 1,
    ) -> None:
        """Begin from published snapshots, which the replica has taken already.

        Args:
            replica: Measures and adopts the parameters.
            arrivals: One snapshot of every fragment.
            device: The name of the device that the island trains on.
            optimizer: The state of the loop's optimiser. Without it, no peer gives such state or gets it.
            incarnation: Distinguishes this process from earlier ones of the same name; random by default.
            ranges: The batches that the loop reads from ranges of the run's text, if any.
            on_marker: Called between two inner steps for each checkpoint of the merger.
            diverged_max: The island leaves after this many losses in a row that are not finite. Some optimisers skip a
                step that fails.
        """
        config = manifest.config
        self.name, self.manifest, self.config = name, manifest, config
        self.link, self.clock, self.device = link, clock, device[:200]
        self.parameters, self.optimizer = parameters, optimizer or OptimizerAccess()
        self.incarnation = incarnation or uuid.uuid4().hex[:8]
        self.ledger = Ledger(name, self.incarnation, manifest.shard_layout, config.sync.interval, config.sync.window)
        self.speed, self.losses, self.totals = Speed(), Losses(), Totals()
        for arrival in arrivals:
            self.ledger.adopted(arrival.snapshot, keeps_progress=False)
        self.optimizer_origin = "fresh"
        self.stretch = self.tokens_per_step = 0.0
        self.run_steps = config.inner.steps
        for channel in link.channels:
            channel.inbox.prepare = replica.prepare
        link.giver.is_willing = self.optimizer.copies is not None
        link.heartbeats.stall_seconds = self.speed.stall_seconds
        self._replica, self._ranges, self._on_marker, self._diverged_max = replica, ranges, on_marker, diverged_max
        self._payload_sizes = [codec(config.wire.up).encoded_size(elements) for elements in manifest.sizes]
        self._codecs = [manifest.codecs(p) for p in range(len(manifest.sizes))]
        self._sequences = [0] * manifest.shards  # a shard's merger expects no gaps
        self.unserved_steps = 0
        self._marker = 0  # the last checkpoint that a merger has announced
        self._arrivals: dict[int, Arrival] = {}  # those that arrived, until they are adopted
        self._has_joined = False
        self._turned_at = clock()
        self._checked = (0, 0)  # how many contributions and steps there were when parameters were checked last

    # -- the run ------------------------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """True if the run is at its end. An island that no merger serves does not end the run alone."""
        steps = self.link.heartbeats.run_steps
        is_served = self.link.heartbeats.serving.is_served is not False
        return self.ledger.merged_step >= steps or (is_served and self.ledger.global_step >= steps)

    @property
    def reason(self) -> str:
        """Why to stop, as in `clock.REASONS`; empty to go on."""
        if self.link.heartbeats.is_replaced:
            return "replaced"
        if self.finished:
            return "completed"
        return _ASKED.get(self.link.heartbeats.request, "stranded" if self.is_stranded else "")

    @property
    def is_stranded(self) -> bool:
        """True if no merger came while the island made as many steps as the run has. Redis keeps what it then sends."""
        has_time = self.link.heartbeats.serving.away_seconds >= STRANDED_SECONDS and not self.link.pumps.trouble
        return has_time and self.unserved_steps >= self.link.heartbeats.run_steps

    @property
    def is_held(self) -> bool:
        """True while the schedule's clock stands still, because the island is its window ahead of the last merge."""
        return self.ledger.is_held(is_served=self.link.heartbeats.serving.is_served is not False, stretch=self.stretch)

    # -- between two steps --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Let the first step begin now. What came before it, such as compilation, is not a part of its time."""
        self._turned_at = self.clock()
        self.beat("training")

    def turn(self, steps: int, tokens: int, loss: Any) -> None:
        """Count steps, adopt what has arrived and send what is due.

        It waits for the device only if nothing was sent for an interval, to look whether the parameters are finite.

        Args:
            steps: Inner steps since the last call.
            tokens: Their tokens.
            loss: Their mean loss: a number, an array that a device may still compute, or None.

        Raises:
            DivergedError: The loss or a parameter is not finite.
            ConfigError: The parameters are not those of the run.
        """
        self.count(steps, tokens, loss)
        self.boundary()

    def count(self, steps: int, tokens: int, loss: Any) -> None:
        """Count steps of the loop, as the first half of `turn`. While the schedule is held, its clock stands still.

        Steps after the end of the run do not count once all earlier progress is sent. A loop that joins a finished run,
        and looks at `finished` only after its first step, makes such a step.
        """
        if self.finished and not self.ledger.farewells():
            return
        self.ledger.stepped(steps, tokens, is_held=self.is_held)
        self.unserved_steps = self.unserved_steps + steps if self.link.heartbeats.serving.is_served is False else 0
        self.totals.steps += steps
        self.totals.tokens += tokens
        now = self.clock()
        self.speed.called(steps, now - self._turned_at)
        self._turned_at, self.link.heartbeats.stall_seconds = now, self.speed.stall_seconds
        self.tokens_per_step = averaged(self.tokens_per_step, tokens / steps)
        if loss is not None:
            self.losses.add(loss)

    def boundary(self) -> None:
        """Process received events, adopt snapshots and send contributions, as the second half of `turn`.

        Raises as `turn`.
        """
        if self.link.pumps.failure is not None:
            raise self.link.pumps.failure from None  # without the frames of the client in another thread
        self._require_finite_loss()
        self.require_sound()
        self.run_steps = self.link.heartbeats.run_steps
        self._process_news()
        blocked = self.link.blocked_shards  # a longer queue stretches the interval
        while (number := self.ledger.due(blocked)) is not None:
            self.send(number)
        if self._is_check_due() and (found := self.parameters.not_finite()):
            raise not_finite(found, found)
        if self._ranges is not None:
            self.link.leases.hold([position.range for position in self._ranges.positions()])
        self.beat("training")

    def _process_news(self) -> None:
        for channel in self.link.channels:
            events, arrivals = channel.inbox.take()
            for event in events:
                self._hear(channel, event)
            self._arrivals |= {arrival.snapshot.fragment: arrival for arrival in arrivals}
        if self._ranges is not None and (lost := self.link.leases.take_lost()):
            self._ranges.forget(lost)
        for who in self.link.giver.take():
            self._hand_over(who)
        for p in sorted(self._arrivals):
            self.adopt(self._arrivals[p])
            del self._arrivals[p]

    def _hear(self, channel: Channel, event: Event) -> None:
        match event:
            case Resume():
                self.ledger.resumed(channel.shard, event.round, channel.outbox.unresolved_rounds())
            case Marker(number=number):  # of each shard, at the same number
                if number > self._marker and self._on_marker is not None:
                    self._on_marker(self)
                self._marker = number
            case _:
                self.ledger.heard(event)

    def _require_finite_loss(self) -> None:
        self.losses.read()
        if self.losses.diverged >= self._diverged_max:
            raise DivergedError(
                f"The loss of {self.name} is not finite",
                "Start the island again: it takes the run's parameters and fresh optimiser state. If all islands end "
                "this way, use a lower learning rate: in your script, or --inner.learning-rate of a new run.",
            )

    def require_sound(self) -> None:
        """Raise the error that names a tensor, if a contribution was not sent because it was not finite."""
        if self.link.unsound:
            found = self.parameters.not_finite() if self.parameters.are_there() else []
            raise not_finite(found, self.manifest.fragments[self.link.unsound[0]])

    def _is_check_due(self) -> bool:
        """Return whether nothing was sent for an interval, as without a merger. What is sent is checked then."""
        sent, steps = self._checked
        is_due = sent == self.sequence and self.totals.steps - steps >= self.config.sync.interval
        if is_due or sent != self.sequence:
            self._checked = self.sequence, self.totals.steps
        return is_due

    def adopt(self, arrival: Arrival) -> None:
        """Adopt a snapshot between two inner steps, unless the island holds these parameters already.

        An older version, or another one of the same number, is adopted too: a broker may have lost rounds.
        """
        snapshot = arrival.snapshot
        if self.ledger.holds(snapshot):
            return
        self.parameters.replace(self._replica.adopt(snapshot.fragment, self.parameters.named(), arrival.params_N))
        self.ledger.adopted(snapshot, self.config.adopt.rule in KEEPS_PROGRESS)

    def use_optimizer(self, state: Any, origin: str) -> None:
        """Use a peer's inner optimiser state, or this island's own, instead of fresh moments."""
        if self.optimizer.use is not None:
            self.optimizer.use(state)
            self.optimizer_origin = origin

    def _hand_over(self, who: str) -> None:
        if (leaves := self.optimizer.present()) is not None:
            self.link.hand_over(StateForPeer(who, leaves, self.ledger.global_step))

    def send(self, number: int, *, farewell: bool = False) -> None:
        """Measure and queue the contribution to a round. With `farewell`, it does not open the round."""
        shard, p = self.ledger.place(number)
        count, name = self.ledger.counts[p], self._codec(p)
        self.stretch = averaged(self.stretch, count.steps / self.config.sync.interval)
        header = Contribution(
            island=self.name,
            incarnation=self.incarnation,
            sequence=self._sequences[shard],
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
            bytes=0,  # these two once it is encoded
            digest="",
            data=self.positions,
        )
        parts = self._replica.measure(p, self.parameters.named(), name)
        self.link.send(Draft(header, parts, self.manifest.sizes[p]))
        self._sequences[shard] += 1
        self.ledger.sent(number)

    @property
    def positions(self) -> str:
        """How far each leased range of the text was read."""
        return "" if self._ranges is None else " ".join(map(str, self._ranges.positions()))

    @property
    def sequence(self) -> int:
        """The number of contributions that this incarnation has sent."""
        return sum(self._sequences)

    def _codec(self, p: int) -> str:
        """Return the run's codec, or the thin one if a payload of the run's would take longer than a stride to send."""
        stride_seconds = self.speed.step_seconds * self.config.sync.interval / len(self.manifest.fragments)
        full, *thin = self._codecs[p]
        return thin[0] if thin and not self.link.uplink.fits(self._payload_sizes[p], stride_seconds) else full

    def beat(self, state: str) -> None:
        """Update the next heartbeat, unless it is nearly as new."""
        if state == "training" and not self._has_joined:
            self._has_joined = True
            where = f"after round {self.ledger.closed} on {self.device}"
            self.link.heartbeats.note("joined", f"{where}, optimiser state: {self.optimizer_origin}")
        if self.link.heartbeats.wants(state):
            self.link.beat(self._heartbeat(state))

    def _heartbeat(self, state: str) -> Heartbeat:
        link, ledger, uplink, seconds = self.link, self.ledger, self.link.uplink, self.speed.step_seconds
        staleness, tokens = ledger.staleness, ledger.unsent_tokens
        backlog, queued_tokens, unreadable = link.backlog, link.queued_tokens, link.unreadable
        unserved = "no merger serves the run" if link.heartbeats.serving.is_served is False else ""
        return replace(
            link.heartbeats.first,
            state=state,
            device=self.device,
            steps=self.totals.steps,
            global_step=ledger.global_step,
            tokens=self.totals.tokens,
            tokens_per_second=self.tokens_per_step / seconds if seconds else 0.0,
            step_seconds=seconds,
            loss=self.losses.mean,
            staleness=staleness,
            backlog=backlog,
            sent=uplink.contributions,
            refused=ledger.refused,
            last_refusal=ledger.last_refusal,
            bytes_up=link.heartbeats.first.bytes_up + uplink.bytes_up,
            bytes_down=link.heartbeats.first.bytes_down + uplink.bytes_down,
            link=link.pumps.trouble or unserved or uplink.in_words or "ok",
            data=self.positions,
            optimizer_origin=self.optimizer_origin,
            ignored=uplink.ignored,
            unreadable=unreadable,
            tokens_unsent=(tokens + queued_tokens) // len(ledger.counts),
        )
