"""What the processes of one island in JAX compute together: our worker's, and those of a script.

All of them run the same programs in the same order, each on its own part of the arrays. Each method here is called in
all processes. The leader's calls tell the others, who make the same ones without values, which the leader shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from archipelago.broker.codecs import Parts, Vector
from archipelago.islands.sync.adoption import Parameters
from archipelago.islands.sync.arrays import Tensors
from archipelago.islands.sync.replica import Replica
from archipelago.islands.team.jax_team import JaxTeam, whole
from archipelago.islands.team.protocol import Said, Work
from archipelago.islands.user_loop.parameters import LoopState, State

if TYPE_CHECKING:
    from archipelago.islands.computation import Computation


class TeamReplica(Replica):
    """The replica in each process. Only the leader has vectors, and only it uses what it measures."""

    def __init__(self, team: JaxTeam, *about: Any, **more: Any) -> None:
        super().__init__(*about, **more)
        self._team = team

    def begin(self, vectors: Sequence[Vector] = ()) -> Tensors:
        self._team.tell(Work.BEGIN)
        fragments = range(len(self.sizes))
        return super().begin([self._shared(p, vectors[p] if vectors else None) for p in fragments])

    def merged(self, vectors: Sequence[Vector] = ()) -> Tensors:
        self._team.tell(Work.EVALUATE)
        fragments = range(len(self.sizes))
        return super().merged([self._shared(p, vectors[p] if vectors else None) for p in fragments])

    def warm_up(self, tensors: Mapping[str, Any]) -> None:
        self._team.tell(Work.WARM_UP)
        super().warm_up(tensors)
        self._team.settled(self.references)

    def measure(self, fragment: int, tensors: Mapping[str, Any], codec: str = "") -> Parts:
        self._team.tell(Work.MEASURE, fragment, codec or self.codec)
        parts = super().measure(fragment, tensors, codec)
        self._team.settled(self.references[fragment])
        return parts

    def prepare(self, fragment: int, new_N: Vector) -> Vector:
        """Leave a snapshot in the memory of the host, from which all processes get it."""
        return new_N

    def adopt(self, fragment: int, tensors: Mapping[str, Any], new_N: Vector | None = None) -> Tensors:
        self._team.tell(Work.ADOPT, fragment)
        return self._team.settled(super().adopt(fragment, tensors, self._shared(fragment, new_N)))  # type: ignore[no-any-return]

    def _shared(self, fragment: int, vector_N: Vector | None) -> Vector:
        own_N = np.zeros(self.sizes[fragment], np.float32) if vector_N is None else vector_N
        shared_N = self._team.share([own_N])[0]
        return shared_N if vector_N is None else vector_N  # in the leader, what was shared is another copy


class TeamState(LoopState):
    """The optimiser's state in each process. Only the leader gives it to peers, and takes theirs."""

    def __init__(self, team: JaxTeam, *about: Any) -> None:
        super().__init__(*about)
        self._team = team

    def _copied(self, leaves: Iterable[Any]) -> list[Any]:
        """Return copies in the memory of the host, gathered one at a time."""
        self._team.tell(Work.GIVE_STATE)
        return [whole(leaf) for leaf in leaves]

    def taken(self, values: Iterable[Any] = ()) -> State:
        """Return the state with the arrays of a peer, which the leader shares one at a time."""
        self._team.tell(Work.TAKE_STATE)
        given = values or (np.zeros(leaf.shape, leaf.dtype) for leaf in self.travelling().values())
        return super().taken(self._team.share([np.asarray(each)])[0] for each in given)


def do_together(said: Said, replica: Any, parameters: Parameters, state: LoopState | None) -> None:
    """Do what the leader says with the parameters and the optimiser's state of this process."""
    match said.work:
        case Work.WARM_UP:
            replica.warm_up(parameters.named())
        case Work.MEASURE:
            replica.measure(said.about, parameters.named(), said.codec_name)
        case Work.ADOPT:
            parameters.replace(replica.adopt(said.about, parameters.named()))
        case Work.GIVE_STATE if state is not None:
            state.copies()


# -- our worker --------------------------------------------------------------------------------------------------------


def follow(team: JaxTeam, computation: Computation, sample: Any, stopped: Callable[[], bool]) -> Said:
    """Do what the leader says until the island ends, and return its last message. `sample` is like its batches."""

    def do(said: Said) -> None:
        match said.work:
            case Work.BEGIN:
                computation.begin(())
            case Work.TRY:
                computation.try_steps(sample, said.steps)
            case Work.STEP:
                computation.step(sample, said.step, said.steps)
            case Work.TAKE_STATE:
                computation.use(())
            case _:
                do_together(said, computation.replica, computation, computation.state)

    return team.hear(do, stopped)
