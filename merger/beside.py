"""Work beside the rounds, on threads of their own: downloads, commits, compactions and checkpoints.

In virtual time there are no threads, and each job is done before the next line of the merger.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

from archipelago.broker.errors import ArchipelagoError

T = TypeVar("T")


class Spawn(Protocol):
    """Runs jobs one after the other. The result of a job, or its error, is in the future."""

    def __call__(self, job: Callable[[], T], /) -> Future[T]: ...


#: Returns what runs the jobs of one kind, by the name of the kind.
Beside = Callable[[str], Spawn]


def in_background(kind: str) -> Spawn:
    """Return what runs jobs on one thread of that name."""
    return ThreadPoolExecutor(1, kind).submit


def in_virtual_time(kind: str) -> Spawn:
    """Return `at_once`, for jobs of any kind."""
    return at_once


def at_once(job: Callable[[], T], /) -> Future[T]:
    """Run the job before returning."""
    future: Future[T] = Future()
    try:
        future.set_result(job())
    except (ArchipelagoError, OSError) as error:
        future.set_exception(error)
    return future
