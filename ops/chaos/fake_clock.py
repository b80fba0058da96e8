"""A clock that can jump. libfaketime shifts one program's time of day by an offset that it reads from a file."""

from __future__ import annotations

from pathlib import Path

from archipelago.broker.errors import ConfigError
from archipelago.broker.files import write_atomically

LIBRARY = "libfaketimeMT.so.1"
FOLDERS = ("/usr/lib/*/faketime", "/usr/lib/faketime", "/usr/local/lib/faketime", "/opt/homebrew/lib/faketime")
#: How often the program reads the file. The library counts in whole seconds.
REFRESH_SECONDS = 1


def library() -> Path | None:
    """Return the path of libfaketime, or None if it is not installed."""
    return next((path for folder in FOLDERS for path in Path("/").glob(f"{folder[1:]}/{LIBRARY}")), None)


def require_library() -> Path:
    """Return the path of libfaketime. Raise ConfigError if it is not installed."""
    if (found := library()) is None:
        raise ConfigError(
            "the fault `clock` needs libfaketime, which is not installed here",
            "Install it (Debian: `apt install libfaketime`), or leave `clock` out of --kinds.",
            code="chaos.no-libfaketime",
        )
    return found


class FakeClock:
    """The time of day of one program. Its monotonic clock, and so its intervals, stay right.

    Args:
        file: The file that holds the offset. It is created with an offset of zero.

    Raises:
        ConfigError: libfaketime is not installed.
    """

    def __init__(self, file: Path) -> None:
        self._library, self._file = require_library(), file.absolute()
        self.jump(0.0)

    def environment(self) -> dict[str, str]:
        """Return the environment variables that the program must be started with."""
        return {
            "LD_PRELOAD": str(self._library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_CACHE_DURATION": str(REFRESH_SECONDS),
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def jump(self, seconds: float) -> None:
        """Set the program's clock ahead of the machine's by `seconds`, within REFRESH_SECONDS."""
        write_atomically(self._file, f"{seconds:+.3f}\n")
