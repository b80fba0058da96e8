"""How a loop leaves its run: at a signal, with its newest progress, or saying why that is not sent.

After SIGTERM, an island leaves at the next step boundary, unless the script handles the signal itself.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType

from archipelago.broker.errors import ArchipelagoError, ConfigError, DivergedError
from archipelago.islands.sync.participant import Participant

log = logging.getLogger(__name__)


#: The exit status of a process that SIGTERM has ended.
TERMINATED = 128 + signal.SIGTERM


class StoppedBySignal(SystemExit):
    """The end of a script that SIGTERM has asked to stop. All processes of one island raise it at the same step."""

    def __init__(self) -> None:
        super().__init__(TERMINATED)


class StopSignal:
    """Notices SIGTERM while it is watched.

    Attributes:
        has_arrived: Whether the signal has arrived.
    """

    def __init__(self) -> None:
        self.has_arrived = False
        self._is_watched = False
        self._was_told = False
        self._process = os.getpid()

    def watch(self) -> None:
        """Handle the signal from now on, in the main thread only, and only if the script has no handler of its own."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._arrive)
            self._is_watched = True

    def release(self) -> None:
        """Give the signal its default meaning again, unless the script has given it another since."""
        is_main = threading.current_thread() is threading.main_thread()
        if self._is_watched and is_main and signal.getsignal(signal.SIGTERM) == self._arrive:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._is_watched = False

    def require_heard(self, has_arrived: bool) -> None:
        """Raise StoppedBySignal at the second call after the signal, for a loop that does not look at `finished`.

        Args:
            has_arrived: Whether it has arrived, in this process or in another one of the island.
        """
        if has_arrived and self._was_told:
            raise StoppedBySignal
        self._was_told = has_arrived

    def _arrive(self, number: int, _frame: FrameType | None) -> None:
        # A second signal ends the process at once. The first one ends forked processes, such as those of a data loader,
        # and a script that has left the run in another thread, which cannot change the handler.
        if self.has_arrived or not self._is_watched or os.getpid() != self._process:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.has_arrived = True


def frozen_fault(loop: Participant) -> ConfigError | None:
    """Return the error that the parameters are not those of the run any more, before the newest progress is sent."""
    try:
        if loop.parameters.are_there():
            loop.parameters.require_frozen()
    except ConfigError as error:
        return error
    return None


def leave_cleanly(loop: Participant) -> str:
    """Send all progress and leave. Parameters that went into a later step are not there any more.

    Returns:
        `done` at the end of the run, `replaced` if a newer process has the island's name, else `left`.
    """
    if loop.parameters.are_there():
        state = loop.end()
    else:
        log.warning("the progress of the newest steps is lost: the parameters of the last `sync` were donated since")
        loop.give_up(*loop.leave_reason())
        state = "left"
    log.info("%s after %s steps, %s tokens", state, loop.totals.steps, f"{loop.totals.tokens:,}")
    return state


def leave_after(loop: Participant, error: BaseException) -> None:
    """Say why the island leaves, and send nothing more, because its parameters may be broken."""
    reason = error.what if isinstance(error, ArchipelagoError) else f"{type(error).__name__}: {error}"
    log.warning("leaves without sending its newest progress: %s", reason)
    loop.give_up("diverged" if isinstance(error, DivergedError) else "left", reason)
