"""Whole runs on disk: `CheckpointStore` keeps images of a run, through Orbax, so that a Redis may lose everything.

A checkpoint is one directory, named by its number, with two Orbax items: `index`, JSON that people can read, and
`blobs`, the large bytes as uint8 arrays. A fragment that has not changed is not written again: the index says in
which earlier checkpoint its blobs lie. Everything in a checkpoint is covered by a digest.

A directory gets its number when all of it is safe on the disk, by one rename, and loses it by one before it is
deleted. So what bears a number is whole; everything else is a leftover of a death, and goes with the next save.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from archipelago.broker.checkpoint_errors import FILE_FAULTS, in_words, remedy
from archipelago.broker.errors import ConfigError, WireError
from archipelago.broker.failpoints import failpoint
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Books, Contribution, Evaluation, Snapshot, TapeEntry, from_fields, to_fields
from archipelago.broker.transport import Image
from archipelago.broker.wire import digest

FORMAT = 1
"""of the index; another one is not read"""

log = logging.getLogger(__name__)
Body = dict[str, Any]
"""an index: what `_packed` makes"""
_FINISHED = re.compile(r"[1-9][0-9]{0,17}")
_LEFTOVER = re.compile(r"([1-9][0-9]{0,17})\..+")


class CheckpointStore:
    """Checkpoints of one run in `folder`, of which the newest `keep` are offered. One saver at a time; any readers.

    Savers that meet by accident, such as a merger and one that was fenced, cannot mix what they write.
    """

    def __init__(self, folder: Path, keep: int = 3) -> None:
        if keep < 1:
            raise ConfigError(f"{keep} checkpoints cannot be kept", "Keep at least one.")
        self.folder = folder.absolute()  # as Orbax wants it
        self.keep = keep
        self._sound: Body | None = None  # the newest index here whose blobs were written or verified by this store

    def numbers(self) -> list[int]:
        """Finished checkpoints, ascending. Raises ConfigError when the folder cannot be listed."""
        return self._finished()[-self.keep :]

    def next_number(self) -> int:
        """At least 1, and greater than that of anything here, finished or not."""
        leftovers = [int(match[1]) for name in self._names() if (match := _LEFTOVER.fullmatch(name))]
        return max([0, *self._finished(), *leftovers]) + 1

    def save(self, image: Image) -> None:
        """Writes a checkpoint, whole or not at all, and lets go of the oldest. Raises ConfigError when it cannot."""
        newest = max(self._finished(), default=0)
        if image.number <= newest:
            raise ConfigError(
                f"checkpoint {image.number} comes too late: {self.folder} holds {newest} already",
                "Does another merger serve this run? Then this one may stop.",
            )
        self._sweep(image.number)  # what died may have filled the disk
        failpoint("checkpoint.before")
        body, blobs = _packed(image, self._previous())
        try:
            self._write(image.number, body, blobs)
        except FILE_FAULTS as error:
            raise ConfigError(
                f"checkpoint {image.number} cannot be written to {self.folder} ({in_words(error)})",
                f"{remedy(error)} Earlier checkpoints are as they were.",
            ) from error
        self._sound = body
        failpoint("checkpoint.done")
        self._tidy(image.number)

    def load(self, number: int | None = None) -> Image | None:
        """The image of that checkpoint, or of the newest that is whole; None where there is none.

        Raises ConfigError when that number is not here, or when there are checkpoints but none can be read.
        """
        if number is not None:
            return self._load(number)
        found, faults = self._newest()
        if found is None and faults:
            each = "; ".join(f"{n}: {fault}" for n, fault in faults.items())
            raise ConfigError(
                f"no checkpoint in {self.folder} can be read ({each})",
                "Put back a copy of the folder, or name another one; `archipelago init` begins a new run.",
            )
        if found is not None:
            self._sound = found[0]
        return found and found[1]

    def _load(self, number: int) -> Image:
        here = self.numbers()
        if number not in here:
            held = f"these: {', '.join(map(str, here))}" if here else "no checkpoints"
            raise ConfigError(f"{self.folder} has no checkpoint {number}", f"It holds {held}.")
        try:
            return self._read(number)[1]
        except FILE_FAULTS as error:
            raise ConfigError(
                f"checkpoint {number} in {self.folder} cannot be read ({in_words(error)})",
                f"These are here: {', '.join(map(str, here))}.",
            ) from error

    def _newest(self) -> tuple[tuple[Body, Image] | None, dict[int, str]]:
        """The newest checkpoint that is whole, and what is wrong with those that are newer, by number."""
        faults: dict[int, str] = {}
        # Listed anew each time: one that vanished while it was read was let go of, because there are newer ones.
        while untried := [number for number in self.numbers() if number not in faults]:
            number = untried[-1]
            try:
                return self._read(number), faults
            except FILE_FAULTS as error:
                faults[number] = in_words(error)
                log.warning("checkpoint %d in %s is left aside: %s", number, self.folder, faults[number])
        return None, faults

    def _previous(self) -> Body | None:
        """The index to refer to. What this store has not written itself is read first: nothing refers to damage."""
        if not self.numbers():
            return None
        if self._sound is None or self._sound["number"] != self.numbers()[-1]:
            found, _ = self._newest()
            self._sound = found and found[0]
        lost = self._sound and [f for f in self._sound["fragments"] if not self._at(f["in"]).is_dir()]
        return None if lost else self._sound

    def _read(self, number: int) -> tuple[Body, Image]:
        body = _restored_body(self._at(number), number)
        wanted: dict[int, dict[str, list[Any]]] = defaultdict(dict)
        for p, fragment in enumerate(body["fragments"]):
            wanted[fragment["in"]] |= {f"snapshot_{p}": fragment["payload"], f"outer_{p}": fragment["outer"]}
        wanted[number]["pending"] = body["payloads"]
        blobs: dict[str, bytes] = {}
        for place, described in wanted.items():
            try:
                blobs |= _restored_blobs(self._at(place), described)
            except FILE_FAULTS as error:
                raise WireError(f"in {place}: {in_words(error)}") from error
        return body, _unpacked(body, blobs)

    def _write(self, number: int, body: Body, blobs: Mapping[str, bytes]) -> None:
        unfinished = self.folder / f"{number}.{secrets.token_hex(4)}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _save(unfinished, body, blobs)
            _sync(unfinished)
            failpoint("checkpoint.written")
            unfinished.rename(self._at(number))
            _sync_folder(self.folder)
            _sync_folder(self.folder.parent)  # the folder may be new
        except BaseException:
            for path in self.folder.glob(f"{unfinished.name}*"):
                shutil.rmtree(path, ignore_errors=True)
            raise

    def _tidy(self, number: int) -> None:
        """Deletes what no kept checkpoint needs."""
        try:
            for unused in set(self._finished()) - self._used():
                self._at(unused).rename(self.folder / f"{unused}.{secrets.token_hex(4)}")
        except FILE_FAULTS as error:
            log.warning("old checkpoints stay in %s: %s", self.folder, in_words(error))
        self._sweep(number)

    def _sweep(self, number: int) -> None:
        """Deletes leftovers up to that number: later ones may be in the making."""
        try:
            for name in self._names():
                if (match := _LEFTOVER.fullmatch(name)) and int(match[1]) <= number:
                    shutil.rmtree(self.folder / name)
        except OSError as error:
            log.warning("leftovers stay in %s: %s", self.folder, in_words(error))

    def _used(self) -> set[int]:
        """The kept checkpoints, and those that they refer to."""
        kept = self.numbers()
        return {*kept, *(f["in"] for number in kept for f in _restored_body(self._at(number), number)["fragments"])}

    def _at(self, number: int) -> Path:
        return self.folder / str(number)

    def _finished(self) -> list[int]:
        return sorted(int(name) for name in self._names() if _FINISHED.fullmatch(name))

    def _names(self) -> list[str]:
        try:
            return [path.name for path in self.folder.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise ConfigError(
                f"the checkpoints in {self.folder} cannot be listed ({error})", "May this user read the folder?"
            ) from None


def describe(image: Image) -> str:
    """A line for people."""
    closed = max(snapshot.round for snapshot, _ in image.snapshots)
    step = max(snapshot.step for snapshot, _ in image.snapshots)
    return (
        f"checkpoint {image.number} of run {image.manifest.run!r}: "
        f"round {closed}, step {step}, {len(image.pending)} pending"
    )


# an image, and the same as an index and blobs


def _packed(image: Image, previous: Body | None) -> tuple[Body, dict[str, bytes]]:
    """The index, and the blobs that neither are empty nor lie in a directory that `previous` refers to."""
    fragments: list[Body] = []
    blobs: dict[str, bytes] = {}
    for p, ((snapshot, payload), outer) in enumerate(zip(image.snapshots, image.outers, strict=True)):
        fragment = {"snapshot": to_fields(snapshot), "payload": _described(payload), "outer": _described(outer)}
        place = _place_of(fragment, p, previous)
        if place is None:
            blobs |= {f"snapshot_{p}": payload, f"outer_{p}": outer}
        fragments.append({"in": image.number if place is None else place, **fragment})
    blobs["pending"] = b"".join(payload for _, payload in image.pending)
    body = {
        "number": image.number,
        "manifest": image.manifest.to_fields(),
        "fragments": fragments,
        "state": image.state,
        "books": to_fields(image.books),
        "cursors": {shard: list(place) for shard, place in image.cursors.items()},
        "tape": [to_fields(entry) for entry in image.tape],
        "evaluations": [to_fields(evaluation) for evaluation in image.evaluations],
        "pending": [{"contribution": to_fields(c), "bytes": len(payload)} for c, payload in image.pending],
        "payloads": _described(blobs["pending"]),
    }
    return body, {name: blob for name, blob in blobs.items() if blob}


def _place_of(fragment: Body, p: int, previous: Body | None) -> int | None:
    """The checkpoint that holds this very fragment, by what `previous` knows."""
    if previous is None or p >= len(previous["fragments"]):
        return None
    before = previous["fragments"][p]
    same = all(fragment[blob] == before[blob] for blob in ("payload", "outer"))
    same &= fragment["snapshot"]["version"] == before["snapshot"]["version"]
    return int(before["in"]) if same else None


def _described(blob: bytes) -> list[Any]:
    """Length in bytes and digest."""
    return [len(blob), digest(blob)]


def _unpacked(body: Body, blobs: Mapping[str, bytes]) -> Image:
    ends = accumulate((row["bytes"] for row in body["pending"]), initial=0)
    payloads = [blobs["pending"][start:end] for start, end in pairwise(ends)]
    return Image(
        manifest=Manifest.from_fields(body["manifest"]),
        number=body["number"],
        snapshots=tuple(
            (from_fields(Snapshot, fragment["snapshot"]), blobs[f"snapshot_{p}"])
            for p, fragment in enumerate(body["fragments"])
        ),
        outers=tuple(blobs[f"outer_{p}"] for p in range(len(body["fragments"]))),
        state=body["state"],
        books=from_fields(Books, body["books"]),
        cursors={shard: (of_pass, sequence) for shard, (of_pass, sequence) in body["cursors"].items()},
        tape=tuple(from_fields(TapeEntry, fields) for fields in body["tape"]),
        evaluations=tuple(from_fields(Evaluation, fields) for fields in body["evaluations"]),
        pending=tuple(
            (from_fields(Contribution, row["contribution"]), payload)
            for row, payload in zip(body["pending"], payloads, strict=True)
        ),
    )


# an index and blobs, and the same on disk


@contextmanager
def _checkpointer() -> Iterator[Any]:
    import orbax.checkpoint as ocp  # takes most of a second

    # One file holds many arrays (OCDBT): a file for each takes longer, and Orbax warns of it.
    handler = ocp.CompositeCheckpointHandler(
        index=ocp.JsonCheckpointHandler("index.json"), blobs=ocp.PyTreeCheckpointHandler(use_ocdbt=True)
    )
    chatter = logging.getLogger("absl")
    level = chatter.level
    chatter.setLevel(logging.CRITICAL)  # what goes wrong is raised, too; the log would get pages of it
    try:
        with ocp.Checkpointer(handler) as checkpointer:
            yield checkpointer
    finally:
        chatter.setLevel(level)


def _save(folder: Path, body: Body, blobs: Mapping[str, bytes]) -> None:
    import orbax.checkpoint as ocp

    index = {"format": FORMAT, "digest": _digest_of(body), "body": body}
    items = {"index": ocp.args.JsonSave(index)}
    if blobs:
        arrays = {name: np.frombuffer(blob, np.uint8) for name, blob in blobs.items()}
        items["blobs"] = ocp.args.PyTreeSave(arrays)
    with _checkpointer() as checkpointer:
        checkpointer.save(folder, args=ocp.args.Composite(**items))


def _digest_of(body: Body) -> str:
    return digest(json.dumps(body, sort_keys=True).encode())


def _restored_body(folder: Path, number: int) -> Body:
    """The index in that directory. Raises WireError, or what Orbax does, when it is not what was written there."""
    import orbax.checkpoint as ocp

    with _checkpointer() as checkpointer:
        index = checkpointer.restore(folder, args=ocp.args.Composite(index=ocp.args.JsonRestore()))["index"]
    if index.get("format") != FORMAT:
        raise WireError(
            f"it has format {index.get('format')!r:.32}, and this version of archipelago reads format {FORMAT} only"
        )
    body: Body = index["body"]
    if index["digest"] != _digest_of(body) or body["number"] != number:
        raise WireError("the index is damaged")
    return body


def _restored_blobs(folder: Path, described: Mapping[str, list[Any]]) -> dict[str, bytes]:
    """Those blobs, of these lengths and digests. Raises WireError, or what Orbax does, when one is not as written."""
    import orbax.checkpoint as ocp

    blobs = {}
    with _checkpointer() as checkpointer:
        for name, (size, whose) in described.items():
            # One at a time: where one of several is damaged, Orbax leaves the reading of the others to its fate.
            how = ocp.args.PyTreeRestore(
                item={name: 0}, restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray)}, partial_restore=True
            )
            array = checkpointer.restore(folder, args=ocp.args.Composite(blobs=how))["blobs"][name] if size else None
            blobs[name] = _verified(name, array, size, whose)
    return blobs


def _verified(name: str, array: Any, size: int, whose: str) -> bytes:
    if size == 0:
        return b""
    if not isinstance(array, np.ndarray) or (array.dtype, array.shape) != (np.uint8, (size,)):
        raise WireError(f"{name} is damaged: no {size} bytes")
    blob = array.tobytes()
    if digest(blob) != whose:
        raise WireError(f"{name} is damaged: its digest is {digest(blob)}, not {whose}")
    return blob


def _sync(tree: Path) -> None:
    """Returns when everything below a directory is on the disk, so that no power cut unmakes it."""
    for folder, _, names in os.walk(tree):
        for name in names:
            with Path(folder, name).open("rb+") as file:
                os.fsync(file.fileno())
        _sync_folder(Path(folder))


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":  # others open files only
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
