"""What an island has downloaded of a fragment, and what it believes of announcements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from archipelago.broker.codecs import Vector
from archipelago.broker.errors import ConfigError, UnknownRunError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Call, Event, Marker, Resume, Snapshot, TapeEntry
from archipelago.broker.transport import ReaderClient
from archipelago.broker.wire import payload_bytes_max


@dataclass(frozen=True)
class Arrival:
    """A snapshot that was downloaded and decoded: float32, N elements, or what a replica has prepared of it."""

    snapshot: Snapshot
    params_N: Vector


#: The newest header of each fragment; None for one that cannot be read.
Heads = Sequence[Snapshot | None]
#: A snapshot's global step may exceed the one before it by this many sync intervals without a confirmation.
STEP_INTERVALS = 4


def fault_in(event: Event, manifest: Manifest) -> str:
    """Return why no merger of this run can have sent this event; empty if one can."""
    match event:
        case Call(round=number, fragment=p):
            is_own = p == manifest.fragment_of(number) and p in manifest.own_fragments
            return "" if is_own else "a call of a fragment that its round does not sync"
        case Snapshot():
            return _snapshot_fault(event, manifest)
        case _:
            return ""


def _snapshot_fault(snapshot: Snapshot, manifest: Manifest) -> str:
    p = snapshot.fragment
    if p not in manifest.own_fragments:
        return "a snapshot of a fragment that the run or shard does not have"
    if snapshot.round != manifest.round_of(snapshot.version, p):
        return "a snapshot of a fragment or version that its round does not give"
    if max(snapshot.bytes, snapshot.difference_bytes) > payload_bytes_max(manifest.sizes[p]):
        return "a snapshot that is larger than its fragment"
    return ""


def last_round(heads: Heads) -> int | None:
    """Return the last round whose snapshot is stored; None if no header can be read."""
    return max((head.round for head in heads if head is not None), default=None)


def judged(
    event: Event, manifest: Manifest, heard: int, window: Sequence[int], read_heads: Callable[[], Heads]
) -> tuple[tuple[Event, ...], str]:
    """Return what an island does about an event, after it has heard of round `heard`.

    Args:
        manifest: The run or the shard.
        heard: The last closed round that the island believes in.
        window: The rounds after it that can be open, in order.
        read_heads: Returns headers of the fragments that were read after the event. Called only if the round is not
            the expected one.

    Returns:
        The events to process in its place, in order, and why it is ignored, or an empty text.
    """
    if fault := fault_in(event, manifest):
        return (), fault
    match event:
        case Snapshot(round=number) if number > window[0]:
            head = read_heads()[event.fragment]
            is_stored = head is not None and head.round >= number
            return ((event,), "") if is_stored else ((), "a snapshot of a round that has not closed")
        case Snapshot(round=number) if number <= heard:
            stored = last_round(read_heads())
            if stored is None or stored >= heard:
                return (event,), ""
            # The island believed in rounds that have not closed. It goes back to the last one that has.
            found = (event,) if number <= stored else ()
            return (Resume(stored, 0), *found), ""
        case Call(round=number) if number > window[-1]:
            return (), "a call of a round that cannot be open"
        case Resume(round=number) if number != heard:
            stored = last_round(read_heads())
            is_possible = number <= (heard if stored is None else stored)
            return ((event,), "") if is_possible else ((), "a return to a round that has not closed")
        case Marker(round=number) if number > heard:
            return (), "a checkpoint of a round that has not closed"
        case _:
            return (event,), ""


def believable_step(
    snapshot: Snapshot, known: int, steps: int, interval: int, newest_rounds: Callable[[], Sequence[TapeEntry]]
) -> int:
    """Return a snapshot's global step as far as it can be believed.

    One damaged number must not end the training of an island, so a step at the end of the run, or far ahead of the
    one before it, must be on the tape too.

    Args:
        known: The largest step that the island believes in.
        interval: The steps between two syncs of a fragment.
        newest_rounds: Returns the newest entries of the tape. Called only for a step that needs it.
    """
    step = min(snapshot.step, steps)
    if step < steps and step <= known + STEP_INTERVALS * interval:
        return step
    confirmed = max((entry.step for entry in newest_rounds()), default=0)
    return min(step, max(known, confirmed))


def differences_after(version: int, announced: Mapping[int, Snapshot]) -> list[Snapshot]:
    """Return the announced versions after that one if all have a difference and these are worth downloading."""
    chain = [announced.get(each) for each in range(version + 1, max(announced, default=0) + 1)]
    known = [snapshot for snapshot in chain if snapshot is not None and snapshot.difference_bytes]
    if not known or len(known) < len(chain) or sum(s.difference_bytes for s in known) >= known[-1].bytes:
        return []
    return known


def require_same_run(reader: ReaderClient, manifest: Manifest) -> None:
    """Raise ConfigError (`island.other-run`) if another run has the name of this one.

    A run that continues from a checkpoint is the same run, and its islands go back to that checkpoint. A new run under
    the old name has other weights, and an island of the old one must neither take them nor send to it.
    A manifest that is lost or damaged says nothing: the run may be restored from a checkpoint.
    """
    try:
        is_other = reader.manifest().uid != manifest.uid
    except (UnknownRunError, ConfigError):
        return
    if is_other:
        raise ConfigError(
            f"another run has taken the name {manifest.run!r}: it was created again",
            "This process ends, because its weights are not those of that run. Start it again for the run of that "
            "name. `archipelago merger --resume` puts an earlier one back, from its checkpoints, if nothing was merged "
            "in the new one.",
            code="island.other-run",
        )
