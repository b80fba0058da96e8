"""Copies of checkpoints in a bucket, made in the background, so that a slow or failing bucket delays nothing.

A process that writes checkpoints offers each of them to a `Copier`, which copies the newest. What it still needs
(`held`) must stay on the disk until it has arrived or a newer one is offered. After a failure the copier tries again,
with growing pauses, for as long as its process lives. A later process of the run begins with the newest one there.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from archipelago.broker.buckets.bundles import Bundles
from archipelago.broker.buckets.folder import BucketError
from archipelago.broker.messages import COPIED, UNCOPIED

#: The pauses between two tries, in seconds: the first, and the longest.
RETRY_SECONDS, RETRY_SECONDS_MAX = 5.0, 300.0
#: How long a process that ends waits for its last copy.
FINISH_SECONDS = 60.0

log = logging.getLogger(__name__)


class Copier:
    """Copies the newest checkpoint of a folder to a bucket.

    Args:
        folder: The folder of the checkpoints, which are folders with their numbers as names.
        about: The `run` and its `uid`. Bundles of another run are neither replaced nor deleted.
        keep: How many of the newest bundles are kept.
        besides: Returns the numbers of older bundles that are kept, too.
    """

    def __init__(
        self,
        bundles: Bundles,
        folder: Path,
        about: Mapping[str, str],
        keep: int,
        besides: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self.bundles, self.folder, self.about, self.keep, self._besides = bundles, folder, dict(about), keep, besides
        #: The newest number in the bucket, as far as it is known. Numbers of new checkpoints must be greater.
        self.newest = -1
        #: Why the last try failed; empty if it did not.
        self.trouble = ""
        self._failures = 0
        self._news: deque[tuple[str, str]] = deque()
        self._waiting: int | None = None  # the checkpoint that waits, and the one on its way
        self._moving: int | None = None
        self._lock = threading.Lock()  # over both
        self._offered, self._closing = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def held(self) -> set[int]:
        """Return the checkpoints that must stay on the disk."""
        with self._lock:
            return {number for number in (self._waiting, self._moving) if number is not None}

    def start(self, newest: int | None) -> None:
        """Begin to work in the background, with the newest checkpoint on the disk, which may not have been copied."""
        self._waiting = newest
        self._thread = threading.Thread(target=self._work, name="bucket-copier", daemon=True)
        self._thread.start()

    def offer(self, number: int) -> None:
        """Copy a checkpoint soon, instead of one that waits."""
        with self._lock:
            self._waiting = number
        self._offered.set()

    def close(self, seconds: float = FINISH_SECONDS) -> bool:
        """Wait for the last copy, at most for some seconds. Return whether everything is copied.

        A bucket that fails is tried once more.
        """
        self._closing.set()
        self._offered.set()
        if self._thread is not None:
            self._thread.join(seconds)
        if self._waiting is not None:
            what = "checkpoint %s is not in %s yet; it is copied when this process is started again"
            log.warning(what, self._waiting, self.bundles.folder, extra={"code": "bucket.behind"})
            if not self.trouble:  # which is news already
                self._news.append((UNCOPIED, f"checkpoint {self._waiting} is on the disk only: its copy takes long"))
        return self._waiting is None

    def news(self) -> list[tuple[str, str]]:
        """Return notes for operators, once: that the bucket fails (UNCOPIED), and that it works again (COPIED)."""
        return [self._news.popleft() for _ in range(len(self._news))]

    def say_again(self) -> None:
        """Let the next news say that the bucket fails, if it does: a merger that serves anew ends what was said."""
        if self.trouble:
            self._news.append((UNCOPIED, f"checkpoints stay on the disk only: {self.trouble}"))

    def turn(self) -> float:
        """Try to copy what waits. Return the seconds until the next try; 0 if nothing failed."""
        with self._lock:
            number = self._moving = self._waiting
        try:
            self._copy(number)
        except (BucketError, OSError) as error:
            self._failures += 1
            self._tell(error)
            return float(min(RETRY_SECONDS * 2 ** (self._failures - 1), RETRY_SECONDS_MAX))
        finally:
            with self._lock:
                self._moving = None
        self._failures = 0
        self._tell(None)
        return 0.0

    def _work(self) -> None:
        while True:  # the first turn learns which numbers the bucket holds
            self._offered.clear()
            is_last = self._closing.is_set()
            pause = self.turn()
            if is_last:
                return
            if pause:
                self._closing.wait(pause)
            else:
                self._offered.wait()
            if self._closing.is_set() and self._waiting is None:
                return

    def _copy(self, number: int | None) -> None:
        numbers = self.bundles.numbers()
        newest = numbers[-1] if numbers else -1
        self.newest = max(self.newest, newest)
        if numbers:
            self._require_ours(newest)
        if number is None:
            return
        if number < newest:  # the next checkpoint gets a greater number
            log.info("checkpoint %s is not copied: %s holds %s already", number, self.bundles.folder, newest)
        elif not (self.folder / str(number)).is_dir():
            log.warning("checkpoint %s is not copied: it was deleted from %s", number, self.folder)
        elif number > newest:
            self.bundles.put(number, self.folder / str(number), self.about)
            self.newest = number
            log.info("checkpoint %s is in %s", number, self.bundles.folder)
        with self._lock:
            if self._waiting == number:
                self._waiting = None
        try:
            self.bundles.prune(self.keep, self._besides())
        except BucketError as error:  # the copy is there; a bucket may allow no deletions
            log.debug("old checkpoints stay in %s: %s", self.bundles.folder, error)

    def _require_ours(self, number: int) -> None:
        try:
            held = self.bundles.manifest(number).about
        except BucketError as error:
            if error.code != "bucket.damaged":
                raise
            return
        if held != self.about:
            which = f"run {held.get('run')!r}, not of {self.about.get('run')!r}"
            if held.get("run") == self.about.get("run"):
                which = f"an earlier run {held.get('run')!r}"
            raise BucketError(
                f"{self.bundles.folder} holds checkpoints of {which}",
                "Name another bucket or folder.",
                code="bucket.other-run",
            )

    def _tell(self, error: Exception | None) -> None:
        """Log and note, once each, that the bucket fails, and that it works again."""
        before, self.trouble = self.trouble, f"{error}" if error else ""
        if error and before:
            log.debug("the bucket still fails: %s", error)
        elif error:
            code = getattr(error, "code", BucketError.code)
            log.warning("no copy in the bucket, training continues: %s", error, extra={"code": code})
            self.say_again()
        elif before:
            log.info("the bucket works again: %s", self.bundles.folder, extra={"code": "bucket.recovered"})
            self._news.append((COPIED, f"copied again: the bucket {self.bundles.folder} works"))
