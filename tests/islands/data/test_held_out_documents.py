"""Documents: which text is held out depends on the bytes of documents, and on nothing else."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipelago.islands.data.documents import Choice, blocks, choose, visible_files
from archipelago.islands.data.preparation import prepare_text
from tests.tiers import examples

#: Texts that look alike by their beginning, as the files of a project do.
TEXTS = [f"# {n // 60}\n" + f"value_{n} = {n * n % 97}\n" * (30 + n % 17) for n in range(600)]


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARCHIPELAGO_DATA", str(tmp_path / "data"))


def folder_of(folder: Path, texts: dict[str, str]) -> Path:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def chosen(folder: Path) -> Choice:
    return choose(visible_files(folder)[0])


def held_out(folder: Path) -> set[str]:
    return {each.path.read_text() for split in chosen(folder).splits[1:] for each in split}


def test_names_and_order_do_not_change_a_corpus_and_another_file_moves_no_document(tmp_path: Path) -> None:
    one = folder_of(tmp_path / "one", {f"{n:03}.py": text for n, text in enumerate(TEXTS[:400])})
    two = folder_of(tmp_path / "two", {f"x/{n % 7}/{900 - n}.txt": text for n, text in enumerate(TEXTS[:400])})
    assert prepare_text(one, "one").digest == prepare_text(two, "two").digest
    before = held_out(one)
    folder_of(one, {f"later/{n}.py": text for n, text in enumerate(TEXTS[400:])})
    after = held_out(one)
    assert before < after
    assert not (after - before) & set(TEXTS[:400])


def test_the_splits_have_whole_files_of_every_part_of_a_folder(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "texts", {f"{n:03}.py": text for n, text in enumerate(TEXTS)})
    opened = prepare_text(folder, "mine")
    train, valid, test = (split.tobytes().decode() for split in (opened.train, opened.valid, opened.test))
    held = held_out(folder)
    assert held
    assert all((text in valid or text in test) == (text in held) for text in TEXTS)
    assert all((text in train) != (text in held) for text in TEXTS)
    assert len({text.split("\n")[0] for text in held}) >= 8  # Of ten parts; the tail of the names has one or two.
    assert 0.01 < len(valid) / sum(map(len, TEXTS)) < 0.2
    assert opened.reading is not None
    assert (opened.reading.documents, opened.reading.held_out) == (len(TEXTS), len(held))


def test_a_few_files_are_held_out_in_blocks(tmp_path: Path) -> None:
    parts = {f"{k}.txt": "".join(f"{k} of {n}, {n * n % 91}\n\n" for n in range(40_000)) for k in "ab"}
    opened = prepare_text(folder_of(tmp_path / "counters", parts), "mine")
    reading = opened.reading
    assert reading is not None
    assert (reading.files, reading.limit) == (2, 64 << 10)
    assert 0 < reading.held_out < reading.documents
    assert min(opened.valid.size, opened.test.size) > 0
    assert all(f"{name} of" in opened.train.tobytes().decode() for name in "ab")


def test_text_that_is_all_the_same_or_in_a_single_file_has_its_end_held_out(tmp_path: Path) -> None:
    opened = prepare_text(folder_of(tmp_path / "texts", {"a.txt": "same\n" * 40_000}), "mine")
    assert opened.reading is not None
    assert opened.reading.limit == 0
    assert opened.valid.size == pytest.approx(0.05 * 200_000, abs=2)
    (tmp_path / "a.txt").write_text("".join(TEXTS))
    opened = prepare_text(tmp_path / "a.txt", "single")
    assert b"".join(split.tobytes() for split in (opened.train, opened.valid, opened.test)).decode() == "".join(TEXTS)


def test_odd_names_and_links_are_no_trouble(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "texts", {"näme with\nbreak.txt": "text", ".hidden/a.txt": "no"})
    (folder / "broken-link").symlink_to(tmp_path / "absent")
    (tmp_path / "elsewhere").mkdir()
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    files, skipped = visible_files(folder)
    assert choose(files, skipped).reading.skipped == {"hidden": 1, "links to folders": 1}
    assert len(files) == 1


def test_folders_that_cannot_be_read_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path / "texts", {"open/a.txt": "text", "closed/b.txt": "text", "c.txt": "text"})
    scandir, is_file = os.scandir, Path.is_file

    def refused(path: Any) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    def no_entry(path: Path) -> bool:
        if path.parent.name == "open":
            raise PermissionError(13, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(os, "scandir", refused)
    monkeypatch.setattr(Path, "is_file", no_entry)
    files, skipped = visible_files(folder)
    assert ([path.name for path in files], skipped) == (["c.txt"], {"unreadable": 1, "unreadable folders": 1})


@settings(max_examples=examples(100))
@given(st.text("aä港\n ", max_size=300), st.integers(8, 40))
def test_blocks_join_to_the_text_and_cut_no_character(text: str, limit: int) -> None:
    found = list(blocks(io.BytesIO(text.encode()), limit))
    assert b"".join(found).decode() == text
    assert all(0 < len(block) <= limit and block.decode() for block in found)
