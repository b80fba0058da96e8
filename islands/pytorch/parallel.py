"""One island of several processes. Only the leader, the first of them, talks to Redis.

This module is for DistributedDataParallel, whose processes all hold the whole model; `sharded` is for FSDP2. At each
step boundary the leader does what an island does. Then it says in one small message what that was, and hands the
parameters that it adopted to the others, which all processes hold again in the same bits. The others learn from the
same message whether to stop. Losing a process means losing the island, as it does for DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist

from archipelago.broker.errors import ConfigError
from archipelago.islands.own_loop.leaving import StoppedBySignal, StopSignal
from archipelago.islands.pytorch.joining import JoinedRun, Joining
from archipelago.islands.pytorch.module import ModuleParameters
from archipelago.islands.pytorch.state import OptimizerState


class Said(NamedTuple):
    """What the leader says after a step boundary, in numbers.

    Attributes:
        has_left: Whether the leader has left because of an error.
        changed: The number of tensors that it adopted.
        finished: Whether to stop.
        stopping: Whether SIGTERM has arrived in any of the processes. They then all stop at the same step.
        step: The run's clock.
        steps: The run's length.
        has_state: Whether the optimisers' state follows.
        work: What all processes do together before the turn of the leader goes on; 0 if the turn has ended.
        about: The number of the fragment or tensor that the work is about.
    """

    has_left: int = 0
    changed: int = 0
    finished: int = 0
    stopping: int = 0
    step: int = 0
    steps: int = 0
    has_state: int = 0
    work: int = 0
    about: int = 0


class ProcessTeam:
    """The processes of one island. Messages go over the hosts' memory, and parameters over the processes' own group."""

    def __init__(self, group: Any, ranks: Sequence[int] = ()) -> None:
        """Make the group for messages. All processes of the island do this at the same time.

        Args:
            group: The processes' own group; None if there is none for all of them.
            ranks: Their ranks, if there is no group. The first one leads.
        """
        self._group = group
        self.ranks = list(ranks) or dist.get_process_group_ranks(group)
        self._leader = self.ranks[0]
        self.messages = dist.new_group(self.ranks, backend="gloo", use_local_synchronization=True)

    def exchange(self, said: Said) -> Said:
        """Return what the leader gives to this call. The others give nothing but whether they have to stop."""
        message = torch.tensor([int(value) for value in said])
        dist.all_reduce(message, group=self.messages)
        heard = Said(*message.tolist())
        return heard._replace(finished=heard.finished or heard.stopping)

    def share_on_host(self, tensor: Any) -> None:
        """Overwrite a tensor of the host by the leader's."""
        dist.broadcast(tensor, self._leader, group=self.messages)

    def share(self, tensors: Sequence[Any]) -> None:
        """Overwrite tensors of the model by the leader's, in place."""
        for tensor in tensors:
            dist.broadcast(tensor.detach(), self._leader, group=self._group)

    def share_chosen(self, parameters: ModuleParameters, chosen: Sequence[int], count: int) -> None:
        """Overwrite some tensors of the model by the leader's, who gives their places. All know how many they are."""
        places = torch.tensor(list(chosen) if chosen else [0] * count)
        self.share_on_host(places)
        tensors = list(parameters.tensors.values())
        self.share([tensors[place] for place in places.tolist()])

    def share_state(self, state: OptimizerState) -> None:
        """Overwrite the optimisers' state by the leader's."""
        values = state.values()
        for value in values:
            self.share_on_host(value)
        state.use(values)


class Leader(JoinedRun):
    """The island's membership, in the process that leads."""

    def __init__(self, group: Any, given: Joining) -> None:
        super().__init__(given)
        self._group = group
        self._team: Any = None  # a ProcessTeam, or that of a mesh
        self._said = Said()

    def __enter__(self) -> Self:
        """Join the run, and hand the parameters and the optimisers' state to the others."""
        self._team = team = self._new_team()
        try:
            super().__enter__()
        except BaseException:
            self._tell_of_error()
            raise
        try:
            self._said = team.exchange(Said(has_state=self.moments != "fresh", **self._clock()))
            self._share(team)
        except BaseException as error:  # without the others there is no island, and no `with` block that would end it
            self._leave(error)
            raise
        return self

    def _new_team(self) -> ProcessTeam:
        return ProcessTeam(self._group)

    def _share(self, team: ProcessTeam) -> None:
        """Hand the first parameters and the optimisers' state to the others."""
        team.share(list(self._parameters.tensors.values()))
        if self._said.has_state and self._state is not None:
            team.share_state(self._state)

    def _tell_of_error(self) -> None:
        """Tell the others that the leader leaves because of an error, which may be that they are gone."""
        with suppress(RuntimeError):
            if self._team is not None:
                self._team.exchange(Said(has_left=True))

    def sync(self, *, tokens: int | None = None, loss: Any = None, steps: int = 1) -> None:
        """Sync, and tell the others. `tokens` counts those of all processes."""
        team = self._team
        try:
            super().sync(tokens=tokens, loss=loss, steps=steps)
        except BaseException:
            if not self._has_left:
                self._tell_of_error()
            raise
        if team is None or self._replica is None:
            return
        changed = self._replica.take_changed()
        self._said = team.exchange(Said(changed=len(changed), **self._clock()))
        if changed:
            places = {name: place for place, name in enumerate(self._parameters.tensors)}
            team.share_chosen(self._parameters, [places[name] for name in changed], len(changed))
        self._stop.require_heard(bool(self._said.stopping))

    def _heed_signal(self) -> None:
        """Do nothing yet: all processes heed the signal together, at the end of `sync`."""

    def _clock(self) -> dict[str, Any]:
        stopping = self._stop.has_arrived
        return {"finished": super().finished, "stopping": stopping, "step": super().step, "steps": super().steps}

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

    def __init__(self, group: Any, given: Joining) -> None:
        self._group = group
        self._parameters, self._state = given.parts()
        self._team: Any = None  # while this process is in the run
        self._said = Said()
        self._stop = StopSignal()
        self.island, self.moments = "", "fresh"

    def __enter__(self) -> Self:
        """Take the parameters and the optimisers' state from the leader.

        Raises:
            ConfigError: The leader could not join (`loop.leader-left`).
        """
        self._team = team = self._new_team()
        self._rehearse()
        self._hear(team)
        self._share(team)
        if self._said.has_state and self._state is not None:
            self.moments = "the leader"
        self._stop.watch()
        return self

    def _new_team(self) -> ProcessTeam:
        return ProcessTeam(self._group)

    def _rehearse(self) -> None:
        if self._state is not None:
            self._state.rehearse()

    def _share(self, team: ProcessTeam) -> None:
        """Take the first parameters and the optimisers' state."""
        team.share(list(self._parameters.tensors.values()))
        if self._said.has_state and self._state is not None:
            team.share_state(self._state)

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
        """Follow the leader no longer."""
        self._team = None

    def sync(self, *, tokens: int | None = None, loss: Any = None, steps: int = 1) -> None:
        """Take from the leader what it adopted. The arguments are those of the leader's call.

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
        if self._said.changed:
            self._team.share_chosen(self._parameters, [], self._said.changed)
        self._stop.require_heard(bool(self._said.stopping))

    def _hear(self, team: ProcessTeam) -> None:
        self._said = team.exchange(Said(stopping=self._stop.has_arrived))
        if self._said.has_left:
            raise ConfigError(
                "the leader of this island (rank 0) has left the run",
                "See the error of that process, and start the island again.",
                code="loop.leader-left",
            )

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
