"""Tests of atomic writes: content, permissions, and the state after a failed write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from archipelago.broker.files import PRIVATE, staged_folder, write_atomically


@pytest.mark.parametrize("content", [b"bytes\x00", "text with an é\n"])
def test_the_content_replaces_the_old_one(tmp_path: Path, content: bytes | str) -> None:
    path = tmp_path / "file"
    path.write_text("a longer text that was there before")
    write_atomically(path, content)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert [found.name for found in tmp_path.iterdir()] == ["file"]


def test_permissions_are_the_default_or_private(tmp_path: Path) -> None:
    usual = tmp_path / "by open"
    usual.touch()
    write_atomically(tmp_path / "file", "")
    write_atomically(tmp_path / "secret", "", mode=PRIVATE)
    assert (tmp_path / "file").stat().st_mode == usual.stat().st_mode
    assert (tmp_path / "secret").stat().st_mode & 0o777 == PRIVATE


def test_a_failed_write_keeps_the_old_file_and_leaves_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "file"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [found.name for found in tmp_path.iterdir()] == ["file"]


def test_a_staged_folder_appears_completely_or_not_at_all(tmp_path: Path) -> None:
    with staged_folder(tmp_path / "out") as stage:
        (stage / "file").write_text("content")
        assert not (tmp_path / "out").exists()
    assert (tmp_path / "out" / "file").read_text() == "content"
    with pytest.raises(OSError), staged_folder(tmp_path / "out"):
        pass
    with pytest.raises(KeyError), staged_folder(tmp_path / "other"):
        raise KeyError
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
