"""Copies of corpora in a bucket, whose address $ARCHIPELAGO_DATA can be.

In the bucket a corpus is a folder with the same files as on a disk. Its card is uploaded last, so a folder without one
is no corpus. Each machine downloads a corpus once, and compares the data with the digest in the card.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path

import platformdirs

from archipelago.broker.buckets.folder import BucketFolder, is_address
from archipelago.broker.errors import DataError
from archipelago.broker.files import staged_folder
from archipelago.broker.observe.progress import progress

DATA_VARIABLE = "ARCHIPELAGO_DATA"
CARD_BYTES_MAX = 64 << 10

log = logging.getLogger(__name__)


def bucket_of_corpora() -> BucketFolder | None:
    """Return the folder of all corpora in the bucket; None if $ARCHIPELAGO_DATA is no address. Raises BucketError."""
    address = os.environ.get(DATA_VARIABLE, "")
    return BucketFolder(address) if is_address(address) else None


def folder_in_front_of(address: str) -> Path:
    """Return the folder of this machine with what was downloaded from an address. Each address has its own."""
    name = hashlib.blake2b(address.rstrip("/").encode(), digest_size=6).hexdigest()
    return platformdirs.user_cache_path("archipelago") / f"corpora-{name}"


def download_corpus(target: Path, card: str, data: str) -> bool:
    """Download the corpus with the name of the folder `target`, if there is a bucket that has it.

    Args:
        target: The folder to create.
        card: The name of the card's file.
        data: The name of the data's file.

    Returns:
        Whether the corpus is there now.

    Raises:
        BucketError: The bucket cannot be read.
        DataError: The corpus in the bucket is damaged (`data.damaged`), or the disk refuses it (`data.unwritable`).
    """
    bucket = bucket_of_corpora()
    if bucket is None:
        return False
    remote = bucket.child(target.name)
    names = [path for path in remote.tree() if path and "/" not in path]
    if card not in names:
        return False
    try:
        with progress(f"downloading the corpus {target.name!r} from {bucket}"), staged_folder(target) as stage:
            remote.download({name: stage / name for name in names})
            if digest_of(stage / data) != _digest_in(stage / card):
                raise DataError(
                    f"the corpus {target.name!r} in {bucket} is damaged ({data} has another digest than {card} says)",
                    "Delete it there, and run `archipelago prepare` again.",
                    code="data.damaged",
                )
    except OSError as error:
        if (target / card).is_file():
            return True  # another process has downloaded it meanwhile
        raise DataError(
            f"the corpus {target.name!r} cannot be downloaded to {target.parent} ({error})",
            "Check the disk's space and permissions.",
            code="data.unwritable",
        ) from error
    return True


def upload_corpus(folder: Path, card: str) -> None:
    """Upload a corpus of this machine, if there is a bucket that does not have it yet.

    Raises:
        BucketError: The bucket refuses it.
        DataError: The bucket has another corpus of that name (`data.taken`).
    """
    bucket = bucket_of_corpora()
    if bucket is None:
        return
    remote = bucket.child(folder.name)
    if card in remote.tree():
        if f'"{_digest_in(folder / card)}"'.encode() in remote.read(card):
            return
        raise DataError(
            f"{bucket} holds a different corpus {folder.name!r} already",
            "Choose another --name, or delete it there.",
            code="data.taken",
        )
    with progress(f"uploading the corpus {folder.name!r} to {bucket}"):
        remote.upload({path.name: path for path in folder.glob("[!.]*") if path.is_file() and path.name != card})
        remote.upload({card: folder / card})


def _digest_in(card: Path) -> str:
    """Return the digest of the data, from its card; empty if the card is damaged."""
    try:
        return str(json.loads(card.read_bytes()[:CARD_BYTES_MAX])["digest"])
    except (ValueError, LookupError, TypeError):
        return ""


def digest_of(path: Path) -> str:
    """Return the BLAKE2b-128 digest of a file, 32 hexadecimal digits. Raises OSError if it cannot be read."""
    with progress(f"verifying {path}"), path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
