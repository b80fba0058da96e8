"""One island of several processes in PyTorch. Only the leader, the first of them, talks to Redis.

The references are split as the parameters are: over all processes with FSDP2 (`fully_shard`), and not at all with
DistributedDataParallel. To send a fragment, each process measures its own piece, and all gather that one fragment,
quantise it, and keep their pieces of what the merger will read. To adopt a fragment, the leader hands it to all, and
each keeps its piece. The bits are those of one device.

What the leader says, and when, is in `islands.team`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from archipelago.broker.codecs import Vector
from archipelago.broker.frozen import FrozenValues
from archipelago.broker.manifest import Manifest
from archipelago.islands.pytorch.joining import Joining, Loss, TorchRun
from archipelago.islands.pytorch.module import ModuleParameters, chunks
from archipelago.islands.pytorch.replica import TeamReplica
from archipelago.islands.pytorch.team import ProcessTeam, ranks_of
from archipelago.islands.team.protocol import Said, Work
from archipelago.islands.team.scripts import Following, Leading, SpreadTensors, create_together
from archipelago.islands.user_loop.new_run import FirstValues, Frozen


def create_split(
    mesh: Any, parameters: ModuleParameters, create: Callable[[FirstValues, Frozen], bool], call: str
) -> bool:
    """Create a run of a model that is split over processes, as `create_together` says."""
    tensors = split_tensors(ProcessTeam(mesh, None, parameters.device, call), parameters)
    return create_together(tensors, create, lambda whole: whole.to(torch.float32).reshape(-1).numpy())


def split_tensors(team: Any, parameters: ModuleParameters) -> SpreadTensors:
    """Return the tensors of a module."""
    names = list(parameters.views())
    return SpreadTensors(team, names, partial(team.gather_tensor, parameters), parameters.frozen_values, chunks)


def joined(mesh: Any, group: Any, given: Joining) -> Leader | Follower:
    """Return the membership of this process, from the mesh of the model or the group of DistributedDataParallel."""
    new_team = partial(ProcessTeam, mesh, group)
    return (Leader if dist.get_rank() == ranks_of(mesh, group)[0] else Follower)(given, new_team)


class Leader(Leading, TorchRun):
    """The island's membership, in the process that leads."""

    def __init__(self, given: Joining, new_team: Callable[[Any, str], Any]) -> None:
        super().__init__(given)
        self._new_team = partial(new_team, self._parameters.device)

    def _frozen(self) -> Sequence[FrozenValues]:
        return split_tensors(self._team, self._parameters).frozen_values()

    def _new_replica(self, manifest: Manifest) -> TeamReplica:
        self._team.share_manifest(manifest)
        return TeamReplica(manifest, self._parameters, self._team)

    def _rehearse(self) -> None:
        super()._rehearse()
        self._team.agree_on_state(self._state)

    def _begin_again(self, vectors: Sequence[Vector]) -> None:
        self._team.tell(Work.BEGIN)
        super()._begin_again(vectors)

    def _state_copies(self) -> Sequence[Any] | None:
        if self._state is None or not self._state.still_travels():
            return None
        self._team.tell(Work.GIVE_STATE)
        return [self._state.digest, *self._team.gather_state(self._state)]

    def _lend(self, named: Mapping[str, Any], vectors: Sequence[Vector]) -> None:
        self._team.tell(Work.EVALUATE)  # not before: the others wait for the parameters, and the copy may fail
        super()._lend(named, vectors)

    def _use_state(self, state: Sequence[Any]) -> None:
        if self._state is not None:
            self._team.tell(Work.TAKE_STATE)
            self._team.scatter_state(self._state, state)


class Follower(Following):
    """The island's membership, in a process that follows the leader."""

    def __init__(self, given: Joining, new_team: Callable[[Any, str], Any]) -> None:
        self._parameters, self._state = given.parts()
        self._replica: TeamReplica | None = None
        super().__init__(given.run, given.island, partial(new_team, self._parameters.device), given.evaluate)
        self._model = given.model

    def sync(self, *, tokens: int | None = None, loss: Loss | None = None, steps: int = 1) -> None:
        """Do with the leader what it does. The arguments are those of the leader's call."""
        self._turn()

    def _do(self, team: Any, said: Said) -> None:
        replica, state = self._replica, self._state
        if said.work == Work.RUN:
            manifest = team.share_manifest(None, said.about)
            self._replica = TeamReplica(manifest, self._parameters, team)
            if state is not None:
                state.rehearse()  # with the leader, because a step of the optimiser may need all processes
            team.agree_on_state(state)
            self._replica.begin(self._parameters.named(), [None] * len(manifest.fragments))
        elif said.work == Work.BEGIN and replica is not None:
            replica.references.clear()
            replica.write(self._parameters.named(), [None] * len(replica.layout))
        elif said.work == Work.MEASURE and replica is not None:
            replica.measure(said.about, self._parameters.named(), said.codec_name)
        elif said.work == Work.ADOPT and replica is not None:
            replica.adopt(said.about, self._parameters.named(), None)
        elif said.work == Work.GIVE_TENSOR:
            team.gather_tensor(self._parameters, said.about)
        elif said.work == Work.GIVE_STATE and state is not None:
            team.gather_state(state)
        elif said.work == Work.EVALUATE and replica is not None:
            with self._parameters.lent() as named:
                replica.write(named, [None] * len(replica.layout))
                self._evaluate_along(lambda: self._model)
        elif said.work == Work.TAKE_STATE and state is not None:
            team.scatter_state(state, ())
            self.optimizer_origin = "the leader"
