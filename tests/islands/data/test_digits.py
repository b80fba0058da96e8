"""The digits on their way from a scikit-learn to a corpus of examples, with a small table in their place."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from archipelago.broker.errors import DataError
from archipelago.islands.data import corpus, digits
from archipelago.islands.data.digits import Table
from archipelago.islands.data.package_index import Archive, Index

ROWS = np.random.default_rng(0).integers(0, 17, (1100, 65))
ROWS[:, -1] = np.arange(1100) % 10
CSV = "\n".join(",".join(map(str, row)) for row in ROWS.tolist()).encode() + b"\n"
TABLE = Table(len(CSV), hashlib.sha256(CSV).hexdigest())
PAGE, FILE = "https://index.test/simple/learning/", "https://index.test/files/learning-1.0.tar.gz"


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "data"
    monkeypatch.setenv("ARCHIPELAGO_DATA", str(folder))
    return folder


def sdist(member: str = "learning-1.0/sklearn/datasets/data/digits.csv.gz") -> bytes:
    out, packed = io.BytesIO(), gzip.compress(CSV)
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        info = tarfile.TarInfo(member)
        info.size = len(packed)
        archive.addfile(info, io.BytesIO(packed))
    return out.getvalue()


@pytest.fixture
def fetch(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """An index that has the archive; pages by address."""
    pages = {PAGE: b'<a href="../../files/learning-1.0.tar.gz">x</a>', FILE: sdist()}

    def urlopen(request: urllib.request.Request, **_: object) -> io.BytesIO:
        if request.full_url not in pages:
            raise urllib.error.URLError("no route to host")
        return io.BytesIO(pages[request.full_url])

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    monkeypatch.setattr(digits, "pip_index", lambda archive: Index("https://index.test/simple", None))
    return pages


def archive(content: bytes) -> Archive:
    digest = hashlib.sha256(content).hexdigest()
    return Archive("learning", "learning-1.0.tar.gz", len(content), digest, "digits", digits.ARCHIVE.remedy)


def packed(path: Path, content: bytes = CSV) -> Path:
    path.write_bytes(gzip.compress(content))
    return path


def test_a_file_becomes_a_corpus_of_examples(tmp_path: Path) -> None:
    opened = digits.prepare_digits(packed(tmp_path / "digits.csv.gz"), table=TABLE)
    assert (opened.name, opened.source) == ("digits", "digits.csv.gz")
    assert [split.shape for split in (opened.train, opened.valid, opened.test)] == [(880, 65), (110, 65), (110, 65)]
    rows = np.concatenate([opened.train, opened.valid, opened.test])
    assert sorted(map(bytes, rows)) == sorted(map(bytes, ROWS.astype(np.uint8))), "an image was lost or cut"
    assert not np.array_equal(rows, ROWS), "the last writers alone would be held out"
    assert opened.identity.bytes == 1100 * 65
    assert corpus.open_corpus("digits").identity == opened.identity


def test_the_order_is_the_same_everywhere() -> None:
    assert digits.mixed(np.arange(8, dtype=np.uint8)[:, None]).ravel().tolist() == [3, 2, 1, 6, 0, 7, 4, 5]


def test_they_are_fetched_through_the_package_index_and_only_once(fetch: dict[str, bytes]) -> None:
    known = archive(fetch[FILE])
    opened = digits.prepare_digits(table=TABLE, archive=known)
    assert (opened.source, len(opened.train)) == ("learning-1.0.tar.gz", 880)
    fetch.clear()
    assert digits.prepare_digits(table=TABLE, archive=known).identity == opened.identity


def test_an_archive_without_them_is_refused(fetch: dict[str, bytes]) -> None:
    fetch[FILE] = sdist("learning-1.0/README")
    with pytest.raises(DataError, match=r"holds no member .*digits\.csv\.gz.*--path"):
        digits.prepare_digits(table=TABLE, archive=archive(fetch[FILE]))
    with pytest.raises(DataError, match="SHA-256"):
        digits.prepare_digits(table=TABLE, archive=archive(sdist()))
    fetch.clear()
    with pytest.raises(DataError, match=r"digits cannot be fetched .*no route to host.*--path"):
        digits.prepare_digits(table=TABLE, archive=archive(sdist()))


@pytest.mark.parametrize("content", [b"", b"not packed", gzip.compress(CSV)[:-9], gzip.compress(CSV + b"\n")])
def test_another_file_is_refused(tmp_path: Path, data: Path, content: bytes) -> None:
    (tmp_path / "digits.csv.gz").write_bytes(content)
    with pytest.raises(DataError, match=r"digits.*--path"):
        digits.prepare_digits(tmp_path / "digits.csv.gz", table=TABLE)
    with pytest.raises(DataError, match="cannot be read from"):
        digits.prepare_digits(tmp_path / "absent", table=TABLE)
    assert not data.exists()


def test_a_bomb_is_read_no_further_than_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    read = gzip.GzipFile.read

    def noted(file: gzip.GzipFile, size: int | None = -1) -> bytes:
        asked.append(-1 if size is None else size)
        return read(file, size)

    monkeypatch.setattr(gzip.GzipFile, "read", noted)
    with pytest.raises(DataError, match="SHA-256"):
        digits.parse(gzip.compress(bytes(10 * len(CSV))), TABLE)
    assert asked == [len(CSV) + 1]
