"""When a process of an island counts as lost, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable

from archipelago.broker.process import OUTAGE

#: A process that has been silent for this long is lost. One that ends closes its connection, which is noticed at once.
SILENCE_SECONDS = 15.0
BEAT_SECONDS = 1.0
#: Called once, in any thread, with the sentence that says which process was lost, and the exit status.
OnLost = Callable[[str, int], None]
#: The exit status of all processes of an island that has lost one.
LOST_STATUS = OUTAGE


def in_words(error: Exception) -> str:
    """Return the reason of a lost connection."""
    if isinstance(error, TimeoutError):
        return f"silent for {SILENCE_SECONDS:g} s"
    if isinstance(error, OSError):
        return (error.strerror or str(error) or type(error).__name__).lower()
    return str(error)
