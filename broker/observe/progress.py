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

from archipelago.broker.observe.logs import printable

SILENT_SECONDS = 3.0
EVERY_SECONDS = 10.0

log = logging.getLogger(__name__)


@contextmanager
def progress(what: str, say: Callable[[str], None] | None = None) -> Iterator[None]:
    """Say from time to time that the work of the block goes on.

    Args:
        what: The work in words, such as `loading the model`.
        say: Receives each line; by default, the log or standard error does.
    """
    said, stopped, began = say or _say, threading.Event(), time.monotonic()

    def watch() -> None:
        pause = SILENT_SECONDS
        while not stopped.wait(pause):
            said(f"{what}: {time.monotonic() - began:.0f} s so far")
            pause = EVERY_SECONDS

    thread = threading.Thread(target=watch, name="progress", daemon=True)
    thread.start()
    try:
        yield
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
