"""What Redis answers, read: entries and their ids, fields as text, events, and how far the merger's group has come.

Nothing here speaks to a server.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from archipelago.broker.errors import WireError
from archipelago.broker.messages import EVENTS, Event, from_fields
from archipelago.broker.redis.keys import is_name
from archipelago.broker.transport import START

#: The consumer group of the updates stream.
GROUP = "merger"

#: The fields of an entry or hash as the server returns them.
Raw = Mapping[bytes, bytes]

log = logging.getLogger(__name__)


def text_fields(raw: Raw) -> dict[str, str]:
    return {k.decode("utf-8", "replace"): v.decode("utf-8", "replace") for k, v in raw.items() if k != b"payload"}


def names_in(members: Iterable[bytes]) -> list[str]:
    """The names among the members of a set, in order; whatever else somebody put there is none of ours."""
    return sorted(name for member in members if is_name(name := member.decode("utf-8", "replace")))


def entry_id(entry: str) -> tuple[int, int]:
    milliseconds, _, number = entry.partition("-")
    return int(milliseconds), int(number or 0)


def next_id(entry: str) -> str:
    """The smallest id beyond that one."""
    milliseconds, number = entry_id(entry)
    return f"{milliseconds}-{number + 1}"


def stream_entries(found: Any) -> Iterator[tuple[str, Raw]]:
    """Entries of one stream, from the list of pairs that RESP2 answers or the map that RESP3 does."""
    if not found:
        return
    streams: Any = found.values() if isinstance(found, dict) else (entries for _, entries in found)
    for entries in streams:
        flat = entries[0] if entries and isinstance(entries[0], list) else entries
        for entry, raw in flat:
            yield entry.decode(), raw or {}


def event_of(entry: str, raw: Raw) -> Event | None:
    """None for a kind that a newer merger may add, and for what cannot be read."""
    fields = text_fields(raw)
    kind = EVENTS.get(fields.get("kind", ""))
    try:
        return from_fields(kind, fields) if kind else None
    except WireError as error:
        log.warning("event %s cannot be read: %s", entry, error.reason)
        return None


def group_of(groups: Any) -> dict[str, Any]:
    """The merger's group in the answer of XINFO GROUPS, empty where there is none."""
    return next((group for group in groups or () if group["name"] == GROUP.encode()), {})


def last_delivered(groups: Any) -> tuple[int, int]:
    """Up to where mergers were given entries, from the answer of XINFO GROUPS; the beginning without a group."""
    return entry_id(group_of(groups).get("last-delivered-id", START.encode()).decode())
