"""Checkpoints of an island on its disk, written and retained by Orbax. A bucket can hold copies.

An island takes one whenever the merger takes one (`Marker`), and one when it leaves. There are two ways to
restore one. An island that rejoins a run restores only its inner optimiser state and its totals; parameters come from
the merger. When a whole run goes back to a checkpoint, each island restores its own checkpoint of the same number:
parameters with unmerged progress, counts, the position in the text, and the contributions in flight.

A checkpoint has three Orbax items: `arrays`, the tree of the inner state and the references, `payloads`, and `rest`,
JSON. Plain Orbax restores them. Arrays on several devices are written by their shards, and restored to those of the
island that reads them, on whatever mesh it is.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from archipelago.broker.buckets.bundles import Bundles
from archipelago.broker.buckets.copier import Copier
from archipelago.broker.buckets.folder import BucketFolder
from archipelago.broker.errors import ArchipelagoError, WireError
from archipelago.broker.files import FILE_FAULTS, in_words, remedy
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Contribution, from_fields, to_fields
from archipelago.broker.wire import digest
from archipelago.islands.sync.arrays import by_tensor, is_spread
from archipelago.islands.sync.connection.outbox import Draft, SentContribution
from archipelago.islands.sync.heartbeat import Totals
from archipelago.islands.sync.ledger import closed_rounds
from archipelago.islands.worker import Island

KEPT = 3
#: The number of a checkpoint that the island takes when it leaves.
LEAVING = 0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class IslandCut:
    """The whole state of an island between two steps. `arrays` are copies on the device, `rest` is JSON."""

    arrays: dict[str, Any]
    rest: dict[str, Any]
    in_flight: Sequence[SentContribution]
    queued: Sequence[Draft]


@dataclass(frozen=True)
class IslandCheckpoint:
    """A checkpoint on disk whose `rest` was read and is sound."""

    step: int
    rest: dict[str, Any]

    @property
    def number(self) -> int:
        """The number of the merger's checkpoint that it belongs to."""
        return int(self.rest["number"])

    @property
    def incarnation(self) -> str:
        """The incarnation that took it."""
        return str(self.rest["incarnation"])


def cut(island: Island, number: int) -> IslandCut:
    """Return the present state of an island. This costs a copy on the device."""
    in_flight, queued = island.link.channels.in_flight(number)
    rest = {
        "number": number,
        "run": island.manifest.run,
        "tree": island.manifest.tree_digest,
        "uid": island.manifest.uid,
        "island": island.name,
        "incarnation": island.incarnation,
        "ledger": island.ledger.state(),
        "batches": island.batches.state(),
        "totals": [island.totals.steps, island.totals.tokens],
    }
    return IslandCut(island.computation.copies(), rest, in_flight, queued)


