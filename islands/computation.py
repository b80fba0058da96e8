"""What an island computes on its devices. It knows no broker, no data and no schedule.

An island over several hosts does this in each of its processes, in the same order (see `team.computing`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from archipelago.broker.codecs import Vector
from archipelago.broker.manifest import Manifest
from archipelago.islands.inner import InnerState, InnerSteps, begin, moment_bounds
from archipelago.islands.models.interface import Params
from archipelago.islands.placement import Placement
from archipelago.islands.sync.adoption import Parameters
from archipelago.islands.sync.arrays import device_copy
from archipelago.islands.sync.recovery import NO_BOUNDS
from archipelago.islands.sync.replica import Replica
from archipelago.islands.team.computing import TeamReplica, TeamState
from archipelago.islands.team.jax_team import JaxTeam
from archipelago.islands.team.protocol import Work
from archipelago.islands.user_loop.parameters import LoopState, not_finite


class Computation(Parameters):
    """The arrays of an island, and everything that is computed with them: parameters, optimiser, inner steps."""

    def __init__(
        self,
        manifest: Manifest,
        steps: InnerSteps,
        fresh: Callable[[Params], InnerState] | None = None,
        placement: Placement | None = None,
        *,
        has_own_optimizer: bool = False,
        team: JaxTeam | None = None,
    ) -> None:
        """Note what the run is, and how it is computed.

        Args:
            fresh: Returns the first state of the inner optimiser for parameters; that of the run's config by default.
            placement: Where everything is on several devices, for which `steps` were compiled; None for one device.
            has_own_optimizer: Whether the optimiser is not that of the run's config, so that nothing bounds its state.
            team: The processes of an island over several hosts. Only their leader has vectors and batches.
        """
        inner = manifest.config.inner
        self.steps, self.placement, self.has_own_optimizer = steps, placement, has_own_optimizer
        templates = None if placement is None else placement.templates
        new_replica: Callable[..., Replica] = Replica if team is None else partial(TeamReplica, team)
        new_state: Callable[..., LoopState] = LoopState if team is None else partial(TeamState, team)
        self._team = team
        self.replica = new_replica(manifest, templates, donates=True)
        self.inner: InnerState
        self._fresh = fresh or partial(begin, inner)
        bounds = NO_BOUNDS if has_own_optimizer else moment_bounds(inner)
        self.state = new_state(lambda: self.inner.optimizer, bounds)

    def begin(self, vectors: Sequence[Vector]) -> None:
        """Start from one vector of each fragment, with fresh inner optimiser state."""
        params = self.replica.begin(list(vectors))
        self.inner = self._fresh(params) if self.placement is None else self.placement.begin(self._fresh, params)

    def step(self, batches_n: Any, schedule_step: int, length: int) -> jax.Array:
        """Dispatch inner steps, one for each batch, and return their losses.

        Args:
            schedule_step: The number of earlier steps, for the schedule of the learning rate.
            length: The length of the run, likewise.
        """
        batches_n = self._shared(Work.STEP, batches_n, step=schedule_step, steps=length)
        self.inner, losses_n = self.steps(self.inner, *self._arguments(batches_n, schedule_step, length))
        return losses_n if self._team is None else self._team.settled(losses_n)

    def try_steps(self, batches_n: Any, length: int) -> None:
        """Compile the inner steps. Nothing changes."""
        batches_n = self._shared(Work.TRY, batches_n, steps=length)
        _, losses_n = self.steps(device_copy(self.inner), *self._arguments(batches_n, 0, length))
        losses_n.block_until_ready()

    def _shared(self, work: Work, batches_n: Any, **numbers: int) -> Any:
        """Return the leader's batches in all processes of a team, and tell them what they are for."""
        if self._team is None:
            return batches_n
        leaves, structure = jax.tree.flatten(batches_n)
        self._team.tell(work, **numbers)
        return jax.tree.unflatten(structure, self._team.share(leaves))

    def _arguments(self, batches_n: Any, schedule_step: int, length: int) -> Any:
        """Return the arguments of the inner steps after the state, on the devices."""
        given = batches_n, np.int32(schedule_step), np.int32(length)
        if self.placement is not None:
            return self.placement.place_batches(given)
        return jax.device_put(given)  # `jnp.asarray` would compile a program for the transfer

    # -- the parameters, as a membership keeps them -------------------------------------------------------------------

    def named(self) -> Params:
        return self.inner.params

    def replace(self, named: Mapping[str, Any]) -> None:
        """Replace the parameters. The inner optimiser's state stays."""
        self.inner = self.inner._replace(params=dict(named))

    def not_finite(self) -> list[str]:
        return not_finite(self.inner.params)

    def use(self, values: Iterable[Any]) -> None:
        """Go on with the state of a peer's inner optimiser."""
        self.inner = self.inner._replace(optimizer=self.state.taken(values))
