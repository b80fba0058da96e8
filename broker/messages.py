"""What travels: plain-text fields, typed and bounded on arrival. Each message is one frozen dataclass.

`to_fields` and `from_fields` are each other's inverse; `from_fields` takes text from outside, and raises WireError
for a missing field, a wrong type or a value out of range, before anything else looks at it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Le, MaxLen
from pydantic import AfterValidator, ConfigDict, StringConstraints, TypeAdapter, ValidationError

from archipelago.broker.errors import WireError

Message = TypeVar("Message")
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Count = Annotated[int, Ge(0), Le(1 << 62)]
Seconds = Annotated[float, Ge(0.0), Le(1e9)]
UnixSeconds = Annotated[float, Ge(0.0), Le(1e12)]
Text = Annotated[str, MaxLen(512)]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
_CONFIG = ConfigDict(extra="ignore")
NOTE_MAX = 500
"""characters of a note's text"""


def _finite(value: float) -> float:
    if math.isinf(value):
        raise ValueError("infinite")
    return value


Measure = Annotated[float, AfterValidator(_finite)]
"""A measured number; NaN says that nothing was measured yet."""


class Identified:
    """What names a contribution: with it, a resend and a redelivery are known from the first."""

    island: str
    incarnation: str
    sequence: int

    @property
    def identity_text(self) -> str:
        """The identity as announcements spell it."""
        return f"{self.island}/{self.incarnation}/{self.sequence}"


@dataclass(frozen=True)
class Contribution(Identified):
    """One island's outer gradient of one fragment, without its payload. Identity: island, incarnation, sequence."""

    __pydantic_config__ = _CONFIG
    island: Name
    incarnation: Name
    sequence: Count
    round: Annotated[int, Ge(1), Le(1 << 62)]
    fragment: Count
    base: Count
    """version of the fragment that the outer gradient was measured from"""
    tokens: Annotated[int, Ge(1), Le(1 << 53)]
    steps: Annotated[int, Ge(1), Le(1 << 53)]
    global_step: Count
    loss: Measure
    step_seconds: Seconds
    """how long one inner step takes this island: the clock of the grace window"""
    farewell: bool
    """sent by an island that leaves: it joins its round, but does not call it"""
    codec: Name
    bytes: Count
    digest: Digest
    data: Annotated[str, MaxLen(4096)] = ""
    """how far the island has read its shards, as `broker.data.Place`s: where others go on once this is merged"""

    @property
    def identity(self) -> tuple[str, str, int]:
        """What a resend or a redelivery has in common with the first."""
        return (self.island, self.incarnation, self.sequence)


@dataclass(frozen=True)
class Call:
    """The merger has the first contribution of a round; every other island answers at its next step boundary."""

    __pydantic_config__ = _CONFIG
    round: Annotated[int, Ge(1), Le(1 << 62)]
    fragment: Count


@dataclass(frozen=True)
class Snapshot:
    """A round has closed: the fragment has new parameters, its version counts them."""

    __pydantic_config__ = _CONFIG
    round: Count
    fragment: Count
    version: Count
    step: Count
    """the global step stamped on it: the furthest of its contributions'"""
    codec: Name
    bytes: Count
    digest: Digest
    """of the payload"""
    merged: Annotated[str, MaxLen(65536)]
    """identities (island/incarnation/sequence) of what was merged, heaviest first"""
    held: Annotated[str, MaxLen(32)] = ""
    """digest of the float32 parameters that islands hold with it"""
    difference_bytes: Count = 0
    """size of the payload that leads there from the version before; 0 where there is none"""

    @property
    def identities(self) -> frozenset[str]:
        """The same, one by one: what a sender waits to read."""
        return frozenset(self.merged.split())


@dataclass(frozen=True)
class Refusal(Identified):
    """A contribution that was not merged, and why: for the island and for whoever reads the stream."""

    __pydantic_config__ = _CONFIG
    island: Text
    incarnation: Text
    sequence: Count
    round: Count
    fragment: Count
    tokens: Count
    reason: Text
    repeat: bool = False
    """the contribution came twice; this is about the second copy only"""
    decided: bool = False
    """of a repeat: the first copy was merged or refused, and need not be waited for"""


