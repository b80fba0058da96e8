"""Files and folders that are written whole or not at all."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from archipelago.broker.errors import ArchipelagoError, ConfigError

PRIVATE = 0o600
READABLE = 0o666  # less the umask
#: A folder without room for this many bytes is full. One checkpoint of the smallest model has about as many.
PROBE_BYTES = 1 << 20

#: The code of our error for an error of the operating system, and what to do.
_REMEDIES = {
    errno.ENOSPC: ("file.disk-full", "Free some space, or choose a folder on another disk."),
    errno.EDQUOT: ("file.disk-full", "Free some space, or choose a folder on another disk."),
    errno.EACCES: ("file.denied", "Choose a folder that this user may write to."),
    errno.EPERM: ("file.denied", "Choose a folder that this user may write to."),
    errno.EROFS: ("file.read-only", "Choose a folder on a disk that can be written to."),
    errno.ENOTDIR: ("file.no-folder", "A file is in the place of a folder. Move it away, or choose another folder."),
    errno.EEXIST: ("file.no-folder", "A file is in the place of a folder. Move it away, or choose another folder."),
    errno.EISDIR: ("file.no-file", "A folder is in the place of a file. Move it away, or choose another name."),
    errno.ENOENT: ("file.missing", "Check the path."),
    errno.ENAMETOOLONG: ("file.name", "Choose a shorter path."),
    errno.ELOOP: ("file.name", "Its symbolic links form a loop. Choose another path."),
    errno.EIO: ("file.disk", "The disk may be damaged. Choose a folder on another disk."),
    errno.EMFILE: ("file.too-many", "Raise the limit of open files (ulimit -n)."),
}
#: The names of staged files and folders, and the time without a change after which a killed process has left one.
_STAGED = re.compile(r"\..+\.staged-[0-9a-f]{8}")
LEFT_SECONDS = 24 * 3600.0
#: The beginning of a path that was a URL, such as that of a bucket.
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
#: The errors that Orbax and tensorstore raise for files that are damaged or cannot be written: those of any library.
FILE_FAULTS = Exception
_SYSTEM_ERROR = re.compile(r"\[os_error_code='(\d+)'\]")


def file_error(error: BaseException) -> ArchipelagoError | None:
    """Return the user's error that stands for an OSError about a file or a disk, or None for another error."""
    if not isinstance(error, OSError) or error.errno not in _REMEDIES:
        return None
    if error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EMFILE):
        return None
    code, remedy = _REMEDIES[error.errno]
    where = f"cannot use {os.fsdecode(error.filename)!s:.200}" if error.filename else "cannot write to the disk"
    return ConfigError(f"{where} ({error.strerror})", remedy, code=code)


def require_writable(folder: Path) -> None:
    """Create a folder for files of a run if necessary, and try to write to it. Raises ConfigError (`file.…`)."""
    try:
        make_untracked(folder)
        probe = folder / f".probe-{secrets.token_hex(4)}"
        try:
            probe.write_bytes(bytes(PROBE_BYTES))
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        error.filename = str(folder)
        raise file_error(error) or error from None


def require_local(path: Path, what: str) -> None:
    """Raise ConfigError (`file.url`) for a path that was a URL, in which `//` has become `/`.

    The option `what` named it. Work is done on a disk, and buckets hold copies.
    """
    if path.parts and _SCHEME.fullmatch(path.parts[0]):
        raise ConfigError(
            f"{what} must be a path on this machine, not a URL ({path.parts[0]}//…)",
            "Name a path on this machine, and copy what was written."
            if what == "--out"
            else "Name a local folder, or leave it out. Workers keep copies in a bucket with --bucket.",
            code="file.url",
        )


