"""Taking up a run from what Redis holds; what is gone there, from a checkpoint, the tape and its entries."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from archipelago.broker.errors import ConfigError, WireError
from archipelago.broker.messages import Snapshot
from archipelago.broker.transport import Image, MergerTransport
from archipelago.broker.wire import digest_of, pack, unpack
from archipelago.merger import outer
from archipelago.merger.checkpoint import CheckpointStore
from archipelago.merger.replay import DifferenceError, replay_round
from archipelago.merger.round_merge import RoundMerge, new_state
from archipelago.merger.state import FragmentState, RunState
from archipelago.merger.weights import NormWindow

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
    """The run as its last commit left it; calls `between` now and then, since large fragments take their time.

    Raises ConfigError when Redis has lost the merger's state and no checkpoint brings it back.
    """
    state, fault = _state(transport)
    snapshots, fragments, lost = [], [], []
    for p in range(len(rules.manifest.fragments)):
        snapshot, payload = transport.reader.fragment(p)
        snapshots.append(snapshot)
        try:
            outer_state = transport.merger.outer(p)
            if snapshot.version and not (outer_state and state.closed):
                raise WireError("it is gone" if state.closed else "the merger's state is gone, or cannot be read")
            fragments.append(_fragment(rules, p, payload, outer_state))
        except WireError as error:
            log.warning("the outer state of fragment %s cannot be read from Redis (%s)", p, error.reason)
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
            f"Redis has lost the merger's state of run {rules.manifest.run!r}, and no checkpoint brings it back",
            "Start the merger with the --folder that holds its checkpoints, or begin another run.",
        )
    log.warning("  fragments %s go on from their published parameters, with fresh outer momentum", lost)
    return found


def _state(transport: MergerTransport) -> tuple[RunState, ConfigError | None]:
    """The merger's state, and what is wrong with it: then it is a fresh one."""
    try:
        return RunState.from_json(transport.reader.merger_state()), None
    except ConfigError as error:
        return RunState(), error


def _fragment(rules: RoundMerge, p: int, payload: bytes, outer_state: bytes) -> FragmentState:
    """Raises WireError for bytes that are not of this run."""
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
    """The run from the newest checkpoint and what came after it; None where they do not bring it back."""
    try:
        image = store.load() if store else None
    except ConfigError as error:
        log.warning("  %s", error.what)
        return None
    if image is None:
        return None
    try:
        state, fragments = rebuild(rules, image, transport)
        _require_published(rules, transport, state, fragments)
    except (DifferenceError, WireError, ConfigError) as error:
        log.warning("  checkpoint %s and the tape do not bring it back: %s", image.number, error)
        return None
    log.warning("  rebuilt from checkpoint %s and the tape after it, to the same bits", image.number)
    known = found.state.closed == state.closed  # what Redis has kept knows of refusals and of the pace, too
    return Loaded(found.state if known else state, fragments, found.snapshots)


def rebuild(rules: RoundMerge, image: Image, transport: MergerTransport) -> tuple[RunState, list[FragmentState]]:
    """The run at the end of the tape: the checkpoint's rounds, and those after it done again from their entries.

    Raises DifferenceError where the tape has a gap, where an entry is gone, or where a bit differs; WireError for an
    image that is not of this run.
    """
    state = RunState.from_json(image.state)
    fragments = of_image(rules, image)
    state.covered = state.closed
    for tape in transport.reader.tape(1 << 20):
        if tape.round > state.closed:
            p = rules.manifest.fragment_of(tape.round)
            deliveries = transport.merger.read([member.entry for member in tape.members])
            fragments[p] = replay_round(rules, state, fragments[p], tape, deliveries)
    return state, fragments


def of_image(rules: RoundMerge, image: Image) -> list[FragmentState]:
    """The fragments in a checkpoint. Raises WireError when it is not of this run."""
    if image.manifest.to_fields() != rules.manifest.to_fields():
        raise WireError(f"checkpoint {image.number} is of another run")
    state = RunState.from_json(image.state)
    both = zip(image.snapshots, image.outers, strict=True)
    return [_with_norms(_fragment(rules, p, payload, o), state, p) for p, ((_, payload), o) in enumerate(both)]


def _require_published(
    rules: RoundMerge, transport: MergerTransport, state: RunState, fragments: list[FragmentState]
) -> None:
    """Raises DifferenceError unless the fragments are those that the islands have seen."""
    full, newest = rules.manifest.config.wire.full, 0
    for p, fragment in enumerate(fragments):
        snapshot, payload = transport.reader.fragment(p)
        seen_N = unpack(pack(np.asarray(fragment.published_N), full, 0), rules.manifest.sizes[p])
        if digest_of(seen_N) != digest_of(unpack(payload, rules.manifest.sizes[p])):
            raise DifferenceError(f"fragment {p} is not what round {snapshot.round} published")
        newest = max(newest, snapshot.round)
    if state.closed != newest:
        raise DifferenceError(f"they end with round {state.closed}, and round {newest} was published")
