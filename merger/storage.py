"""A merger's folder on disk: checkpoints and the record of the run. It can restore the run into an empty Redis.

A bucket can hold copies of checkpoints. A newer one than those in the folder is downloaded before a run is restored.

In a run with several shards, the folder holds the parts of shard 0, and its folder `shard-K` those of shard K. So does
the bucket. The mergers of all shards need the same folder or bucket.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast

from archipelago.broker.buckets.bundles import Bundles
from archipelago.broker.buckets.copier import Copier
from archipelago.broker.buckets.folder import BucketError, BucketFolder
from archipelago.broker.commits import Image
from archipelago.broker.errors import BrokerError, ConfigError, RunExistsError, UnknownRunError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import NOTE_MAX, REFUSED, Note
from archipelago.broker.process import up_command
from archipelago.broker.redis.administration import delete_shard
from archipelago.broker.redis.transport import RedisTransport
from archipelago.broker.shards.reader import Bounded, BoundedReader, Spawn, on_a_thread
from archipelago.broker.shards.transport import SHARD_EXISTS, of_shard, restore, whole
from archipelago.broker.transport import ReaderClient, Transport
from archipelago.merger.checkpoint import CheckpointStore, describe
from archipelago.merger.executor import at_once, in_background
from archipelago.merger.record import Recorder

if TYPE_CHECKING:
    from archipelago.merger.checkpointer import Checkpointer

KEEP = 3
#: The code of the error about checkpoints of another run.
OTHER_RUN = "broker.other-run"

log = logging.getLogger(__name__)


def tell_refusal(transport: RedisTransport, text: str, wall: Callable[[], float] = time.time) -> None:
    """Leave a note for the run's scripts, its islands and the page that says why no merger serves it."""
    with suppress(BrokerError):
        transport.reader.note(Note(wall(), "merger", REFUSED, text[:NOTE_MAX]))


