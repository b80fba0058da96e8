from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from archipelago.broker.config import ModelConfig, RunConfig
from archipelago.broker.errors import ConfigError, DataError
from archipelago.broker.manifest import Corpus
from archipelago.islands.creation import require_readable
from archipelago.islands.data import corpus

LINE = "Ein Boot, zwei Häfen, drei Inseln.\n"
TEXT = LINE * (corpus.MINIMUM_BYTES // len(LINE) + 1)


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "data"
    monkeypatch.setenv("ARCHIPELAGO_DATA", str(folder))
    return folder


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small standard library in the place of this Python's."""
    root = tmp_path / "library"
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(root) if name == "stdlib" else "")
    return root


def write(path: Path, content: str | bytes = TEXT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def whole(opened: corpus.OpenCorpus) -> bytes:
    return opened.train.tobytes() + opened.valid.tobytes() + opened.test.tobytes()


@given(st.integers(corpus.MINIMUM_BYTES, 1 << 40))
def test_splits_cover_the_text(size: int) -> None:
    train, valid, test = corpus.splits_of(size)
    assert train + valid + test == size
    assert train == pytest.approx(0.9 * size, abs=1)
    assert min(valid, test) == pytest.approx(0.05 * size, abs=2)


def test_a_file_becomes_three_read_only_views_of_its_bytes(tmp_path: Path, data: Path) -> None:
    opened = corpus.prepare_text(write(tmp_path / "text.txt"), "mine")
    assert whole(opened) == TEXT.encode()
    assert not any(view.flags.writeable for view in (opened.train, opened.valid, opened.test))
    assert opened.identity == Corpus("mine", opened.digest, len(TEXT.encode()))
    assert corpus.open_corpus("mine").identity == opened.identity
    assert corpus.prepared() == ["mine"]
    assert json.loads((data / "mine" / "corpus.json").read_text())["digest"] == opened.digest


def test_a_folder_is_joined_in_order_without_binary_and_hidden_files(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    write(folder / "b.txt", "second")
    write(folder / "a" / "deep.txt")
    write(folder / "c.txt", "third")
    write(folder / "image.png", b"\x89PNG\0\0")
    write(folder / "latin.txt", "Häfen".encode("latin-1"))
    write(folder / ".git" / "config", "not this")
    opened = corpus.prepare_text(folder, "mine")
    assert whole(opened) == TEXT.encode() + b"\nsecond\nthird"
    assert opened.source == "texts (3 files of text, 2 others skipped)"


def test_what_is_found_out_late_to_be_binary_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "CHUNK_BYTES", 7)  # so that characters are cut as well
    write(tmp_path / "texts" / "1.txt")
    write(tmp_path / "texts" / "2.txt", LINE.encode() + b"\0")
    write(tmp_path / "texts" / "3.txt", LINE.encode() + "ä".encode()[:1])
    write(tmp_path / "texts" / "4.txt", LINE)
    opened = corpus.prepare_text(tmp_path / "texts", "mine")
    assert whole(opened) == f"{TEXT}\n{LINE}".encode()
    write(tmp_path / "same.txt", whole(opened))
    assert corpus.prepare_text(tmp_path / "same.txt", "same").digest == opened.digest


@pytest.mark.parametrize("content", [b"", b"short", b"\0" * (1 << 17)])
def test_too_little_text_is_refused_and_leaves_nothing(tmp_path: Path, data: Path, content: bytes) -> None:
    with pytest.raises(DataError, match=r"too little to train on.*65,536 bytes"):
        corpus.prepare_text(write(tmp_path / "text.txt", content), "mine")
    assert list(data.iterdir()) == []


def test_a_path_to_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no file or folder to prepare at .*absent"):
        corpus.prepare_text(tmp_path / "absent", "mine")


def test_a_name_stands_for_one_text(tmp_path: Path) -> None:
    first = corpus.prepare_text(write(tmp_path / "text.txt"), "mine")
    assert corpus.prepare_text(tmp_path / "text.txt", "mine").identity == first.identity
    with pytest.raises(DataError, match=r"different corpus 'mine'.*another --name"):
        corpus.prepare_text(write(tmp_path / "other.txt", TEXT + "."), "mine")
    assert corpus.open_corpus("mine").identity == first.identity
    with pytest.raises(DataError, match="'stdlib' is the name"):
        corpus.prepare_text(tmp_path / "text.txt", "stdlib")


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "x" * 65])
def test_names_that_could_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="corpus name"):
        corpus.prepare_text(write(tmp_path / "text.txt"), name)
    with pytest.raises(ConfigError, match="corpus name"):
        corpus.open_corpus(name)


