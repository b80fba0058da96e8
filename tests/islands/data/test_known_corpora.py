"""Preparation of the corpora that we download, enwik8 and the digits, with small files in place of the real ones."""

from __future__ import annotations

import gzip
import hashlib
import io
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from archipelago.broker.errors import DataError
from archipelago.islands.data import corpus, digits, enwik8
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.islands.data.preparation import TextWriter
from tests.failing import failing

TEXT = b"<page>An archipelago is a chain of islands.</page>\n" * 2000
WANTED = enwik8.Text(len(TEXT), hashlib.sha256(TEXT).hexdigest())
ROWS = np.random.default_rng(0).integers(0, 17, (1100, 65))
ROWS[:, -1] = np.arange(1100) % 10
CSV = "\n".join(",".join(map(str, row)) for row in ROWS.tolist()).encode() + b"\n"
TABLE = digits.Table(len(CSV), hashlib.sha256(CSV).hexdigest())


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "data"
    monkeypatch.setenv("ARCHIPELAGO_DATA", str(folder))
    return folder


def zipped(path: Path, member: str = "enwik8", content: bytes = TEXT) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
    return path


def tarred(path: Path, member: str = "somemodel-0.1/data/enwik8.gz") -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, payload in (("somemodel-0.1/setup.py", b"raise SystemExit"), (member, gzip.compress(TEXT))):
            info = tarfile.TarInfo(name)
            info.size = len(payload)
            archive.addfile(info, io.BytesIO(payload))
    return path


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def gzipped(path: Path) -> Path:
    return written(path, gzip.compress(TEXT))


def raw(path: Path) -> Path:
    return written(path, TEXT)


def wheel(path: Path, member: str = "sklearn/datasets/data/digits.csv.gz") -> Path:
    return zipped(path, member, gzip.compress(CSV))


@pytest.mark.parametrize(
    ("module", "prepare", "served"),
    [
        (enwik8, partial(enwik8.prepare_enwik8, text=WANTED), zipped),
        (digits, partial(digits.prepare_digits, table=TABLE), wheel),
    ],
)
def test_a_corpus_is_downloaded_only_once(
    module: ModuleType,
    prepare: Callable[[], OpenCorpus],
    served: Callable[[Path], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folders: list[Path] = []

    def download(source: object, folder: Path, progress: object) -> Path:
        folders.append(folder)
        return served(folder / "downloaded")

    monkeypatch.setattr(module, "download", download)
    opened = prepare()
    assert opened.source == "downloaded"
    assert prepare().identity == opened.identity
    assert [folder.exists() for folder in folders] == [False]


# -- enwik8 -----------------------------------------------------------------------------------------------------------


def test_each_form_of_the_file_is_unpacked(tmp_path: Path) -> None:
    for pack in (zipped, gzipped, raw, tarred):
        seen: list[tuple[str, int, int]] = []
        opened = enwik8.prepare_enwik8(pack(tmp_path / "file"), lambda *report, s=seen: s.append(report), WANTED)
        assert (opened.name, opened.source) == ("enwik8", "file")
        assert opened.train.tobytes() + opened.valid.tobytes() + opened.test.tobytes() == TEXT
        assert seen[-1] == ("unpacking", len(TEXT), len(TEXT))
        shutil.rmtree(tmp_path / "data")


def test_another_text_and_files_without_enwik8_are_refused(tmp_path: Path, data: Path) -> None:
    wrong = (replace(WANTED, sha256="0" * 64), *(replace(WANTED, bytes=len(TEXT) + more) for more in (1, -1)))
    for wanted in wrong:
        with failing(DataError, "data.wrong-file"):
            enwik8.prepare_enwik8(raw(tmp_path / "file"), text=wanted)
    for path in (tmp_path / "absent", tmp_path, zipped(tmp_path / "a.zip", "other"), tarred(tmp_path / "b", "other")):
        with failing(DataError, "data.unreadable"):
            enwik8.prepare_enwik8(path, text=WANTED)
    assert list(data.iterdir()) == []


def test_an_endless_file_is_read_up_to_the_expected_size(tmp_path: Path) -> None:
    read = 0

    class Endless(io.RawIOBase):
        def read(self, size: int = -1, /) -> bytes:
            nonlocal read
            read += size
            return bytes(size)

    with failing(DataError, "data.wrong-file"), (tmp_path / "out").open("wb") as file:
        enwik8.copy(Endless(), TextWriter(file), replace(WANTED, bytes=5 << 20))  # type: ignore[arg-type]
    assert read <= 7 << 20


def test_damaged_archives_are_refused(tmp_path: Path) -> None:
    for pack in (zipped, gzipped, tarred):
        path = pack(tmp_path / "file")
        content = bytearray(path.read_bytes())
        content[len(content) // 3 : len(content) // 2] = bytes(len(content) // 2 - len(content) // 3)
        for damaged in (content, content[: len(content) // 2]):
            path.write_bytes(damaged)
            with pytest.raises(DataError) as caught:
                enwik8.prepare_enwik8(path, text=WANTED)
            assert caught.value.code in ("data.unreadable", "data.wrong-file"), pack


# -- the digits -------------------------------------------------------------------------------------------------------


def test_a_file_becomes_a_corpus_of_examples(tmp_path: Path) -> None:
    opened = digits.prepare_digits(written(tmp_path / "digits.csv.gz", gzip.compress(CSV)), table=TABLE)
    assert (opened.name, opened.source) == ("digits", "digits.csv.gz")
    assert [split.shape for split in (opened.train, opened.valid, opened.test)] == [(880, 65), (110, 65), (110, 65)]
    rows = np.concatenate([opened.train, opened.valid, opened.test])
    assert sorted(map(bytes, rows)) == sorted(map(bytes, ROWS.astype(np.uint8))), "an image is missing or incomplete"
    assert not np.array_equal(rows, ROWS), "the held-out images are of the last writers only"
    assert opened.identity.bytes == 1100 * 65
    assert corpus.open_corpus("digits").identity == opened.identity
    # The order is the same on every machine.
    assert digits.shuffled(np.arange(8, dtype=np.uint8)[:, None]).ravel().tolist() == [3, 2, 1, 6, 0, 7, 4, 5]


def test_other_files_than_the_digits_are_refused(tmp_path: Path, data: Path) -> None:
    path = tmp_path / "digits.csv.gz"
    for content in (b"", b"not packed", gzip.compress(CSV)[:-9], gzip.compress(CSV + b"\n")):
        with pytest.raises(DataError) as caught:
            digits.prepare_digits(written(path, content), table=TABLE)
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
