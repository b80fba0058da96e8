"""scikit-learn's digits: 1,797 images of 8 × 8 pixels (UCI's "Optical Recognition of Handwritten Digits").

The images come from a file that the user names, from scikit-learn's repository, or from a wheel of scikit-learn on the
package index. Nothing of scikit-learn is installed or run.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from archipelago.broker.errors import DataError
from archipelago.islands.data.corpus import DIGITS, OpenCorpus, is_prepared, open_corpus
from archipelago.islands.data.download import UNREADABLE, Package, Progress, Source, download, silent
from archipelago.islands.data.preparation import prepare_examples

_MEMBER = "sklearn/datasets/data/digits.csv.gz"
_REMEDY = f"Copy {_MEMBER} from any installed scikit-learn, and name the file with --path."
_PACKED_BYTES_MAX = 1 << 20
_ORDER_SEED = 0


@dataclass(frozen=True)
class Table:
    """The size and the hash of the unpacked file: a row per image, its pixels (0 to 16) and then its label."""

    bytes: int
    sha256: str


TABLE = Table(264_712, "6ebb3d2fee246a4e99363262ddf8a00a3c41bee6014c373ed9d9216ba7f651b8")
SOURCE = Source(
    name=DIGITS,
    url=f"https://raw.githubusercontent.com/scikit-learn/scikit-learn/1.7.2/{_MEMBER}",
    bytes=57_523,
    sha256="09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22",
    package=Package(
        requirement="scikit-learn==1.7.2",
        file="scikit_learn-1.7.2-cp312-cp312-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
        sha256="e5bf3d930aee75a65478df91ac1225ff89cd28e9ac7bd1196853a9229b6adb0b",
        # Any wheel has the file. A fixed one has a known hash, and pip runs nothing of a wheel.
        options=(
            "--only-binary=:all:",
            "--python-version=3.12",
            "--implementation=cp",
            "--abi=cp312",
            "--platform=manylinux2014_x86_64",
        ),
    ),
    remedy=_REMEDY,
)


def prepare_digits(
    path: Path | None = None, progress: Progress = silent, table: Table = TABLE, source: Source = SOURCE
) -> OpenCorpus:
    """Prepare the digits as examples of 64 pixels and a label, or open the corpus if it exists.

    Args:
        path: scikit-learn's digits.csv.gz, or a wheel of scikit-learn. None downloads it.
        progress: Called during the download.
        table: The expected table.
        source: Where to download it.

    Raises:
        DataError: It cannot be downloaded (`data.unreachable`) or read (`data.unreadable`), it is another file
            (`data.wrong-file`), or one of the errors of `create`.
    """
    if is_prepared(DIGITS):
        return open_corpus(DIGITS)
    with tempfile.TemporaryDirectory(prefix="archipelago-") as folder:
        path = path or download(source, Path(folder), progress)
        examples_NxR = parse(_read(path), table)
    return prepare_examples(shuffled(examples_NxR), DIGITS, path.name)


def shuffled(examples_NxR: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Shuffle the images, always in the same way. The file is sorted by writer, and the last images are held out."""
    keys = np.random.PCG64(_ORDER_SEED).random_raw(len(examples_NxR))
    mixed: NDArray[np.uint8] = examples_NxR[np.argsort(keys, kind="stable")]
    return mixed


def parse(packed: bytes, table: Table = TABLE) -> NDArray[np.uint8]:
    """Return the rows of digits.csv.gz, uint8 [1797, 65].

    Raises:
        DataError: It is damaged (`data.unreadable`), or another file (`data.wrong-file`).
    """
    try:
        with gzip.open(io.BytesIO(packed)) as file:
            text = file.read(table.bytes + 1)
    except UNREADABLE as error:
        raise _unreadable("the file", error) from error
    found = hashlib.sha256(text).hexdigest()
    if found != table.sha256:
        raise DataError(
            f"the digits have the SHA-256 {table.sha256}, and this file has {found}", _REMEDY, code="data.wrong-file"
        )
    return np.loadtxt(io.BytesIO(text), delimiter=",").astype(np.uint8)


def _read(path: Path) -> bytes:
    """Read the packed table from a wheel, or from the file itself."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as wheel, wheel.open(_MEMBER) as member:
                return member.read(_PACKED_BYTES_MAX)
        with path.open("rb") as file:
            return file.read(_PACKED_BYTES_MAX)
    except UNREADABLE as error:
        raise _unreadable(str(path), error) from error


def _unreadable(path: str, error: Exception) -> DataError:
    return DataError(f"the digits cannot be read from {path} ({error})", _REMEDY, code="data.unreadable")