class MergerFolder:
    """The folders `checkpoints/` and `record/` of one run. The newest `keep` checkpoints stay, also in the bucket."""

    def __init__(self, path: Path, keep: int = KEEP, bucket: BucketFolder | None = None) -> None:
        self.path, self.bucket = path, bucket
        self.store = CheckpointStore(path / "checkpoints", keep, self.fetch)
        self.recorder = Recorder(path / "record")
        self._bundles = Bundles(bucket.child("checkpoints")) if bucket else None
        self._parts: Sequence[MergerFolder] = (self,)

    def parts(self, manifest: Manifest) -> Sequence[MergerFolder]:
        """Return the folder of each shard of a run, in order. This one is that of the run and of its shard 0."""
        if len(self._parts) != manifest.shards:
            names = [f"shard-{k}" for k in range(1, manifest.shards)]
            others = [
                MergerFolder(self.path / name, self.store.keep, self.bucket.child(name) if self.bucket else None)
                for name in names
            ]
            parts = (self, *others)
            for part in parts:
                part._parts = parts
                part.store.parts = [each.store for each in parts]
        return self._parts

    @property
    def place(self) -> str:
        """The folder, and the bucket if there is one, in words."""
        path = self.path.absolute()
        return f"{path} and {self.bucket}" if self.bucket else f"{path}"

    def fetch(self) -> None:
        """Download the bucket's newest checkpoint if it is newer than those on disk, and sound. Raises BucketError."""
        if self._bundles is not None:
            self._bundles.fetch_newer(self.store.folder, max(self.store.numbers(), default=-1))

    def checkpointer(
        self, transport: Transport, manifest: Manifest, every_seconds: float, spawn: Spawn | None = None
    ) -> Checkpointer:
        """Return a checkpointer that writes here; it also writes the record if the run has one."""
        # This loads JAX, which readers of this folder do not need.
        from archipelago.merger.checkpoint_cut import Following, Leading, Parts
        from archipelago.merger.checkpointer import Checkpointer

        recorder = self.recorder if manifest.config.record else None
        copier = self._copier(manifest) if self._bundles else None
        parts = leading = following = None
        if manifest.shards > 1:
            # Other servers, and the bucket, may hang.
            asking: Spawn = on_a_thread if spawn is None else at_once
            listed, own = Bounded(asking), manifest.shard or 0

            def reader(k: int) -> ReaderClient:
                found = of_shard(transport, manifest, k).reader
                return found if k == own else cast(ReaderClient, BoundedReader(found, asking))

            every = [reader(k) for k in range(manifest.shards)]
            parts = Parts(every, lambda number: listed(lambda: self._missing(number), number))
            # A reader of its own, because one that reads from two positions in turn takes replayed events for new ones.
            leading, following = (None, Following(reader(0))) if own else (Leading(every[0], parts), None)
        copies, spawn = spawn is None, spawn or in_background("checkpoint", 1)
        return Checkpointer(
            transport, self.store, recorder, every_seconds, spawn, copier, parts, leading, following, copies=copies
        )

    def _in_bucket(self) -> set[int]:
        """Return the checkpoints that the bucket has, or nothing without one. Raises BucketError."""
        return set(self._bundles.numbers()) if self._bundles else set()

    def _missing(self, number: int) -> list[int]:
        """Return the shards that have no part of a checkpoint, here or in the bucket."""
        parts = enumerate(self._parts)
        return [k for k, part in parts if number not in part.store.numbers() and number not in part._in_bucket()]

    def _copier(self, manifest: Manifest) -> Copier:
        assert self._bundles is not None  # noqa: S101

        def besides() -> list[int]:  # of a run with several shards, also the newest of which the bucket has all parts
            complete = set.intersection(*(part._in_bucket() for part in self._parts)) if len(self._parts) > 1 else ()
            return [*self.store.later(), *sorted(complete)[-1:]]

        copier = Copier(self._bundles, self.store.folder, _about(manifest), self.store.keep, besides)
        self.store.held = copier.held
        return copier

    def missing_in_bucket(self) -> int:
        """Return the number of the newest checkpoint if the bucket, which may be away, does not have it; else 0."""
        if self._bundles is None or not (numbers := self.store.numbers()):
            return 0
        with suppress(BucketError):
            return 0 if numbers[-1] in self._in_bucket() else numbers[-1]
        return numbers[-1]

    def newest(self) -> Sequence[Image]:
        """Return each shard's part of the newest checkpoint that is complete and sound; nothing if there is none.

        Raises:
            ConfigError: There are checkpoints, and none is complete (`checkpoint.incomplete`) or can be read.
            BucketError: The bucket cannot be read, which may hold a newer checkpoint.
        """
        self.fetch()
        image = self.store.load()
        if image is None:
            return []
        parts = self.parts(image.manifest)
        if len(parts) == 1:
            return [image]
        for number in sorted(set.intersection(*(part._numbers() for part in parts)), reverse=True):
            try:
                return [part._read(number) for part in parts]
            except ConfigError as error:
                if isinstance(error, BucketError) and error.code != "bucket.damaged":
                    raise
                log.warning("skipping checkpoint %s of all shards: %s", number, error, extra={"code": error.code})
        raise ConfigError(
            f"{self.place} holds no checkpoint with the parts of all {len(parts)} shards",
            f"The parts of shard K are in {self.path}/shard-K. If its merger wrote to another machine, copy that "
            "folder here. Mergers on several machines need one folder (--folder) or bucket (--bucket).",
            code="checkpoint.incomplete",
        )

    def _numbers(self) -> set[int]:
        return {*self.store.numbers(), *self._in_bucket()}

    def _read(self, number: int) -> Image:
        if self._bundles is not None and number not in self.store.numbers():
            self._bundles.get(number, self.store.path_of(number))
        image = self.store.load(number)
        assert image is not None  # noqa: S101 - a missing number is an error
        return image

    def _others(self, manifest: Manifest) -> dict[str, dict[str, str]]:
        """Return the places of checkpoints of another run than this one, here and in the bucket, each with its run."""
        held = {str(part.path): part.store.about() for part in self.parts(manifest)}
        if self._bundles is not None:
            try:
                numbers = self._bundles.numbers()
                held[str(self.bucket)] = dict(self._bundles.manifest(numbers[-1]).about) if numbers else {}
            except BucketError as error:  # the run is served without its bucket, which the copier tells
                log.debug("cannot look into %s: %s", self.bucket, error)
        return {place: about for place, about in held.items() if about and about != _about(manifest)}

    def _replaces(self, transport: Transport, manifest: Manifest, *, resume: bool) -> bool:
        """Delete a new run that has the name of the run whose checkpoints lie here, and return whether there was one.

        It needs `resume`. The earlier run must have the same tensors, and nothing may have been merged in the new one.
        Raises UnknownRunError (`broker.other-run`), with nothing changed, if the run is another one, which stays.
        """
        others = self._others(manifest)
        if not others:
            return False
        place, about = next(iter(others.items()))
        if (name := about.get("run", "")) != manifest.run:
            raise _of_another_name(place, name, manifest.run)
        what = f"{place} holds checkpoints of an earlier run {name!r}, and this Redis has a new one"
        if not resume:
            raise UnknownRunError(
                f"{what}, which this merger does not serve",
                f"To continue the earlier run, start this merger with --resume. To train the new one, move {place} "
                "away, and start this merger again.",
                code=OTHER_RUN,
            )
        images, reader = self.newest(), whole(transport, manifest).reader
        earlier = images[0].manifest if images else manifest
        if merged := reader.counters().merged:
            why = f"{merged:,} contributions were merged in the new one"
        elif reader.is_served():
            why = "another merger serves the new one"
        elif earlier.uid == manifest.uid or earlier.run != manifest.run:
            why = "the newest checkpoint is not of an earlier run of that name"
        elif earlier.tensors != manifest.tensors:
            why = "they have other tensors"
        else:
            why = ""
        if why or not isinstance(transport, RedisTransport):
            raise UnknownRunError(
                f"{what}; --resume does not replace it, because {why}",
                f"To give up the new one, delete it with `archipelago rm {manifest.run}`, and start this merger again "
                "with --resume. To keep it, give this merger another --folder and --bucket.",
                code=OTHER_RUN,
            )
        for shard in reversed(range(manifest.shards)):
            delete_shard(transport.of_shard(shard).connection)
        log.warning("the new run %r, in which nothing was merged, gives way to the earlier one", manifest.run)
        return True

    def bring_back(self, transport: Transport) -> Manifest | None:
        """Create the run from the newest checkpoint in a Redis that does not have it.

        Returns:
            The manifest of the run, or None when there is no checkpoint.

        Raises:
            RunExistsError: The run exists.
            UnknownRunError: The checkpoint is of another run (`broker.other-run`).
            BucketError: The bucket cannot be read, which may hold a newer checkpoint.
        """
        images = self.newest()
        if not images:
            return None
        manifest = images[0].manifest.of_shard(None)
        if manifest.run != transport.run:
            raise _of_another_name(self.place, manifest.run, transport.run)
        restore(transport, images)
        for part, own in zip(self._parts, images, strict=True):
            part.recorder.go_back(own.round)
        log.info("the run continues from %s", describe(images))
        if isinstance(transport, RedisTransport) and transport.invitation and not transport.membership.all().by_name:
            log.warning(
                "this Redis has lost the members of the run, so what they send is refused until an administrator runs "
                "`archipelago invite --run %s` where the run's first invitation was made: it puts them back",
                transport.run, extra={"code": "members.lost"},
            )  # fmt: skip
        return manifest

    def lost(self, error: UnknownRunError, transport: RedisTransport) -> UnknownRunError:
        """Return the error of a merger whose Redis has lost the run, with what its folder or bucket can restore.

        If islands live, it is left in Redis for all who look for the run.
        """
        if error.code != UnknownRunError.code:
            return error
        places, unread = {number: f"{self.path.absolute()}" for number in self.store.numbers()}, ""
        try:
            places = {**dict.fromkeys(self._numbers(), f"{self.bucket}"), **places}
        except BucketError as fault:
            unread = f" {self.bucket} may hold more, but could not be read: {fault.what}."
        code, remedy = "broker.lost", (
            f"No checkpoint of it was found in {self.place}; start the merger that wrote its checkpoints with "
            "--resume, or create the run again."
        )  # fmt: skip
        if places:
            up = up_command(self.path.parent, transport.run)
            again = f"Continue it with `{up} --resume`" if up else "Start its merger again with --resume"
            code, remedy = "broker.resumable", (
                f"{transport.reader.stored.others_first()}{again}: it continues from checkpoint {max(places)} in "
                f"{places[max(places)]}. Islands that still run go on from there."
            )  # fmt: skip
        remedy += unread
        with suppress(BrokerError):
            if any(presence.is_live for presence in transport.reader.presences()):
                tell_refusal(transport, f"this Redis has lost it. {remedy}")
        return UnknownRunError(error.what, remedy, code=code)

    def find_or_bring_back(self, transport: Transport, *, resume: bool) -> Manifest:
        """Return the run's manifest. If Redis does not have the run and `resume` is set, restore it first.

        Raises:
            UnknownRunError: There is no run (`broker.unknown-run`), or only in a checkpoint (`broker.resumable`), or
                the checkpoints are of an earlier run of that name (`broker.other-run`).
            ConfigError: The manifest is damaged (`config.manifest`), or of another version (`config.format`).
        """
        try:
            manifest = transport.reader.manifest()
            if not self._replaces(transport, manifest, resume=resume):
                return manifest
        except UnknownRunError as error:
            if error.code == OTHER_RUN:
                raise
            self.fetch()
            numbers = self.store.numbers()
            if not numbers:
                raise
            if not resume:
                others_first = transport.reader.stored.others_first() if isinstance(transport, RedisTransport) else ""
                remedy = f"{self.path} holds its checkpoint {numbers[-1]}: continue from there with --resume, or "
                remedy = f"{others_first}{remedy}move {self.path} away to begin anew."
                raise UnknownRunError(error.what, remedy, code="broker.resumable") from None
        try:
            self.bring_back(transport)
        except RunExistsError as error:
            if error.code == SHARD_EXISTS:
                raise
            log.info("another process has restored the run already")
        return transport.reader.manifest()


def _of_another_name(place: str, held: str, run: str) -> UnknownRunError:
    what = f"{place} holds checkpoints of run {held!r}, not of {run!r}"
    return UnknownRunError(what, f"Name that run with --run {held}, or another folder.", code=OTHER_RUN)


def _about(manifest: Manifest) -> dict[str, str]:
    """Return what tells a run's checkpoints from those of other runs."""
    return {"run": manifest.run, "uid": manifest.uid}


@contextmanager
def fetched(address: str) -> Iterator[MergerFolder]:
    """Yield a temporary folder with the newest checkpoint of a bucket, if there is one.

    Args:
        address: The folder of a merger in a bucket, or that of its run.

    Raises:
        BucketError: The bucket cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="archipelago-") as temporary:
        folder = MergerFolder(Path(temporary), bucket=BucketFolder(address))
        folder.fetch()
        if not folder.store.numbers():
            folder = MergerFolder(Path(temporary), bucket=BucketFolder(address).child("merger"))
            folder.fetch()
        yield folder
