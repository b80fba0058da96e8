"""Copies of checkpoints in a bucket, made in the background, so that a slow or failing bucket delays nothing.

A process that writes checkpoints offers each of them to a `Copier`. Their files are linked into a staging folder, so
they stay on this disk until they have arrived, however many newer checkpoints follow. If the bucket is slower than the
checkpoints, only the newest is copied. After a failure the copier tries again, with growing pauses, for as long as its
process lives, and a later process continues with what is left in the staging folder.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path

from archipelago.broker.buckets.bundles import Bundles
from archipelago.broker.buckets.folder import BucketError, BucketFolder
from archipelago.broker.buckets.record import copy_record

#: The pauses between two tries, in seconds: the first, and the longest.
RETRY_SECONDS, RETRY_SECONDS_MAX = 5.0, 300.0
#: How long a process that ends waits for its last copy.
FINISH_SECONDS = 60.0
_ABOUT = "about.json"

log = logging.getLogger(__name__)


class Copier:
    """Copies the newest checkpoint of a folder to a bucket, and the files of a record.

    Args:
        bundles: Where the copies go.
        stage: A folder on the disk of the checkpoints, for those that wait.
        about: The run. Bundles of a run with another name are neither replaced nor deleted.
        keep: How many of the newest bundles are kept.
        record: The local and the remote folder of a record, whose files never change.
        besides: Returns the numbers of older bundles that are kept, too.
    """

    def __init__(
        self,
        bundles: Bundles,
        stage: Path,
        about: Mapping[str, str],
        keep: int,
        record: tuple[Path, BucketFolder] | None = None,
        besides: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self.bundles, self.stage, self.about, self.keep = bundles, stage.absolute(), dict(about), keep
        self.record, self._besides = record, besides
        #: The newest number in the bucket, as far as it is known. Numbers of new checkpoints must be greater.
        self.newest = -1
        #: Why the last try failed; empty if it did not.
        self.trouble = ""
        self._waiting: int | None = None
        self._failures = 0
        self._news: list[str] = []
        self._changed = threading.Condition()
        self._is_closing = self._is_working = self._has_ended = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to work in the background, with what an earlier process has left."""
        self._take_left()
        self._thread = threading.Thread(target=self._work, name="bucket-copier", daemon=True)
        self._thread.start()

    def offer(self, number: int, source: Path) -> None:
        """Copy a checkpoint soon. It replaces one that waits. Its files are linked, and may be deleted at once.

        A full disk is logged; the checkpoint is not copied then.
        """
        place, about = self.stage / str(number), self.stage / f"{number}.{_ABOUT}"
        try:
            about.unlink(missing_ok=True)  # it is written last, so that a later process takes whole checkpoints only
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(source, place, copy_function=_link)
            about.write_text(json.dumps(self.about), encoding="utf-8")
        except OSError as error:
            self._fail(BucketError(f"checkpoint {number} cannot be copied ({error})", "Is the disk full?"))
            return
        with self._changed:
            self._waiting = number
            if not self._is_working:  # else the turn in progress does it
                self._discard_below(number)
            self._changed.notify_all()

    def close(self, seconds: float = FINISH_SECONDS) -> bool:
        """Wait for the last copy, at most for some seconds. Return whether everything is copied.

        A bucket that fails is tried once more. What is not copied stays in the staging folder.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._has_ended or self._thread is None, seconds)
            is_done = self._waiting is None and not self._is_working
        if not is_done:
            log.warning(
                "the newest checkpoint is not in %s yet; it waits in %s until this process is started again",
                self.bundles.folder, self.stage, extra={"code": "bucket.behind"},
            )  # fmt: skip
        return is_done

    def news(self) -> list[str]:
        """Return what operators should read, once: that the bucket fails, and that it works again."""
        with self._changed:
            found, self._news = self._news, []
        return found

    def turn(self) -> float:
        """Try to copy what waits. Return the seconds until the next try; 0 if nothing failed."""
        with self._changed:
            number = self._waiting
            self._is_working = True
        try:
            self._copy(number)
        except (BucketError, OSError) as error:
            self._failures += 1
            self._fail(error)
            return float(min(RETRY_SECONDS * 2 ** (self._failures - 1), RETRY_SECONDS_MAX))
        else:
            self._failures = 0
            self._recover()
            return 0.0
        finally:
            with self._changed:
                self._is_working = False
                if self._waiting is not None:
                    self._discard_below(self._waiting)

    # -- the thread -------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            pause, is_last = self.turn(), False  # the first turn learns which numbers the bucket holds
            while not is_last:
                with self._changed:
                    if pause:
                        self._changed.wait_for(lambda: self._is_closing, pause)
                    else:
                        self._changed.wait_for(lambda: self._waiting is not None or self._is_closing)
                    if self._waiting is None and self._is_closing:
                        return
                    is_last = self._is_closing
                pause = self.turn()
        finally:
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()

    def _copy(self, number: int | None) -> None:
        numbers = self.bundles.numbers()
        self.newest = max([self.newest, *numbers])
        if numbers:
            self._require_ours(numbers[-1])
        if self.record is not None:
            copy_record(*self.record)
        if number is None:
            return
        source = self.stage / str(number)
        if not source.is_dir():
            log.warning("checkpoint %s is not copied: it was deleted from %s", number, self.stage)
            self._done(number)
            return
        if number > max(numbers, default=-1):
            self.bundles.put(number, source, self.about)
            self.newest = number
            log.info("checkpoint %s is in %s", number, self.bundles.folder)
        elif not self.bundles.has(number, source):
            # Another process has written there. The next checkpoint gets a greater number.
            log.info("checkpoint %s is not copied: %s holds %s", number, self.bundles.folder, numbers[-1])
        self._done(number)
        self._prune()

    def _require_ours(self, number: int) -> None:
        try:
            held = self.bundles.manifest(number).about
        except BucketError as error:
            if error.code != "bucket.damaged":
                raise
            return
        if held.get("run") != self.about.get("run"):
            raise BucketError(
                f"{self.bundles.folder} holds checkpoints of run {held.get('run')!r}, not of {self.about.get('run')!r}",
                "Name another bucket or folder.",
                code="bucket.other-run",
            )

    def _done(self, number: int) -> None:
        with self._changed:
            if self._waiting == number:
                self._waiting = None
            self._discard_below(number + 1)

    def _discard_below(self, number: int) -> None:
        """Delete the older checkpoints in the staging folder. A newer one may be on its way into it."""
        for path in self.stage.glob("*"):
            stem = path.name.partition(".")[0]
            if stem.isdecimal() and int(stem) < number:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    def _prune(self) -> None:
        try:
            self.bundles.prune(self.keep, self._besides())
        except BucketError as error:  # the copy is there; a bucket may allow no deletions
            log.debug("old checkpoints stay in %s: %s", self.bundles.folder, error)

    def _take_left(self) -> None:
        """Continue with the newest checkpoint of this run that an earlier process could not copy."""
        left = sorted((int(path.name), path) for path in self.stage.glob("[0-9]*") if path.name.isdecimal())
        for number, _ in reversed(left):
            with suppress(OSError, ValueError):
                if json.loads((self.stage / f"{number}.{_ABOUT}").read_text(encoding="utf-8")) == self.about:
                    self._waiting = number
                    return

    def _fail(self, error: Exception) -> None:
        text = f"{error}"
        if self.trouble:
            log.debug("the bucket still fails: %s", text)
        else:
            code = getattr(error, "code", BucketError.code)
            log.warning("no copy in the bucket, training continues: %s", text, extra={"code": code})
            self._tell(f"checkpoints stay on the disk only: {text}")
        self.trouble = text

    def _recover(self) -> None:
        if self.trouble:
            self.trouble = ""
            log.info("the bucket works again: %s", self.bundles.folder, extra={"code": "bucket.recovered"})
            self._tell(f"copied again: the bucket {self.bundles.folder} works")

    def _tell(self, text: str) -> None:
        with self._changed:
            self._news.append(text)


def _link(source: str, target: str) -> None:
    """Link a file, or copy it where that is impossible."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
