"""scikit-learn's digits: 1,797 images of 8 × 8 pixels of 0 to 16, by UCI's "Optical Recognition of Handwritten Digits".

They come from a file that the user names, or else from the package index that pip is configured for, where
scikit-learn's source distribution carries them (7 MB): nothing of scikit-learn is installed or run.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from archipelago.broker.errors import DataError
from archipelago.islands.data import corpus
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.islands.data.package_index import UNREADABLE, Archive, Progress, download, member, pip_index, silent

NAME = "digits"
_MEMBER = "/sklearn/datasets/data/digits.csv.gz"
_BY_HAND = "Give the path of sklearn/datasets/data/digits.csv.gz out of any scikit-learn with --path."
_ORDER_SEED = 0


@dataclass(frozen=True)
class Table:
    """What the unpacked file must be: a row for each image, its pixels and then its label, comma-separated."""

    bytes: int
    sha256: str


DIGITS = Table(264_712, "6ebb3d2fee246a4e99363262ddf8a00a3c41bee6014c373ed9d9216ba7f651b8")
ARCHIVE = Archive(
    project="scikit-learn",
    file="scikit_learn-1.7.2.tar.gz",
    bytes=7_193_136,
    sha256="20e9e49ecd130598f1ca38a1d85090e1a600147b9c02fa6f15d69cb53d968fda",
    holds=NAME,
    remedy=_BY_HAND,
)


def prepare_digits(
    source: Path | None = None, progress: Progress = silent, table: Table = DIGITS, archive: Archive = ARCHIVE
) -> OpenCorpus:
    """The digits as a corpus of that name, 64 pixels and a label each; the one that is there already, if any.

    `source` is digits.csv.gz, or None to fetch it through the package index. Raises DataError when it cannot be had, or
    is another file.
    """
    if corpus.is_prepared(NAME):
        return corpus.open_corpus(NAME)
    examples_NxR = parse(_fetched(progress, archive) if source is None else _read(source), table)
    return corpus.prepare_examples(mixed(examples_NxR), NAME, (source or Path(archive.file)).name)


def mixed(examples_NxR: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """In an order of chance, always the same: the file has one writer after the other, and the last are held out."""
    keys = np.random.PCG64(_ORDER_SEED).random_raw(len(examples_NxR))
    shuffled: NDArray[np.uint8] = examples_NxR[np.argsort(keys, kind="stable")]
    return shuffled


def parse(packed: bytes, table: Table = DIGITS) -> NDArray[np.uint8]:
    """The rows of digits.csv.gz; uint8 [1797, 65]. Raises DataError for any other file."""
    try:
        with gzip.open(io.BytesIO(packed)) as file:
            text = file.read(table.bytes + 1)
    except UNREADABLE as error:
        raise DataError(f"the file that should hold the digits is damaged ({error})", _BY_HAND) from error
    found = hashlib.sha256(text).hexdigest()
    if found != table.sha256:
        raise DataError(f"the digits must have the SHA-256 {table.sha256}, and this has {found}", _BY_HAND)
    return np.loadtxt(io.BytesIO(text), delimiter=",").astype(np.uint8)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"the digits cannot be read from {path} ({error.strerror})", _BY_HAND) from error


def _fetched(progress: Progress, archive: Archive) -> bytes:
    with tempfile.TemporaryDirectory(prefix="archipelago-") as folder:
        path = download(pip_index(archive), Path(folder), archive, progress)
        try:
            with tarfile.open(path, "r:*") as tar:
                return member(tar, archive, _MEMBER).read()
        except UNREADABLE as error:
            raise DataError(f"{archive.file} cannot be read ({error})", _BY_HAND) from error
