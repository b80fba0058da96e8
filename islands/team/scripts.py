"""A script of several processes as one island, in any framework: the leader is its membership, and the others follow.

What they say to each other is in `protocol`. A framework adds what the processes do together.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Self

from archipelago.broker.codecs import Vector
from archipelago.broker.errors import ConfigError
from archipelago.broker.frozen import FrozenValues
from archipelago.islands.sync.leaving import StoppedBySignal, StopSignal
from archipelago.islands.sync.script import REASONS, Clock, Joined
from archipelago.islands.team.protocol import Said, Team, Work, leader_left
from archipelago.islands.user_loop.held_out import Evaluate, checked_loss, require_evaluate
from archipelago.islands.user_loop.new_run import FirstValues, Frozen
from archipelago.islands.user_loop.session import Session

log = logging.getLogger(__name__)

#: Makes the team, from the call that all processes make, in words.
NewTeam = Callable[[str], Team]
#: What a framework raises if another process is gone.
GONE = (RuntimeError, ValueError, TimeoutError)
#: How long processes that call `final` wait for each other, if its timeout is not longer.
MEETING_SECONDS = 10.0


@dataclass(frozen=True)
class SpreadTensors:
    """The tensors of a model that is spread over processes. The leader gathers them one at a time.

    Attributes:
        names: The names of all tensors, in an order that all processes share.
        gather: Returns the whole tensor of a number in the memory of the leader's host. All processes call it.
        frozen: Returns those that are not trained.
        pieces: From a whole tensor to its bytes.
    """

    team: Team
    names: Sequence[str]
    gather: Callable[[int], Any]
    frozen: Frozen
    pieces: Callable[[Any], Iterator[memoryview]]

    def whole(self, name: str) -> Any:
        """Return a tensor in the memory of the leader's host. Only the leader calls this."""
        number = self.names.index(name)
        self.team.tell(Work.GIVE_TENSOR, number)
        return self.gather(number)

    def frozen_values(self) -> list[FrozenValues]:
        """Return the tensors that are not trained, which the leader gathers when they are read."""

        def read(name: str) -> Iterator[memoryview]:
            yield from self.pieces(self.whole(name))

        return [replace(values, pieces=partial(read, values.name)) for values in self.frozen()]


def create_together(
    tensors: SpreadTensors, create: Callable[[FirstValues, Frozen], bool], vector_of: Callable[[Any], Vector]
) -> bool:
    """Create a run of a model that is spread over processes, all of which call this. Return what `create` returned.

    Args:
        create: Called in the leader, which tells the others which tensors to give.
        vector_of: From a whole tensor to its values as a float32 vector.

    Raises:
        ConfigError: The leader has failed (`loop.leader-left`), or another process does something else
            (`loop.not-together`).
    """
    team = tensors.team
    if team.leads:
        try:
            is_new = create(lambda name: vector_of(tensors.whole(name)), tensors.frozen_values)
        except BaseException:
            with suppress(*GONE):
                team.exchange(Said(has_left=1))
            raise
        team.exchange(Said(finished=is_new))
        return is_new
    said = team.hear(lambda said: tensors.gather(said.about))
    if said.has_left:
        raise leader_left()
    return bool(said.finished)


def told(said: Said, ended: str) -> Clock:
    """Return what a process asks after each step. `ended` says why it has left."""
    return Clock(ended or REASONS[said.finished], said.step, said.steps)


def _meet(team: Team, timeout: float) -> None:
    """Let all processes call `final` together. Raises ConfigError (`loop.not-together`) if one does not."""
    seconds = max(timeout, MEETING_SECONDS)
    try:
        team.meet(seconds)
    except GONE as error:
        raise ConfigError(
            f"not all processes of this island have called `final` within {seconds:g} s",
            "Call it in every process, and not only in that of rank 0.",
            code="loop.not-together",
        ) from error


def _join_call(run: str, evaluate: Evaluate | None) -> str:
    """Return the call of `join` in words. All processes evaluate, or none."""
    return f"join {run}, evaluate=…" if evaluate else f"join {run}"


