"""Verification of a corpus's data against the digest on its card.

The data is read and hashed in full once. The result is stored beside it, with the file's size and times and the digest
of a sample of its blocks. While these still match, later openings read only the sample. The file's change time is
among them, which no program can set, so a copy on another machine is hashed again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from archipelago.broker.files import write_atomically

#: The file with the result, beside the data.
RECORD_FILE = ".verified.json"
#: How many blocks of the data are read at each opening, and their size.
SAMPLE_BLOCKS, SAMPLE_BYTES = 64, 16 << 10
_READ_BYTES = 8 << 20
#: Progress is logged after this many seconds, and then again as often.
PROGRESS_SECONDS = 2.0

log = logging.getLogger(__name__)


def is_verified(path: Path, digest: str, clock: Callable[[], float] = time.monotonic) -> bool:
    """Return whether a file has this BLAKE2b-128 digest. It is hashed in full unless that was done before.

    Args:
        path: The file.
        digest: Thirty-two hexadecimal digits.
        clock: Monotonic seconds, for the progress.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        found = _evidence(file, digest)
        if _recorded(path) == found:
            return True
        if _digest(file, path, clock) != digest:
            return False
        if _evidence(file, digest) == found:  # otherwise someone wrote to the file meanwhile
            _record(path, found)
    return True


def record_verified(path: Path, digest: str) -> None:
    """Store that a file has this digest, after a program that knows it has written the file."""
    with path.open("rb") as file:
        _record(path, _evidence(file, digest))


def _evidence(file: BinaryIO, digest: str) -> dict[str, str | int]:
    """Return what must stay the same for a verification to remain valid."""
    status = os.fstat(file.fileno())
    sample = hashlib.blake2b(digest_size=16)
    last = max(0, status.st_size - SAMPLE_BYTES)
    for number in range(SAMPLE_BLOCKS):
        file.seek(last * number // (SAMPLE_BLOCKS - 1))
        sample.update(file.read(SAMPLE_BYTES))
    return {
        "digest": digest,
        "bytes": status.st_size,
        "modified_ns": status.st_mtime_ns,
        "changed_ns": status.st_ctime_ns,
        "sample": sample.hexdigest(),
    }


def _recorded(path: Path) -> object:
    """Return the stored result; None if there is none."""
    try:
        with path.with_name(RECORD_FILE).open("rb") as file:
            return json.loads(file.read(4096))
    except (OSError, ValueError, RecursionError):
        return None


def _record(path: Path, found: dict[str, str | int]) -> None:
    try:
        write_atomically(path.with_name(RECORD_FILE), json.dumps(found) + "\n")
    except OSError as error:
        log.info("%s is read in full at each start, because the result cannot be stored (%s)", path, error.strerror)


def _digest(file: BinaryIO, path: Path, clock: Callable[[], float]) -> str:
    whole, hashed, size = hashlib.blake2b(digest_size=16), 0, os.fstat(file.fileno()).st_size
    due = clock() + PROGRESS_SECONDS
    for block in _blocks(file):
        whole.update(block)
        hashed += len(block)
        if clock() >= due:
            log.warning("verifying %s once: %d %% of %.1f GB", path, 100 * hashed // max(1, size), size / 1e9)
            due = clock() + PROGRESS_SECONDS
    return whole.hexdigest()


def _blocks(file: BinaryIO) -> Iterator[memoryview]:
    file.seek(0)
    buffer = bytearray(_READ_BYTES)
    view = memoryview(buffer)
    while size := file.readinto(buffer):  # type: ignore[attr-defined]
        yield view[:size]
