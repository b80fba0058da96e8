"""Copies of checkpoints in a bucket, made in the background, so that a slow or failing bucket delays nothing.

A process that writes checkpoints offers each of them to a `Copier`, which copies the newest. An offer links the files
into a folder of their own, so the checkpoint may be deleted, and they stay on this disk until they have arrived or a
newer one is offered. After a failure the copier tries again, with growing pauses, for as long as its process lives. A
later process of the run continues with the newest of these folders.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path

from archipelago.broker.buckets.bundles import Bundles
from archipelago.broker.buckets.folder import BucketError
from archipelago.broker.wire import digest

#: The pauses between two tries, in seconds: the first, and the longest.
RETRY_SECONDS, RETRY_SECONDS_MAX = 5.0, 300.0
#: How long a process that ends waits for its last copy.
FINISH_SECONDS = 60.0

log = logging.getLogger(__name__)


class Copier:
    """Copies the newest checkpoint of a folder to a bucket.

    Args:
        bundles: Where the copies go.
        folder: The folder of the checkpoints, which are folders with their numbers as names.
        uploads: A folder on the same disk, for the files that are on their way.
        about: The `run` and its `uid`. Bundles of another run are neither replaced nor deleted.
        keep: How many of the newest bundles are kept.
        besides: Returns the numbers of older bundles that are kept, too.
    """

    def __init__(
        self,
        bundles: Bundles,
        folder: Path,
        uploads: Path,
        about: Mapping[str, str],
        keep: int,
        besides: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self.bundles, self.folder, self.uploads, self.about, self.keep = bundles, folder, uploads, dict(about), keep
        self._besides, self._run = besides, digest(repr(sorted(about.items())).encode())[:8]
        #: The newest number in the bucket, as far as it is known. Numbers of new checkpoints must be greater.
        self.newest = -1
        #: Why the last try failed; empty if it did not.
        self.trouble = ""
        self._failures = 0
        self._news: deque[str] = deque()
        self._waiting: Path | None = None  # the staged folders of the checkpoint that waits, and of the one on its way
        self._moving: Path | None = None
        self._lock = threading.Lock()  # over what waits, here and on the disk
        self._offered, self._closing = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to work in the background, with the checkpoint of this run that an earlier process has left."""
        self._waiting = self._left()
        self._thread = threading.Thread(target=self._work, name="bucket-copier", daemon=True)
        self._thread.start()

    def offer(self, number: int) -> None:
        """Copy a checkpoint soon, instead of one that waits. Its files are linked now, and may be deleted then.

        A refusal by the disk is logged; the checkpoint is not copied then.
        """
        # Other processes may offer that number, too.
        place = self.uploads / f"{number}-{self._run}-{secrets.token_hex(4)}"
        stage = place.with_name(f".{place.name}")
        try:
            shutil.copytree(self.folder / str(number), stage, copy_function=_link)
            stage.rename(place)
        except OSError as error:
            shutil.rmtree(stage, ignore_errors=True)
            self._tell(BucketError(f"checkpoint {number} cannot be linked ({error!s:.200})", "Is the disk full?"))
            return
        with self._lock:
            before, self._waiting = self._waiting, place
            if before and before != self._moving:  # the turn in progress deletes what is on its way
                shutil.rmtree(before, ignore_errors=True)
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
            log.warning(
                "checkpoint %s is not in %s yet; it is copied when this process is started again",
                _number_of(self._waiting), self.bundles.folder, extra={"code": "bucket.behind"},
            )  # fmt: skip
        return self._waiting is None

    def news(self) -> list[str]:
        """Return what operators should read, once: that the bucket fails, and that it works again."""
        return [self._news.popleft() for _ in range(len(self._news))]

    def turn(self) -> float:
        """Try to copy what waits. Return the seconds until the next try; 0 if nothing failed."""
        with self._lock:
            place = self._moving = self._waiting
        try:
            self._copy(place)
        except (BucketError, OSError) as error:
            self._failures += 1
            self._tell(error)
            return float(min(RETRY_SECONDS * 2 ** (self._failures - 1), RETRY_SECONDS_MAX))
        finally:
            with self._lock:
                self._moving = None
                if place is not None and place != self._waiting:  # it has arrived, or a newer one waits
                    shutil.rmtree(place, ignore_errors=True)
        self._failures = 0
        self._tell(None)
        return 0.0

    def _left(self) -> Path | None:
        """Return the newest folder that another process of this run has left."""
        with suppress(OSError):  # another process may have just deleted it
            found = self.uploads.glob(f"[0-9]*-{self._run}-*")
            return max(found, key=lambda place: (_number_of(place), place.stat().st_mtime_ns), default=None)
        return None

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

    def _copy(self, place: Path | None) -> None:
        numbers = self.bundles.numbers()
        self.newest = max([self.newest, *numbers])
        if numbers:
            self._require_ours(numbers[-1])
        if place is None:
            return
        number = _number_of(place)
        if number <= max(numbers, default=-1):  # the next checkpoint gets a greater number
            log.info("checkpoint %s is not copied: %s holds %s already", number, self.bundles.folder, numbers[-1])
        elif not place.is_dir():
            log.warning("checkpoint %s is not copied: it was deleted from %s", number, self.uploads)
        else:
            self.bundles.put(number, place, self.about)
            self.newest = number
            log.info("checkpoint %s is in %s", number, self.bundles.folder)
        with self._lock:
            if self._waiting == place:
                self._waiting = None
        for left in self.uploads.glob("*[0-9]-*"):
            # A killed process may have left it. No process copies it any more, because its number is too low now.
            if _number_of(left) < number:
                shutil.rmtree(left, ignore_errors=True)
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
            self._news.append(f"checkpoints stay on the disk only: {error}")
        elif before:
            log.info("the bucket works again: %s", self.bundles.folder, extra={"code": "bucket.recovered"})
            self._news.append(f"copied again: the bucket {self.bundles.folder} works")


def _number_of(place: Path) -> int:
    return int(place.name.strip(".").partition("-")[0])


def _link(source: str, target: str) -> None:
    """Link a file, or copy it where that is impossible."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
