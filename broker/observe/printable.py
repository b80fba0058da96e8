"""Text that is safe to show in a terminal or a log.

Everyone who can write to a run's Redis chooses names of hosts and devices, notes and reasons. A control character among
them could rewrite a terminal's screen or forge a line of a log, and an override of the writing direction could disguise
a name.
"""

from __future__ import annotations

from typing import Final

_DIRECTIONS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_SEPARATORS = (0x2028, 0x2029)
_SURROGATES = range(0xD800, 0xE000)
#: Maps the characters that are not shown to the replacement character.
CONTROLS: Final = dict.fromkeys([*range(32), *range(0x7F, 0xA0), *_DIRECTIONS, *_SEPARATORS, *_SURROGATES], "\ufffd")
_IN_LINES: Final = {code: shown for code, shown in CONTROLS.items() if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """Return the text with a replacement for every control character, also for line ends."""
    return text.translate(CONTROLS)


def printable_lines(text: str) -> str:
    """Return the text with a replacement for every control character except line ends and tabs."""
    return text.translate(_IN_LINES)
