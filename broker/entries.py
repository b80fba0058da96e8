"""The names of entries of the updates streams: `NAME/ID`, where NAME is the island that sent the entry.

Each island has a stream of its own, so the name of an entry says who sent it.
"""

from __future__ import annotations

import re

from archipelago.broker.errors import WireError

_ENTRY = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,63})/([0-9]{1,20})-([0-9]{1,20})")
#: The longest name of an entry, in characters.
ENTRY_MAX = 128
#: The largest number of an entry within its millisecond.
NUMBER_MAX = (1 << 64) - 1


def entry_name(sender: str, entry_id: str) -> str:
    """Return the name of an entry of the stream of `sender`."""
    return f"{sender}/{entry_id}"


def parse_entry(entry: str) -> tuple[str, str]:
    """Return the sender of an entry, and its id in the sender's stream. Raises WireError."""
    found = _ENTRY.fullmatch(entry)
    if not found:
        raise WireError(f"{entry[:40]!r} is not the name of an entry", code="wire.entry")
    return found[1], f"{found[2]}-{found[3]}"


def sender_of(entry: str) -> str:
    """Return the island whose stream holds the entry."""
    return entry.partition("/")[0]


def arrival(entry: str) -> tuple[int, str, int]:
    """Return a key that sorts entries of several streams by the time at which they arrived. Raises WireError.

    Entries of one millisecond are sorted by the names of their islands, because each stream numbers its own.
    """
    sender, entry_id = parse_entry(entry)
    milliseconds, _, number = entry_id.partition("-")
    return int(milliseconds), sender, int(number)


def position(name: str, after: str) -> str:
    """Return the id in the stream of `name` after which all entries arrived later than the entry `after`.

    Raises:
        WireError: `after` is not the name of an entry.
    """
    sender, entry_id = parse_entry(after)
    if name == sender:
        return entry_id
    milliseconds = int(entry_id.partition("-")[0])
    if name > sender:
        milliseconds -= 1
    return f"{milliseconds}-{NUMBER_MAX}" if milliseconds >= 0 else "0-0"
