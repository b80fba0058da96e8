"""Tests of atomic writes and of folders that git ignores."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from archipelago.broker.errors import ConfigError
from archipelago.broker.files import (
    LEFT_SECONDS,
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


def test_the_content_replaces_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("a longer text that was there before")
    for content in ("text with an é\n", b"bytes\x00"):
        write_atomically(path, content)
        assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
        assert [found.name for found in tmp_path.iterdir()] == ["file"]
    (tmp_path / "by open").touch()
    write_atomically(tmp_path / "secret", "", mode=PRIVATE)
    assert path.stat().st_mode == (tmp_path / "by open").stat().st_mode
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


def test_the_next_write_deletes_what_killed_processes_have_left(tmp_path: Path) -> None:
    ends = "0123abcd", "0123abce", "0123abcf", "0123abd0", "0123abd1", "notes"
    folder, link, broken, file, young, mine = (f".12.staged-{end}" for end in ends)
    (tmp_path / "version").mkdir()
    for writes in (
        lambda: write_atomically(tmp_path / "new", b""),
        lambda: staged_folder(tmp_path / "out").__enter__(),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "content").touch()
        (tmp_path / link).symlink_to("version")
        (tmp_path / broken).symlink_to("deleted")
        for name in (file, young, mine):
            (tmp_path / name).touch()
        for name in (folder, link, broken, file, mine):
            os.utime(tmp_path / name, (0.0, time.time() - LEFT_SECONDS - 60.0), follow_symlinks=False)
        writes()
        left = {path.name for path in tmp_path.iterdir()}
        assert {folder, link, broken, file, young, mine, "version"} & left == {young, mine, "version"}


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


CODES = {
    errno.ENOSPC: "file.disk-full",
    errno.EACCES: "file.denied",
    errno.EROFS: "file.read-only",
    errno.ENOTDIR: "file.no-folder",
    errno.EEXIST: "file.no-folder",
    errno.EISDIR: "file.no-file",
}


def code_of(error: BaseException) -> str | None:
    found = file_error(error)
    return found.code if found else None


def test_errors_of_disks_become_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    errors = {number: OSError(number, os.strerror(number), str(tmp_path)) for number in CODES}
    assert {number: code_of(error) for number, error in errors.items()} == CODES
    assert code_of(OSError(errno.ENOSPC, "full")) == "file.disk-full", "a full disk needs no name"

    def main() -> int:
        raise errors[errno.EACCES]

    assert guarded(main) == 2
    said = capsys.readouterr().err
    assert str(tmp_path) in said
    assert said.count("\n") == 1
    # Other errors are not hidden, and an error without a file is not about a file.
    for other in (OSError(errno.ECONNRESET, "reset"), OSError(errno.EACCES, "denied"), ValueError("no")):
        assert code_of(other) is None, other


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


def test_a_url_is_not_a_folder() -> None:
    for url in ("s3://bucket/runs", "gs://bucket", "https://host/x", "s3:/bucket"):
        with failing(ConfigError, "file.url"):
            require_local(Path(url), "--folder")
    for path in ("runs", "/runs/s3:/x", "a/s3:", "~/runs", ".", "c:"):
        require_local(Path(path), "--folder")
