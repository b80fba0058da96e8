"""The messages of a run. Each is one frozen dataclass, and travels as fields of plain text.

`from_fields` is the inverse of `to_fields`. It checks text from outside before any other code uses it, and raises
WireError for a missing field, a wrong type or a value out of range. Fields that it does not know are ignored.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Le, MaxLen
from pydantic import AfterValidator, Json, StringConstraints, TypeAdapter, ValidationError

from archipelago.broker.errors import WireError, fault_in
from archipelago.broker.ranges import ReadPosition, parse_positions

Message = TypeVar("Message")
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
#: The largest count. Counters stay there instead of growing past it.
COUNT_MAX = 1 << 62
Count = Annotated[int, Ge(0), Le(COUNT_MAX)]
#: Inner steps, which a device counts in 32 bits.
Steps = Annotated[int, Ge(0), Le((1 << 31) - 1)]
Seconds = Annotated[float, Ge(0.0), Le(1e9)]
UnixSeconds = Annotated[float, Ge(0.0), Le(1e12)]
Text = Annotated[str, MaxLen(512)]
#: XXH3-128, or SHA-256 of a payload where members sign.
Digest = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{32}|[0-9a-f]{64})$")]
#: The longest text of the identities that a round merges, in characters. The merger admits no more to one round.
MERGED_MAX = 1 << 16
#: The longest text of a note, in characters.
NOTE_MAX = 500
#: The kind of the note of a merger that does not serve a run.
REFUSED = "refused"
#: The kind of the note of a merger whose checkpoints fail.
UNSAVED = "unsaved"
#: The kinds of the notes of a merger whose checkpoints are not copied to the bucket, and are copied again.
UNCOPIED, COPIED = "uncopied", "bucket"
#: The longest name of an entry, in characters.
ENTRY_MAX = 128


#: The largest magnitude of a measured number: sums and squares of several are still finite.
MEASURE_MAX = 1e150


def _moderate(value: float) -> float:
    if abs(value) > MEASURE_MAX:
        raise ValueError("too large")
    return value


#: A measured number. NaN means that nothing was measured yet.
Measure = Annotated[float, AfterValidator(_moderate)]


class Identified:
    """The three parts of a contribution's identity, by which resent and redelivered copies are recognised."""

    island: str
    incarnation: str
    sequence: int

    @cached_property
    def identity_text(self) -> str:
        """The identity as text: `island/incarnation/sequence`."""
        return f"{self.island}/{self.incarnation}/{self.sequence}"


@dataclass(frozen=True)
class Contribution(Identified):
    """The header of one island's outer gradient of one fragment. The payload travels beside it.

    Attributes:
        base: The version of the fragment from which the outer gradient was measured.
        tokens: Tokens of the inner steps behind the outer gradient.
        steps: Inner steps behind the outer gradient.
        step_seconds: The duration of one inner step of this island. The grace window depends on it.
        farewell: The island leaves with this contribution, which joins a round but does not open one.
        bytes: The size of the payload.
        digest: The digest of the payload.
        data: How far the island has read its ranges of text, as `broker.ranges.ReadPosition`s. Once this is merged,
            other islands continue there.
    """

    island: Name
    incarnation: Name
    sequence: Count
    round: Annotated[int, Ge(1), Le(1 << 62)]
    fragment: Count
    base: Count
    tokens: Annotated[int, Ge(1), Le(1 << 53)]
    steps: Annotated[int, Ge(1), Le((1 << 31) - 1)]
    global_step: Steps
    loss: Measure
    step_seconds: Seconds
    farewell: bool
    codec: Name
    bytes: Count
    digest: Digest
    data: Annotated[str, MaxLen(4096)] = ""

    @cached_property
    def identity(self) -> tuple[str, str, int]:
        """The identity, which a resent or redelivered copy shares with the first one."""
        return (self.island, self.incarnation, self.sequence)

    @cached_property
    def positions(self) -> tuple[ReadPosition, ...]:
        """The positions in `data`. Raises WireError if they cannot be read."""
        return parse_positions(self.data) if self.data else ()


@dataclass(frozen=True)
class Call:
    """The merger has the first contribution of a round. Every other island answers at its next step boundary."""

    round: Annotated[int, Ge(1), Le(1 << 62)]
    fragment: Count


