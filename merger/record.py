"""The record of a run on disk: all rounds with their contributions, for `archipelago replay`.

It is a folder of segments, one for each checkpoint, and each is written atomically. If a merger
died between two writes, a round may be in two segments. Both copies are the same.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

from archipelago.broker.commits import Delivery
from archipelago.broker.errors import ConfigError, WireError
from archipelago.broker.files import write_atomically
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Contribution, Snapshot, TapeEntry, from_fields, to_fields
from archipelago.broker.wire import digest

log = logging.getLogger(__name__)
MAGIC = b"ARR1"
_DIGEST_CHARACTERS = 32
_SEGMENT = re.compile(r"rounds-(\d+)-(\d+)\.bin")
_BEGIN = "begin.bin"
Round = tuple[TapeEntry, tuple[Delivery, ...]]


@dataclass
class Record:
    """A record that was read: the run or the shard, version 0 of its fragments, and its rounds by number."""

    manifest: Manifest
    beginning: Sequence[tuple[Snapshot, bytes]]
    rounds: dict[int, Round] = field(default_factory=dict)


class Recorder:
    """Writes the record of one run into its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, manifest: Manifest, snapshots: Sequence[tuple[Snapshot, bytes]]) -> None:
        """Write version 0 of the run. Raises ConfigError if it cannot, or if the folder holds another run's record."""
        body: dict[str, Any] = {
            "manifest": manifest.to_fields(), "snapshots": [[to_fields(s), data] for s, data in snapshots]
        }  # fmt: skip
        if manifest.shard is not None:
            body["shard"] = manifest.shard
        if (self.folder / _BEGIN).exists():
            # Of the snapshots only what they hold: the first invitation signs those that Redis has.
            known, own = (
                {**each, "snapshots": [data for _, data in each["snapshots"]]}
                for each in (_read(self.folder / _BEGIN), body)
            )
            if known != own:
                raise ConfigError(
                    f"{self.folder} holds the record of another run {manifest.run!r}",
                    "Move it away, or name another folder with --folder.",
                    code="record.folder",
                )
            return
        try:
            self._write(_BEGIN, body)
        except OSError as error:
            raise ConfigError(
                f"the record cannot be written to {self.folder} ({error})",
                "Name another folder with --folder.",
                code="record.folder",
            ) from None

    def append(self, rounds: Sequence[Round]) -> None:
        """Add a segment of rounds that follow each other. Raises OSError."""
        if not rounds:
            return
        packed = [
            [to_fields(entry), [[d.entry, to_fields(d.contribution), d.payload] for d in deliveries]]
            for entry, deliveries in rounds
        ]
        self._write(f"rounds-{rounds[0][0].round:08}-{rounds[-1][0].round:08}.bin", {"rounds": packed})

    def last_round(self) -> int:
        """Return the last recorded round, 0 if there is none."""
        return max((last for _, _, last in _segments(self.folder)), default=0)

    def go_back(self, last_round: int) -> None:
        """Delete the segments with later rounds, which the run has lost."""
        for path, _, last in _segments(self.folder):
            if last > last_round:
                log.warning("deleting %s: the run has lost its rounds after round %s", path, last_round)
                path.unlink(missing_ok=True)

    def _write(self, name: str, body: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        data = msgpack.packb(body)
        write_atomically(self.folder / name, [MAGIC + digest(data).encode(), data])


def _segments(folder: Path) -> Iterator[tuple[Path, int, int]]:
    for path in sorted(folder.glob("rounds-*.bin")):
        if found := _SEGMENT.fullmatch(path.name):
            yield path, int(found[1]), int(found[2])


def read(folder: Path) -> Record:
    """Read the record in a folder. Raises ConfigError if there is none (`record.missing`) or it is damaged."""
    if not (folder / _BEGIN).is_file():
        raise ConfigError(
            f"there is no record of a run in {folder}",
            "Only a run that was created with --record can be replayed. Name it, or its folder, such as runs/demo.",
            code="record.missing",
        )
    try:
        body = _read(folder / _BEGIN)
        snapshots = [(from_fields(Snapshot, fields), _bytes(data)) for fields, data in body["snapshots"]]
        record = Record(_manifest(body["manifest"]).of_shard(body.get("shard", 0)), snapshots)
        for path, _, _ in _segments(folder):
            _add(record, _read(path))
    except (WireError, OSError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"the record in {folder} cannot be read ({error})",
            "Was it made by another version of archipelago?",
            code="record.damaged",
        ) from None
    return record


def _manifest(fields: Any) -> Manifest:
    """Return the manifest of a record. Raises WireError: its own remedy is for a run in Redis."""
    try:
        return Manifest.from_fields(fields)
    except ConfigError as error:
        raise WireError(error.what) from None


def _add(record: Record, body: Any) -> None:
    for fields, deliveries in body["rounds"]:
        entry = from_fields(TapeEntry, fields)
        known = record.rounds.get(entry.round)
        if known is None or entry.epoch >= known[0].epoch:
            record.rounds[entry.round] = (entry, tuple(_unpacked(*delivery) for delivery in deliveries))


def _unpacked(entry: str, fields: dict[str, str], payload: bytes) -> Delivery:
    return Delivery(entry, from_fields(Contribution, fields), _bytes(payload))


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):  # bytes(number) would take that much memory
        raise WireError(f"{type(value).__name__} where bytes should be")
    return value


def _read(path: Path) -> Any:
    data = path.read_bytes()
    body = data[len(MAGIC) + _DIGEST_CHARACTERS :]
    if data[: len(data) - len(body)] != MAGIC + digest(body).encode():
        raise ConfigError(
            f"{path} is damaged",
            "Copy it again from its origin; no later round can be replayed.",
            code="record.damaged",
        )
    return msgpack.unpackb(body, max_bin_len=1 << 32, max_str_len=1 << 26)
