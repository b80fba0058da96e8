"""Work beside the rounds, on threads of their own: downloads, commits, compactions and checkpoints.

In virtual time there are no threads, and each job is done before the next line of the merger.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from archipelago.broker.errors import ArchipelagoError
from archipelago.broker.shards.reader import Spawn

T = TypeVar("T")
#: How often a merger that waits for a job, or computes for long, looks whether its lease must be renewed.
BETWEEN_SECONDS = 0.25


#: Returns what runs the jobs of one kind, on that many threads of that name. Jobs begin in order.
NewExecutor = Callable[[str, int], Spawn]


def in_background(kind: str, threads: int) -> Spawn:
    """Return what runs jobs on threads of that name."""
    return ThreadPoolExecutor(threads, kind).submit


def at_once(job: Callable[[], T], /) -> Future[T]:
    """Run the job before returning."""
    future: Future[T] = Future()
    try:
        future.set_result(job())
    except (ArchipelagoError, OSError) as error:
        future.set_exception(error)
    return future


def awaited(future: Future[T], between: Callable[[], object]) -> T:
    """Return the result of a job, or raise its error. `between` is called meanwhile, every BETWEEN_SECONDS."""
    while True:
        try:
            return future.result(BETWEEN_SECONDS)
        except TimeoutError:
            if future.done():  # just now, or it is the error of the job
                return future.result()
        between()


def beside(spawn: Spawn, call: Callable[[], T], between: Callable[[], object]) -> T:
    """Make a call as a job, and wait for it as `awaited` does. What it logs has the name of this thread."""
    name = threading.current_thread().name

    def named() -> T:
        threading.current_thread().name = name
        return call()

    return awaited(spawn(named), between)
