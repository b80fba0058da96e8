"""Short messages for errors of checkpoint files. Orbax and tensorstore raise many types, with pages of text."""

from __future__ import annotations

import errno
import os
import re

from archipelago.broker.errors import ArchipelagoError

#: The errors that Orbax raises for files that are damaged or cannot be written.
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

_SYSTEM_ERROR = re.compile(r"\[os_error_code='(\d+)'\]")


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
    number = _system_error(error)
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "Free some space there, or name another folder with --folder."
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "Give this user the right to write there, or name another folder with --folder."
    return "Check that the disk has space and that the folder is writable."
