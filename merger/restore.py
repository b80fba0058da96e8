"""Load a run from Redis: its compactions, and the rounds after them, merged again from their contributions.

What Redis has lost is rebuilt from a checkpoint, the tape and its entries.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import jax
import numpy as np

from archipelago.broker.errors import ConfigError, WireError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Snapshot
from archipelago.broker.transport import MergerTransport
from archipelago.broker.wire import digest, digest_of, newest, unpack
from archipelago.merger.checkpoint import CheckpointStore
from archipelago.merger.committing import RoundLog, parse_log
from archipelago.merger.repair import Found, Loaded, repaired
from archipelago.merger.replay import DifferenceError, fragment_of, merge_again, rebuild, with_norms
from archipelago.merger.round_merge import RoundMerge, new_state
from archipelago.merger.state import FragmentState, RunState

REMEDY = (
    "Run `archipelago merger --run {run} --folder FOLDER` with the folder of its checkpoints, "
    "or begin another run with `archipelago init`."
)
#: The largest difference of a fragment that is merged again with other bits, as a share of what its rounds changed.
NEARLY = 0.01
T = TypeVar("T")

log = logging.getLogger(__name__)


def load(
    transport: MergerTransport,
    rules: RoundMerge,
    store: CheckpointStore | None,
    between: Callable[[], object] = lambda: None,
) -> Loaded:
    """Load the run as its last commit left it, and rebuild what Redis has lost.

    Each fragment begins with its newest compaction, and the rounds after it are merged again from their contributions,
    to the same bits. The state, the newest headers and the tape each know the last closed round. What disagrees with
    the others, or cannot be read, is rebuilt from a checkpoint and the tape, to the same bits.

    Args:
        transport: The connection to the run.
        rules: How the run merges its rounds.
        store: Checkpoints to rebuild from.
        between: Called after each fragment and each round, because they may take long and the lease must be renewed.

    Raises:
        ConfigError: Redis has lost what no checkpoint can restore (`config.lost-state`).
    """
    found = _found(transport, rules, between)
    if not (found.lost or found.lost_state):
        return Loaded(found.state, _whole(found.fragments), _whole(found.heads), _whole(found.full), found.uncovered())
    recovered = _recovered(transport, rules, store, found)
    return recovered if recovered is not None else _from_what_is_left(transport, rules, found, between)


def _found(transport: MergerTransport, rules: RoundMerge, between: Callable[[], object]) -> Found:
    """Read one fragment after another: the payloads of all of them would take a third of the merger's memory."""
    state, fault = _state(transport)
    heads, manifest = transport.reader.heads(), rules.manifest
    # A missing state says round 0. It is no witness against the tape.
    closed = _last_round(transport, None if fault else state.closed or None, heads)
    full: list[Snapshot | None] = []
    fragments: list[FragmentState | None] = []
    logs: list[list[RoundLog]] = []
    for p in range(len(manifest.fragments)):
        version, head, held = manifest.version_at(closed, p), heads[p], _full(transport, manifest, p)
        if head is None or (head.fragment, head.round, head.version) != (p, manifest.round_of(version, p), version):
            _log_lost(f"the header of fragment {p}", f"it is not of version {version}, and round {closed} was closed")
            heads[p] = None
        if held is not None and held[0].version > version:
            _log_lost(f"the snapshot of fragment {p}", f"it is of round {held[0].round}, and round {closed} was closed")
            held = None
        full.append(held[0] if held else None)
        logs.append(_logs(transport, p, range((held[0].version if held else version) + 1, version + 1)))
        fragments.append(_stored_fragment(transport, rules, p, held, version, logs[p], state, between))
        between()
    return Found(state, fault, closed, heads, full, logs, fragments)


