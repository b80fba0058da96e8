"""Places where a test may kill a process: between two writes to Redis, at the instruction that matters.

`ARCHIPELAGO_FAILPOINT=commit.done` kills the process the first time that it gets there, `commit.done:3` the third
time. Without it a failpoint does nothing. SIGKILL, so that nothing is tidied up: no handler, no `finally`, no flush.
"""

from __future__ import annotations

import itertools
import os
import signal

VARIABLE = "ARCHIPELAGO_FAILPOINT"

FAILPOINTS: dict[str, str] = {
    "publish.placed": "the chunks of a contribution are up, and no entry points to them",
    "publish.done": "a contribution is in the stream, and its island does not know",
    "actions.done": "actions without a contribution are in the stream, and its island does not know",
    "acquire.before": "the lease was seen to be free, and is not taken",
    "acquire.done": "the lease and a new epoch are taken, and the merger does not know",
    "renew.done": "the lease lasts longer, and the merger does not know",
    "release.before": "the lease is about to be given back",
    "release.done": "the lease is given back",
    "announce.before": "the fence is checked for an announcement, and nothing is sent",
    "announce.done": "an announcement is in the stream, and the merger does not know",
    "refuse.before": "contributions are about to be refused",
    "refuse.done": "contributions are refused, and the merger does not know",
    "commit.placed-snapshot": "the chunks of a round's snapshot are up, and nothing points to them",
    "commit.placed-outer": "the chunks of the merger's own state are up, too, and nothing points to them",
    "commit.watched": "the fence is checked for a commit, and nothing is sent",
    "commit.done": "a round is committed, and the merger does not know",
    "trim.before": "entries that a checkpoint covers are about to be let go",
    "trim.done": "entries that a checkpoint covers are gone, and the merger does not know",
    "restore.placed": "the chunks of a run that is restored are up, and the run does not exist",
    "restore.done": "a run is restored, and the merger does not know",
    "checkpoint.before": "a checkpoint is about to be written, and nothing of it is on disk",
    "checkpoint.done": "a checkpoint bears its number, and older ones are still there",
}
"""Each failpoint, and what has happened by the time that a process is killed there."""


def parse_target(text: str) -> tuple[str, int]:
    """Which failpoint, and at which of its times (1 is the first). Raises ValueError for one that does not exist."""
    name, _, times = text.partition(":")
    if name not in FAILPOINTS:
        raise ValueError(f"{VARIABLE}: there is no failpoint {name!r}; there are {', '.join(FAILPOINTS)}")
    if times and not (times.isascii() and times.isdigit() and int(times) > 0):
        raise ValueError(f"{VARIABLE}: {times!r} is not a number from 1 up")
    return name, int(times or 1)


_target, _at = parse_target(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else ("", 0)
_reached = itertools.count(1)


def failpoint(name: str) -> None:
    """Kills this process where the environment says so. Raises ValueError for a name that is not in FAILPOINTS."""
    if name not in FAILPOINTS:
        raise ValueError(f"there is no failpoint {name!r}")
    if name == _target and next(_reached) == _at:
        os.kill(os.getpid(), signal.SIGKILL)