class Leading(Session):
    """What the leader of several processes adds to the membership of a script."""

    _new_team: NewTeam
    _team: Any = None
    _said = Said()

    def __enter__(self) -> Self:
        """Join the run together with the others."""
        self._stop.watch()  # first: until then, `jax.distributed` takes the signal, and it is lost
        try:
            self._team = self._new_team(_join_call(self._run, self._evaluate))
            super().__enter__()
        except BaseException:
            self._tell_of_error()
            self._stop.release()
            raise
        try:
            self._said = self._team.exchange(self._own_clock())
        except BaseException as error:  # without the others there is no island, and no `with` block that would end it
            self._leave(error)
            raise
        return self

    def _turn(self, steps: Any, tokens: Any, loss: Any) -> None:
        """Sync, and tell the others. `tokens` counts those of all processes."""
        try:
            super()._turn(steps, tokens, loss)
        except BaseException:
            if not self._ended:
                self._tell_of_error()
            raise
        self._said = self._team.exchange(self._own_clock())
        self._stop.require_heard(bool(self._said.stopping))

    def _tell_of_error(self) -> None:
        """Tell the others that the leader leaves because of an error, which may be that they are gone.

        If they may wait for a tensor, they hear of it when this process ends.
        """
        if self._team is not None and not self._is_torn:
            with suppress(*GONE):
                self._team.exchange(Said(has_left=1))

    def _heed_signal(self) -> None:
        """Do nothing yet: all processes heed the signal together, at the end of `sync`."""

    def _own_clock(self) -> Said:
        reason, step, steps = super()._clock()
        return Said(finished=REASONS.index(reason), stopping=self._stop.has_arrived, step=step, steps=steps)

    def _clock(self) -> Clock:
        """Return what the others were told, because all processes must take the same turn."""
        return told(self._said, self._ended)

    def _leave(self, error: BaseException | None, *, awaits_merge: bool = True) -> None:
        """Leave the run. If all processes measure, they do so without an error only, and send the newest progress."""
        if self._ended or self._loop is None:
            return
        # The others also wait where the final parameters may be evaluated.
        evaluates = self._evaluate is not None and (error is None or isinstance(error, StoppedBySignal))
        if not (self._team.leaves_together or evaluates):
            self._team.is_alone = True
            try:
                super()._leave(error, awaits_merge=awaits_merge)
            finally:
                self._team.is_alone = False
        elif error is not None and not isinstance(error, StoppedBySignal):  # the others have stopped to follow
            is_ours = isinstance(error, Exception)
            super()._leave(error if is_ours else RuntimeError(f"stopped by {type(error).__name__}"))
        else:
            try:
                super()._leave(error, awaits_merge=awaits_merge)
            finally:
                with suppress(*GONE):
                    self._team.exchange(Said(finished=True))

    def final(self, timeout: float = 60.0) -> Any:
        """Take the run's own parameters together with the others."""
        self._require_over()
        _meet(self._team, timeout)
        try:
            found = super().final(timeout)
        except BaseException:
            self._tell_of_error()
            raise
        self._team.exchange(Said(finished=True))
        return found

    def _pause(self, seconds: float) -> None:  # what the others wait for must not take long
        super()._pause(seconds)
        self._team.tell(Work.WAIT)


class Following(Joined):
    """The membership of a script in a process that follows the leader."""

    def __init__(self, run: str, island: str | None, new_team: NewTeam, evaluate: Evaluate | None = None) -> None:
        require_evaluate(evaluate)
        self._run, self._island, self._new_team, self._evaluate = run, island or "", new_team, evaluate
        self._team: Any = None
        self._said = Said()
        self._stop = StopSignal()
        self.optimizer_origin, self._ended = "fresh", ""

    @abstractmethod
    def _do(self, team: Any, said: Said) -> None:
        """Do one piece of work with the other processes."""

    def _evaluate_along(self, merged: Callable[[], Any]) -> None:
        """Evaluate the merged parameters with the leader, whose loss counts. An error here ends nothing."""
        try:
            if self._evaluate is not None:
                self._evaluate(merged())
        except Exception as error:  # noqa: BLE001 - as in the leader
            log.warning("`evaluate` failed in this process: %.300s", error)

    def __enter__(self) -> Self:
        """Take the parameters and the optimiser's state from the leader. Raises ConfigError (`loop.leader-left`)."""
        self._stop.watch()  # as in the leader
        try:
            self._team = self._new_team(_join_call(self._run, self._evaluate))
            self._hear()
        except BaseException:
            self._stop.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None or isinstance(error, StoppedBySignal):
                self.leave()
        finally:
            self._ended = self._ended or "left"
            self._stop.release()

    def leave(self) -> None:
        """Follow the leader no longer. If all processes measure, send the newest progress together with it first."""
        if self._ended or self._team is None:
            return
        self._ended = self.reason or "left"
        if not (self._team.leaves_together or self._evaluate):
            return
        try:
            self._team.hear(partial(self._do, self._team))
        except GONE as error:
            log.warning("the leader of this island is gone: %s", error)

    def report(self, *, held_out: Any) -> None:
        """Check a held-out loss. Only that of the leader is recorded."""
        checked_loss(held_out, "`held_out`")

    def _turn(self) -> None:
        """Do with the leader what it does at this step. Raises ConfigError (`loop.leader-left`, `loop.left`)."""
        if self._team is None or self._ended:
            raise ConfigError(
                "this process has not joined the run, or has left it",
                "Call `sync` inside of `with join(...) as run:`.",
                code="loop.left",
            )
        self._hear()
        self._stop.require_heard(bool(self._said.stopping))

    def final(self, timeout: float = 60.0) -> Any:
        """Leave, and take the run's own parameters with the leader. Raises ConfigError (`loop.leader-left`)."""
        self._require_over()
        _meet(self._team, timeout)
        self.leave()
        if self._team.hear(partial(self._do, self._team)).has_left:
            raise leader_left()
        return getattr(self, "params", None)

    def _hear(self) -> None:
        """Do what the leader says, until its turn ends. Raises ConfigError (`loop.leader-left`)."""
        self._said = self._team.hear(partial(self._do, self._team), lambda: self._stop.has_arrived)
        if self._said.has_left:
            raise leader_left()

    def _clock(self) -> Clock:
        return told(self._said, self._ended)
