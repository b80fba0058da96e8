"""What a script can ask of a run that it has joined: how far the run is, and whether and why to stop training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from archipelago.broker.errors import ConfigError

#: Why a script is to stop training. The processes of one island tell each other the number of the reason.
REASONS = (
    "",  #: it goes on
    "signalled",  #: SIGTERM has arrived
    "completed",  #: the run has made all of its steps
    "drained",  #: the operator asked the island to leave
    "expelled",  #: the operator or a rule of the run excludes the island from now on
    "replaced",  #: a newer process has the island's name
    "stranded",  #: no merger served the run for as many steps as the whole run has
    "left",  #: the script has left by itself, or after an error
)


class Clock(NamedTuple):
    """What the loop asks after each step, under the names that it asks for."""

    reason: str = ""
    step: int = 0
    steps: int = 0


class Joined(ABC):
    """A run that a script has joined, in each process of an island."""

    _run: str
    _island = ""

    @abstractmethod
    def _clock(self) -> Clock:
        """Return what `finished`, `reason`, `step` and `steps` say."""

    @property
    def island(self) -> str:
        """The name of this island."""
        return self._island

    @property
    def finished(self) -> bool:
        """Whether to stop training. `reason` says why."""
        return bool(self.reason)

    @property
    def reason(self) -> str:
        """Why to stop training: one of `REASONS`, and "" while there is none. It stays when the island has left."""
        return self._clock().reason

    @property
    def step(self) -> int:
        """The run's clock in steps, for a schedule of the learning rate. It follows the fastest island."""
        return self._clock().step

    @property
    def steps(self) -> int:
        """The length of the run in steps, which an operator can change."""
        return self._clock().steps

    def _require_over(self) -> None:
        """Raise ConfigError (`loop.left`) while there is no end of the run to wait for."""
        if not self.reason:
            is_training = bool(self.steps)
            raise ConfigError(
                f"this island {'still trains in' if is_training else 'has not joined'} the run {self._run!r}",
                "Call `final` once `run.finished` is true, or after the `with`. `run.leave()` leaves earlier.",
                code="loop.left",
            )

    def __repr__(self) -> str:
        clock = self._clock()
        state = clock.reason or ("training" if clock.steps else "not joined")
        return f"<run {self._run!r}, island {self._island!r}, step {clock.step:,} of {clock.steps:,}: {state}>"