@dataclass(frozen=True)
class Snapshot:
    """A round has closed, and the fragment has new parameters.

    Attributes:
        version: How many rounds of this fragment have closed.
        step: The global step of the snapshot, which is the largest one among its contributions.
        bytes: The size of the payload.
        digest: The digest of the payload.
        merged: The identities (island/incarnation/sequence) of the merged contributions.
        held: The digest of the float32 parameters that an island holds once it has this version.
        difference_bytes: The size of the payload that leads from the previous version to this one; 0 if there is none.
    """

    round: Count
    fragment: Count
    version: Count
    step: Steps
    codec: Name
    bytes: Count
    digest: Digest
    merged: Annotated[str, MaxLen(MERGED_MAX)]
    held: Annotated[str, MaxLen(32)] = ""
    difference_bytes: Count = 0

    @property
    def identities(self) -> frozenset[str]:
        return frozenset(self.merged.split())


@dataclass(frozen=True)
class Refusal(Identified):
    """A contribution was not merged, for the given reason.

    Attributes:
        repeat: This is about a second copy of a contribution.
        decided: Only with `repeat`: the first copy was merged or refused already, so its island need not wait for it.
    """

    island: Text
    incarnation: Text
    sequence: Count
    round: Count
    fragment: Count
    tokens: Count
    reason: Text
    repeat: bool = False
    decided: bool = False


@dataclass(frozen=True)
class Resume:
    """A merger starts or restarts from the state in Redis. A process that knows of later rounds must go back to it.

    Attributes:
        round: The last closed round.
        epoch: The epoch of the merger's lease.
    """

    round: Count
    epoch: Count


@dataclass(frozen=True)
class Marker:
    """The merger has taken a checkpoint. Islands take theirs when they read this event.

    The checkpoints that all processes take at the same marker form one consistent state of the run (Chandy and Lamport
    1985; Decoupled DiLoCo, E.2).

    Attributes:
        number: The number of the checkpoint.
        round: The last round in the checkpoint.
    """

    number: Annotated[int, Ge(1), Le(1 << 62)]
    round: Count


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
class RoundMember(Identified):
    """One contribution's part in a round, as the tape records it.

    Attributes:
        weight: The contribution's share of the round. The weights of a round sum to one.
        tokens: The tokens that it counts for: those that it claims, or fewer (`merger.claims`).
        steps: The inner steps that it counts for, likewise.
        clip: The factor by which clipping scaled the contribution; 1 if it was not clipped.
        entry: The entry that holds its fields and payload until a checkpoint covers them, as `NAME/ID`: the island
            whose updates stream it is in, and its id there.
        data: The positions to which it moves the cursors of ranges of text.
        score: How well its island's contributions agree with those of the others; 1 is usual, 0 unrelated.
        factor: The factor on its weight that followed from the score; 1 if it was not lowered.
    """

    island: Name
    incarnation: Name
    sequence: Count
    base: Count
    staleness: Count
    weight: Measure
    clip: Measure
    tokens: Count
    steps: Count
    loss: Measure
    entry: Annotated[str, MaxLen(ENTRY_MAX)] = ""
    data: Annotated[str, MaxLen(4096)] = ""
    score: Measure = 1.0
    factor: Measure = 1.0


@dataclass(frozen=True)
class TapeEntry:
    """The merger's decisions in one round. With the payloads they are enough to replay the round bit for bit.

    Attributes:
        epoch: The epoch of the merger that closed the round.
        step: The global step of the snapshot.
        gain: The factor on the merged outer gradient that follows from normalised staleness.
        quorum_seconds: Time from the first contribution to the quorum.
        grace_seconds: The length of the grace window.
        open_seconds: Time from the first contribution to the close of the round.
        live: Islands that were live at the close.
        bytes_up: Bytes of the members' payloads.
        loss: Mean of the members' losses, weighted by tokens.
        digest: The digest of the published parameters' float32 bytes.
        members: The merged contributions.
        unix_seconds: The clock of the Redis at the close; 0 if it was not recorded.
        merge_seconds: Time that the close spent on weights, merge and outer step.
        spectra_seconds: The part of it that changed spectra of matrices.
        busy_seconds: Time since the previous close in which the merger did not wait for contributions.
        steered: Settings that took effect with this round, as `name=value name=value` (see `broker.control`).
        before: The run's state before the round, as far as the merge depends on it (`merger.committing`).
    """

    round: Count
    fragment: Count
    version: Count
    epoch: Count
    step: Count
    gain: Measure
    quorum_seconds: Seconds
    grace_seconds: Seconds
    open_seconds: Seconds
    live: Count
    bytes_up: Count
    loss: Measure
    digest: Digest
    members: Annotated[tuple[RoundMember, ...], Json]
    unix_seconds: UnixSeconds = 0.0
    merge_seconds: Seconds = 0.0
    spectra_seconds: Seconds = 0.0
    busy_seconds: Seconds = 0.0
    steered: Text = ""
    before: Annotated[str, MaxLen(1 << 24)] = ""


