"""What goes wrong with checkpoints on disk, in words: Orbax and tensorstore raise all kinds, with pages of text."""

from __future__ import annotations

import errno
import os
import re

from archipelago.broker.errors import ArchipelagoError

FILE_FAULTS = (
    ArchipelagoError,
    OSError,
    ValueError,  # tensorstore's own errors are among these
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    RuntimeError,
)
"""what Orbax raises for files that are damaged or cannot be written"""

_SYSTEM_ERROR = re.compile(r"\[os_error_code='(\d+)'\]")


def in_words(error: BaseException) -> str:
    """What went wrong, in at most 300 characters: tensorstore's go on for pages, the cause somewhere in the middle."""
    if number := _system_error(error):
        return os.strerror(number)
    text = error.what if isinstance(error, ArchipelagoError) else f"{type(error).__name__}: {error}"
    text = text.partition(" [tensorstore_spec=")[0].strip().replace("\n", " ")
    return text if len(text) <= 300 else f"{text[:80]} … {text[-200:]}"


def _system_error(error: BaseException) -> int:
    """The system's number for what went wrong, which tensorstore has in its text; 0 where there is none."""
    if isinstance(error, OSError):
        return error.errno or 0
    found = _SYSTEM_ERROR.search(str(error))
    return int(found[1]) if found else 0


def remedy(error: BaseException) -> str:
    """What a user can do about a checkpoint that cannot be written."""
    number = _system_error(error)
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "Free some space there, or name another folder with --folder."
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "Let this user write there, or name another folder with --folder."
    return "Is the disk full, or the folder read-only?"
