"""A folder at an address that fsspec understands, such as s3://BUCKET/FOLDER or gs://BUCKET/FOLDER.

Object stores have no folders and no renames. A file appears there when its upload ends, so what consists of several
files needs one that is written last (`bundles`). This module is the only one that talks to fsspec: it turns the errors
of all its backends into ours.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from archipelago.broker.address import redacted
from archipelago.broker.errors import ConfigError
from archipelago.broker.machine import install_hint
from archipelago.broker.observe.progress import progress

#: The environment variable that names the bucket of all workers.
BUCKET_VARIABLE = "ARCHIPELAGO_BUCKET"
#: The extra that installs what a scheme needs.
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
#: Codes of errors that do not end by themselves, so that a worker should not start with them.
MISTAKES = frozenset(["bucket.denied", "bucket.missing", "bucket.scheme"])
#: The most bytes that are read into memory. Manifests and cards are smaller; the rest of a larger file is not read.
READ_BYTES_MAX = 64 << 20
#: How many files are transferred at once, where the backend can, and how many parts of each by s3fs. A part has 50 MiB,
#: and a file of less than two is sent whole, so s3fs holds up to 100 MiB of each file in memory.
FILES_AT_ONCE, PARTS_AT_ONCE = 8, 2

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_PROBE = ".archipelago-probe"

log = logging.getLogger(__name__)


class BucketError(ConfigError):
    """A bucket cannot be used, or refuses a request."""

    code = "bucket.failed"


def is_address(text: str) -> bool:
    """Return whether a text names a place by a URL, and is no path on this machine."""
    return _ADDRESS.match(text) is not None


def is_bucket(text: str) -> bool:
    """Return whether a text is an address of a scheme that fsspec can write to, such as s3://. A Redis's is not."""
    found = _ADDRESS.match(text)
    return found is not None and found[1] in _known_schemes() - {"http", "https"}


def chosen(address: str | None) -> str | None:
    """Return the address of the bucket that the user has chosen: the option's, or that of $ARCHIPELAGO_BUCKET."""
    return address or os.environ.get(BUCKET_VARIABLE) or None


class BucketFolder:
    """A folder in a bucket. Opening one does not contact the bucket.

    Every method raises BucketError if the bucket cannot be reached, or refuses.

    Args:
        address: The URL of the folder.

    Raises:
        BucketError: The address is not a URL that fsspec knows, or a package is missing (`bucket.scheme`).
    """

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self.shown = redacted(self.address)
        self._fs, path = _opened(self.address, self.shown)
        self._path = path.rstrip("/")

    def __str__(self) -> str:
        return self.shown

    def child(self, *names: str) -> BucketFolder:
        return BucketFolder("/".join([self.address, *names]))

    def names(self) -> list[str]:
        """Return the names of the files and folders in this folder; nothing if there is no such folder."""
        found: list[str] = []
        with self._translated("list"), suppress(FileNotFoundError):
            self._fs.invalidate_cache()  # some backends keep listings whatever they are told
            found = self._fs.ls(self._path, detail=False)
        own = self._path.strip("/")  # some buckets have an empty file in the place of a folder
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found if path.strip("/") != own)

    def tree(self) -> dict[str, int]:
        """Return the size of each file in this folder and in those below it, by its path in this folder."""
        with self._translated("read"):
            self._fs.invalidate_cache()
            found = self._fs.find(self._path, detail=True)
        start = len(self._path.lstrip("/")) + 1
        return {path.lstrip("/")[start:]: int(about["size"] or 0) for path, about in found.items()}

    def read(self, name: str) -> bytes:
        """Return the content of a file, at most READ_BYTES_MAX."""
        with self._translated("read"):
            return bytes(self._fs.cat_file(self._at(name), start=0, end=READ_BYTES_MAX))

    def write(self, name: str, data: bytes) -> None:
        """Write a file. Readers see the old content or the new if the bucket replaces files whole, as S3 does."""
        with tempfile.NamedTemporaryFile(prefix="archipelago-") as file:  # only uploads create folders everywhere
            file.write(data)
            file.flush()
            self.upload({name: Path(file.name)})

    def upload(self, files: Mapping[str, Path]) -> None:
        """Copy files of this machine to the bucket, by their names there. Raises OSError if one cannot be read here."""
        for path in files.values():
            path.open("rb").close()  # so that a refusal by the disk is not taken for one by the bucket
        with self._translated("write"):
            self._fs.put([str(path) for path in files.values()], [self._at(name) for name in files])

    def download(self, files: Mapping[str, Path]) -> None:
        """Copy files from the bucket to this machine, by their names there. Raises OSError if the disk refuses them."""
        for path in files.values():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("wb").close()  # so that a refusal by the disk is not taken for one by the bucket
        with self._translated("read"):
            self._fs.get([self._at(name) for name in files], [str(path) for path in files.values()])

    def delete(self, name: str) -> None:
        """Delete a file or a folder, if it is there."""
        with self._translated("delete from"), suppress(FileNotFoundError):
            self._fs.rm(self._at(name), recursive=True)

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"

    @contextmanager
    def _translated(self, verb: str) -> Iterator[None]:
        """Turn an error of the backend into a BucketError. That of a full disk of this machine passes."""
        try:
            yield
        except Exception as error:  # each backend has exceptions of its own
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise _error(self.shown, verb, error) from error


