"""Checkpoints of an island on its disk, written and retained by Orbax.

An island takes one whenever the merger takes one (`Marker`), and one when it leaves. There are two ways to
restore one. An island that rejoins a run restores only its inner optimiser state and its totals; parameters come from
the merger. When a whole run goes back to a checkpoint, each island restores its own checkpoint of the same number:
parameters with unmerged progress, counts, the position in the text, and the contributions in flight.

A checkpoint has three Orbax items: `arrays`, the tree of the inner state and the references, `payloads`, and `rest`,
JSON. Plain Orbax restores them.
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

from archipelago.broker.checkpoint_errors import FILE_FAULTS, in_words, remedy
from archipelago.broker.errors import WireError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Actions, Contribution, from_fields, to_fields
from archipelago.broker.wire import digest
from archipelago.islands.inner import InnerState
from archipelago.islands.sync.actions import ActionLog, RestoreWhole, TakeMoments
from archipelago.islands.sync.arrays import device_copy
from archipelago.islands.sync.connection.outbox import Draft, Published
from archipelago.islands.sync.progress import Totals
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
    in_flight: Sequence[Published]
    queued: Sequence[Draft]


@dataclass(frozen=True)
class Found:
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

    @property
    def who(self) -> str:
        """The island and the incarnation that took the checkpoint."""
        return f"{self.rest['island']}/{self.incarnation}"

    @property
    def done(self) -> int:
        """The number of actions that the incarnation had done."""
        return int(self.rest["done"])

    @property
    def unsent_actions(self) -> list[Actions]:
        """The actions before the checkpoint that the broker may not have. Raises WireError."""
        return [from_fields(Actions, fields) for fields in self.rest["untold"]]


def cut(island: Island, number: int) -> IslandCut:
    """Return the present state of an island. This costs a copy on the device."""
    in_flight, queued = island.link.outbox.in_flight(number)
    parts = [
        actions for actions in (*(draft.actions for draft in queued), island.action_log.peek()) if actions is not None
    ]
    rest = {
        "number": number,
        "run": island.manifest.run,
        "tree": island.manifest.tree_digest,
        "uid": island.manifest.uid,
        "island": island.name,
        "incarnation": island.incarnation,
        "ledger": island.ledger.state(),
        "batches": island.batches.state(),
        "done": island.action_log.done,
        "untold": [to_fields(actions) for actions in parts],
        "totals": [island.totals.steps, island.totals.tokens],
    }
    arrays = {"inner": device_copy(island.inner)._asdict(), "references": list(island.replica.references)}
    return IslandCut(arrays, rest, in_flight, queued)


class IslandStore:
    """The checkpoints of one island in a folder."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder.absolute()
        self.manifest = manifest
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
            host = jax.device_get(taken.arrays)
            rest = {
                **taken.rest,
                "in_flight": [to_fields(contribution) for contribution, _ in sent],
                "digest": _digest(host),
            }
            rest["rest_digest"] = _rest_digest(rest)
            payloads = [np.frombuffer(payload, np.uint8) for _, payload in sent] or [np.zeros(1, np.uint8)]
            with self._manager() as manager:
                newest = manager.latest_step()
                manager.save(
                    # This is not the global step, because a rejoining island may start at an earlier one.
                    0 if newest is None else newest + 1,
                    args=ocp.args.Composite(
                        rest=ocp.args.JsonSave(rest),
                        arrays=ocp.args.StandardSave(host),
                        payloads=ocp.args.StandardSave(payloads),
                    ),
                    force=True,
                )
                manager.wait_until_finished()
        except FILE_FAULTS as error:
            self._warn(f"no checkpoint in {self.folder}, training continues: {in_words(error)}. {remedy(error)}")
        else:
            self._trouble = ""

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

    def close(self) -> None:
        """End without a last checkpoint, because the folder may belong to a newer process now."""
        self._pool.shutdown()

    # -- reading ----------------------------------------------------------------------------------------------------

    def find(self, number: int | None = None, last_round: int | None = None) -> Found | None:
        """Return the newest sound checkpoint of this run, or None.

        Args:
            number: The number that it must have. Two mergers may use the same number, hence `last_round`.
            last_round: The last closed round that it may contain.
        """

        def fits(found: Found) -> bool:
            known = last_round is None or found.rest["ledger"]["closed"] <= last_round
            return (number is None or found.number == number) and known

        return next(self._found(fits), None)

    def _found(self, wanted: Callable[[Found], bool]) -> Iterator[Found]:
        if not any(self.folder.glob("[0-9]*")):
            return  # without importing Orbax
        import orbax.checkpoint as ocp

        with self._manager() as manager:
            for step in sorted(manager.all_steps(), reverse=True):
                try:
                    rest = manager.restore(step, args=ocp.args.Composite(rest=ocp.args.JsonRestore()))["rest"]
                    if rest["rest_digest"] != _rest_digest(rest):
                        raise ValueError("its JSON is damaged")
                    found = Found(step, rest)
                    ours = (self.manifest.run, self.manifest.tree_digest, self.manifest.uid)
                    is_ours = (rest["run"], rest["tree"], rest["uid"]) == ours
                    if not is_ours:
                        log.warning("skipping checkpoint %s in %s: it belongs to another run", step, self.folder)
                    if is_ours and wanted(found):
                        yield found
                except FILE_FAULTS as error:
                    self._skip(step, in_words(error))

    def restore_moments(self, island: Island) -> Found | None:
        """Restore the island's inner optimiser state and totals from the newest sound checkpoint, and return that."""
        for found in self._found(lambda found: True):
            if (host := self._arrays(found, island)) is not None:
                island.inner = InnerState(island.inner.params, device_copy(host["inner"]["optimizer"]))
                island.totals = Totals(*found.rest["totals"])
                island.moments = "own checkpoint"
                island.action_log.add(TakeMoments(found.who, found.done))
                return found
        return None

    def restore_whole(self, found: Found, island: Island) -> bool:
        """Restore the island's whole state under its new incarnation. Return False if the checkpoint is damaged."""
        host = self._arrays(found, island)
        payloads = self._payloads(found)
        if host is None or payloads is None:
            return False
        rest = found.rest
        island.batches.restore(rest["batches"])
        island.inner = InnerState(*device_copy((host["inner"]["params"], host["inner"]["optimizer"])))
        island.replica.references = jax.device_put(list(host["references"]))
        island.ledger.restore(rest["ledger"])
        island.ledger.formerly = found.incarnation
        island.action_log = ActionLog(island.name, island.incarnation, island.action_log.enabled)
        island.action_log.add(RestoreWhole(found.who, found.done))
        newest = next(self._found(lambda found: True), found)  # steps after the restored checkpoint were made, too
        island.totals = Totals(*map(max, rest["totals"], newest.rest["totals"]))
        island.moments = "own checkpoint"
        island.link.resume(payloads)
        return True

    def _arrays(self, found: Found, island: Island) -> dict[str, Any] | None:
        like = {"inner": island.inner._asdict(), "references": island.replica.references}
        host: dict[str, Any] | None = self._restored(found, "arrays", like)
        if host is not None and _digest(host) != found.rest["digest"]:
            self._skip(found.step, "its arrays are damaged")
            return None
        return host

    def _payloads(self, found: Found) -> list[Published] | None:
        try:
            sent = [from_fields(Contribution, fields) for fields in found.rest["in_flight"]]
        except WireError as error:
            self._skip(found.step, in_words(error))
            return None
        like = [np.zeros(contribution.bytes, np.uint8) for contribution in sent] or [np.zeros(1, np.uint8)]
        payloads = self._restored(found, "payloads", like)
        if payloads is None:
            return None
        published = [Published(c, bytes(data), entry="") for c, data in zip(sent, payloads, strict=False)]
        if any(digest(p.payload) != p.contribution.digest for p in published):
            self._skip(found.step, "its payloads are damaged")
            return None
        return published

    def _restored(self, found: Found, item: str, like: Any) -> Any:
        import orbax.checkpoint as ocp

        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        try:
            with self._manager() as manager:
                args = ocp.args.Composite(**{item: ocp.args.StandardRestore(abstract)})
                return jax.device_get(manager.restore(found.step, args=args)[item])
        except FILE_FAULTS as error:
            self._skip(found.step, in_words(error))
            return None

    def _skip(self, step: int, reason: str) -> None:
        log.warning("skipping checkpoint %s in %s: %s", step, self.folder, reason)

    def _manager(self) -> Any:
        import orbax.checkpoint as ocp

        options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, create=True, enable_async_checkpointing=False)
        return ocp.CheckpointManager(self.folder, options=options)


def _digest(host: dict[str, Any]) -> str:
    return digest(b"".join(digest(np.ascontiguousarray(leaf).tobytes()).encode() for leaf in jax.tree.leaves(host)))


def _rest_digest(rest: dict[str, Any]) -> str:
    covered = {key: value for key, value in rest.items() if key != "rest_digest"}
    return digest(json.dumps(covered, sort_keys=True).encode())