@dataclass(frozen=True)
class Resume:
    """A merger has begun, or begun again, from what Redis holds. Who was told more than that has to go back to it."""

    __pydantic_config__ = _CONFIG
    round: Count
    """the last closed round"""
    epoch: Count


@dataclass(frozen=True)
class Marker:
    """The merger has taken a checkpoint of what it knows so far; islands take theirs when they read this.

    What everybody knew when they read or wrote it fits together (Chandy and Lamport 1985; Decoupled DiLoCo, E.2).
    """

    __pydantic_config__ = _CONFIG
    number: Annotated[int, Ge(1), Le(1 << 62)]
    """of the checkpoint"""
    round: Count
    """the last round in it"""


Event = Call | Snapshot | Refusal | Resume | Marker
EVENTS: dict[str, type[Event]] = {
    "call": Call,
    "snapshot": Snapshot,
    "refused": Refusal,
    "resume": Resume,
    "marker": Marker,
}
KINDS = {kind: name for name, kind in EVENTS.items()}


@dataclass(frozen=True)
class Heartbeat:
    """What an island says of itself, about once a second."""

    __pydantic_config__ = _CONFIG
    island: Name
    incarnation: Name
    state: Name
    """joining, training, leaving or left"""
    host: Text
    pid: Count
    device: Text
    steps: Count
    global_step: Count
    tokens: Count
    """trained on by this island, over its returns"""
    tokens_per_second: Measure
    step_seconds: Seconds
    loss: Measure
    staleness: Measure
    """mean over the fragments of: newest version announced minus version held"""
    backlog: Count
    """contributions that wait to be sent"""
    sent: Count
    refused: Count
    last_refusal: Text
    bytes_up: Count
    bytes_down: Count
    link: Text
    """ok, or what went wrong last"""
    data: Annotated[str, MaxLen(4096)] = ""
    """the shards that it holds, and how far it has read them"""
    moments: Text = "fresh"
    """where its inner optimiser state came from when it began: fresh, its own checkpoint, or a peer"""
    uplink_bytes_per_second: Measure = math.nan
    """what its way up has just shown to carry, beside what a message takes that has hardly a byte; NaN: not known"""
    downlink_bytes_per_second: Measure = math.nan
    """the same of its way down"""


LIVE_SECONDS = 10.0
"""An island that was not heard of for so long is not waited for."""


@dataclass(frozen=True)
class Presence:
    """An island's last heartbeat, and how long ago the broker got it."""

    heartbeat: Heartbeat
    age_seconds: float

    @property
    def is_live(self) -> bool:
        """Heard of lately, and not gone."""
        return self.age_seconds < LIVE_SECONDS and self.heartbeat.state in ("joining", "training", "leaving")

    @property
    def is_training(self) -> bool:
        """Live, and able to answer a round: what the merger waits for."""
        return self.is_live and self.heartbeat.state == "training"


@dataclass(frozen=True)
class Member(Identified):
    """One contribution's part in a round, as the tape keeps it."""

    __pydantic_config__ = _CONFIG
    island: Name
    incarnation: Name
    sequence: Count
    base: Count
    staleness: Count
    weight: Measure
    """share of the round: the weights of a round sum to one"""
    clip: Measure
    """factor that the clip scaled it with; 1 where it did nothing"""
    tokens: Count
    steps: Count
    loss: Measure
    entry: Annotated[str, MaxLen(64)] = ""
    """of the updates stream, where fields and payload lie until a checkpoint covers them"""


@dataclass(frozen=True)
class TapeEntry:
    """One round's decisions: with the payloads, enough to run it again bit for bit."""

    __pydantic_config__ = _CONFIG
    round: Count
    fragment: Count
    version: Count
    epoch: Count
    step: Count
    gain: Measure
    """factor on the merged outer gradient, from normalised staleness"""
    quorum_seconds: Seconds
    """from the first contribution to the quorum"""
    grace_seconds: Seconds
    """the grace window that was allowed"""
    open_seconds: Seconds
    """from the first contribution to the close"""
    live: Count
    bytes_up: Count
    loss: Measure
    """mean of the members' losses by tokens"""
    digest: Digest
    """of the published parameters' float32 bytes"""
    members: tuple[Member, ...]
    unix_seconds: UnixSeconds = 0.0
    """wall clock of the merger when the round closed; 0 where none was noted"""
    merge_seconds: Seconds = 0.0
    """arithmetic of the close: weights, merge, outer step"""
    steered: Text = ""
    """settings that took effect with this round, `name=value name=value` (`broker.control`)"""


