"""Our worker's training: inner steps of our models and of users' tasks, on leased ranges of the text."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from archipelago.broker.manifest import Manifest
from archipelago.islands.computation import Computation
from archipelago.islands.data.batches import Supply
from archipelago.islands.inner import InnerState
from archipelago.islands.sync.connection.downloads import Arrival
from archipelago.islands.sync.connection.link import Link
from archipelago.islands.sync.participant import Participant
from archipelago.islands.sync.recovery import OptimizerAccess
from archipelago.islands.tasks.workload import DIVERGED_MAX


class Island(Participant):
    """An island whose steps are ours. Sync after `make_step`, or call `boundary` and `advance` in turn."""

    def __init__(
        self,
        name: str,
        manifest: Manifest,
        computation: Computation,
        batches: Supply,
        link: Link,
        arrivals: Sequence[Arrival],
        clock: Callable[[], float] = time.monotonic,
        incarnation: str = "",
        on_marker: Callable[[Participant], object] | None = None,
    ) -> None:
        """Begin from published snapshots with fresh inner optimiser state.

        Args:
            name, manifest, link, arrivals, clock, incarnation, on_marker: As for a `Participant`.
            computation: Parameters, the inner optimiser's state and the inner steps.
        """
        computation.begin([arrival.params_N for arrival in arrivals])
        where = computation.placement
        super().__init__(
            name, manifest, link, computation.replica, computation, arrivals,
            jax.devices()[0].device_kind if where is None else where.device,
            OptimizerAccess(computation.state.copies, computation.state.decode, computation.use), clock, incarnation,
            ranges=batches, on_marker=on_marker, diverged_max=DIVERGED_MAX,
        )  # fmt: skip
        self.computation, self.batches = computation, batches
        self._in_flight: jax.Array | None = None

    def warm_up(self) -> None:
        """Compile everything that the loop runs, on copies, so that no peer waits for a compilation later."""
        self.beat("joining")
        self.computation.try_steps(self.batches.sample(1), self.link.heartbeats.run_steps)
        self.computation.replica.warm_up(self.computation.named())

    def make_step(self) -> tuple[int, Any]:
        """Dispatch an inner step, on which the device works during the next boundary.

        Return its tokens, and the loss of the step before it, which has ended.
        """
        batch = self.batches.next(1)
        schedule_step = min(self.ledger.global_step, self.run_steps)  # constant from then on
        losses_n, earlier = self.computation.step(batch, schedule_step, self.run_steps), self._in_flight
        # One call may be in flight. This keeps the device busy, and still measures the time of steps.
        if earlier is not None:
            earlier.block_until_ready()
        self._in_flight = losses_n
        return self.batches.tokens, earlier

    def advance(self) -> None:
        """Make a step and count it. The caller passes the boundary after it itself, as in virtual time."""
        self.count(1, *self.make_step())

    @property
    def inner(self) -> InnerState:
        """Parameters and the inner optimiser's state."""
        return self.computation.inner

    @property
    def learning_rate(self) -> float:
        """The present inner learning rate; NaN for a task with an optimiser of its own."""
        if self.computation.has_own_optimizer:
            return math.nan
        return dataclasses.replace(self.config.inner, steps=self.run_steps).rate_at(self.ledger.global_step)