def _logs(transport: MergerTransport, p: int, versions: Sequence[int]) -> list[RoundLog]:
    """Return the logs of these versions, up to the first one that is lost."""
    out: list[RoundLog] = []
    for version in versions:
        try:
            found = parse_log(transport.merger.log(p, version))
            if (found.tape.fragment, found.tape.version) != (p, version):
                raise WireError("it is of another round")
        except WireError as error:
            _log_lost(f"the log of version {version} of fragment {p}", error.reason)
            return out
        out.append(found)
    return out


def _full(transport: MergerTransport, manifest: Manifest, p: int) -> tuple[Snapshot, bytes] | None:
    """Return the newest full snapshot of a fragment and its payload, or None if it is lost or damaged."""
    try:
        snapshot, payload = transport.reader.fragment(p)
        if snapshot.fragment != p or digest(payload) != snapshot.digest:
            raise WireError("its payload is not the published one")
        if snapshot.round != manifest.round_of(snapshot.version, p):
            raise WireError(f"round {snapshot.round} does not give version {snapshot.version}")
        params_N = unpack(payload, manifest.sizes[p])
        if snapshot.held and digest_of(params_N) != snapshot.held:
            raise WireError("its parameters are not the published ones")
    except WireError as error:
        _log_lost(f"the snapshot of fragment {p}", error.reason)
        return None
    return snapshot, payload


def _last_round(transport: MergerTransport, stated: int | None, heads: Sequence[Snapshot | None]) -> int:
    """Return the last closed round: what two of the state, the headers and the tape agree on, or else the newest."""
    newest = max((head.round for head in heads if head is not None), default=None)
    tape = transport.reader.tape(1)
    votes = [v for v in (stated, newest, tape[0].round if tape else None) if v is not None]
    return max(votes, key=lambda vote: (votes.count(vote), vote), default=0)


def _stored_fragment(
    transport: MergerTransport,
    rules: RoundMerge,
    p: int,
    held: tuple[Snapshot, bytes] | None,
    version: int,
    logs: Sequence[RoundLog],
    state: RunState,
    between: Callable[[], object],
) -> FragmentState | None:
    """Return a fragment from its full state and the logs after it, or None if any of these is lost."""
    first = held[0].version if held else version
    try:
        outer_state = transport.merger.outer(p, first) if first else b""
        if first and not outer_state:
            raise WireError("it is missing")
        fragment = fragment_of(rules, p, held[1] if held else None, outer_state)
    except WireError as error:
        _log_lost(f"the outer state of fragment {p}", error.reason)
        return None
    if first + len(logs) < version:
        return None
    try:
        fragment = merge_again(rules, fragment, logs, transport, between)
    except DifferenceError as error:
        what = "the rounds of fragment %s after version %s cannot be merged again: %s"
        log.warning(what, p, first, error.what, extra={"code": error.code})
        return None
    return with_norms(fragment, state, p)


def _log_lost(what: str, why: str) -> None:
    log.warning("%s cannot be read from Redis (%s)", what, why, extra={"code": "restore.lost"})


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
        log.warning("%s", error.what, extra={"code": error.code})
    try:
        image = store.load()
    except ConfigError as error:
        log.warning("%s", error.what, extra={"code": error.code})
        return None
    if image is None:
        return None
    try:
        state, fragments = rebuild(rules, image, transport, found.closed)
        _require_published(found, state, fragments)
    except (DifferenceError, WireError, ConfigError) as error:
        log.warning(
            "checkpoint %s and the tape cannot restore the run: %s", image.number, error, extra={"code": error.code}
        )
        return None
    log.warning(
        "rebuilt from checkpoint %s and the tape after it, bit for bit",
        image.number,
        extra={"code": "restore.rebuilt"},
    )
    if not found.lost_state:
        state = found.state  # the state in Redis also has refusals and timings
    return repaired(transport, rules.manifest, found, state, fragments)


