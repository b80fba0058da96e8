"""One island of several processes. Only the leader, the first of them, talks to Redis.

In DistributedDataParallel, all processes hold the whole model. The leader measures and adopts, and hands what it has
adopted to the others, so that all hold the same bits. With FSDP2 (`fully_shard`), the references are split as the
parameters are. To send a fragment, each process measures its own piece, and the leader gathers that one fragment,
quantises it, and hands back what the merger will read. To adopt a fragment, the leader hands each process its piece.
All the arithmetic is done element by element, so the bits are those of one device.

What the leader says, and when, is in `islands.team.protocol`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from archipelago.broker.codecs import Vector
from archipelago.broker.errors import ConfigError
from archipelago.broker.frozen import FrozenValues
from archipelago.broker.manifest import Manifest
from archipelago.islands.pytorch.host import HostCopy
from archipelago.islands.pytorch.joining import Joining, TorchRun
from archipelago.islands.pytorch.module import ModuleParameters
from archipelago.islands.pytorch.replica import SharedReplica, SplitReplica, Tell
from archipelago.islands.pytorch.team import ProcessTeam, ranks_of
from archipelago.islands.sync.leaving import StoppedBySignal, StopSignal
from archipelago.islands.team.protocol import Said, Work, leader_left
from archipelago.islands.user_loop.new_run import FirstValues, Frozen

log = logging.getLogger(__name__)

#: Makes the team, from the device of the model in this process and the call that all processes make, in words.
NewTeam = Callable[[Any, str], Any]


def create_together(
    mesh: Any, parameters: ModuleParameters, create: Callable[[FirstValues, Frozen], bool], purpose: str
) -> bool:
    """Create a run of a model that is split over processes, all of which call this. Return what `create` returned.

    Args:
        mesh: The mesh of the model.
        parameters: Its parameters.
        create: Called in the leader with functions that gather one tensor, and those that are frozen.
        purpose: The call in words.

    Raises:
        ConfigError: The leader has failed (`loop.leader-left`), or another process does something else
            (`loop.not-together`).
    """
    team = ProcessTeam(mesh, None, parameters.device, purpose)

    def first(name: str) -> Vector:
        vector: Vector = team.whole(parameters, name).to(torch.float32).reshape(-1).numpy()
        return vector

    if team.leads:
        try:
            is_new = create(first, lambda: team.frozen_values(parameters))
        except BaseException:
            with suppress(RuntimeError):  # the others may be gone
                team.exchange(Said(has_left=1))
            raise
        team.exchange(Said(finished=is_new))
        return is_new
    said = team.hear(lambda said: team.gather_tensor(parameters, said.about))
    if said.has_left:
        raise leader_left()
    return bool(said.finished)


def joined(mesh: Any, group: Any, given: Joining) -> Leader | Follower:
    """Return the membership of this process.

    Args:
        mesh: The mesh that the model is split over; None if all processes hold all of it.
        group: The process group of DistributedDataParallel, without a mesh.
        given: What the script gives to `join`.
    """
    new_team = partial(ProcessTeam, mesh, group)
    return (Leader if dist.get_rank() == ranks_of(mesh, group)[0] else Follower)(given, new_team)


def _replica(
    manifest: Manifest, parameters: ModuleParameters, team: Any, tell: Tell = lambda is_adoption, fragment: None
) -> SharedReplica | SplitReplica:
    if team.mesh is None:
        return SharedReplica(manifest, parameters, team, tell)
    return SplitReplica(manifest, parameters, team.courier, tell)


class Leader(TorchRun):
    """The island's membership, in the process that leads."""

    def __init__(self, given: Joining, new_team: NewTeam) -> None:
        super().__init__(given)
        self._new_team = new_team
        self._team: Any = None
        self._said = Said()
        self._from_peer: Sequence[Any] = ()

    def __enter__(self) -> Self:
        """Join the run, and hand the parameters and the optimisers' state to the others."""
        self._team = team = self._new_team(self._parameters.device, f"join {self._run}")
        try:
            super().__enter__()
        except BaseException:
            self._tell_of_error()
            raise
        try:
            self._said = team.exchange(Said(has_state=self.optimizer_origin != "fresh", **self._clock()))
            if self._said.has_state and self._state is not None:
                team.scatter_state(self._state, self._from_peer)
        except BaseException as error:  # without the others there is no island, and no `with` block that would end it
            self._leave(error)
            raise
        self._from_peer = ()
        return self

    # -- what several processes add to joining ------------------------------------------------------------------------

    def _frozen(self) -> Sequence[FrozenValues]:
        if self._team.mesh is None:
            return super()._frozen()
        values: list[FrozenValues] = self._team.frozen_values(self._parameters)
        return values

    def _new_replica(self, manifest: Manifest) -> SharedReplica | SplitReplica:
        team = self._team
        largest, fragments = max(manifest.sizes), len(manifest.fragments)
        if team.mesh is not None and 2 * largest > manifest.parameters > 0 and len(team.ranks) > 1:
            log.warning(
                "the leader gathers up to %.0f %% of the model at a time: the largest of the run's %s fragments",
                100 * largest / manifest.parameters, fragments,
            )  # fmt: skip
        team.share_manifest(manifest)

        def tell(is_adoption: bool, fragment: int) -> None:
            team.tell(Work.ADOPT if is_adoption else Work.MEASURE, fragment)

        return _replica(manifest, self._parameters, team, tell)

    def _state_copies(self) -> Sequence[Any] | None:
        if self._team.mesh is None:
            return super()._state_copies()
        if self._state is None or not self._state.still_travels():
            return None
        self._team.tell(Work.GIVE_STATE)
        return [self._state.digest, *map(HostCopy, self._team.gather_state(self._state))]

    def _use_state(self, state: Sequence[Any]) -> None:
        """Keep a peer's values until the others wait for them."""
        self._from_peer = state

    # -- training -----------------------------------------------------------------------------------------------------

    def sync(self, *, tokens: int | None = None, loss: Any = None, steps: int = 1) -> None:
        """Sync, and tell the others. `tokens` counts those of all processes."""
        try:
            super().sync(tokens=tokens, loss=loss, steps=steps)
        except BaseException:
            if not self._has_left:
                self._tell_of_error()
            raise
        self._said = self._team.exchange(Said(**self._clock()))
        self._stop.require_heard(bool(self._said.stopping))

    def _tell_of_error(self) -> None:
        """Tell the others that the leader leaves because of an error, which may be that they are gone.

        If they may wait for a tensor, they hear of it when this process ends.
        """
        if self._team is not None and not self._is_torn:
            with suppress(RuntimeError):
                self._team.exchange(Said(has_left=1))

    def _heed_signal(self) -> None:
        """Do nothing yet: all processes heed the signal together, at the end of `sync`."""

    def _clock(self) -> dict[str, Any]:
        stopping = self._stop.has_arrived
        return {"finished": super().finished, "stopping": stopping, "step": super().step, "steps": super().steps}

    def _leave(self, error: BaseException | None) -> None:
        """Leave the run. If the model is split, all processes do without an error, and send the newest progress."""
        if self._has_left or self._loop is None:
            return
        if self._team.mesh is None:
            super()._leave(error)
            return
        if error is not None and not isinstance(error, StoppedBySignal):  # the others have stopped to follow
            is_ours = isinstance(error, Exception)
            super()._leave(error if is_ours else RuntimeError(f"stopped by {type(error).__name__}"))
            return
        try:
            super()._leave(error)
        finally:
            with suppress(RuntimeError):  # the others may be gone
                self._team.exchange(Said(finished=True))

    # What the others were told, because all processes must take the same turn.

    @property
    def finished(self) -> bool:
        """Whether to stop training."""
        return bool(self._said.finished) or self._has_left

    @property
    def step(self) -> int:
        """The run's clock in steps."""
        return self._said.step

    @property
    def steps(self) -> int:
        """The length of the run in steps."""
        return self._said.steps