class IslandStore:
    """The checkpoints of one island in a folder.

    Args:
        folder: The folder on disk.
        manifest: The run.
        bucket: A folder in a bucket that holds copies. The disk has what the island restores; what is newer in the
            bucket is downloaded first.
    """

    def __init__(self, folder: Path, manifest: Manifest, bucket: BucketFolder | None = None) -> None:
        self.folder = folder.absolute()
        self.manifest = manifest
        self._bundles = Bundles(bucket.child("checkpoints")) if bucket else None
        about = {"run": manifest.run, "uid": manifest.uid}
        uploads = self.folder / "uploads"
        self.copier = Copier(self._bundles, self.folder, uploads, about, KEPT) if self._bundles else None
        self._pool = ThreadPoolExecutor(1, "island-checkpoint")
        self._job: Future[None] | None = None
        self._trouble = ""

    # -- writing ----------------------------------------------------------------------------------------------------

    def save(self, taken: IslandCut) -> None:
        """Write a checkpoint. A failure is logged, and training continues."""
        import orbax.checkpoint as ocp  # imported late: it takes most of a second, and not every run needs it

        try:
            sent = [(p.contribution, p.payload) for p in taken.in_flight]
            sent += [draft.encoded(self.manifest.config.wire.zstd_level) for draft in taken.queued]
            arrays = self._arrays_to_write(taken)
            rest = {
                **taken.rest,
                "in_flight": [to_fields(contribution) for contribution, _ in sent],
                "digest": _digest(arrays),
            }
            rest["rest_digest"] = _rest_digest(rest)
            payloads = [np.frombuffer(payload, np.uint8) for _, payload in sent] or [np.zeros(1, np.uint8)]
            with self._manager() as manager:
                newest = manager.latest_step()
                # This is not the global step, because a rejoining island may start at an earlier one.
                step = 1 + max(-1 if newest is None else newest, self.copier.newest if self.copier else -1)
                manager.save(
                    step,
                    args=ocp.args.Composite(
                        rest=ocp.args.JsonSave(rest),
                        arrays=ocp.args.StandardSave(arrays),
                        payloads=ocp.args.StandardSave(payloads),
                    ),
                    force=True,
                )
                manager.wait_until_finished()
        except FILE_FAULTS as error:
            self._warn(f"no checkpoint in {self.folder}, training continues: {in_words(error)}. {remedy(error)}")
        else:
            self._trouble = ""
            if self.copier is not None:
                self.copier.offer(step)

    def _arrays_to_write(self, taken: IslandCut) -> dict[str, Any]:
        """Return the arrays of a cut, with references by tensor, which depend on no mesh."""
        references = zip(self.manifest.layout, taken.arrays["references"], strict=True)
        by_name = [by_tensor(rows, held) for rows, held in references]
        found: dict[str, Any] = _on_host({**taken.arrays, "references": by_name})
        return found

    def _warn(self, trouble: str) -> None:
        """Log a warning. A repeat of the last one is logged at debug level."""
        log.log(logging.DEBUG if trouble == self._trouble else logging.WARNING, "%s", trouble)
        self._trouble = trouble

    def on_marker(self, island: Island, number: int) -> None:
        """Write a checkpoint in the background, unless the last one is still being written."""
        if self._job is None or self._job.done():
            taken = cut(island, number)
            self._job = self._pool.submit(self.save, taken)

    def finish(self, island: Island) -> None:
        """Write the last checkpoint, on leaving."""
        if self._job is not None:
            self._job.result()
        self.save(cut(island, LEAVING))
        self._pool.shutdown()
        if self.copier is not None:
            self.copier.close()

    def close(self) -> None:
        """End without a last checkpoint, because the folder may belong to a newer process now."""
        self._pool.shutdown()

    # -- reading ----------------------------------------------------------------------------------------------------

    def find(self, number: int | None = None, last_rounds: Sequence[int] | None = None) -> IslandCheckpoint | None:
        """Return the newest sound checkpoint of this run, or None.

        Args:
            number: The number that it must have. Two mergers may use the same number, hence `last_rounds`.
            last_rounds: The last closed round of each shard that it may contain, as that shard counts.
        """
        layout = self.manifest.shard_layout
        allowed = [layout.run_round(shard, last) for shard, last in enumerate(last_rounds or [])]

        if number is not None:
            self._fetch(KEPT)

        def fits(found: IslandCheckpoint) -> bool:
            known = closed_rounds(found.rest["ledger"])
            is_known = all(known[shard] <= last for shard, last in enumerate(allowed))
            return (number is None or found.number == number) and is_known

        return next(self._found(fits), None)

    def _found(self, wanted: Callable[[IslandCheckpoint], bool]) -> Iterator[IslandCheckpoint]:
        if self._is_empty():
            return  # without importing Orbax
        import orbax.checkpoint as ocp

        with self._manager() as manager:
            for step in sorted(manager.all_steps(), reverse=True):
                try:
                    rest = manager.restore(step, args=ocp.args.Composite(rest=ocp.args.JsonRestore()))["rest"]
                    if rest["rest_digest"] != _rest_digest(rest):
                        raise ValueError("its JSON is damaged")
                    found = IslandCheckpoint(step, rest)
                    ours = (self.manifest.run, self.manifest.tree_digest, self.manifest.uid)
                    is_ours = (rest["run"], rest["tree"], rest["uid"]) == ours
                    if not is_ours:
                        log.warning("skipping checkpoint %s in %s: it belongs to another run", step, self.folder)
                    if is_ours and wanted(found):
                        yield found
                except FILE_FAULTS as error:
                    self._skip(step, in_words(error))

    def _is_empty(self) -> bool:
        return not any(self.folder.glob("[0-9]*"))

    def _fetch(self, most: int) -> None:
        """Download the newest checkpoints of the bucket that are newer than those on disk. Log a failure."""
        if self._bundles is None:
            return
        newest = max((int(path.name) for path in self.folder.glob("[0-9]*") if path.name.isdecimal()), default=-1)
        try:
            self._bundles.fetch_newer(self.folder, newest, most)
        except (ArchipelagoError, OSError) as error:
            log.warning("no checkpoint could be downloaded: %s", error, extra={"code": "bucket.failed"})

    def restore_moments(self, island: Island) -> bool:
        """Restore the island's inner optimiser state and totals from the newest sound checkpoint, if there is one."""
        self._fetch(1)
        for found in self._found(lambda found: True):
            if (host := self._arrays(found, island)) is not None:
                island.computation.restore_optimizer(host["inner"]["optimizer"])
                island.totals = Totals(*found.rest["totals"])
                island.moments = "own checkpoint"
                return True
        return False

    def restore_whole(self, found: IslandCheckpoint, island: Island) -> bool:
        """Restore the island's whole state under its new incarnation. Return False if the checkpoint is damaged."""
        host = self._arrays(found, island)
        payloads = self._payloads(found)
        if host is None or payloads is None:
            return False
        rest = found.rest
        island.batches.restore(rest["batches"])
        island.computation.restore(host["inner"], host["references"])
        island.ledger.restore(rest["ledger"])
        island.ledger.formerly = found.incarnation
        newest = next(self._found(lambda found: True), found)  # steps after the restored checkpoint were made, too
        island.totals = Totals(*map(max, rest["totals"], newest.rest["totals"]))
        island.moments = "own checkpoint"
        island.link.resume(payloads)
        return True

    def _arrays(self, found: IslandCheckpoint, island: Island) -> dict[str, Any] | None:
        host: dict[str, Any] | None = self._restored(found, "arrays", island.computation.examples())
        if host is not None and _digest(host) != found.rest["digest"]:
            self._skip(found.step, "its arrays are damaged")
            return None
        return host

    def _payloads(self, found: IslandCheckpoint) -> list[SentContribution] | None:
        try:
            sent = [from_fields(Contribution, fields) for fields in found.rest["in_flight"]]
        except WireError as error:
            self._skip(found.step, in_words(error))
            return None
        like = [np.zeros(contribution.bytes, np.uint8) for contribution in sent] or [np.zeros(1, np.uint8)]
        payloads = self._restored(found, "payloads", like)
        if payloads is None:
            return None
        published = [SentContribution(c, bytes(data), entry="") for c, data in zip(sent, payloads, strict=False)]
        if any(digest(p.payload) != p.contribution.digest for p in published):
            self._skip(found.step, "its payloads are damaged")
            return None
        return published

    def _restored(self, found: IslandCheckpoint, item: str, like: Any) -> Any:
        import orbax.checkpoint as ocp

        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        try:
            with self._manager() as manager:
                args = ocp.args.Composite(**{item: ocp.args.StandardRestore(abstract)})
                return _on_host(manager.restore(found.step, args=args)[item])
        except FILE_FAULTS as error:
            self._skip(found.step, in_words(error))
            return None

    def _skip(self, step: int, reason: str) -> None:
        log.warning("skipping checkpoint %s in %s: %s", step, self.folder, reason)

    def _manager(self) -> Any:
        import orbax.checkpoint as ocp

        # In an island over several hosts, the leader has gathered the arrays, and writes alone.
        alone = ocp.options.MultiprocessingOptions(
            primary_host=0, active_processes={0}, barrier_sync_key_prefix="archipelago"
        )
        options = ocp.CheckpointManagerOptions(
            max_to_keep=KEPT,
            create=jax.process_count() == 1,
            enable_async_checkpointing=False,
            multiprocessing_options=alone if jax.process_count() > 1 else ocp.options.MultiprocessingOptions(),
        )
        return ocp.CheckpointManager(self.folder, options=options)


def _on_host(tree: Any) -> Any:
    """Return a tree with arrays of numpy for those on one device. Those on several devices stay there."""
    return jax.tree.map(lambda leaf: leaf if is_spread(leaf) else np.asarray(leaf), tree)


def _digest(arrays: dict[str, Any]) -> str:
    """Return the digest of all arrays, one of which is whole in the host's memory at a time."""
    return digest(b"".join(digest(np.ascontiguousarray(leaf).tobytes()).encode() for leaf in jax.tree.leaves(arrays)))


def _rest_digest(rest: dict[str, Any]) -> str:
    covered = {key: value for key, value in rest.items() if key != "rest_digest"}
    return digest(json.dumps(covered, sort_keys=True).encode())