@dataclass(frozen=True)
class Evaluation:
    """The loss of the merger's parameters on held-out data, or one that a script reports of its own.

    Attributes:
        tokens: Tokens merged until then, each counted once.
        unix_seconds: When, by the clock of the Redis.
        bits_per_byte: The loss. Of a task or a script, it is in bits instead of nats, as `LossUnit` converts it.
        by: The island that evaluated; empty if `up` measured the end of the run.
    """

    round: Count
    step: Count
    tokens: Count
    unix_seconds: UnixSeconds
    bits_per_byte: Measure
    by: Text = ""


@dataclass(frozen=True)
class Note:
    """Something that happened to the run, in words for an operator.

    Attributes:
        unix_seconds: When, by the clock of the Redis.
        who: An island's name, or `merger`.
        kind: For an island `joined`, `left`, `stalled`, `replaced`, `diverged`, `drained` or `expelled`. For a merger
            `served`, `left`, `lowered`, `restored`, `expelled`, `idle`, `steered`, `paused`, `resumed`, `checkpoint`,
            COPIED, UNSAVED while its checkpoints fail, UNCOPIED while copies of them do or, while it does not serve,
            REFUSED.
        text: At most NOTE_MAX characters.
    """

    unix_seconds: UnixSeconds
    who: Text
    kind: Name
    text: Text


@dataclass(frozen=True)
class Counters:
    """The run's counters. In contributions and in tokens, published = merged + refused + pending."""

    published: Count = 0
    published_tokens: Count = 0
    merged: Count = 0
    merged_tokens: Count = 0
    refused: Count = 0
    refused_tokens: Count = 0
    bytes_up: Count = 0

    @property
    def pending(self) -> int:
        """How many contributions were neither merged nor refused."""
        return max(0, self.published - self.merged - self.refused)

    @property
    def pending_tokens(self) -> int:
        return max(0, self.published_tokens - self.merged_tokens - self.refused_tokens)


@dataclass(frozen=True)
class Handover:
    """The header of the inner optimiser state that an island, the giver, sends to a new one.

    The payload travels beside it; `bytes` and `digest` are its size and digest.
    """

    giver: Name
    incarnation: Name
    global_step: Count
    bytes: Count
    digest: Digest


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    """Return what validates values of that type. It takes milliseconds to build, so it is built at its first use."""
    return TypeAdapter(kind)


def to_fields(message: Any) -> dict[str, str]:
    """Return the message as plain text, in the order of its fields. Tuples become JSON."""
    fields = {}
    for f in dataclasses.fields(message):
        value = getattr(message, f.name)
        if isinstance(value, tuple):
            fields[f.name] = json.dumps([dataclasses.asdict(part) for part in value])
        elif isinstance(value, float):
            fields[f.name] = repr(float(value))  # the shortest text that restores the same bits
        else:
            fields[f.name] = str(int(value)) if isinstance(value, bool) else str(value)
    return fields


def text_fields(raw: Mapping[bytes, bytes]) -> dict[str, str]:
    """Return the fields of an entry or hash as text, without the payload."""
    return {k.decode("utf-8", "replace"): v.decode("utf-8", "replace") for k, v in raw.items() if k != b"payload"}


def from_raw(kind: type[Message], raw: Mapping[bytes, bytes]) -> Message:
    """Return the message in the fields of an entry or hash. Raises WireError, as `from_fields` does."""
    return from_fields(kind, text_fields(raw))


def from_fields(kind: type[Message], fields: Mapping[str, str]) -> Message:
    """Return the message in the fields. Raises WireError, which names the first invalid field."""
    try:
        return adapter(kind).validate_python(fields)  # type: ignore[no-any-return, arg-type]
    except ValidationError as error:
        raise WireError(f"{kind.__name__.lower()}: {fault_in(error)}", code="wire.message") from None
