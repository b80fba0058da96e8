"""What a script gives to `join` and `sync`, and what it can ask of a run: how far it is, and why to stop."""

from __future__ import annotations

import operator
import os
import platform
import uuid
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from archipelago.broker.config import OWN_TOKENS_PER_STEP_MAX
from archipelago.broker.errors import ConfigError
from archipelago.broker.process import URL_VARIABLE, invitation_at, require_role
from archipelago.broker.redis.keys import checked_name

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


#: No call stands for more steps. A larger number is most likely the count of all steps so far.
CALL_STEPS_MAX = 1 << 24
#: The kinds of numpy's dtypes that a loss may have; V stands for bfloat16.
_NUMBERS = "biufV"


def island_name(address: str | None, given: str | None, option: str = "`island=`") -> str:
    """Return the island's name. An invited island has the name in its join file.

    Args:
        address: The URL of the Redis, or the path of a join file; None for $ARCHIPELAGO_URL.
        given: The name that the user gives; None for that of the join file, or a random one.

    Raises:
        ConfigError: The name cannot be used, or is not the one in the join file (`invitation.other`).
    """
    invited = invitation_at(address or os.environ.get(URL_VARIABLE, ""))
    require_role(invited, "island")
    own = invited.island if invited else ""
    if own and given not in (None, own):
        raise ConfigError(
            f"the join file is the one of the island {own!r}, not of {given!r}",
            f"Leave out {option}, or use the join file of that island.",
            code="invitation.other",
        )
    random = f"{platform.node().split('.')[0][:20] or 'island'}-{uuid.uuid4().hex[:4]}"
    return checked_name(given or own or random, "the island name")


def checked_counts(steps: Any, tokens: Any) -> tuple[int, int]:
    """Return the steps of a call and their tokens, at least one of each. Without tokens, each step is one.

    Raises ConfigError (`loop.argument`) if these are no numbers, or impossible ones.
    """
    try:
        whole = operator.index(steps)
        count = whole if tokens is None else _whole(tokens)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # an array of several numbers gives any of these
        whole, count = 0, 0
    if not 1 <= whole <= CALL_STEPS_MAX or not 0 <= count <= whole * OWN_TOKENS_PER_STEP_MAX:
        raise ConfigError(
            f"steps={_shown(steps)} with tokens={_shown(tokens)} are impossible",
            f"Give whole numbers: the steps since the last call, 1 to {CALL_STEPS_MAX:,}, and the tokens that they "
            f"trained on, at most {OWN_TOKENS_PER_STEP_MAX:,} for each step.",
            code="loop.argument",
        )
    return whole, max(count, 1)


def _whole(tokens: Any) -> int:
    if isinstance(tokens, str | bytes) or (whole := int(tokens)) != tokens:
        raise TypeError(tokens)
    return whole


def require_loss(loss: Any) -> None:
    """Raise ConfigError (`loop.argument`) unless this is a number, an array of numbers that is not empty, or None."""
    if loss is None or isinstance(loss, int | float):
        return
    dtype = getattr(loss, "dtype", None)
    is_number = hasattr(loss, "__array__") if dtype is None else getattr(dtype, "kind", "?") in _NUMBERS
    if not is_number or getattr(loss, "size", 1) == 0:
        raise ConfigError(
            f"loss={_shown(loss)} is not a number",
            "Give the loss of these steps: a number, or an array or tensor of numbers, or leave it out.",
            code="loop.argument",
        )


def _shown(value: Any) -> str:
    """Return a value in words. An array is not read, because a device may still compute it."""
    return repr(value)[:60] if isinstance(value, int | float | complex | str | None) else f"a {type(value).__name__}"