class Follower:
    """The island's membership, in a process that follows the leader."""

    def __init__(self, given: Joining, new_team: NewTeam) -> None:
        self._new_team, self._run = new_team, given.run
        self._parameters, self._state = given.parts()
        self._team: Any = None  # while this process is in the run
        self._replica: SharedReplica | SplitReplica | None = None
        self._said = Said()
        self._stop = StopSignal()
        self.island, self.optimizer_origin = "", "fresh"

    def __enter__(self) -> Self:
        """Take the parameters and the optimisers' state from the leader.

        Raises:
            ConfigError: The leader could not join (`loop.leader-left`).
        """
        self._team = team = self._new_team(self._parameters.device, f"join {self._run}")
        self._hear(team)
        if self._said.has_state and self._state is not None:
            team.scatter_state(self._state, ())
            self.optimizer_origin = "the leader"
        self._stop.watch()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave."""
        try:
            if error is None or isinstance(error, StoppedBySignal):
                self.leave()
        finally:
            self._team = None
            self._stop.release()

    def leave(self) -> None:
        """Follow the leader no longer. If the model is split, send the newest progress together with it first."""
        team, self._team = self._team, None
        if team is None or team.mesh is None:
            return
        try:
            team.hear(partial(self._do, team))
        except RuntimeError as error:
            log.warning("the leader of this island is gone: %s", error)

    def sync(self, *, tokens: int | None = None, loss: Any = None, steps: int = 1) -> None:
        """Do with the leader what it does. The arguments are those of the leader's call.

        Raises:
            ConfigError: The leader has left (`loop.leader-left`), or this process has (`loop.left`).
        """
        if self._team is None:
            raise ConfigError(
                "this process has not joined the run, or has left it",
                "Call `sync` inside of `with join(...) as run:`.",
                code="loop.left",
            )
        self._hear(self._team)
        self._stop.require_heard(bool(self._said.stopping))

    def _hear(self, team: Any) -> None:
        """Do what the leader says, until its turn ends. Raises ConfigError (`loop.leader-left`)."""
        self._said = team.hear(partial(self._do, team), lambda: self._stop.has_arrived)
        if self._said.has_left:
            raise leader_left()

    def _do(self, team: Any, said: Said) -> None:
        replica = self._replica
        if said.work == Work.RUN:
            manifest = team.share_manifest(None, said.about)
            self._replica = _replica(manifest, self._parameters, team)
            if self._state is not None:
                self._state.rehearse()  # with the leader, because a step of the optimiser may need all processes
            self._replica.begin(self._parameters.named(), [None] * len(manifest.fragments))
        elif said.work == Work.MEASURE and replica is not None:
            replica.measure(said.about, self._parameters.named())
        elif said.work == Work.ADOPT and replica is not None:
            replica.adopt(said.about, self._parameters.named(), None)
        elif said.work == Work.GIVE_TENSOR:
            team.gather_tensor(self._parameters, said.about)
        elif said.work == Work.GIVE_STATE and self._state is not None:
            team.gather_state(self._state)

    @property
    def finished(self) -> bool:
        """Whether to stop training."""
        return bool(self._said.finished) or self._team is None

    @property
    def step(self) -> int:
        """The run's clock in steps."""
        return self._said.step

    @property
    def steps(self) -> int:
        """The length of the run in steps."""
        return self._said.steps