def test_an_unknown_name_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"prepared: none yet.*archipelago prepare FILE_OR_DIR --name NAME"):
        corpus.open_corpus("theirs")
    with pytest.raises(DataError, match=r"`archipelago prepare digits`"):
        corpus.open_corpus("digits")
    corpus.prepare_text(write(tmp_path / "text.txt"), "mine")
    with pytest.raises(DataError, match=r"'theirs'.*prepared: mine"):
        corpus.open_corpus("theirs")


def test_a_text_of_another_size_is_damaged(tmp_path: Path, data: Path) -> None:
    corpus.prepare_text(write(tmp_path / "text.txt"), "mine")
    write(data / "mine" / "text.bin", TEXT.encode()[:-1])
    with pytest.raises(DataError, match=r"damaged.*text.bin holds .* Delete"):
        corpus.open_corpus("mine")
    (data / "mine" / "text.bin").unlink()
    with pytest.raises(DataError, match=r"damaged.*cannot be read"):
        corpus.open_corpus("mine")


@pytest.mark.parametrize(
    "change", [{"name": "other"}, {"bytes": -1}, {"digest": "xyz"}, {"splits": {"train": 1, "valid": 1, "test": 1}}]
)
def test_a_card_that_contradicts_itself_is_damaged(tmp_path: Path, data: Path, change: dict[str, object]) -> None:
    corpus.prepare_text(write(tmp_path / "text.txt"), "mine")
    card = data / "mine" / "corpus.json"
    write(card, json.dumps(json.loads(card.read_text()) | change))
    with pytest.raises(DataError, match=r"damaged.*corpus\.json"):
        corpus.open_corpus("mine")


def test_a_card_that_is_not_json_is_damaged(tmp_path: Path, data: Path) -> None:
    corpus.prepare_text(write(tmp_path / "text.txt"), "mine")
    write(data / "mine" / "corpus.json", "{")
    with pytest.raises(DataError, match="damaged"):
        corpus.open_corpus("mine")


def test_who_comes_second_uses_what_the_first_has_put_there(data: Path) -> None:
    def overtaken(writer: corpus.TextWriter) -> str:
        corpus.create("mine", fill)
        return fill(writer)

    def fill(writer: corpus.TextWriter) -> str:
        writer.write(TEXT.encode())
        return "test"

    assert whole(corpus.create("mine", overtaken)) == TEXT.encode()
    assert [path.name for path in data.iterdir()] == ["mine"]


