"""Disks and background threads of simulated processes. A disk outlives its process; a thread may."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np

from archipelago.broker.commits import Image
from archipelago.broker.errors import ArchipelagoError, ConfigError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Snapshot
from archipelago.islands.checkpoint import IslandStore, OwnState
from archipelago.islands.sync.measures import Totals
from archipelago.islands.sync.participant import Participant
from archipelago.merger.checkpoint import CheckpointStore
from archipelago.merger.record import Recorder, Round
from archipelago.merger.storage import MergerFolder

#: Called at each point of a write. It raises Crash if the process dies there, or OSError if the disk is full.
Fail = Callable[[str], None]


class _Job(Future[Any]):
    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__()
        self._work = work

    def run(self) -> None:
        """Do the work. A crash of the process is not caught."""
        if self.done():
            return
        try:
            self.set_result(self._work())
        except (ArchipelagoError, OSError) as error:
            self.set_exception(error)

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the thread, which takes no virtual time."""
        self.run()
        return super().result(0)


class Jobs:
    """One background thread whose work waits until `run_one`."""

    def __init__(self) -> None:
        self.waiting: list[_Job] = []

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Add a job, like `ThreadPoolExecutor.submit`."""
        self.waiting = [job for job in self.waiting if not job.done()]
        self.waiting.append(_Job(lambda: work(*args)))
        return self.waiting[-1]

    def run_one(self) -> None:
        """Do the oldest job, if there is one."""
        if self.waiting:
            self.waiting.pop(0).run()

    def shutdown(self) -> None:
        """Do nothing: there is no thread to end."""


class Store(CheckpointStore):
    """The store of one shard in one process, with a dictionary of images by number as the disk."""

    def __init__(self, disk: dict[int, Image], fail: Fail) -> None:
        super().__init__(Path("/"))
        self._disk, self._fail = disk, fail

    def numbers(self) -> list[int]:
        return sorted(self._disk)

    def save(self, image: Image) -> None:
        """Write a checkpoint as a whole or not at all."""
        self._fail("checkpoint.before")
        if image.number <= max(self._disk, default=0):
            raise ConfigError(f"checkpoint {image.number} is older than the newest")
        self._fail("checkpoint.written")
        complete = self.complete()[-1:]
        self._disk[image.number] = image
        self._fail("checkpoint.done")
        for number in {*self.numbers()[: -self.keep]}.difference(complete):
            del self._disk[number]

    def load(self, number: int | None = None) -> Image | None:
        """Return the newest checkpoint, or that of a number."""
        if number is None:
            number = max(self._disk, default=None)
        return None if number is None else self._disk[number]


class Record:
    """A `Recorder` in memory."""

    def __init__(self, fail: Fail) -> None:
        self._fail = fail
        self.beginning: Sequence[tuple[Snapshot, bytes]] = ()
        self.segments: dict[tuple[int, int], Sequence[Round]] = {}

    def begin(self, manifest: Manifest, snapshots: Sequence[tuple[Snapshot, bytes]]) -> None:
        self.beginning = self.beginning or snapshots

    def append(self, rounds: Sequence[Round]) -> None:
        """Write a segment as a whole or not at all."""
        self._fail("record.before")
        if rounds:
            self.segments[rounds[0][0].round, rounds[-1][0].round] = rounds
        self._fail("record.after")

    def last_round(self) -> int:
        return max((last for _, last in self.segments), default=0)

    def names(self) -> list[str]:
        return [f"{first}-{last}" for first, last in self.segments]

    def go_back(self, last_round: int) -> None:
        self.segments = {span: segment for span, segment in self.segments.items() if span[1] <= last_round}


def folder_on(
    disks: Sequence[dict[int, Image]], records: Sequence[Record], manifest: Manifest, fail: Fail
) -> MergerFolder:
    """Return the folder of a run in one process, with the disk and the record of each shard."""
    folder = MergerFolder(Path("/"))
    parts, stores = folder.parts(manifest), [Store(disk, fail) for disk in disks]
    for part, store, record in zip(parts, stores, records, strict=True):
        part.store, part.recorder, store.parts = store, cast(Recorder, record), stores
    return folder


class IslandDisk(IslandStore):
    """An island's store with a dictionary as the disk, and with explicit background jobs."""

    def __init__(self, disk: dict[str, OwnState], manifest: Manifest, fail: Fail) -> None:
        super().__init__(Path("/"), manifest)
        self.jobs = Jobs()
        self._pool = self.jobs  # type: ignore[assignment]
        self._disk, self._fail = disk, fail

    def save(self, own: OwnState) -> None:
        """Write the state as a whole or not at all."""
        with suppress(OSError):  # a full disk does not stop training
            self._fail("island checkpoint.before")
            self._disk[self.manifest.uid] = own
            self._fail("island checkpoint.after")

    def restore(self, island: Participant) -> bool:
        if self.manifest.uid not in self._disk:
            return False
        state, totals = self._disk[self.manifest.uid]
        island.use_optimizer([np.copy(leaf) for leaf in state.leaves[1:]], "own checkpoint")
        island.totals = Totals(totals.steps, totals.tokens)
        return True
