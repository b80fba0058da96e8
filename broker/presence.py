"""Who takes part in a run: heartbeats of islands, and claims to their names.

Two processes may be started under one name. The newer one takes the name over, and the older one leaves when it sees
that. Each claim has a generation, which is larger than that of any claim before it. A server that has lost its newest
writes holds an older claim, or none; the holder then writes its own again.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple

from annotated_types import MaxLen

from archipelago.broker.messages import Count, Measure, Name, Seconds, Steps, Text

#: The merger does not wait for an island whose last heartbeat is older than this.
LIVE_SECONDS = 10.0
#: A generation is the server's time in milliseconds, or one more than the last one if that is larger. A stored one
#: that lies further ahead than this was not written by a claim, and is ignored.
AHEAD_MS: Final = 10 * 365 * 24 * 3600 * 1000
_NAME_CLAIM = re.compile(r"([0-9]{1,18}) ([A-Za-z0-9][A-Za-z0-9._-]{0,63})")


@dataclass(frozen=True)
class Heartbeat:
    """The state of an island, as it reports it about once a second.

    Attributes:
        state: `joining`, `training`, `leaving` or `left`.
        steps: Inner steps of this island.
        tokens: Tokens that this island has trained on, restarts included.
        staleness: Mean over the fragments of the newest announced version minus the version held.
        backlog: Contributions that wait to be sent.
        sent: Contributions that were sent.
        refused: Contributions that were refused.
        last_refusal: The reason of the newest refusal.
        bytes_up: Bytes that were uploaded.
        bytes_down: Bytes that were downloaded, restarts included.
        link: `ok`, or the last fault of the connection.
        data: The leased ranges of text, and how far each was read.
        optimizer_origin: That of the inner optimiser's state: fresh, its own checkpoint, the script's own, or a peer.
        ignored: Announcements that no merger of the run can have sent.
        unreadable: The fragments whose newest version cannot be read, as numbers with spaces in between.
        tokens_unsent: Tokens of inner steps that no contribution has carried to the broker yet (mean over fragments).
        machine: Operating system, processor, cores and memory of its host, in words.
    """

    island: Name
    incarnation: Name
    state: Name
    host: Text
    pid: Count
    device: Text
    steps: Count = 0
    global_step: Steps = 0
    tokens: Count = 0
    tokens_per_second: Measure = 0.0
    step_seconds: Seconds = 0.0
    loss: Measure = math.nan
    staleness: Measure = 0.0
    backlog: Count = 0
    sent: Count = 0
    refused: Count = 0
    last_refusal: Text = ""
    bytes_up: Count = 0
    bytes_down: Count = 0
    link: Text = "ok"
    data: Annotated[str, MaxLen(4096)] = ""
    optimizer_origin: Text = "fresh"
    ignored: Count = 0
    unreadable: Text = ""
    tokens_unsent: Count = 0
    machine: Text = ""


@dataclass(frozen=True)
class Presence:
    """An island's last heartbeat, and its age since the broker got it."""

    heartbeat: Heartbeat
    age_seconds: float

    @property
    def unreadable(self) -> set[int]:
        """The fragments whose newest version the island cannot read."""
        return {int(word) for word in self.heartbeat.unreadable.split() if word.isdecimal() and word.isascii()}

    @property
    def is_live(self) -> bool:
        """Whether the heartbeat is recent, and the island has not left."""
        # A negative age means that the heartbeat was written with a longer life than islands give it.
        is_recent = 0.0 <= self.age_seconds < LIVE_SECONDS
        return is_recent and self.heartbeat.state in ("joining", "training", "leaving")

    @property
    def is_training(self) -> bool:
        """Whether the island is live and can answer a round, so that the merger waits for it."""
        return self.is_live and self.heartbeat.state == "training"


class NameClaim(NamedTuple):
    """A claim to the name of an island: its generation, and the incarnation that made it."""

    generation: int
    incarnation: str

    def __str__(self) -> str:
        return f"{self.generation} {self.incarnation}"


def parse_name_claim(text: str) -> NameClaim | None:
    """Return the claim in a text; None if there is none."""
    found = _NAME_CLAIM.fullmatch(text)
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
