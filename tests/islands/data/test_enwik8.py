"""enwik8, with a small file of a local server in the place of the real one."""

from __future__ import annotations

import hashlib
import io
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
from archipelago.islands.data.preparation import Enwik8, prepare_enwik8
from tests.failing import failing

TEXT = b"<page>An archipelago is a chain of islands.</page>\n" * 2000


def zipped(member: str = "enwik8", content: bytes = TEXT) -> bytes:
    with zipfile.ZipFile(buffer := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
    return buffer.getvalue()


class Web:
    """A local server with one page."""

    def __init__(self) -> None:
        self.content: bytes | None = zipped()
        self.wanted = Enwik8(len(TEXT), hashlib.sha256(TEXT).hexdigest(), "", len(zipped()))


@pytest.fixture
def web() -> Iterator[Web]:
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
        web.wanted = replace(web.wanted, url=f"http://127.0.0.1:{server.server_port}/enwik8.zip")
        yield web
        server.shutdown()


def test_the_text_is_downloaded_once_and_nothing_else_is_taken_for_it(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARCHIPELAGO_DATA", str(tmp_path))
    good = zipped()
    damaged = good[: len(good) // 3] + bytes(len(good) // 3) + good[2 * len(good) // 3 :]
    for content in (None, b"", bytes(8 << 20), TEXT, damaged, good[:-30], zipped("other"), zipped(content=TEXT[1:])):
        web.content = content
        with failing(DataError, "data.unreachable"):
            prepare_enwik8(wanted=web.wanted)
    assert list(tmp_path.iterdir()) == []
    web.content = good
    opened = prepare_enwik8(wanted=web.wanted)
    assert (opened.name, opened.source) == ("enwik8", "enwik8.zip")
    assert opened.train.tobytes() + opened.valid.tobytes() + opened.test.tobytes() == TEXT
    web.content = None
    assert prepare_enwik8(wanted=web.wanted).identity == opened.identity


def test_a_corpus_of_another_tokenizer_is_not_taken_for_the_wanted_one(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARCHIPELAGO_DATA", str(tmp_path))
    prepare_enwik8("tokens", 260, web.wanted)
    with failing(DataError, "data.taken"):
        prepare_enwik8("tokens", 264, web.wanted)