def test_a_failure_midway_leaves_nothing(data: Path) -> None:
    def fill(writer: corpus.TextWriter) -> str:
        writer.write(TEXT.encode())
        raise DataError("the cable was cut")

    with pytest.raises(DataError, match="the cable was cut"):
        corpus.create("mine", fill)
    assert list(data.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARCHIPELAGO_DATA", str(write(tmp_path / "file")))
    with pytest.raises(DataError, match="set ARCHIPELAGO_DATA to another folder"):
        corpus.prepare_text(tmp_path / "file", "mine")


def test_without_a_choice_corpora_live_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ARCHIPELAGO_DATA")
    assert corpus.data_folder().parts[-2:] == ("archipelago", "corpora")


def test_the_library_is_its_sources_without_tests_and_guests(library: Path) -> None:
    wanted = {f"{name}.py": f"import {name}\n{TEXT}" for name in ("abc", "email/parser", "zipfile")}
    for path, content in wanted.items():
        write(library / path, content)
    for path in ("site-packages/guest.py", "test/test_abc.py", "email/tests/a.py", "_sysconfigdata_x.py", "notes.txt"):
        write(library / path, "not this")
    write(library / "latin.py", "Häfen".encode("latin-1"))
    opened = corpus.open_corpus("stdlib")
    assert sorted(whole(opened).count(content.encode()) for content in wanted.values()) == [1, 1, 1]
    assert opened.identity.bytes == sum(len(content.encode()) for content in wanted.values()) + 2
    assert b"not this" not in whole(opened)
    assert opened.source.endswith("(3 files of text, 1 others skipped)")
    write(library / "later.py")
    assert corpus.prepare_stdlib().identity == opened.identity


def test_the_library_comes_in_the_same_order_on_every_machine(library: Path) -> None:
    for name in ("a", "b", "c", "d/e"):
        write(library / f"{name}.py")
    assert [path.stem for path in corpus._stdlib_files(library)] == ["b", "a", "c", "e"]


def test_a_python_without_sources_says_so(library: Path) -> None:
    with pytest.raises(DataError, match=r"no sources.*archipelago prepare"):
        corpus.prepare_stdlib()


def test_this_pythons_own_library_can_be_trained_on() -> None:
    opened = corpus.prepare_stdlib()
    assert opened.identity.bytes > 5_000_000
    assert b"def " in opened.valid.tobytes()


# -- examples -------------------------------------------------------------------------------------------------------


def examples(count: int = 1500, size: int = 65) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.random.default_rng(0).integers(0, 256, (count, size), np.uint8)


def test_examples_become_three_views_of_whole_examples(data: Path) -> None:
    wanted = examples()
    opened = corpus.prepare_examples(wanted, "images", "a camera")
    assert np.array_equal(np.concatenate([opened.train, opened.valid, opened.test]), wanted)
    assert [len(split) for split in (opened.train, opened.valid, opened.test)] == [1200, 150, 150]
    assert not any(view.flags.writeable for view in (opened.train, opened.valid, opened.test))
    assert (opened.source, opened.identity.bytes) == ("a camera", wanted.size)
    assert corpus.open_corpus("images").identity == opened.identity
    assert json.loads((data / "images" / "corpus.json").read_text())["example_bytes"] == 65


@given(st.integers(0, 1 << 40))
def test_splits_of_examples_cover_them(count: int) -> None:
    train, valid, test = corpus.splits_of_examples(count)
    assert train + valid + test == count
    assert min(train, valid, test) >= 0


def test_a_card_that_cuts_examples_is_damaged(data: Path) -> None:
    corpus.prepare_examples(examples(), "images", "a camera")
    card = data / "images" / "corpus.json"
    card.write_text(card.read_text().replace('"example_bytes": 65', '"example_bytes": 64'))
    with pytest.raises(DataError, match="contradicts itself"):
        corpus.open_corpus("images")


def test_a_card_of_before_there_were_examples_is_one_of_text(tmp_path: Path, data: Path) -> None:
    opened = corpus.prepare_text(write(tmp_path / "text.txt"), "mine")
    card = data / "mine" / "corpus.json"
    values = json.loads(card.read_text())
    assert values.pop("example_bytes") == 0
    card.write_text(json.dumps(values))
    assert corpus.open_corpus("mine").train.shape == opened.train.shape


def test_a_model_of_examples_reads_no_text_and_no_others(tmp_path: Path) -> None:
    digits = RunConfig(model=ModelConfig(size="digits"))
    text = corpus.prepare_text(write(tmp_path / "text.txt"), "mine")
    with pytest.raises(
        ConfigError, match=r"'digits' reads examples of 65 bytes.*'mine' is running text.*--data.corpus"
    ):
        require_readable(digits, text)
    with pytest.raises(ConfigError, match="'small' is examples of 64"):
        require_readable(digits, corpus.prepare_examples(examples(size=64), "small", "a camera"))
    images = corpus.prepare_examples(examples(), "images", "a camera")
    require_readable(digits, images)
    require_readable(RunConfig(), images)
    require_readable(RunConfig(), text)
