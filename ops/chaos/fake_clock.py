"""A clock that jumps: libfaketime between a program and the time of day, told by a file how far to be off."""

from __future__ import annotations

from pathlib import Path

from archipelago.broker.errors import ConfigError

LIBRARY = "libfaketimeMT.so.1"
FOLDERS = ("/usr/lib/*/faketime", "/usr/lib/faketime", "/usr/local/lib/faketime", "/opt/homebrew/lib/faketime")
LOOK_SECONDS = 1
"""how often the program looks at the file; the library counts in whole ones"""


def library() -> Path | None:
    """Where the library lies; None where it is not installed."""
    return next((path for folder in FOLDERS for path in Path("/").glob(f"{folder[1:]}/{LIBRARY}")), None)


def require_library() -> Path:
    """Where the library lies. Raises ConfigError where it is not installed."""
    if (found := library()) is None:
        raise ConfigError(
            "a clock that jumps needs libfaketime, which is not installed here",
            "Install it (Debian: `apt install libfaketime`), or leave `clock` out of --kinds.",
        )
    return found


class FalseClock:
    """One program's time of day; intervals, which go by the monotonic clock, stay right.

    Raises ConfigError where the library is missing.
    """

    def __init__(self, file: Path) -> None:
        self._library, self._file = require_library(), file.absolute()
        self.jump(0.0)

    def environment(self) -> dict[str, str]:
        """What the program has to be started with."""
        return {
            "LD_PRELOAD": str(self._library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_CACHE_DURATION": str(LOOK_SECONDS),
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def jump(self, seconds: float) -> None:
        """From within LOOK_SECONDS on it is so many seconds ahead of the machine's clock, or behind it."""
        beside = self._file.with_suffix(".new")
        beside.write_text(f"{seconds:+.3f}\n", encoding="utf-8")
        beside.replace(self._file)  # never half written
