"""Downloads: the canonical address first, then the package index, and never a file with another hash."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from archipelago.broker.errors import DataError
from archipelago.islands.data import download as subject
from archipelago.islands.data.download import Package, Source, download
from tests.failing import failing

CONTENT = b"an archipelago is a chain of islands\n" * 1000


class Web:
    """A local server with one page."""

    def __init__(self) -> None:
        self.content: bytes | None = CONTENT
        self.sent = 0

    def source(self, url: str) -> Source:
        package = Package("islands==1.0", "islands-1.0.tar.gz", "0" * 64, ("--no-binary=:all:",))
        return Source("islands", url, len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), package, "Name the file.")


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
            self.wfile.write(web.content)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield web, web.source(f"http://127.0.0.1:{server.server_port}/islands")
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
    assert path.read_bytes() == CONTENT
    assert seen[-1] == ("downloading", len(CONTENT), len(CONTENT))
    assert pip == []
    for content in (None, CONTENT + b"!", CONTENT[:-1]):
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
        assert outcome is None or caught.value.remedy == "Name the file."


@pytest.mark.full
def test_pip_accepts_our_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask this environment's pip for a release that no index has. It must not complain about the options."""
    package = subject.Package("islands==1.0", "islands-1.0.tar.gz", "0" * 64, ("--no-binary=:all:",))
    source = Source("islands", "", 1, "0" * 64, package, "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        subject._from_package_index(source, tmp_path, subject.silent)
    assert caught.value.returncode == 1, "pip ends with 2 for unknown options"
