"""One island of several processes in JAX: a script whose arrays are spread over the processes of `jax.distributed`.

All processes measure and adopt, each on its own part of the arrays, as those of our worker do (`islands.team`). Only
the leader, the first of them, talks to Redis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax.typing import ArrayLike

from archipelago.broker.frozen import FrozenValues
from archipelago.broker.manifest import Manifest
from archipelago.islands.sync.replica import Replica
from archipelago.islands.team.computing import TeamReplica, TeamState, do_together
from archipelago.islands.team.jax_team import JaxTeam, whole
from archipelago.islands.team.protocol import Said, Work
from archipelago.islands.team.scripts import Following, Leading, SpreadTensors, create_together
from archipelago.islands.user_loop.joining import JoinedRun, Joining
from archipelago.islands.user_loop.new_run import FirstValues, Frozen
from archipelago.islands.user_loop.parameters import LoopState, TreeParameters, frozen_values
from archipelago.islands.user_loop.tree import TreeLayout, host_vector, pieces


def create_spread(layout: TreeLayout, params: Any, create: Callable[[FirstValues, Frozen], bool], call: str) -> bool:
    """Create a run of a tree that is spread over processes, as `create_together` says."""
    return create_together(spread_leaves(new_team(call), layout, params), create, host_vector)


def new_team(call: str) -> JaxTeam:
    """Return the processes, which all make this call. Raises ConfigError (`loop.not-together`) if not."""
    team = JaxTeam()
    team.require_together(call)
    return team


def spread_leaves(team: JaxTeam, layout: TreeLayout, tree: Any) -> SpreadTensors:
    """Return the leaves of a tree."""
    leaves, frozen = jax.tree.leaves(tree), partial(frozen_values, layout)
    return SpreadTensors(team, layout.names, lambda number: whole(leaves[number]), frozen, pieces)


def joined(given: Joining) -> Leader | Follower:
    return (Leader if jax.process_index() == 0 else Follower)(given)


class Leader(Leading, JoinedRun):
    """The island's membership, in the process that leads."""

    _new_team = staticmethod(new_team)

    def _turn(self, steps: Any, tokens: Any, loss: Any) -> None:
        if self._team is not None:
            self._team.settled(self._given)
        super()._turn(steps, tokens, loss)

    def _new_state(self, newest: Callable[[], Any]) -> LoopState:
        return TeamState(self._team, newest)

    def _new_replica(self, manifest: Manifest) -> Replica:
        self._team.share_manifest(manifest)
        return TeamReplica(self._team, manifest, self._parameters.layout.templates)

    def _frozen(self) -> Sequence[FrozenValues]:
        return spread_leaves(self._team, self._parameters.layout, self._parameters.tree).frozen_values()


class Follower(Following):
    """The island's membership, in a process that follows the leader.

    Attributes:
        state: The inner optimiser's state to begin with, as the leader has it.
    """

    def __init__(self, given: Joining) -> None:
        super().__init__(given.run, given.island, new_team, given.evaluate)
        self._parameters = TreeParameters(given.params, given.trained)
        self._newest_state = given.newest_state()
        self._state: TeamState | None = None
        self._replica: TeamReplica | None = None
        self.state: Any = None

    @property
    def params(self) -> Any:
        """The parameters: those of the run at first, then those that `sync` returned last."""
        return self._parameters.tree

    def sync(self, params: Any, *, tokens: int | None = None, loss: ArrayLike | None = None, steps: int = 1) -> Any:
        """Do with the leader what it does, and return the parameters. The arguments are those of the leader's call."""
        self._parameters.offer(self._team.settled(params) if self._team is not None else params)
        self._turn()
        return self._parameters.tree

    def _do(self, team: Any, said: Said) -> None:
        replica, parameters, state = self._replica, self._parameters, self._state
        if said.work == Work.RUN:
            manifest = team.share_manifest(None, said.about)
            parameters.choose(manifest)
            self._replica = TeamReplica(team, manifest, parameters.layout.templates)
        elif said.work == Work.GIVE_TENSOR:
            spread_leaves(team, parameters.layout, parameters.tree).gather(said.about)
        elif said.work == Work.BEGIN and replica is not None:
            parameters.start(replica.begin())
            if self._newest_state is not None and self._state is None:
                self._state = TeamState(team, self._newest_state)
                self.state = self._state.newest()
        elif said.work == Work.EVALUATE and replica is not None:
            self._evaluate_along(lambda: parameters.tree_with(replica.merged()))
        elif said.work == Work.TAKE_STATE and state is not None:
            self.state, self.optimizer_origin = state.taken(), "the leader"
        elif replica is not None:
            do_together(said, replica, parameters, state)
