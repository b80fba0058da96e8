"""The name of an island."""

from __future__ import annotations

import os
import platform
import uuid

from archipelago.broker.errors import ConfigError
from archipelago.broker.process import URL_VARIABLE, invitation_at, require_role
from archipelago.broker.redis.keys import checked_name


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
    if invited is not None and given not in (None, invited.name):
        raise ConfigError(
            f"the join file is the one of the island {invited.name!r}, not of {given!r}",
            f"Leave out {option}, or use the join file of that island.",
            code="invitation.other",
        )
    random = f"{platform.node().split('.')[0][:20] or 'island'}-{uuid.uuid4().hex[:4]}"
    return checked_name(given or (invited.name if invited else random), "the island name")
