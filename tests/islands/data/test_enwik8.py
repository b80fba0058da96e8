"""enwik8, with small files in place of the real one: from the canonical address, or from a file."""

from __future__ import annotations

import gzip
import hashlib
import io
import shutil
import threading
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from archipelago.broker.errors import DataError
from archipelago.islands.data import enwik8
from archipelago.islands.data.enwik8 import Source, download
from archipelago.islands.data.preparation import TextWriter
from tests.failing import failing

TEXT = b"<page>An archipelago is a chain of islands.</page>\n" * 2000
WANTED = Source(len(TEXT), hashlib.sha256(TEXT).hexdigest(), "", len(TEXT))


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "data"
    monkeypatch.setenv("ARCHIPELAGO_DATA", str(folder))
    return folder


def zipped(path: Path, member: str = "enwik8", content: bytes = TEXT) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
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
    opened = enwik8.prepare_enwik8(source=WANTED)
    assert opened.source == "downloaded"
    assert enwik8.prepare_enwik8(source=WANTED).identity == opened.identity
    assert [folder.exists() for folder in folders] == [False]


def test_each_form_of_the_file_is_unpacked(tmp_path: Path) -> None:
    for pack in (zipped, gzipped, raw):
        seen: list[tuple[str, int, int]] = []
        opened = enwik8.prepare_enwik8(pack(tmp_path / "file"), lambda *report, s=seen: s.append(report), WANTED)
        assert (opened.name, opened.source) == ("enwik8", "file")
        assert opened.train.tobytes() + opened.valid.tobytes() + opened.test.tobytes() == TEXT
        assert seen[-1] == ("unpacking", len(TEXT), len(TEXT))
        shutil.rmtree(tmp_path / "data")


def test_another_text_and_files_without_enwik8_are_refused(tmp_path: Path, data: Path) -> None:
    wrong = (replace(WANTED, sha256="0" * 64), *(replace(WANTED, bytes=len(TEXT) + more) for more in (1, -1)))
    for wanted in wrong:
        with failing(DataError, "data.unreachable"):
            enwik8.prepare_enwik8(raw(tmp_path / "file"), source=wanted)
    for path in (tmp_path / "absent", tmp_path, zipped(tmp_path / "a.zip", "other")):
        with failing(DataError, "data.unreachable"):
            enwik8.prepare_enwik8(path, source=WANTED)
    assert list(data.iterdir()) == []


def test_an_endless_file_is_read_up_to_the_expected_size(tmp_path: Path) -> None:
    read = 0

    class Endless(io.RawIOBase):
        def read(self, size: int = -1, /) -> bytes:
            nonlocal read
            read += size
            return bytes(size)

    with failing(DataError, "data.unreachable"), (tmp_path / "out").open("wb") as file:
        enwik8.copy(Endless(), TextWriter(file), replace(WANTED, bytes=5 << 20))  # type: ignore[arg-type]
    assert read <= 7 << 20


def test_damaged_archives_are_refused(tmp_path: Path) -> None:
    for pack in (zipped, gzipped):
        path = pack(tmp_path / "file")
        content = bytearray(path.read_bytes())
        content[len(content) // 3 : len(content) // 2] = bytes(len(content) // 2 - len(content) // 3)
        for damaged in (content, content[: len(content) // 2]):
            path.write_bytes(damaged)
            with pytest.raises(DataError) as caught:
                enwik8.prepare_enwik8(path, source=WANTED)
            assert caught.value.code == "data.unreachable", pack


# -- the download ------------------------------------------------------------------------------------------------------


class Web:
    """A local server with one page."""

    def __init__(self) -> None:
        self.content: bytes | None = TEXT


@pytest.fixture
def web() -> Iterator[tuple[Web, Source]]:
    web = Web()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if web.content is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):  # the client stops a download that is too large
                self.wfile.write(web.content)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield web, replace(WANTED, url=f"http://127.0.0.1:{server.server_port}/islands")
        server.shutdown()


def test_the_file_is_downloaded_up_to_its_size_and_reported(web: tuple[Web, Source], tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    path = download(web[1], tmp_path, lambda *report: seen.append(report))
    assert path.read_bytes() == TEXT
    assert seen[-1] == ("downloading", len(TEXT), len(TEXT))
    for content in (None, bytes(8 << 20)):
        web[0].content = content
        with failing(DataError, "data.unreachable") as caught:
            download(web[1], tmp_path)
        assert "--path" in caught.value.remedy
        assert path.stat().st_size <= 3 << 20
