"""Who holds the name of an island. All functions are pure.

Two processes may be started under one name. The newer one takes the name over, and the older one leaves when it sees
that. Each claim has a generation, which is larger than that of any claim before it. A server that has lost its newest
writes holds an older claim, or none; the holder then writes its own again.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

#: A generation is the server's time in milliseconds, or one more than the last one if that is larger. A stored one
#: that lies further ahead than this was not written by a claim, and is ignored.
AHEAD_MS: Final = 10 * 365 * 24 * 3600 * 1000
_TEXT = re.compile(r"([0-9]{1,18}) ([A-Za-z0-9][A-Za-z0-9._-]{0,63})")


class NameClaim(NamedTuple):
    """A claim to the name of an island: its generation, and the incarnation that made it."""

    generation: int
    incarnation: str

    def __str__(self) -> str:
        return f"{self.generation} {self.incarnation}"


def parse_claim(text: str) -> NameClaim | None:
    """Return the claim in a text; None if there is none."""
    found = _TEXT.fullmatch(text)
    return NameClaim(int(found[1]), found[2]) if found else None


def next_claim(stored: NameClaim | None, incarnation: str, now_ms: int) -> NameClaim:
    """Return the claim of an incarnation that begins at that time of the server."""
    if stored is None or stored.generation > now_ms + AHEAD_MS:
        return NameClaim(now_ms, incarnation)
    return NameClaim(max(stored.generation + 1, now_ms), incarnation)


def newest_claim(own: NameClaim, stored: NameClaim | None) -> NameClaim:
    """Return the claim that counts: a process's own one, unless a newer one is stored."""
    is_newer = stored is not None and own < stored and stored.generation <= own.generation + AHEAD_MS
    return stored if stored is not None and is_newer else own
