"""The optimiser state and the totals of an island on its disk, and how an island comes back. A bucket can hold a copy.

An island writes them whenever the merger takes a checkpoint (`Marker`), and when it leaves. They have the form in which
an island hands its state to a newcomer (`sync.recovery`), and it takes its own as it takes that of a peer, on whatever
mesh it is. Parameters always come from the merger, so that no progress counts twice and no outdated island overwrites
the run. The learning rate follows the global step of the merger, and reading continues at the cursors in Redis.
"""

from __future__ import annotations

import json
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from archipelago.broker.buckets.folder import BucketError, BucketFolder
from archipelago.broker.errors import ArchipelagoError
from archipelago.broker.files import FILE_FAULTS, in_words, remedy, write_atomically
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Handover, from_fields, to_fields
from archipelago.islands.sync.measures import Totals
from archipelago.islands.sync.participant import Participant
from archipelago.islands.sync.recovery import StateForPeer, encode

#: The file in the island's folder: a line of JSON, and the payload of a handover.
FILE = "optimizer.state"

log = logging.getLogger(__name__)


#: What an island needs to come back: its optimiser state, as copies that no step donates, and its totals.
OwnState = tuple[StateForPeer, Totals]


def taken(island: Participant) -> OwnState | None:
    """Return the present state of an island. This costs a copy of the optimiser's state on the device.

    None if the optimiser's state is not there now, such as when another process of the island is lost.
    """
    leaves = island.optimizer.present()
    if leaves is None and island.optimizer.copies is not None:
        return None
    state = StateForPeer(f"{island.name}/{island.incarnation}", leaves or (), island.ledger.global_step)
    return state, Totals(island.totals.steps, island.totals.tokens)


class IslandStore:
    """The newest state of one island in a folder; from its copy in the bucket where the disk has none."""

    def __init__(self, folder: Path, manifest: Manifest, bucket: BucketFolder | None = None) -> None:
        self.path, self.manifest, self._bucket = folder.absolute() / FILE, manifest, bucket
        self._pool = ThreadPoolExecutor(1, "island-checkpoint")
        self._job: Future[None] | None = None
        self._trouble = ""

    # -- writing ----------------------------------------------------------------------------------------------------

    def save(self, own: OwnState) -> None:
        """Write the state, and copy it to the bucket. A failure is logged, and training continues."""
        state, totals = own
        try:
            handover, payload = encode(state, state.who)
            about = {**self._run(), "handover": to_fields(handover), "totals": [totals.steps, totals.tokens]}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, [json.dumps(about).encode() + b"\n", payload])
            if self._bucket is not None:
                self._bucket.upload({FILE: self.path})
        except BucketError as error:
            self._tell(f"no copy in the bucket, training continues: {error}", error.code)
        except FILE_FAULTS as error:
            self._tell(f"no checkpoint in {self.path.parent}, training continues: {in_words(error)}. {remedy(error)}")
        else:
            if self._trouble.startswith("bucket."):
                log.info("the bucket works again: %s", self._bucket, extra={"code": "bucket.recovered"})
            self._trouble = ""

    def _tell(self, trouble: str, code: str = "") -> None:
        """Log once why the state is not written or, with the code of a bucket's error, not copied."""
        is_told, self._trouble = self._trouble == (code or trouble), code or trouble
        log.log(logging.DEBUG if is_told else logging.WARNING, "%s", trouble, extra={"code": code})

    def on_marker(self, island: Participant) -> None:
        """Write the state in the background, unless the last one is still being written."""
        if (self._job is None or self._job.done()) and (own := taken(island)) is not None:
            self._job = self._pool.submit(self.save, own)

    def finish(self, island: Participant) -> None:
        """Write the last state, on leaving."""
        if self._job is not None:
            self._job.result()
        if (own := taken(island)) is not None:
            self.save(own)
        self._pool.shutdown()

    def close(self) -> None:
        """End without a last state, because the folder may belong to a newer process now."""
        self._pool.shutdown()

    # -- reading ----------------------------------------------------------------------------------------------------

    def restore(self, island: Participant) -> bool:
        """Restore the island's optimiser state and totals. Return False if there is nothing that can be used."""
        try:
            if self._bucket is not None and not self.path.exists() and FILE in self._bucket.names():
                self._bucket.download({FILE: self.path})
        except (ArchipelagoError, OSError) as error:
            log.warning("no checkpoint could be downloaded: %s", error, extra={"code": "bucket.failed"})
        if not self.path.exists():
            return False
        try:
            line, _, payload = self.path.read_bytes().partition(b"\n")
            about = json.loads(line)
            if any(about[key] != value for key, value in self._run().items()):
                log.warning("no optimiser state from %s: it belongs to another run", self.path)
                return False
            totals = Totals(*map(int, about["totals"]))
            decode = island.optimizer.decode
            state = decode(from_fields(Handover, about["handover"]), payload) if decode is not None else None
        except FILE_FAULTS as error:
            log.warning("no optimiser state from %s: %s", self.path, in_words(error))
            return False
        island.use_optimizer(state, "own checkpoint")
        island.totals = totals
        return True

    def _run(self) -> dict[str, Any]:
        return {"run": self.manifest.run, "uid": self.manifest.uid, "tree": self.manifest.tree_digest}
