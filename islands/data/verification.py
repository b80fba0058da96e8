"""Verification of a corpus's data against the digest on its card.

The data is hashed in full once. The result is stored beside it, with the file's size and times. While these still
match, the data is not read again. The file's change time is among them, which no program can set, so a copy on another
machine is hashed again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from io import BufferedReader
from pathlib import Path

from archipelago.broker.files import write_atomically
from archipelago.broker.observe.progress import progress

#: The file with the result, beside the data.
RECORD_FILE = ".verified.json"

log = logging.getLogger(__name__)


def is_verified(path: Path, digest: str) -> bool:
    """Return whether a file has this BLAKE2b-128 digest. It is hashed in full unless that was done before.

    Args:
        path: The file.
        digest: Thirty-two hexadecimal digits.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        found = _evidence(file, digest)
        if _recorded(path) == found:
            return True
        if _digest(file, path) != digest:
            return False
        if _evidence(file, digest) == found:  # otherwise someone wrote to the file meanwhile
            _record(path, found)
    return True


def record_verified(path: Path, digest: str) -> None:
    """Store that a file has this digest, after a program that knows it has written the file."""
    with path.open("rb") as file:
        _record(path, _evidence(file, digest))


def _evidence(file: BufferedReader, digest: str) -> dict[str, str | int]:
    """Return what must stay the same for a verification to remain valid."""
    status = os.fstat(file.fileno())
    times = {"modified_ns": status.st_mtime_ns, "changed_ns": status.st_ctime_ns}
    return {"digest": digest, "bytes": status.st_size, **times}


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


def _digest(file: BufferedReader, path: Path) -> str:
    with progress(f"verifying {path}, once"):
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
