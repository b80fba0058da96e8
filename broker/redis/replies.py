"""Parse the replies of Redis: ids of entries, marks of epochs, counters and the merger's state.

All functions are pure.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from archipelago.broker.commits import NUMBER_MAX
from archipelago.broker.errors import WireError
from archipelago.broker.messages import COUNT_MAX, Counters, text_fields
from archipelago.broker.redis.keys import is_name
from archipelago.broker.signing import MERGER, SIGNATURE, Raw, Signing

#: The field of the merger's state that tells it from all others.
DIGEST = "digest"
#: A larger epoch is damage. Every take-over counts one.
EPOCH_MAX = 1 << 53


def names_in(members: Iterable[bytes]) -> list[str]:
    """Return the valid names among the members of a set, sorted. Other programs may have added other members."""
    return sorted(name for member in members if is_name(name := member.decode("utf-8", "replace")))


def entry_id(entry: str) -> tuple[int, int]:
    """Return the id of a stream entry as two numbers, which sort as Redis sorts ids."""
    milliseconds, _, number = entry.partition("-")
    return int(milliseconds), int(number or 0)


def epoch_mark(epoch: int, holder: str = "none") -> bytes:
    """Return the value of the epoch's key. The holder is the merger that serves, or `none` before the first one."""
    return f"{epoch} {holder}".encode()


def epoch_in(mark: bytes | None) -> int:
    """Return the number with which the epoch's key begins; 0 if there is none, or no merger can have written it."""
    try:
        epoch = int((mark or b"0").split()[0])
    except (ValueError, IndexError):
        return 0
    return epoch if 0 <= epoch <= EPOCH_MAX else 0


def is_last(entry: str) -> bool:
    """Return whether no entry of a stream can follow that one. A client that appends chooses the ids."""
    return entry_id(entry) == (NUMBER_MAX, NUMBER_MAX)


def next_id(entry: str) -> str:
    """Return the smallest id that is greater than that one, which must not be the last."""
    milliseconds, number = entry_id(entry)
    return f"{milliseconds}-{number + 1}" if number < NUMBER_MAX else f"{milliseconds + 1}-0"


def fields_of(answer: Any) -> dict[str, str]:
    """Return the fields of a hash from its reply. Raises WireError for a key of another type, which is an error."""
    if isinstance(answer, Exception):
        raise WireError("it is not a hash")
    return text_fields(answer)


def counts_in(fields: Mapping[str, str]) -> tuple[dict[str, int], list[str]]:
    """Return the counters, and the names of those that are no numbers, which count as 0.

    A counter that is too large counts as the largest one.
    """
    counts, faults = {}, []
    for name in (f.name for f in dataclasses.fields(Counters) if f.name in fields):
        count = _count(fields[name])
        if count is None:
            faults.append(name)
        else:
            counts[name] = count
    return counts, faults


def count_in(value: bytes | None) -> int:
    """Return a counter, at most COUNT_MAX; 0 for a value that is missing or no number."""
    return _count((value or b"").decode("utf-8", "replace")) or 0


def _count(text: str) -> int | None:
    return min(int(text), COUNT_MAX) if re.fullmatch(r"[0-9]{1,30}", text, re.ASCII) else None


def state_fields(signing: Signing, state: str) -> dict[str, str]:
    """Return the merger's state as Redis keeps it, in the fields of a hash, with its signature if signing is on.

    Each entry of a mapping in it has a field of its own, so that a commit writes only those that have changed.

    Args:
        signing: Signs it.
        state: The state as sorted JSON, without empty mappings.
    """
    values: dict[str, Any] = {}
    for key, value in json.loads(state or "{}").items():
        values |= {f"{key}/{name}": each for name, each in value.items()} if isinstance(value, dict) else {key: value}
    if signing.is_on:
        values[SIGNATURE] = signing.signed("state", {"state": state})[SIGNATURE]
    return {name: json.dumps(value) for name, value in values.items()}


def state_in(signing: Signing, stored: Raw) -> str:
    """Return the merger's state, which `state_fields` has divided; empty without any. Raises WireError."""
    values: dict[str, Any] = {}
    try:
        for name, text in stored.items():
            key, is_entry, entry = name.decode().partition("/")
            of = values.setdefault(key, {}) if is_entry else values
            of[entry if is_entry else key] = json.loads(text)
        signature = {SIGNATURE.encode(): str(values.pop(SIGNATURE)).encode()} if SIGNATURE in values else {}
        state = json.dumps(values, sort_keys=True) if values else ""
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise WireError(f"a part of the merger's state cannot be read ({error})", code="wire.message") from None
    if stored:
        signing.verify("state", MERGER, {b"state": state.encode(), **signature})
    return state
