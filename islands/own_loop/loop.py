"""An island whose loop belongs to its user. It counts the steps that the loop reports, and never waits."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from archipelago.broker.config import OWN_TOKENS_PER_STEP_MAX
from archipelago.broker.errors import ConfigError
from archipelago.broker.manifest import Manifest
from archipelago.islands.own_loop.tensors import not_finite
from archipelago.islands.sync.adoption import AnyReplica
from archipelago.islands.sync.connection.link import Link
from archipelago.islands.sync.connection.outbox import Draft
from archipelago.islands.sync.connection.snapshots import Arrival
from archipelago.islands.sync.connection.uplink import averaged
from archipelago.islands.sync.heartbeat import SMOOTHING
from archipelago.islands.sync.participant import Host, Participant

#: No call stands for more steps. A larger number is most likely the count of all steps so far.
CALL_STEPS_MAX = 1 << 24
#: The kinds of numpy's dtypes that a loss may have; V stands for bfloat16.
_NUMBERS = "biufV"


def checked_counts(steps: Any, tokens: Any) -> tuple[int, int]:
    """Return the steps of a call and their tokens, at least one of each. Without tokens, each step is one.

    Raises:
        ConfigError: These are no numbers, or impossible ones (`loop.argument`).
    """
    try:
        whole = operator.index(steps)
        count = whole if tokens is None else _whole(tokens)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # an array of several numbers gives any of these
        whole, count = 0, 0
    if not 1 <= whole <= CALL_STEPS_MAX or not 0 <= count <= whole * OWN_TOKENS_PER_STEP_MAX:
        raise ConfigError(
            f"steps={_shown(steps)} with tokens={_shown(tokens)} are impossible",
            f"Give the steps since the last call, 1 to {CALL_STEPS_MAX:,}, and the tokens that they trained on, at "
            f"most {OWN_TOKENS_PER_STEP_MAX:,} for each step.",
            code="loop.argument",
        )
    return whole, max(count, 1)


def _whole(tokens: Any) -> int:
    if isinstance(tokens, str | bytes):
        raise TypeError(tokens)
    return int(tokens)


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


#: The exponent of a bfloat16 number. All its bits are set in NaN and in infinity.
_EXPONENT = np.uint16(0x7F80)


def is_sound(draft: Draft) -> bool:
    """Return whether no value of a contribution is NaN or infinite.

    The first array of every codec holds either the numbers themselves, as float32 or the bits of bfloat16, or the
    scales of its blocks as the bits of bfloat16. A block with a NaN or an infinity has the scale NaN.
    """
    first = np.asarray(draft.parts[0])
    if first.dtype == np.uint16:
        return not bool(np.any((first & _EXPONENT) == _EXPONENT))
    return bool(np.all(np.isfinite(first)))


#: Seconds between two heartbeats that the loop prepares. Preparing one costs more than everything else of a call.
BEAT_SECONDS = 0.5
#: A loop that does not sync for this long is not waited for, unless its calls usually take so long.
STALL_SECONDS = 60.0
#: A loop whose calls are far apart has not stopped before this many of them.
STALL_CALLS = 20


class Parameters(Protocol):
    """The parameters of a user's loop, by the names of the run's tensors."""

    def named(self) -> Mapping[str, Any]:
        """Return the present parameters by name. Raises ConfigError if they are not those of the run."""

    def replace(self, named: Mapping[str, Any]) -> None:
        """Replace the parameters between two steps."""

    def are_there(self) -> bool:
        """Return whether the parameters can be read. Those that were given to a later step cannot."""

    def require_frozen(self) -> None:
        """Raise ConfigError (`loop.frozen-changed`) if a tensor that is not trained has changed. This may wait."""

    def not_finite(self) -> list[str]:
        """Return the names of those with NaN or infinity. This waits for the device."""


class OwnLoop(Participant):
    """One island of one run. The session calls `turn` after the steps of its user's loop, then `leave`."""

    diverged_max = 1

    def __init__(
        self,
        name: str,
        manifest: Manifest,
        link: Link,
        replica: AnyReplica,
        parameters: Parameters,
        arrivals: Sequence[Arrival],
        host: Host,
        optimizer_leaves: Callable[[], Sequence[Any] | None] | None,
        clock: Callable[[], float] = time.monotonic,
        incarnation: str = "",
    ) -> None:
        """Begin from published snapshots, which the replica has taken already.

        Args:
            parameters: The parameters of the loop.
            optimizer_leaves: Returns copies of the inner optimiser's arrays, or None if they are not there now. Without
                it, newcomers ask other islands.
            name, manifest, link, replica, arrivals, host, clock, incarnation: As for a `Participant`.
        """
        super().__init__(name, manifest, link, replica, arrivals, host, clock, incarnation)
        link.stall_seconds = STALL_SECONDS
        link.gives_state = optimizer_leaves is not None
        self.tokens_per_step = 0.0
        self.parameters = parameters
        self._optimizer_leaves = optimizer_leaves
        self._turned_at = clock()
        self._call_seconds = 0.0  # between two calls, as a moving average without pauses
        self._long_call = (1, 0.0)  # the steps and seconds of the last call, if it was a long one
        self._beat_due = -math.inf
        #: How many contributions and steps there were when parameters were checked last.
        self._checked = (0, 0)

    def begin(self) -> None:
        """Let the first step begin now. What came before it, such as compilation, is not a part of its time."""
        self._turned_at = self.clock()
        self.beat("training")

    def turn(self, steps: int, tokens: int, loss: Any) -> None:
        """Count steps, adopt what has arrived and send what is due.

        It waits for the device only if nothing was sent for an interval, to look whether the parameters are finite.

        Args:
            steps: Inner steps since the last call.
            tokens: Their tokens.
            loss: Their mean loss: a number, an array that a device may still compute, or None.

        Raises:
            DivergedError: The loss or a parameter is not finite.
            ConfigError: The parameters are not those of the run.
        """
        self.count(steps, tokens, loss)
        self.require_sound()
        self.boundary()
        if self._is_check_due() and (found := self.parameters.not_finite()):
            raise not_finite(found, found)
        if self._turned_at >= self._beat_due:
            self._beat_due = self._turned_at + BEAT_SECONDS
            self.beat("training")

    def count(self, steps: int, tokens: int, loss: Any) -> None:
        """Count steps of the loop, as the first half of `turn`."""
        self.stepped(steps, tokens, is_held=self.is_held)
        now = self.clock()
        seconds, self._turned_at = now - self._turned_at, now
        self._note_speed(steps, seconds)
        self.tokens_per_step = averaged(self.tokens_per_step, tokens / steps, SMOOTHING)
        if loss is not None:
            self.losses.add(loss)

    def _note_speed(self, steps: int, seconds: float) -> None:
        """Note the time of a call. A pause says nothing about the speed, but a loop whose calls are all long has one.

        A long call counts if the one before it was long as well, and then as the faster of both, because the first step
        of a loop compiles.
        """
        before, self._long_call = self._long_call, (steps, seconds if seconds > STALL_SECONDS else 0.0)
        if self._long_call[1]:
            if not before[1]:
                return
            steps, seconds = min(before, self._long_call, key=lambda call: call[1] / call[0])
        self.speed.stepped(steps, seconds)
        self._call_seconds = averaged(self._call_seconds, seconds, SMOOTHING)
        self.link.stall_seconds = max(STALL_SECONDS, STALL_CALLS * self._call_seconds)

    def require_sound(self) -> None:
        """Raise the error that names a tensor, if a contribution was not sent because it was not finite."""
        if self.link.channels.unsound:
            found = self.parameters.not_finite() if self.parameters.are_there() else []
            raise not_finite(found, self.manifest.fragments[self.link.channels.unsound[0]])

    def _is_check_due(self) -> bool:
        """Return whether nothing was sent for an interval, as without a merger. What is sent is checked then."""
        sent, steps = self._checked
        is_due = sent == self.sequence and self.totals.steps - steps >= self.config.sync.interval
        if is_due or sent != self.sequence:
            self._checked = self.sequence, self.totals.steps
        return is_due

    # -- what a participant needs -------------------------------------------------------------------------------------

    @property
    def params(self) -> Mapping[str, Any]:
        """The parameters by name."""
        return self.parameters.named()

    def set_params(self, params: Mapping[str, Any]) -> None:
        """Replace the parameters."""
        self.parameters.replace(params)

    def optimizer_leaves(self) -> Sequence[Any] | None:
        """Return copies of the inner optimiser's arrays."""
        return None if self._optimizer_leaves is None else self._optimizer_leaves()

    @property
    def draft_check(self) -> Callable[[Draft], bool]:
        """Let no NaN leave the island."""
        return is_sound
