"""Files that are written whole or not at all, and that survive a crash of the machine."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

PRIVATE = 0o600
READABLE = 0o666  # less the umask


def write_atomically(path: Path, content: bytes | str, *, mode: int = READABLE) -> None:
    """Replace a file so that readers, and a machine that crashes, see the old content or the new, never a mixture.

    Args:
        path: The file. Its folder must exist.
        content: The new content; text is written as UTF-8.
        mode: The permissions of the new file, from its first byte on. The umask takes bits away.

    Raises:
        OSError: The disk did not take the content. The old file is still there.
    """
    data = content.encode() if isinstance(content, str) else content
    stage = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(stage, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        stage.replace(path)
    except BaseException:
        stage.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk. For a folder this covers its entries, not the files in it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
