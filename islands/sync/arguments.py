"""What a script gives to `sync`: the steps of a call, their tokens and their loss."""

from __future__ import annotations

import operator
from typing import Any

from archipelago.broker.config import OWN_TOKENS_PER_STEP_MAX
from archipelago.broker.errors import ConfigError

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
