"""Load a run from Redis. State that Redis has lost is rebuilt from a checkpoint, the tape and its entries."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from archipelago.broker.errors import ArchipelagoError, ConfigError, WireError
from archipelago.broker.messages import Snapshot
from archipelago.broker.transport import START, MergerTransport, Repair
from archipelago.broker.wire import digest, digest_of, pack, unpack
from archipelago.merger import outer
from archipelago.merger.admission import version_after
from archipelago.merger.checkpoint import CheckpointStore
from archipelago.merger.rebuild import fragment_of, rebuild, with_norms
from archipelago.merger.replay import DifferenceError
from archipelago.merger.round_merge import RoundMerge
from archipelago.merger.state import FragmentState, RunState

#: More events than the broker keeps.
EVENTS_SEARCHED = 1 << 16
REMEDY = (
    "Run `archipelago merger --run {run} --folder FOLDER` with the folder of its checkpoints, "
    "or begin another run with `archipelago init`."
)
T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """A run between two rounds.

    Attributes:
        repair: What Redis has lost, or holds differently, and must be written back.
    """

    state: RunState
    fragments: list[FragmentState]
    snapshots: list[Snapshot]
    repair: Repair = field(default_factory=Repair)


@dataclass(frozen=True)
class Found:
    """What Redis holds of a run, as far as it can be read.

    Attributes:
        state: The merger's state; a fresh one if it cannot be read.
        fault: Why the state cannot be read.
        closed: The last closed round, on which most of the records agree.
        published: The snapshot of each fragment and its parameters (float32 [N]); None if it is lost.
        fragments: Each fragment whose own state can be read; None if it is lost.
    """

    state: RunState
    fault: ConfigError | None
    closed: int
    published: list[tuple[Snapshot, bytes] | None]
    fragments: list[FragmentState | None]

    @property
    def lost_state(self) -> bool:
        """Whether the state cannot be used."""
        return self.fault is not None or self.state.closed != self.closed

    @property
    def lost(self) -> list[int]:
        """The fragments of which anything is lost."""
        both = enumerate(zip(self.published, self.fragments, strict=True))
        return [p for p, (published, fragment) in both if published is None or fragment is None]


def load(
    transport: MergerTransport,
    rules: RoundMerge,
    store: CheckpointStore | None,
    between: Callable[[], object] = lambda: None,
) -> Loaded:
    """Load the run as its last commit left it, and rebuild what Redis has lost.

    The state, the newest snapshots and the tape each know the last closed round. What disagrees with the others, or
    cannot be read, is rebuilt from a checkpoint and the tape, to the same bits.

    Args:
        transport: The connection to the run.
        rules: How the run merges its rounds.
        store: Checkpoints to rebuild from.
        between: Called after each fragment, because large fragments take long to load and the lease must be renewed.

    Raises:
        ConfigError: Redis has lost what no checkpoint can restore (`config.lost-state`, `config.lost-fragment`).
    """
    found = _found(transport, rules, between)
    if not (found.lost or found.lost_state):
        return Loaded(found.state, _whole(found.fragments), [snapshot for snapshot, _ in _whole(found.published)])
    recovered = _recovered(transport, rules, store, found)
    return recovered if recovered is not None else _from_what_is_left(transport, rules, found)


def _found(transport: MergerTransport, rules: RoundMerge, between: Callable[[], object]) -> Found:
    state, fault = _state(transport)
    published = [_published(transport, rules, p) for p in range(len(rules.manifest.fragments))]
    # A missing state says round 0. It is no witness against the tape.
    closed = _last_round(transport, None if fault else state.closed or None, published)
    fragments: list[FragmentState | None] = []
    for p, held in enumerate(published):
        version = version_after(closed, p, len(published))
        if held is not None and (held[0].round, held[0].version) != (round_of(version, p, len(published)), version):
            _log_lost(f"the snapshot of fragment {p}", f"it is of round {held[0].round}, and round {closed} was closed")
            published[p] = held = None
        fragments.append(_stored_fragment(transport, rules, p, held[1] if held else None, version, state))
        between()
    return Found(state, fault, closed, published, fragments)


def _published(transport: MergerTransport, rules: RoundMerge, p: int) -> tuple[Snapshot, bytes] | None:
    """Return the newest snapshot of a fragment and its payload, or None if it is lost or damaged."""
    try:
        snapshot, payload = transport.reader.fragment(p)
        if snapshot.fragment != p or digest(payload) != snapshot.digest:
            raise WireError("its payload is not the published one")
        params_N = unpack(payload, rules.manifest.sizes[p])
        if snapshot.held and digest_of(params_N) != snapshot.held:
            raise WireError("its parameters are not the published ones")
    except WireError as error:
        _log_lost(f"the snapshot of fragment {p}", error.reason)
        return None
    return snapshot, payload


def round_of(version: int, p: int, fragments: int) -> int:
    """Return the round that published this version of fragment `p`; 0 for version 0."""
    return p + 1 + (version - 1) * fragments if version else 0


def _last_round(
    transport: MergerTransport, stated: int | None, published: Sequence[tuple[Snapshot, bytes] | None]
) -> int:
    """Return the last closed round: what two of the state, the snapshots and the tape agree on, or else the newest."""
    snapshots = max((held[0].round for held in published if held is not None), default=None)
    tape = transport.reader.tape(1)
    votes = [v for v in (stated, snapshots, tape[0].round if tape else None) if v is not None]
    return max(votes, key=lambda vote: (votes.count(vote), vote), default=0)


def _stored_fragment(
    transport: MergerTransport, rules: RoundMerge, p: int, payload: bytes | None, version: int, state: RunState
) -> FragmentState | None:
    """Return a fragment with its stored outer state, or None if that is lost."""
    try:
        outer_state = transport.merger.outer(p, version) if version else b""
        if version and not outer_state:
            raise WireError("it is missing")
        return with_norms(fragment_of(rules, p, payload, outer_state), state, p)
    except WireError as error:
        _log_lost(f"the outer state of fragment {p}", error.reason)
        return None


def _log_lost(what: str, why: str) -> None:
    log.warning("%s cannot be read from Redis (%s)", what, why, extra={"code": "restore.lost"})


def _code(error: ArchipelagoError) -> dict[str, str]:
    return {"code": error.code}


def _whole(parts: Sequence[T | None]) -> list[T]:
    return [part for part in parts if part is not None]


def _state(transport: MergerTransport) -> tuple[RunState, ConfigError | None]:
    """Return the merger's state, and the error if it cannot be read; the state is a fresh one then."""
    try:
        return RunState.from_json(transport.reader.merger_state()), None
    except ConfigError as error:
        return RunState(), error