def _from_what_is_left(
    transport: MergerTransport, rules: RoundMerge, found: Found, between: Callable[[], object]
) -> Loaded:
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
            code="config.lost-state",
        )
    fragments, fresh = [], []
    for p, fragment in enumerate(found.fragments):
        if fragment is None:
            fragment = _nearly_merged_again(transport, rules, found, p, between)
        if fragment is None:
            fresh.append(p)
            fragment = _published_fragment(transport, rules, found, p)
        fragments.append(with_norms(fragment, found.state, p))
    if fresh:
        log.warning(
            "fragments %s continue from their published parameters with fresh outer momentum",
            fresh,
            extra={"code": "restore.fresh"},
        )
    if again := [p for p, held in enumerate(found.full) if held is None and p not in fresh]:
        log.warning(
            "fragments %s are published again from the merger's exact parameters",
            again,
            extra={"code": "restore.published"},
        )
    state = RunState() if found.lost_state else found.state  # before the first round, the state is a fresh one
    return repaired(transport, rules.manifest, found, state, fragments)


def _nearly_merged_again(
    transport: MergerTransport, rules: RoundMerge, found: Found, p: int, between: Callable[[], object]
) -> FragmentState | None:
    """Return a fragment with the momentum that its rounds have here, although the bits are not those of the tape.

    Another processor, or another version of a library, may round differently. What islands hold is read from Redis.

    Returns:
        None if a part is lost, or if the parameters are further from those that the islands hold than NEARLY of what
        the rounds have changed.
    """
    full, logs, held = found.full[p], found.logs[p], _full(transport, rules.manifest, p)
    if full is None or held is None or not logs:
        return None
    try:
        outer_state = transport.merger.outer(p, full.version) if full.version else b""
        if full.version and not outer_state:
            return None
        before = fragment_of(rules, p, held[1], outer_state)
        fragment = merge_again(rules, before, logs, transport, between, exactly=False)
        holding = newest(transport.reader, rules.manifest, p)
    except (DifferenceError, WireError):
        return None
    if holding.snapshot.version != logs[-1].tape.version:
        return None
    published_N = holding.params_N
    moved, off = (float(np.linalg.norm(published_N - np.asarray(x.published_N))) for x in (before, fragment))
    if not off <= NEARLY * moved:
        return None
    log.warning(
        "fragment %s keeps its momentum, but merging its rounds again gives other bits here: its parameters are off by "
        "%.1e of what they changed. Was the last merger on another kind of processor, or of another version?",
        p,
        off / moved if moved else 0.0,
        extra={"code": "restore.nearly"},
    )
    return replace(fragment, published_N=jax.numpy.asarray(published_N))


def _published_fragment(transport: MergerTransport, rules: RoundMerge, found: Found, p: int) -> FragmentState:
    """Return a fragment with its newest published parameters that can be read, and without momentum.

    Raises:
        ConfigError: None can be read (`config.lost-state`).
    """
    if found.full[p] is None:
        raise ConfigError(
            f"Redis has lost fragment {p} of run {rules.manifest.run!r}, and no checkpoint can restore it",
            REMEDY.format(run=rules.manifest.run),
            code="config.lost-state",
        )
    try:
        return new_state(newest(transport.reader, rules.manifest, p).params_N, rules.outer)
    except WireError as error:
        log.warning("%s, so the run goes on from the older version", error.reason, extra={"code": "restore.older"})
        return new_state(unpack(transport.reader.fragment(p)[1], rules.manifest.sizes[p]), rules.outer)


def _require_published(found: Found, state: RunState, fragments: Sequence[FragmentState]) -> None:
    """Raise DifferenceError unless the rebuilt run ends with the last closed round, and equals what was published."""
    for p, (head, fragment) in enumerate(zip(found.heads, fragments, strict=True)):
        if head is not None and head.held and digest_of(np.asarray(fragment.published_N)) != head.held:
            raise DifferenceError(f"fragment {p} differs from what round {head.round} published")
    if state.closed != found.closed:
        raise DifferenceError(f"the tape ends with round {state.closed}, and round {found.closed} was closed")
