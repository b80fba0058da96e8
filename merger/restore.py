"""Load a run from Redis. State that Redis has lost is rebuilt from a checkpoint, the tape and its entries."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from archipelago.broker.errors import ArchipelagoError, ConfigError, WireError
from archipelago.broker.messages import Snapshot
from archipelago.broker.transport import Image, MergerTransport
from archipelago.broker.wire import digest_of, pack, unpack
from archipelago.merger import outer
from archipelago.merger.checkpoint import CheckpointStore
from archipelago.merger.replay import DifferenceError, replay_round
from archipelago.merger.round_merge import RoundMerge, new_state
from archipelago.merger.state import FragmentState, RunState
from archipelago.merger.weights import NormWindow

#: More rounds than any tape holds.
WHOLE_TAPE = 1 << 20

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """A run between two rounds."""

    state: RunState
    fragments: list[FragmentState]
    snapshots: list[Snapshot]


def load(
    transport: MergerTransport,
    rules: RoundMerge,
    store: CheckpointStore | None,
    between: Callable[[], None] = lambda: None,
) -> Loaded:
    """Load the run as its last commit left it.

    Args:
        transport: The connection to the run.
        rules: How the run merges its rounds.
        store: Checkpoints to rebuild from.
        between: Called after each fragment, because large fragments take long to load and the lease must be renewed.

    Raises:
        ConfigError: Redis has lost the merger's state, and no checkpoint can restore it (`config.lost-state`).
    """
    state, fault = _state(transport)
    snapshots, fragments, lost = [], [], []
    for p in range(len(rules.manifest.fragments)):
        snapshot, payload = transport.reader.fragment(p)
        snapshots.append(snapshot)
        try:
            outer_state = transport.merger.outer(p)
            if snapshot.version and not (outer_state and state.closed):
                raise WireError("it is missing" if state.closed else "the merger's state is missing")
            fragments.append(_fragment(rules, p, payload, outer_state))
        except WireError as error:
            log.warning(
                "the outer state of fragment %s cannot be read from Redis (%s)",
                p,
                error.reason,
                extra={"code": "restore.lost-outer"},
            )
            lost.append(p)
            fragments.append(_fragment(rules, p, payload, b""))
        between()
    found = Loaded(state, [_with_norms(f, state, p) for p, f in enumerate(fragments)], snapshots)
    if not (lost or fault):
        return found
    recovered = _recovered(transport, rules, store, found)
    if recovered is not None:
        return recovered
    if fault:
        raise fault
    if not state.closed:
        raise ConfigError(
            f"Redis has lost the merger's state of run {rules.manifest.run!r}, and no checkpoint can restore it",
            "Start the merger with the --folder that holds its checkpoints, or begin another run.",
            code="config.lost-state",
        )
    log.warning(
        "fragments %s continue from their published parameters with fresh outer momentum",
        lost,
        extra={"code": "restore.fresh"},
    )
    return found


def _code(error: ArchipelagoError) -> dict[str, str]:
    return {"code": error.code}


def _state(transport: MergerTransport) -> tuple[RunState, ConfigError | None]:
    """Return the merger's state, and the error if it cannot be read; the state is a fresh one then."""
    try:
        return RunState.from_json(transport.reader.merger_state()), None
    except ConfigError as error:
        return RunState(), error


def _fragment(rules: RoundMerge, p: int, payload: bytes, outer_state: bytes) -> FragmentState:
    """Return a fragment from its published payload and its own state. Raises WireError if they do not fit the run."""
    size = rules.manifest.sizes[p]
    fresh = new_state(unpack(payload, size), rules.outer)
    if not outer_state:
        return fresh
    params_N, state = outer.load(fresh.outer, outer_state, size)
    wire = rules.manifest.config.wire
    exact = wire.full == "float32" and not wire.sends_differences
    return FragmentState(params_N, state, NormWindow(), params_N if exact else fresh.params_N)


def _with_norms(fragment: FragmentState, state: RunState, p: int) -> FragmentState:
    return replace(fragment, norms=state.norms.get(p, NormWindow()))


def _recovered(
    transport: MergerTransport, rules: RoundMerge, store: CheckpointStore | None, found: Loaded
) -> Loaded | None:
    """Return the run from the newest checkpoint and the tape after it, or None if these cannot restore it."""
    try:
        image = store.load() if store else None
    except ConfigError as error:
        log.warning("%s", error.what, extra=_code(error))
        return None
    if image is None:
        return None
    try:
        state, fragments = rebuild(rules, image, transport)
        _require_published(rules, transport, state, fragments)
    except (DifferenceError, WireError, ConfigError) as error:
        log.warning("checkpoint %s and the tape cannot restore the run: %s", image.number, error, extra=_code(error))
        return None
    log.warning(
        "rebuilt from checkpoint %s and the tape after it, bit for bit",
        image.number,
        extra={"code": "restore.rebuilt"},
    )
    known = found.state.closed == state.closed  # the state in Redis also has refusals and timings
    return Loaded(found.state if known else state, fragments, found.snapshots)


def rebuild(rules: RoundMerge, image: Image, transport: MergerTransport) -> tuple[RunState, list[FragmentState]]:
    """Return the run at the end of the tape: the checkpoint, and the replay of all later rounds.

    Raises:
        DifferenceError: The tape has a gap, an entry is missing, or a bit differs.
        WireError: The image is not of this run.
    """
    state = RunState.from_json(image.state)
    fragments = of_image(rules, image)
    state.covered = state.closed
    for tape in transport.reader.tape(WHOLE_TAPE):
        if tape.round > state.closed:
            p = rules.manifest.fragment_of(tape.round)
            deliveries = transport.merger.read([member.entry for member in tape.members])
            fragments[p] = replay_round(rules, state, fragments[p], tape, deliveries)
    return state, fragments


def of_image(rules: RoundMerge, image: Image) -> list[FragmentState]:
    """Return the fragments in a checkpoint. Raises WireError if it is not of this run (`wire.other-run`)."""
    if image.manifest.to_fields() != rules.manifest.to_fields():
        raise WireError(f"checkpoint {image.number} is of another run", code="wire.other-run")
    state = RunState.from_json(image.state)
    both = zip(image.snapshots, image.outers, strict=True)
    return [_with_norms(_fragment(rules, p, payload, o), state, p) for p, ((_, payload), o) in enumerate(both)]


def _require_published(
    rules: RoundMerge, transport: MergerTransport, state: RunState, fragments: list[FragmentState]
) -> None:
    """Raise DifferenceError unless the fragments are those that were published."""
    full, newest = rules.manifest.config.wire.full, 0
    for p, fragment in enumerate(fragments):
        snapshot, payload = transport.reader.fragment(p)
        seen_N = unpack(pack(np.asarray(fragment.published_N), full, 0), rules.manifest.sizes[p])
        if digest_of(seen_N) != digest_of(unpack(payload, rules.manifest.sizes[p])):
            raise DifferenceError(
                f"fragment {p} differs from what round {snapshot.round} published", code="replay.published"
            )
        newest = max(newest, snapshot.round)
    if state.closed != newest:
        raise DifferenceError(
            f"the tape ends with round {state.closed}, and round {newest} was published", code="replay.published"
        )
