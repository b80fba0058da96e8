"""How a user's loop leaves its run: with its newest progress, or saying why that is not sent."""

from __future__ import annotations

import logging

from archipelago.broker.errors import ConfigError, DivergedError
from archipelago.islands.own_loop.loop import OwnLoop

log = logging.getLogger(__name__)


def frozen_fault(loop: OwnLoop) -> ConfigError | None:
    """Return the error that the parameters are not those of the run any more, before the newest progress is sent."""
    try:
        if loop.parameters.are_there():
            loop.parameters.require_frozen()
    except ConfigError as error:
        return error
    return None


def leave_cleanly(loop: OwnLoop) -> None:
    """Send all progress and leave. Parameters that went into a later step are not there any more."""
    state = "done" if loop.finished else "left"
    if loop.must_leave:
        log.warning("leaves: %s", loop.leave_reason()[1])
    if not loop.parameters.are_there():
        kind, reason = loop.leave_reason()
        log.warning("the progress of the newest steps is lost: the parameters of the last `sync` were donated since")
        loop.give_up(kind, reason)
    elif not loop.leave(state):
        log.warning("the broker did not take %s contributions", loop.link.channels.backlog)
    log.info("%s after %s steps, %s tokens", state, loop.totals.steps, f"{loop.totals.tokens:,}")


def leave_after(loop: OwnLoop, error: BaseException) -> None:
    """Say why the island leaves, and send nothing more, because its parameters may be broken."""
    reason = error.what if isinstance(error, DivergedError) else f"{type(error).__name__}: {error}"
    log.warning("leaves without sending its newest progress: %s", reason)
    loop.give_up("diverged" if isinstance(error, DivergedError) else "left", reason)
