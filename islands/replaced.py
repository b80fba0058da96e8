"""What an island remembers after a newer process took its name over, so that a supervisor cannot start a fight.

A supervisor restarts a process that has ended. Without a record the restarted island would take the name back, its
rival would leave and be restarted too, and so on. The record names the rival. While that lives, an island of this name
does not start in the same folder.
"""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Sequence
from pathlib import Path

from archipelago.broker.errors import ConfigError
from archipelago.broker.files import write_atomically
from archipelago.broker.machine import has_ended
from archipelago.broker.presence import Heartbeat, Presence

RECORD_FILE = "replaced.json"

log = logging.getLogger(__name__)


def remember(folder: Path, name: str, incarnation: str) -> None:
    """Record that the incarnation of a newer process has the name. An empty one is unknown, and not recorded."""
    try:
        if incarnation:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / RECORD_FILE, json.dumps({"island": name, "by": incarnation}) + "\n")
    except OSError as error:
        log.warning("the loss of the name cannot be recorded in %s: %s", folder, error.strerror)


def require_free(folder: Path, name: str, presences: Sequence[Presence]) -> None:
    """Raise ConfigError if the process that took this island's name over still lives.

    Args:
        folder: The folder of the island.
        name: Its name.
        presences: The islands of the run.
    """
    path = folder / RECORD_FILE
    rival = _rival(path, name)
    if rival is None:
        return
    for beat in (presence.heartbeat for presence in presences if presence.is_live):
        if (beat.island, beat.incarnation) == (name, rival) and not _has_ended_here(beat):
            raise ConfigError(
                f"another process has taken over the name {name!r}: process {beat.pid} on {beat.host!r:.80}",
                f"Stop that process, or give this island another --name. Delete {path} to take the name back.",
                code="island.replaced",
            )
    path.unlink(missing_ok=True)


def _rival(path: Path, name: str) -> str | None:
    try:
        found = json.loads(path.read_bytes()[:4096])
        return str(found["by"]) if found["island"] == name else None
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def _has_ended_here(beat: Heartbeat) -> bool:
    """Return whether the process ran on this machine and has ended, although its heartbeat is recent."""
    return beat.host == platform.node()[:200] and has_ended(beat.pid)
