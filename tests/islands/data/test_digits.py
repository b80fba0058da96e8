"""Preparation of the digits, with a small table in place of the real one."""

from __future__ import annotations

import gzip
import hashlib
import zipfile
from pathlib import Path

import numpy as np
import pytest

from archipelago.broker.errors import DataError
from archipelago.islands.data import corpus, digits
from archipelago.islands.data.digits import Table
from tests.failing import failing

ROWS = np.random.default_rng(0).integers(0, 17, (1100, 65))
ROWS[:, -1] = np.arange(1100) % 10
CSV = "\n".join(",".join(map(str, row)) for row in ROWS.tolist()).encode() + b"\n"
TABLE = Table(len(CSV), hashlib.sha256(CSV).hexdigest())


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "data"
    monkeypatch.setenv("ARCHIPELAGO_DATA", str(folder))
    return folder


def packed(path: Path, content: bytes = CSV) -> Path:
    path.write_bytes(gzip.compress(content))
    return path


def wheel(path: Path, member: str = "sklearn/datasets/data/digits.csv.gz") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, gzip.compress(CSV))
    return path


def test_a_file_becomes_a_corpus_of_examples(tmp_path: Path) -> None:
    opened = digits.prepare_digits(packed(tmp_path / "digits.csv.gz"), table=TABLE)
    assert (opened.name, opened.source) == ("digits", "digits.csv.gz")
    assert [split.shape for split in (opened.train, opened.valid, opened.test)] == [(880, 65), (110, 65), (110, 65)]
    rows = np.concatenate([opened.train, opened.valid, opened.test])
    assert sorted(map(bytes, rows)) == sorted(map(bytes, ROWS.astype(np.uint8))), "an image is missing or incomplete"
    assert not np.array_equal(rows, ROWS), "the held-out images are of the last writers only"
    assert opened.identity.bytes == 1100 * 65
    assert corpus.open_corpus("digits").identity == opened.identity


def test_the_order_is_the_same_on_every_machine() -> None:
    assert digits.shuffled(np.arange(8, dtype=np.uint8)[:, None]).ravel().tolist() == [3, 2, 1, 6, 0, 7, 4, 5]


def test_the_digits_are_downloaded_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[Path] = []

    def download(source: object, folder: Path, progress: object) -> Path:
        folders.append(folder)
        return wheel(folder / "learning.whl")

    monkeypatch.setattr(digits, "download", download)
    opened = digits.prepare_digits(table=TABLE)
    assert (opened.source, len(opened.train)) == ("learning.whl", 880)
    assert digits.prepare_digits(table=TABLE).identity == opened.identity
    assert [folder.exists() for folder in folders] == [False]


def test_another_file_is_refused(tmp_path: Path, data: Path) -> None:
    path = tmp_path / "digits.csv.gz"
    for content in (b"", b"not packed", gzip.compress(CSV)[:-9], gzip.compress(CSV + b"\n")):
        path.write_bytes(content)
        with pytest.raises(DataError) as caught:
            pytest.fail(f"{content[:80]!r}: {digits.prepare_digits(path, table=TABLE)}")
        assert caught.value.code in {"data.unreadable", "data.wrong-file"}
    assert not data.exists()
    for path in (tmp_path / "absent", wheel(tmp_path / "other.whl", "README")):
        with failing(DataError, "data.unreadable"):
            digits.prepare_digits(path, table=TABLE)


def test_a_decompression_bomb_is_read_no_further_than_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    read = gzip.GzipFile.read

    def noted(file: gzip.GzipFile, size: int | None = -1) -> bytes:
        asked.append(-1 if size is None else size)
        return read(file, size)

    monkeypatch.setattr(gzip.GzipFile, "read", noted)
    with failing(DataError, "data.wrong-file"):
        digits.parse(gzip.compress(bytes(10 * len(CSV))), TABLE)
    assert asked == [len(CSV) + 1]