@dataclass(frozen=True)
class Evaluation:
    """The merger's parameters on held-out text."""

    __pydantic_config__ = _CONFIG
    round: Count
    step: Count
    tokens: Count
    """trained on by all islands so far, whether merged or not: what a single process would be given"""
    unix_seconds: UnixSeconds
    """wall clock of whoever evaluated"""
    bits_per_byte: Measure


@dataclass(frozen=True)
class Note:
    """Something that happened to the run, in words, for whoever looks."""

    __pydantic_config__ = _CONFIG
    unix_seconds: UnixSeconds
    """wall clock of whoever writes it"""
    who: Text
    """an island's name, or `merger`"""
    kind: Name
    """joined, left, diverged, drained and expelled, of an island; served, steered, paused, resumed and checkpoint, of a
    merger, which also has left"""
    text: Text


@dataclass(frozen=True)
class Books:
    """published = merged + refused + pending, in contributions and in tokens."""

    __pydantic_config__ = _CONFIG
    published: Count = 0
    published_tokens: Count = 0
    merged: Count = 0
    merged_tokens: Count = 0
    refused: Count = 0
    refused_tokens: Count = 0
    bytes_up: Count = 0
    bytes_down: Count = 0
    kept: Count = 0
    """merged contributions that still lie in the stream, until a checkpoint on disk covers them"""


@dataclass(frozen=True)
class Pending:
    """What is published and neither merged nor refused."""

    contributions: int
    tokens: int


@dataclass(frozen=True)
class Actions:
    """Consecutive actions of one incarnation of an island, as text (`islands/sync/actions.py`).

    Attributes:
        index: Position of the first action among all actions of the incarnation.
        text: The actions, separated by spaces.
    """

    __pydantic_config__ = _CONFIG
    island: Name
    incarnation: Name
    index: Count
    text: Annotated[str, MaxLen(1 << 20)]


@dataclass(frozen=True)
class Handover:
    """A healthy island gives a newcomer its inner optimiser state; the payload travels beside this."""

    __pydantic_config__ = _CONFIG
    giver: Name
    incarnation: Name
    index: Count
    """how many of its actions the giver had done then"""
    global_step: Count
    bytes: Count
    digest: Digest


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def to_fields(message: Any) -> dict[str, str]:
    """Plain text, field by field, in the order of the dataclass; tuples become JSON."""
    fields = {}
    for f in dataclasses.fields(message):
        value = getattr(message, f.name)
        if isinstance(value, tuple):
            fields[f.name] = json.dumps([dataclasses.asdict(part) for part in value])
        elif isinstance(value, float):
            fields[f.name] = repr(float(value))  # the shortest text that gives the same bits again
        else:
            fields[f.name] = str(int(value)) if isinstance(value, bool) else str(value)
    return fields


def from_fields(kind: type[Message], fields: Mapping[str, str]) -> Message:
    """The message in those fields. Raises WireError that names the first offending field."""
    values: dict[str, Any] = dict(fields)
    try:
        if kind is TapeEntry:
            values["members"] = json.loads(values["members"])
        return _adapter(kind).validate_python(values)  # type: ignore[no-any-return, arg-type]
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"]))
        why = fault["msg"][:1].lower() + fault["msg"][1:]
        raise WireError(f"{kind.__name__.lower()}: {where}: {why}", code="wire.message") from None
    except KeyError as error:
        raise WireError(f"{kind.__name__.lower()}: {error.args[0]}: missing", code="wire.message") from None
    except (ValueError, RecursionError) as error:
        raise WireError(f"{kind.__name__.lower()}: members: {error!r:.80}", code="wire.message") from None