# -- rebuild -----------------------------------------------------------------------------------------------------------


def _recovered(
    transport: MergerTransport, rules: RoundMerge, store: CheckpointStore | None, found: Found
) -> Loaded | None:
    """Return the run from the newest checkpoint and the tape after it, or None if these cannot restore it."""
    if store is None:
        return None
    try:
        store.fetch()
    except ConfigError as error:
        log.warning("%s", error.what, extra=_code(error))
    try:
        image = store.load()
    except ConfigError as error:
        log.warning("%s", error.what, extra=_code(error))
        return None
    if image is None:
        return None
    try:
        state, fragments = rebuild(rules, image, transport, found.closed)
        _require_published(rules, found, state, fragments)
    except (DifferenceError, WireError, ConfigError) as error:
        log.warning("checkpoint %s and the tape cannot restore the run: %s", image.number, error, extra=_code(error))
        return None
    log.warning(
        "rebuilt from checkpoint %s and the tape after it, bit for bit",
        image.number,
        extra={"code": "restore.rebuilt"},
    )
    if not found.lost_state:
        state = found.state  # the state in Redis also has refusals and timings
    return _repaired(transport, rules, found, state, fragments)


def _repaired(
    transport: MergerTransport, rules: RoundMerge, found: Found, state: RunState, fragments: list[FragmentState]
) -> Loaded:
    """Return the run with a repair that writes back whatever was not found."""
    announced = _announced(transport, found)
    snapshots, lost, outers = [], {}, {}
    for p, fragment in enumerate(fragments):
        held = found.published[p]
        version = version_after(found.closed, p, len(fragments))
        if held is None:
            held = lost[p] = _snapshot(rules, p, fragment, version, announced.get((p, version)), state)
        snapshots.append(held[0])
        if version and found.fragments[p] is None:
            outers[p] = (version, outer.dump(fragment.params_N, fragment.outer))
    return Loaded(state, fragments, snapshots, Repair(state.to_json() if found.lost_state else None, lost, outers))


