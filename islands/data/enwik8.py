"""enwik8, the first 100,000,000 bytes of an English Wikipedia of 2006: the usual benchmark of byte-level models.

The text comes from its canonical address, or from a file that the user names.
"""

from __future__ import annotations

import gzip
import hashlib
import tempfile
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import BinaryIO, cast
from urllib.error import HTTPError

from archipelago.broker.errors import DataError
from archipelago.islands.data.corpus import ENWIK8, OpenCorpus, is_prepared, open_corpus
from archipelago.islands.data.documents import Progress
from archipelago.islands.data.preparation import Filled, TextWriter, chunks, create

CONNECT_SECONDS = 15.0
#: The errors of the archive modules for damaged, foreign (KeyError) and encrypted (RuntimeError) files.
UNREADABLE = (OSError, EOFError, zlib.error, zipfile.BadZipFile, KeyError, RuntimeError)
_REMEDY = "Download enwik8.zip (http://mattmahoney.net/dc/enwik8.zip) elsewhere, and name the file with --path."


@dataclass(frozen=True)
class Source:
    """The text, and where it is downloaded.

    Attributes:
        bytes: The size of the text.
        sha256: The hash of the text.
        url: The canonical address of its file.
        file_bytes: The size of that file.
    """

    bytes: int = 100_000_000
    sha256: str = "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"
    url: str = "http://mattmahoney.net/dc/enwik8.zip"
    file_bytes: int = 36_445_475


def silent(activity: str, done: int, total: int) -> None:
    """A `Progress` that shows nothing."""


def prepare_enwik8(path: Path | None = None, progress: Progress = silent, source: Source = Source()) -> OpenCorpus:
    """Prepare enwik8, or open the corpus if it exists.

    Args:
        path: The official enwik8.zip, or a gzipped or unpacked enwik8. None downloads it (36 MB).
        progress: Called during the download and the unpacking.
        source: The expected text, and where to download it.

    Raises:
        DataError: It cannot be downloaded or read, or it is another text (`data.unreachable`), or one of the errors of
            `create`.
    """
    if is_prepared(ENWIK8):
        return open_corpus(ENWIK8)
    with ExitStack() as stack:
        if path is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="archipelago-")))
            path = download(source, folder, progress)
        stream, name = _opened(path, stack), path.name

        def fill(writer: TextWriter) -> Filled:
            copy(stream, writer, source, progress)
            return Filled(name)

        return create(ENWIK8, fill)


def copy(stream: BinaryIO, writer: TextWriter, source: Source, progress: Progress = silent) -> None:
    """Copy a stream, and stop as soon as it cannot be the text. Raises DataError (`data.unreachable`)."""
    sha256 = hashlib.sha256()
    for chunk in _readable(stream):
        if writer.size + len(chunk) > source.bytes:
            raise _wrong(f"enwik8 has {source.bytes:,} bytes, and this file has more")
        writer.write(chunk)
        sha256.update(chunk)
        progress("unpacking", writer.size, source.bytes)
    if writer.size != source.bytes:
        raise _wrong(f"enwik8 has {source.bytes:,} bytes, and this file has {writer.size:,}")
    if sha256.hexdigest() != source.sha256:
        raise _wrong(f"enwik8 has the SHA-256 {source.sha256}, and this file has {sha256.hexdigest()}")


def _wrong(what: str) -> DataError:
    return DataError(what, f"The file is not enwik8, or it was cut off. {_REMEDY}", code="data.unreachable")


# -- the download ------------------------------------------------------------------------------------------------------


def download(source: Source, folder: Path, progress: Progress = silent) -> Path:
    """Download the file into `folder`, and return its path. Raises DataError (`data.unreachable`).

    `copy` compares the text with its hash, so the file needs none.
    """
    path, done = folder / ENWIK8, 0
    try:
        with urllib.request.urlopen(source.url, timeout=CONNECT_SECONDS) as answer, path.open("wb") as file:  # noqa: S310
            for chunk in chunks(answer):
                done += len(chunk)
                if done > source.file_bytes:
                    raise ValueError(f"the file is larger than {source.file_bytes:,} bytes")
                file.write(chunk)
                progress("downloading", done, source.file_bytes)
    except (HTTPException, OSError, ValueError) as error:
        if isinstance(error, HTTPError):
            error.close()  # it holds the connection
        reason = " ".join(f"{error}".split())[:200] or type(error).__name__
        raise DataError(
            f"enwik8 cannot be downloaded from {source.url} ({reason})", _REMEDY, code="data.unreachable"
        ) from None
    return path


# -- the file ----------------------------------------------------------------------------------------------------------


def _unreadable(path: str, error: Exception) -> DataError:
    return DataError(f"enwik8 cannot be read from {path} ({error})", _REMEDY, code="data.unreachable")


def _readable(stream: BinaryIO) -> Iterator[bytes]:
    try:
        yield from chunks(stream)
    except UNREADABLE as error:
        raise _unreadable("the file", error) from error


def _opened(path: Path, stack: ExitStack) -> BinaryIO:
    """Open the text inside `path`, unpacked as it is read. It stays open until `stack` closes."""
    try:
        if zipfile.is_zipfile(path):
            return cast(BinaryIO, stack.enter_context(stack.enter_context(zipfile.ZipFile(path)).open(ENWIK8)))
        file = stack.enter_context(path.open("rb"))
        is_packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
    except UNREADABLE as error:
        raise _unreadable(str(path), error) from error
    return cast(BinaryIO, stack.enter_context(gzip.GzipFile(fileobj=file, mode="rb"))) if is_packed else file
