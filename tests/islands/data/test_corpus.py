"""Corpora: how texts and folders become corpora, and what is refused."""

from __future__ import annotations

import json
import os
import sysconfig
from pathlib import Path
from typing import BinaryIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from archipelago.broker.errors import ConfigError, DataError
from archipelago.broker.manifest import Corpus
from archipelago.islands.data import corpus, documents, preparation
from archipelago.islands.data.documents import Choice
from tests.failing import failing

LINE = "Ein Boot, zwei Häfen, drei Inseln.\n"
TEXT = LINE * (preparation.MINIMUM_BYTES // len(LINE) + 1)


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "data"
    monkeypatch.setenv("ARCHIPELAGO_DATA", str(folder))
    return folder


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small standard library in place of this Python's."""
    root = tmp_path / "library"
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(root) if name == "stdlib" else "")
    return root


def write(path: Path, content: str | bytes = TEXT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def whole(opened: corpus.OpenCorpus) -> bytes:
    return opened.train.tobytes() + opened.valid.tobytes() + opened.test.tobytes()


@given(st.integers(preparation.MINIMUM_BYTES, 1 << 40))
def test_splits_cover_the_text(size: int) -> None:
    train, valid, test = vars(preparation.splits_of(size)).values()
    assert train + valid + test == size
    assert train == pytest.approx(0.9 * size, abs=1)
    assert min(valid, test) == pytest.approx(0.05 * size, abs=2)


def test_a_file_becomes_three_read_only_views_of_its_bytes(tmp_path: Path, data: Path) -> None:
    opened = preparation.prepare_text(write(tmp_path / "text.txt"), "mine")
    assert whole(opened) == TEXT.encode()
    assert not any(view.flags.writeable for view in (opened.train, opened.valid, opened.test))
    assert opened.identity == Corpus("mine", opened.digest, len(TEXT.encode()))
    assert corpus.open_corpus("mine").identity == opened.identity
    assert corpus.prepared() == ["mine"]
    assert json.loads((data / "mine" / "corpus.json").read_text())["digest"] == opened.digest


def test_a_folder_is_joined_without_binary_and_hidden_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with late binary data is skipped entirely."""
    monkeypatch.setattr(documents, "LIMITS", (40, 40, 40))
    folder = tmp_path / "texts"
    write(folder / "b.txt", "second")
    write(folder / "a" / "deep.txt")
    write(folder / "c.txt", "third")
    write(folder / "image.png", b"\x89PNG\0\0")
    write(folder / "late.png", LINE.encode() * 3 + b"\0")
    write(folder / "latin.txt", "Häfen".encode("latin-1"))
    write(folder / "late.txt", LINE.encode() * 3 + "ä".encode()[:1])
    write(folder / "nothing.txt", " \n")
    write(folder / ".git" / "config", "not this")
    opened = preparation.prepare_text(folder, "mine")
    assert sorted(whole(opened).replace(TEXT.encode(), b"text\n").split()) == [b"second", b"text", b"third"]
    assert opened.reading is not None
    assert opened.reading.files == 3
    assert opened.reading.skipped == {"binary": 2, "empty": 1, "hidden": 1, "not UTF-8": 2}
    assert corpus.open_corpus("mine").reading == opened.reading


def test_too_little_text_or_none_is_refused_and_leaves_no_files(tmp_path: Path, data: Path) -> None:
    for content in (b"", b"short", b"\0" * (1 << 17)):
        with failing(DataError, "data.too-small"):
            preparation.prepare_text(write(tmp_path / "text.txt", content), "mine")
    assert list(data.iterdir()) == []


def test_a_name_belongs_to_one_text(tmp_path: Path) -> None:
    first = preparation.prepare_text(write(tmp_path / "text.txt"), "mine")
    assert preparation.prepare_text(tmp_path / "text.txt", "mine").identity == first.identity
    with failing(DataError, "data.taken"):
        preparation.prepare_text(write(tmp_path / "other.txt", TEXT + "."), "mine")
    assert corpus.open_corpus("mine").identity == first.identity


def test_an_unknown_name_or_a_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    preparation.prepare_text(write(tmp_path / "texts" / "text.txt"), "mine")
    for name, said in (("theirs", "mine"), ("texts", "prepare texts`")):
        with failing(DataError, "data.missing") as caught:
            corpus.open_corpus(name)
        assert said in str(caught.value)
    for path in ("./texts", "texts/", "texts/text.txt", str(tmp_path), "s3://bucket/corpora/mine"):
        with failing(ConfigError, "data.missing"):
            corpus.open_corpus(path)


def test_a_text_of_another_size_or_with_other_bytes_is_refused(tmp_path: Path, data: Path) -> None:
    preparation.prepare_text(write(tmp_path / "text.txt"), "mine")
    path = data / "mine" / "text.bin"
    times = path.stat()
    middle = path.stat().st_size // 2 + 7
    with path.open("r+b") as file:
        file.seek(middle)
        file.write(b"?")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as after a copy that keeps the times
    assert corpus.open_corpus("mine").train.size
    with failing(DataError, "data.damaged"):
        corpus.open_corpus("mine", verifies=True)
    write(path, TEXT)
    assert whole(corpus.open_corpus("mine")) == TEXT.encode()
    write(path, TEXT.encode()[:-1])
    with failing(DataError, "data.damaged"):
        corpus.open_corpus("mine")
    path.unlink()
    with failing(DataError, "data.damaged"):
        corpus.open_corpus("mine")


def test_a_card_that_contradicts_itself_or_is_not_json_is_damaged(tmp_path: Path, data: Path) -> None:
    preparation.prepare_text(write(tmp_path / "text.txt"), "mine")
    card = data / "mine" / "corpus.json"
    sound = json.loads(card.read_text())
    splits = {"train": 1, "valid": 1, "test": 1}
    for change in ({"name": "other"}, {"bytes": -1}, {"digest": "xyz"}, {"splits": splits}):
        write(card, json.dumps(sound | change))
        with failing(DataError, "data.damaged"):
            pytest.fail(f"{change}: {corpus.open_corpus('mine')}")
    write(card, json.dumps(sound | {"example_bytes": 64}))  # of version 0.2; that of a text has 0
    with failing(DataError, "data.damaged") as caught:
        corpus.open_corpus("mine")
    assert "examples" in str(caught.value)
    write(card, json.dumps(sound | {"example_bytes": 0}))
    assert whole(corpus.open_corpus("mine")) == TEXT.encode()
    write(card, "{")
    with failing(DataError, "data.damaged"):
        corpus.open_corpus("mine")


def test_two_processes_can_prepare_the_same_corpus_and_a_failed_write_leaves_no_files(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, written = write(tmp_path / "text.txt"), Choice.write

    def failed(choice: Choice, target: BinaryIO) -> tuple[int, ...]:
        written(choice, target)
        raise DataError("the disk failed", code="data.cable")

    def overtaken(choice: Choice, target: BinaryIO) -> tuple[int, ...]:
        monkeypatch.setattr(Choice, "write", written)
        preparation.prepare_text(text, "mine")
        return written(choice, target)

    monkeypatch.setattr(Choice, "write", failed)
    with failing(DataError, "data.cable"):
        preparation.prepare_text(text, "mine")
    assert list(data.iterdir()) == []
    monkeypatch.setattr(Choice, "write", overtaken)
    assert whole(preparation.prepare_text(text, "mine")) == TEXT.encode()
    assert [path.name for path in data.iterdir()] == ["mine"]


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default is in the user's cache."""
    monkeypatch.setenv("ARCHIPELAGO_DATA", str(write(tmp_path / "file")))
    with failing(DataError, "data.unwritable"):
        preparation.prepare_text(tmp_path / "file", "mine")
    monkeypatch.delenv("ARCHIPELAGO_DATA")
    assert corpus.data_folder().parts[-2:] == ("archipelago", "corpora")


def test_the_library_excludes_tests_and_installed_packages(library: Path) -> None:
    with failing(DataError, "data.no-source"):
        preparation.prepare_stdlib()
    wanted = {f"{name}.py": f"import {name}\n{TEXT}" for name in ("abc", "email/parser", "zipfile")}
    for path, content in wanted.items():
        write(library / path, content)
    for path in ("site-packages/a.py", "test/test_abc.py", "email/tests/a.py", "_sysconfigdata_x.py", "notes.txt"):
        write(library / path, "not this")
    write(library / "latin.py", "Häfen".encode("latin-1"))
    opened = corpus.open_corpus("stdlib")
    assert sorted(whole(opened).count(content.encode()) for content in wanted.values()) == [1, 1, 1]
    assert opened.identity.bytes == sum(len(content.encode()) for content in wanted.values()) + 2
    assert b"not this" not in whole(opened)
    assert opened.reading is not None
    assert (opened.reading.files, opened.reading.skipped) == (3, {"not UTF-8": 1})
    write(library / "later.py")
    assert preparation.prepare_stdlib().identity == opened.identity
