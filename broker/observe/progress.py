"""Progress of work that takes long: a line after three seconds, then one every ten, and one at the end.

Work that is done sooner prints nothing. In a worker, the lines go to its log; in other verbs, to standard error.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from archipelago.broker.observe.logs import printable

SILENT_SECONDS = 3.0
EVERY_SECONDS = 10.0

log = logging.getLogger(__name__)


@dataclass
class Activity:
    """Something that takes a while.

    Attributes:
        what: The activity in words, such as `loading the model`.
        total: The number of parts that it has; 0 if that is not known.
        done: The number of parts that are done.
    """

    what: str
    total: int = 0
    done: int = 0

    def line(self, seconds: float) -> str:
        words = f"{self.what}: {seconds:.0f} s so far"
        if not self.total:
            return words
        words = f"{words}, {self.done:,} of {self.total:,}"
        if not 0 < self.done < self.total:
            return words
        left = seconds * (self.total - self.done) / self.done
        return f"{words}, about {left:.0f} s left" if left < 120 else f"{words}, about {left / 60:.0f} min left"


@contextmanager
def progress(what: str, total: int = 0, say: Callable[[str], None] | None = None) -> Iterator[Activity]:
    """Say from time to time that the work of the block goes on. The block may set `done` of the activity.

    `say` receives each line; by default, the log or standard error does.
    """
    said = say or _say
    activity, stopped = Activity(what, total), threading.Event()
    began = time.monotonic()

    def watch() -> None:
        pause = SILENT_SECONDS
        while not stopped.wait(pause):
            said(activity.line(time.monotonic() - began))
            pause = EVERY_SECONDS

    thread = threading.Thread(target=watch, name="progress", daemon=True)
    thread.start()
    try:
        yield activity
    finally:
        stopped.set()
        thread.join()
        if (seconds := time.monotonic() - began) >= SILENT_SECONDS:
            said(f"{what}: ended after {seconds:.0f} s")


def _say(line: str) -> None:
    if logging.getLogger().handlers:
        log.info("%s", line)
    else:
        sys.stderr.write(f"{printable(line)}\n")
        sys.stderr.flush()
