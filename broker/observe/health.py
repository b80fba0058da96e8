"""The health of a worker, for the probes of an orchestrator: `/healthz` and `/readyz`, beside `/metrics`.

`/healthz` fails when the worker's loop has made no turn for a long time, so that it should be killed and started again.
`/readyz` holds once the worker has joined the run. Neither depends on Redis: a worker survives any outage of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

#: A loop that has made no turn for this long hangs. One turn may hold a slow inner step, a compilation, or the merge of
#: a large fragment, so the bound is far above all of them.
HANG_SECONDS: Final = 900.0


class Health:
    """The health of one worker. Its threads may ask at any time.

    The worker is starting, then its loop runs, then it leaves. Only the loop is watched: it makes a turn now and then.

    Args:
        clock: Monotonic seconds.
        hang_seconds: The longest turn of a loop that does not hang.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, hang_seconds: float = HANG_SECONDS) -> None:
        self._clock, self._hang_seconds = clock, hang_seconds
        self._phase: Callable[[], str] = lambda: "starting"
        #: When the loop made its last turn; infinity before its first turn and after its last one.
        self._turned_at = math.inf

    def watched(self, stopped: Callable[[], bool], phase: Callable[[], str]) -> Callable[[], bool]:
        """Return `stopped` for a loop that asks it once in each turn. The loop runs from its first question on.

        Args:
            stopped: Whether a signal has arrived.
            phase: What the loop does, in a few words.
        """

        def ask() -> bool:
            if stopped():
                self.leave()
                return True
            self._phase, self._turned_at = phase, self._clock()
            return False

        return ask

    def leave(self) -> None:
        """Note that the loop has ended, and that the worker leaves."""
        self._phase, self._turned_at = lambda: "leaving", math.inf

    def alive(self) -> tuple[bool, str]:
        """Return whether the loop is alive, or not watched, and what to say about it."""
        silent = self._clock() - self._turned_at
        if silent > self._hang_seconds:
            return False, f"{self._phase()}, but the loop has made no turn for {silent:.0f} s"
        return True, self._phase()

    def ready(self) -> tuple[bool, str]:
        """Return whether the worker has joined the run and works, and what to say about it."""
        is_alive, text = self.alive()
        return is_alive and self._turned_at < math.inf, text