def open_bucket(address: str, *names: str) -> BucketFolder:
    """Open the folder of a worker, and write, read and delete a small file, so that missing rights show at once.

    A bucket that cannot be reached is logged only, because it may come back. Raises BucketError if the address or the
    rights are wrong (MISTAKES).
    """
    folder = BucketFolder(address).child(*names)
    try:
        with progress(f"testing {folder}"):
            folder.write(_PROBE, b"archipelago")
            folder.read(_PROBE)
            with suppress(BucketError):  # it may be forbidden to delete; then old checkpoints stay
                folder.delete(_PROBE)
    except BucketError as error:
        if error.code in MISTAKES:
            raise
        log.warning("%s", error, extra={"code": error.code})
    return folder


def _known_schemes() -> set[str]:
    import fsspec

    return {*fsspec.available_protocols(), *fsspec.registry}


def _opened(address: str, shown: str) -> tuple[Any, str]:
    """Return the filesystem of an address and the path in it."""
    import fsspec

    found = _ADDRESS.match(address)
    scheme = found[1] if found else ""
    if scheme not in _known_schemes():
        raise BucketError(
            f"{scheme}:// in {shown:.200} is unknown" if scheme else f"{shown!r:.200} is not an address of a bucket",
            "Write it as s3://BUCKET/FOLDER. Other schemes are gs, az and sftp.",
            code="bucket.scheme",
        )
    options: dict[str, Any] = {"use_listings_cache": False}
    if scheme in ("file", "local"):
        options["auto_mkdir"] = True
    if scheme in ("s3", "s3a"):  # s3fs and our copiers try again, too
        options["config_kwargs"] = {"retries": {"mode": "standard", "total_max_attempts": 2}}
        options["max_concurrency"] = PARTS_AT_ONCE
    try:
        filesystem, path = fsspec.core.url_to_fs(address, **options)
    except ImportError as error:
        remedy = install_hint(EXTRAS[scheme]) if scheme in EXTRAS else ""
        said = f"addresses with {scheme}:// need a package that this Python does not have ({error})"
        raise BucketError(said, remedy, code="bucket.scheme") from None
    except Exception as error:  # each backend has exceptions of its own
        raise _error(shown, "open", error) from error
    filesystem.batch_size = FILES_AT_ONCE  # of filesystems that work asynchronously; others transfer one by one
    return filesystem, str(path)


def _error(shown: str, verb: str, error: Exception) -> BucketError:
    """Return our error for one of a backend."""
    name, text = type(error).__name__, " ".join(f"{error}".split())[:200]
    if isinstance(error, PermissionError) or "Forbidden" in name:
        return BucketError(
            f"this process may not {verb} {shown} ({text or name})",
            "Give its credentials the right to list, read, write and delete there.",
            code="bucket.denied",
        )
    if "Credential" in name or "Credential" in text:
        return BucketError(
            f"there are no usable credentials for {shown} ({text or name})",
            "Set them as for the provider's own tools, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
            "GOOGLE_APPLICATION_CREDENTIALS.",
            code="bucket.denied",
        )
    if isinstance(error, FileNotFoundError):
        return BucketError(
            f"cannot {verb} {shown} ({text or 'it does not exist'})",
            "Create the bucket, or check its name.",
            code="bucket.missing",
        )
    own = " For a server of your own, set AWS_ENDPOINT_URL." if shown.startswith("s3") else ""
    return BucketError(
        f"cannot {verb} {shown} now ({name}: {text})", f"Check the address and the network.{own}", code="bucket.failed"
    )
