"""Tests of atomic writes and of folders that git ignores."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from archipelago.broker.errors import ConfigError
from archipelago.broker.files import (
    PRIVATE,
    file_error,
    make_untracked,
    require_local,
    require_writable,
    staged_folder,
    write_atomically,
)
from archipelago.broker.process import guarded
from tests.failing import failing


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


def test_staged_folders_of_killed_processes_are_deleted(tmp_path: Path) -> None:
    for name in (killed := ".12.staged-0123abcd", young := ".12.staged-0123abce", mine := ".12.staged-notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("content")
    with staged_folder(tmp_path / "other") as other:
        for path in (tmp_path / killed, tmp_path / mine, other):
            os.utime(path, (0.0, 0.0))
        with staged_folder(tmp_path / "out"):
            pass
        assert {path.name for path in tmp_path.iterdir()} == {young, mine, other.name, "out"}


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


# -- errors of disks and folders ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, "file.disk-full"),
        (errno.EACCES, "file.denied"),
        (errno.EROFS, "file.read-only"),
        (errno.ENOTDIR, "file.no-folder"),
        (errno.EEXIST, "file.no-folder"),
        (errno.EISDIR, "file.no-file"),
    ],
)
def test_errors_of_disks_become_one_clear_error(
    number: int, code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = file_error(OSError(number, os.strerror(number), str(tmp_path)))
    assert found is not None
    assert found.code == code
    assert str(tmp_path) in found.what

    def main() -> int:
        raise OSError(number, os.strerror(number), str(tmp_path))

    assert guarded(main) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_full_disk_needs_no_name() -> None:
    found = file_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert found is not None
    assert found.code == "file.disk-full"


def test_other_errors_of_the_system_are_not_hidden() -> None:
    assert file_error(OSError(errno.ECONNRESET, "reset")) is None
    assert file_error(OSError(errno.EACCES, "denied")) is None  # not about a file
    assert file_error(ValueError("no")) is None


def test_a_folder_is_tried_before_anything_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_writable(tmp_path / "new" / "folder")
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == [".gitignore"]
    (tmp_path / "file").touch()
    with failing(ConfigError, "file.no-folder"):
        require_writable(tmp_path / "file")
    with failing(ConfigError, "file.no-folder"):
        require_writable(tmp_path / "file" / "below")

    def full(_path: Path, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with failing(ConfigError, "file.disk-full") as failure:
        require_writable(tmp_path)
    assert str(tmp_path) in failure.value.what


@pytest.mark.parametrize("url", ["s3://bucket/runs", "gs://bucket", "https://host/x", "s3:/bucket"])
def test_a_url_is_not_a_folder(url: str) -> None:
    with failing(ConfigError, "file.url"):
        require_local(Path(url), "--folder")


@pytest.mark.parametrize("path", ["runs", "/runs/s3:/x", "a/s3:", "~/runs", ".", "c:"])
def test_paths_are_local(path: str) -> None:
    require_local(Path(path), "--folder")
