"""One island of several processes whose parameters are split by FSDP2 (`fully_shard`).

The references are split as the parameters are. To send a fragment, each process measures its own piece, and the leader
gathers that one fragment, quantises it, and hands back what the merger will read. To adopt a fragment, the leader hands
each process its piece. All the arithmetic is done element by element, so the bits are those of one device.

The leader decides at each step boundary. It says what all do next, fragment by fragment, until its turn ends.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import IntEnum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from archipelago.broker.codecs import Vector
from archipelago.broker.errors import ConfigError
from archipelago.broker.frozen import FrozenValues
from archipelago.broker.manifest import Manifest
from archipelago.islands.own_loop.leaving import StoppedBySignal
from archipelago.islands.own_loop.new_run import FirstValues, Frozen
from archipelago.islands.pytorch.host import HostCopy
from archipelago.islands.pytorch.joining import Joining
from archipelago.islands.pytorch.module import ModuleParameters, chunks
from archipelago.islands.pytorch.parallel import Follower, Leader, ProcessTeam, Said
from archipelago.islands.pytorch.pieces import Courier, Pieces, own_piece
from archipelago.islands.pytorch.replica import SplitReplica
from archipelago.islands.pytorch.state import OptimizerState

log = logging.getLogger(__name__)


class Work(IntEnum):
    """What all processes do together, when the leader says so."""

    BEGIN = 1
    MEASURE = 2
    ADOPT = 3
    GIVE_STATE = 4
    GIVE_TENSOR = 5


class SplitTeam(ProcessTeam):
    """The processes of one mesh.

    Attributes:
        mesh: The mesh.
        on_host: Carries tensors of the host.
        courier: Carries tensors of the model's device.
    """

    def __init__(self, mesh: Any, device: Any, purpose: str) -> None:
        """Make the groups. All processes of the mesh do this at the same time.

        Args:
            mesh: The mesh.
            device: The device of the model in this process.
            purpose: The call that all processes make, in words.

        Raises:
            ConfigError: The processes make different calls (`loop.not-together`).
        """
        super().__init__(None, [int(rank) for rank in mesh.mesh.flatten()])
        self.mesh = mesh
        self.on_host = self.courier = Courier(self.messages, self.ranks)
        self._require_together(purpose)
        if device.type != "cpu":
            group = mesh.get_group() if mesh.ndim == 1 else dist.new_group(self.ranks, use_local_synchronization=True)
            self.courier = Courier(group, self.ranks)

    @property
    def leads(self) -> bool:
        """Whether this process is the leader."""
        return self.on_host.leads

    def _require_together(self, purpose: str) -> None:
        number = int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:6])
        bounds = torch.tensor([number, -number])
        dist.all_reduce(bounds, dist.ReduceOp.MAX, group=self.messages)
        if bounds.tolist() != [number, -number]:
            raise ConfigError(
                f"this process calls `{purpose}`, and another process of this island calls something else",
                "With FSDP2, call `create` and `join` in every process, in the same order.",
                code="loop.not-together",
            )

    def tell(self, work: Work, about: int = 0) -> None:
        """Say what all processes do now."""
        self.exchange(Said(work=work, about=about))

    def share_manifest(self, manifest: Manifest | None, size: int = 0) -> Manifest:
        """Return the leader's manifest. The others give the size of its message."""
        if manifest is not None:
            data = json.dumps(manifest.to_fields()).encode()
            self.tell(Work.BEGIN, len(data))
            self.share_on_host(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            return manifest
        message = torch.empty(size, dtype=torch.uint8)
        self.share_on_host(message)
        return Manifest.from_fields(json.loads(message.numpy().tobytes()))

    # -- the optimisers' state, which travels over the hosts' memory --------------------------------------------------

    def gather_state(self, state: OptimizerState) -> list[Any]:
        """Return whole copies of all values in the leader's memory, and nothing in the others'."""
        return [
            self._gathered(Pieces.of(entry.name, entry.example, self.mesh), entry.present(), tuple(entry.tensor.shape))
            for entry in state.entries
        ]

    def scatter_state(self, state: OptimizerState, values: Sequence[Any]) -> None:
        """Replace the optimisers' state by values that the leader has."""
        for number, entry in enumerate(state.entries):
            own = torch.empty_like(entry.present(), device="cpu")
            pieces = Pieces.of(entry.name, entry.example, self.mesh)
            self.on_host.scatter(pieces, values[number] if values else None, own)
            entry.put(own)

    # -- whole tensors of the model, for `create` and for digests -----------------------------------------------------

    def gather_tensor(self, parameters: ModuleParameters, place: int) -> Any:
        """Return one whole tensor in the memory of the leader's host, and None in the others'."""
        name, view = list(parameters.views().items())[place]
        return self._gathered(parameters.pieces[name], own_piece(view).detach(), tuple(view.shape))

    def whole(self, parameters: ModuleParameters, name: str) -> Any:
        """Return one whole tensor in the memory of the leader's host. Only the leader calls this."""
        place = list(parameters.views()).index(name)
        self.tell(Work.GIVE_TENSOR, place)
        return self.gather_tensor(parameters, place)

    def frozen_values(self, parameters: ModuleParameters) -> list[FrozenValues]:
        """Return the parameters that are not trained. The leader gathers those that are read, one at a time."""

        def read(name: str) -> Iterator[memoryview]:
            yield from chunks(self.whole(parameters, name))

        return [replace(values, pieces=partial(read, values.name)) for values in parameters.frozen_values()]

    def _gathered(self, pieces: Pieces, own: Any, shape: tuple[int, ...]) -> Any:
        whole = torch.empty(shape, dtype=own.dtype) if self.leads else None
        self.on_host.gather(pieces, own.cpu(), whole)
        return whole


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
    team = SplitTeam(mesh, parameters.device, purpose)

    def first(name: str) -> Vector:
        vector: Vector = team.whole(parameters, name).to(torch.float32).reshape(-1).numpy()
        return vector

    if team.leads:
        try:
            is_new = create(first, lambda: team.frozen_values(parameters))
        except BaseException:
            with suppress(RuntimeError):  # the others may be gone
                team.exchange(Said(has_left=True))
            raise
        team.exchange(Said(finished=is_new))
        return is_new
    while (said := team.exchange(Said())).work:
        team.gather_tensor(parameters, said.about)
    if said.has_left:
        raise ConfigError(
            "the leader of this island (rank 0) could not create the run", "See the error of that process.",
            code="loop.leader-left",
        )  # fmt: skip
    return bool(said.finished)


def joined(mesh: Any, given: Joining) -> Leader | Follower:
    """Return the membership of this process of a mesh."""
    if dist.get_rank() == int(mesh.mesh.flatten()[0]):
        return SplitLeader(mesh, given)
    return SplitFollower(mesh, given)


class SplitLeader(Leader):
    """The island's membership, in the process that leads."""

    def __init__(self, mesh: Any, given: Joining) -> None:
        super().__init__(None, given)
        self._mesh = mesh
        self._from_peer: Sequence[Any] = ()

    def _new_team(self) -> ProcessTeam:
        return SplitTeam(self._mesh, self._parameters.device, f"join {self._run}")

    def _frozen(self) -> Sequence[FrozenValues]:
        values: list[FrozenValues] = self._team.frozen_values(self._parameters)
        return values

    def _new_replica(self, manifest: Manifest) -> SplitReplica:
        team = self._team
        largest, fragments = max(manifest.sizes), len(manifest.fragments)
        if 2 * largest > manifest.parameters > 0 and len(team.ranks) > 1:
            log.warning(
                "the leader gathers up to %.0f %% of the model at a time: the largest of the run's %s fragments",
                100 * largest / manifest.parameters, fragments,
            )  # fmt: skip
        team.share_manifest(manifest)

        def tell(is_adoption: bool, fragment: int) -> None:
            team.tell(Work.ADOPT if is_adoption else Work.MEASURE, fragment)

        return SplitReplica(manifest, self._parameters, team.courier, tell)

    def _state_copies(self) -> Sequence[Any] | None:
        if self._state is None or self._team is None or not self._state.still_travels():
            return None
        self._team.tell(Work.GIVE_STATE)
        return [self._state.digest, *map(HostCopy, self._team.gather_state(self._state))]

    def _use_state(self, values: Sequence[Any]) -> None:
        """Keep a peer's values until the others wait for their pieces."""
        self._from_peer = values

    def _share(self, team: ProcessTeam) -> None:
        if self._said.has_state and self._state is not None:
            self._team.scatter_state(self._state, self._from_peer)
        self._from_peer = ()

    def _tell_of_error(self) -> None:
        """Tell the others, unless they may wait for a tensor. They hear of it when this process ends."""
        if not self._is_torn:
            super()._tell_of_error()

    def _leave(self, error: BaseException | None) -> None:
        """Leave the run. Without an error, all processes do, and send the newest progress together."""
        if self._has_left or self._loop is None or self._team is None:
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


class SplitFollower(Follower):
    """The island's membership, in a process that follows the leader."""

    def __init__(self, mesh: Any, given: Joining) -> None:
        super().__init__(None, given)
        self._mesh, self._run = mesh, given.run
        self._replica: SplitReplica | None = None

    def _new_team(self) -> ProcessTeam:
        return SplitTeam(self._mesh, self._parameters.device, f"join {self._run}")

    def _rehearse(self) -> None:
        """Wait with this until the leader does it, because a step of the optimiser may need all processes."""

    def _hear(self, team: ProcessTeam) -> None:
        """Do what the leader says, until its turn ends."""
        super()._hear(team)
        while self._said.work:
            self._do(team, self._said)
            super()._hear(team)

    def _do(self, team: Any, said: Said) -> None:
        replica = self._replica
        if said.work == Work.BEGIN:
            manifest = team.share_manifest(None, said.about)
            self._replica = SplitReplica(manifest, self._parameters, team.courier)
            if self._state is not None:
                self._state.rehearse()
            self._replica.begin(self._parameters.named(), [None] * len(manifest.fragments))
        elif said.work == Work.MEASURE and replica is not None:
            replica.measure(said.about, self._parameters.named())
        elif said.work == Work.ADOPT and replica is not None:
            replica.adopt(said.about, self._parameters.named(), None)
        elif said.work == Work.GIVE_TENSOR:
            team.gather_tensor(self._parameters, said.about)
        elif said.work == Work.GIVE_STATE and self._state is not None:
            team.gather_state(self._state)

    def _share(self, team: ProcessTeam) -> None:
        if self._said.has_state and self._state is not None:
            self._team.scatter_state(self._state, ())

    def leave(self) -> None:
        """Send the newest progress together with the leader, and follow it no longer."""
        team, self._team = self._team, None
        if team is None:
            return
        try:
            while (said := team.exchange(Said())).work:
                self._do(team, said)
        except RuntimeError as error:
            log.warning("the leader of this island is gone: %s", error)
