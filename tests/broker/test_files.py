"""Tests of atomic writes and of folders that git ignores."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from archipelago.broker.files import PRIVATE, make_untracked, staged_folder, write_atomically


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


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_git_ignores_a_new_folder_but_not_one_that_was_there(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for folder in (tmp_path / "mine", tmp_path / "runs" / "demo", tmp_path / "runs" / "demo" / "islands"):
        make_untracked(folder)
        make_untracked(folder)
        (folder / "file").touch()
    git = shutil.which("git") or ""
    subprocess.run([git, "init", "--quiet", tmp_path], check=True)
    command = [git, "-C", str(tmp_path), "status", "--porcelain", "--untracked-files=all"]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "?? mine/file\n"
