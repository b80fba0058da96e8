"""Preparation of enwik8, with small files in place of the real one."""

from __future__ import annotations

import gzip
import hashlib
import io
import shutil
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from archipelago.broker.errors import DataError
from archipelago.islands.data import enwik8
from archipelago.islands.data.preparation import TextWriter
from tests.failing import failing

TEXT = b"<page>An archipelago is a chain of islands.</page>\n" * 2000
WANTED = enwik8.Text(len(TEXT), hashlib.sha256(TEXT).hexdigest())


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


def test_a_corpus_is_downloaded_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[Path] = []

    def download(source: object, folder: Path, progress: object) -> Path:
        folders.append(folder)
        return zipped(folder / "downloaded")

    monkeypatch.setattr(enwik8, "download", download)
    opened = enwik8.prepare_enwik8(text=WANTED)
    assert opened.source == "downloaded"
    assert enwik8.prepare_enwik8(text=WANTED).identity == opened.identity
    assert [folder.exists() for folder in folders] == [False]


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
