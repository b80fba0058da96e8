"""What a script gives to `join` and to `sync`, in any framework."""

from __future__ import annotations

import operator
import os
import platform
import uuid
from typing import Any

from archipelago.broker.config import OWN_TOKENS_PER_STEP_MAX
from archipelago.broker.errors import ConfigError
from archipelago.broker.process import URL_VARIABLE, invitation_at, require_role
from archipelago.broker.redis.keys import checked_name

#: No call stands for more steps. A larger number is most likely the count of all steps so far.
CALL_STEPS_MAX = 1 << 24
#: The kinds of numpy's dtypes that a loss may have; V stands for bfloat16.
_NUMBERS = "biufV"


def island_name(address: str | None, given: str | None, option: str = "`island=`") -> str:
    """Return the island's name. An invited island has the name in its join file.

    Args:
        address: The URL of the Redis, or the path of a join file; None for $ARCHIPELAGO_URL.
        given: The name that the user gives; None for that of the join file, or a random one.
        option: What the user gives it with.

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
