"""Failpoints: named places between two writes at which a test can kill the process.

`ARCHIPELAGO_FAILPOINT=commit.done` kills the process when it first reaches that place, and `commit.done:3` when it
reaches it for the third time. Without the variable a failpoint does nothing. The process gets SIGKILL, so that no
handler, no `finally` block and no flush runs.
"""

from __future__ import annotations

import os
import signal

VARIABLE = "ARCHIPELAGO_FAILPOINT"

#: Each failpoint, and the state of the run when a process is killed there.
FAILPOINTS: dict[str, str] = {
    "publish.placed": "the chunks of a contribution are stored, and no entry points to them",
    "publish.done": "a contribution is in the stream, and its island does not know",
    "acquire.before": "the merger has seen that the lease is free, and has not taken it",
    "acquire.done": "the lease and a new epoch are taken, and the merger does not know",
    "renew.done": "the lease is extended, and the merger does not know",
    "release.before": "the lease is about to be given back",
    "release.done": "the lease is given back",
    "announce.before": "an announcement is about to be made",
    "announce.done": "an announcement is in the stream, and the merger does not know",
    "refuse.before": "contributions are about to be refused",
    "refuse.done": "contributions are refused, and the merger does not know",
    "compact.placed": "the chunks of a compaction are stored, and nothing points to them",
    "compact.done": "a compaction has replaced an earlier one, and the merger does not know",
    "commit.placed": "the chunks of a round's difference are stored, and nothing points to them",
    "commit.done": "a round is committed, and the merger does not know",
    "trim.before": "entries that a checkpoint covers are about to be deleted",
    "trim.done": "entries that a checkpoint covers are deleted, and the merger does not know",
    "restore.placed": "the chunks of a restored run are stored, and the run does not exist",
    "restore.done": "a run is restored, and the merger does not know",
    "checkpoint.before": "a checkpoint is about to be written, and no part of it is on disk",
    "checkpoint.done": "a checkpoint is complete under its number, and older ones are not yet deleted",
}


_target, _, _times = os.environ.get(VARIABLE, "").partition(":")
_left = int(_times or 1)
if _target and (_target not in FAILPOINTS or _left < 1):
    raise ValueError(f"{VARIABLE} names no failpoint and no visit of it, counted from 1: {os.environ[VARIABLE]!r}")


def failpoint(name: str) -> None:
    """Kill this process if the environment names this failpoint and visit."""
    global _left
    if name == _target:
        _left -= 1
        if not _left:
            os.kill(os.getpid(), signal.SIGKILL)