def write_atomically(path: Path, content: bytes | str | Sequence[bytes], *, mode: int = READABLE) -> None:
    """Replace a file so that readers, and a machine that crashes, see the old content or the new, never a mixture.

    Args:
        path: The file. Its folder must exist.
        content: The new content, or its parts in order; text is written as UTF-8.
        mode: The permissions of the new file, from its first byte on. The umask takes bits away.

    Raises:
        OSError: The disk did not take the content. The old file is still there.
    """
    whole = content.encode() if isinstance(content, str) else content
    stage = stage_of(path)
    try:
        with os.fdopen(os.open(stage, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.writelines([whole] if isinstance(whole, bytes) else whole)
            file.flush()
            os.fsync(file.fileno())
        _delete_left(stage)
        stage.replace(path)
    except BaseException:
        stage.unlink(missing_ok=True)
        raise
    sync(path.parent)


def stage_of(path: Path) -> Path:
    """Return a hidden name beside a file or folder. What is left there under it is deleted after `LEFT_SECONDS`."""
    return path.with_name(f".{path.name}.staged-{secrets.token_hex(4)}")


def _delete_left(stage: Path) -> None:
    """Delete staged files, folders and links beside a new one that killed processes have left there.

    An optimiser's state is as large as the model. Ages are differences between times that the file system wrote: the
    clock of this machine may be wrong.
    """
    with suppress(OSError):  # the next call tries again
        now, others = stage.stat().st_mtime, [*stage.parent.iterdir()]
        for path in others:
            with suppress(OSError):
                found = path.lstat()  # a link is deleted, not what it leads to
                if _STAGED.fullmatch(path.name) and now - found.st_mtime > LEFT_SECONDS:
                    shutil.rmtree(path, ignore_errors=True) if stat.S_ISDIR(found.st_mode) else path.unlink()


def make_untracked(folder: Path) -> None:
    """Create a folder for files of a run, with its parents, and make git ignore it. Raises OSError.

    What a run leaves behind is large, and some of it is secret, so it must not get into the user's repository. A folder
    that exists already stays as it is: it may hold files of the user's.
    """
    if folder.is_dir():
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("# Archipelago keeps the files of a run here.\n*\n", encoding="utf-8")


def exposure(folder: Path) -> str:
    """Make a folder private to this user, creating it if necessary. Return why that is impossible; empty if it is not.

    A folder that others could write to may hold their files already, so taking away their rights is not enough.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid != os.getuid():
            return "belongs to another user"
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return "can be written to by other users"
        # A user who can change a parent folder can replace this folder.
        for parent in folder.resolve().parents:
            status = parent.stat()
            if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
                return f"lies in {parent}, which every user can change"
        folder.chmod(0o700)
    except OSError as error:
        return f"cannot be used ({error.strerror})"
    return ""


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk. For a folder this covers its entries, not the files in it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """Yield a new folder beside `target` that becomes `target` when the block ends, or is deleted when it fails.

    Such folders that killed processes have left beside `target` are deleted. Raises OSError if the disk refuses it, or
    if `target` is there already and is not an empty folder.
    """
    stage = stage_of(target.absolute())
    stage.mkdir(parents=True)
    try:
        _delete_left(stage)
        yield stage
        stage.rename(target)
        sync(stage.parent)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def in_words(error: BaseException) -> str:
    """Return the cause of an error in at most 300 characters."""
    if number := _system_error(error):
        return os.strerror(number)
    text = error.what if isinstance(error, ArchipelagoError) else f"{type(error).__name__}: {error}"
    text = text.partition(" [tensorstore_spec=")[0].strip().replace("\n", " ")
    return text if len(text) <= 300 else f"{text[:80]} … {text[-200:]}"


def _system_error(error: BaseException) -> int:
    """Return the system's error number, which tensorstore puts into its text; 0 if there is none."""
    if isinstance(error, OSError):
        return error.errno or 0
    found = _SYSTEM_ERROR.search(str(error))
    return int(found[1]) if found else 0


def remedy(error: BaseException) -> str:
    """Return what a user can do if a checkpoint cannot be written."""
    otherwise = ("", "Check that the disk has space and that the folder is writable.")
    return _REMEDIES.get(_system_error(error), otherwise)[1]