def repair_from(
    rules: RoundMerge,
    state: RunState,
    fragments: Sequence[FragmentState],
    snapshots: Sequence[Snapshot],
    damaged: AbstractSet[str],
) -> Repair:
    """Return the repair of damaged keys, by their names, from the memory of the merger that serves the run."""
    wire, lost, outers = rules.manifest.config.wire, {}, {}
    for p, (fragment, snapshot) in enumerate(zip(fragments, snapshots, strict=True)):
        if f"fragment:{p}" in damaged:
            lost[p] = (snapshot, pack(np.asarray(fragment.published_N), wire.full, wire.full_zstd_level))
        if f"outer:{p}" in damaged and snapshot.version:
            outers[p] = (snapshot.version, outer.dump(fragment.params_N, fragment.outer))
    return Repair(state.to_json() if state.closed else None, lost, outers, state.cursors)


def _announced(transport: MergerTransport, found: Found) -> dict[tuple[int, int], Snapshot]:
    """Return the announcements of the versions that are lost, as far as they are still among the newest events."""
    if None not in found.published:
        return {}
    entries = transport.reader.events(START, 0.0, EVENTS_SEARCHED)
    return {(event.fragment, event.version): event for _, event in entries if isinstance(event, Snapshot)}


def _snapshot(
    rules: RoundMerge, p: int, fragment: FragmentState, version: int, announced: Snapshot | None, state: RunState
) -> tuple[Snapshot, bytes]:
    wire, held_N = rules.manifest.config.wire, np.asarray(fragment.published_N)
    payload = pack(held_N, wire.full, wire.full_zstd_level)
    number = round_of(version, p, len(rules.manifest.fragments))
    base = announced or Snapshot(number, p, version, state.step if version else 0, wire.full, 0, "", "")
    size = base.difference_bytes if base.held == digest_of(held_N) else 0
    held = digest_of(held_N) if version else ""
    return replace(base, bytes=len(payload), digest=digest(payload), held=held, difference_bytes=size), payload


def _from_what_is_left(transport: MergerTransport, rules: RoundMerge, found: Found) -> Loaded:
    """Return the run without a checkpoint, as close to what was as Redis allows.

    Raises:
        ConfigError: The state, or all of a fragment, is lost.
    """
    run, closed = rules.manifest.run, found.closed
    if found.lost_state and closed:
        why = found.fault.what if found.fault else f"it is of round {found.state.closed}, and round {closed} was closed"
        raise ConfigError(
            f"Redis has lost the merger's state of run {run!r} ({why}), and no checkpoint can restore it",
            REMEDY.format(run=run),
            code="config.merger-state" if found.fault else "config.lost-state",
        )
    fragments, fresh = [], []
    for p, (held, fragment) in enumerate(zip(found.published, found.fragments, strict=True)):
        if fragment is None and held is None:
            raise ConfigError(
                f"Redis has lost fragment {p} of run {run!r}, and no checkpoint can restore it",
                REMEDY.format(run=run),
                code="config.lost-fragment",
            )
        if fragment is None and held is not None:
            fresh.append(p)
            fragment = with_norms(fragment_of(rules, p, held[1], b""), found.state, p)
        fragments.append(fragment)
    if fresh:
        log.warning(
            "fragments %s continue from their published parameters with fresh outer momentum",
            fresh,
            extra={"code": "restore.fresh"},
        )
    if again := [p for p, held in enumerate(found.published) if held is None]:
        log.warning(
            "fragments %s are published again from the merger's exact parameters",
            again,
            extra={"code": "restore.published"},
        )
    state = RunState() if found.lost_state else found.state  # before the first round, the state is a fresh one
    return _repaired(transport, rules, found, state, _whole(fragments))


def _require_published(rules: RoundMerge, found: Found, state: RunState, fragments: Sequence[FragmentState]) -> None:
    """Raise DifferenceError unless the rebuilt run ends with the last closed round, and equals what was published."""
    full = rules.manifest.config.wire.full
    for p, (held, fragment) in enumerate(zip(found.published, fragments, strict=True)):
        if held is None:
            continue
        size = rules.manifest.sizes[p]
        seen_N = unpack(pack(np.asarray(fragment.published_N), full, 0), size)
        if digest_of(seen_N) != digest_of(unpack(held[1], size)):
            raise DifferenceError(
                f"fragment {p} differs from what round {held[0].round} published", code="replay.published"
            )
    if state.closed != found.closed:
        raise DifferenceError(
            f"the tape ends with round {state.closed}, and round {found.closed} was closed", code="replay.published"
        )
