"""Load a shard: its compactions, and the rounds after them, merged again from the tape and the contributions.

What Redis holds is read here and nowhere else, so damage is found here. If any of it cannot be read, the shard is
restored from its newest checkpoint and as much of the tape after it as fits. Else loading stops with one sentence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import jax
import numpy as np

from archipelago.broker.commits import Image, Rewrite, nothing
from archipelago.broker.errors import ConfigError, WireError
from archipelago.broker.full_state import FullState, separated
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import COUNT_MAX, Snapshot, TapeEntry
from archipelago.broker.transport import MergerTransport
from archipelago.broker.wire import digest_of, full_snapshot, newest
from archipelago.merger.checkpoint import CheckpointStore
from archipelago.merger.committing import full_state, snapshot_of, state_before
from archipelago.merger.replay import DifferenceError, fragment_of, replay_round
from archipelago.merger.round_merge import RoundMerge
from archipelago.merger.state import FragmentState, RunState

REMEDY = (
    "Run `archipelago merger --run {run} --folder FOLDER` with the folder of its checkpoints, "
    "or begin another run with `archipelago init`."
)
#: The largest difference of a fragment that is merged again with other bits, as a share of what its rounds changed.
NEARLY = 0.01
#: More rounds than any tape holds.
WHOLE_TAPE = 1 << 20

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """A shard between two rounds.

    Attributes:
        full: The header of each fragment's newest compaction.
        tape: The rounds that no compaction or no checkpoint covers, in order, as far as they are on the tape.
        rewrite: What Redis must hold, if it is restored from a checkpoint.
    """

    state: RunState
    fragments: dict[int, FragmentState]
    snapshots: dict[int, Snapshot]
    full: dict[int, Snapshot]
    tape: Sequence[TapeEntry] = ()
    rewrite: Rewrite | None = None


def load(
    transport: MergerTransport,
    rules: RoundMerge,
    store: CheckpointStore | None,
    go_on: Callable[[], object] = nothing,
    require_lease: Callable[[], object] = nothing,
) -> Loaded:
    """Load the shard as its last commit left it, to the same bits. If it is damaged, restore it from a checkpoint.

    Args:
        go_on: Called after each fragment and each round. It raises FencedError if this load was given up.
        require_lease: Raises FencedError if another merger serves now. What it writes while this one reads looks like
            damage.

    Raises:
        ConfigError: Redis has lost what no checkpoint can restore (`config.lost-state`).
    """
    try:
        found = _from_redis(transport, rules, go_on, has_checkpoints=store is not None)
    except (WireError, ConfigError, DifferenceError) as error:
        damage = error.what
    else:
        if store is not None:
            _warn_of_later(store, rules.manifest, found.state.closed)
        return found
    require_lease()
    log.warning("a part of the run is lost in Redis: %s", damage, extra={"code": "restore.lost"})
    image = _newest_image(store, rules.manifest)
    if image is None:
        raise ConfigError(
            f"Redis has lost a part of run {rules.manifest.run!r} ({damage}), and no checkpoint can restore it",
            REMEDY.format(run=rules.manifest.run),
            code="config.lost-state",
        )
    return _from_checkpoint(transport, rules, image, go_on)


def _warn_of_later(store: CheckpointStore, manifest: Manifest, closed: int) -> None:
    """Warn if the newest checkpoint, whole and sound, is of later rounds than Redis has: Redis came back older.

    If only older ones are, the run has gone on from here before, or an operator went back on purpose.
    """
    with suppress(ConfigError):  # the folder or that checkpoint cannot be read
        later, number = store.after(closed), max(store.complete(), default=0)
        if number not in later or store.load(number) is None:
            return
        log.warning(
            "this Redis came back older: it has run %r up to round %s, and checkpoint %s has it up to round %s. The "
            "run goes on from here, and the rounds after that are lost. The checkpoint is kept until the run has "
            "passed that round. To go on from it instead: stop the mergers, delete the checkpoints with greater "
            "numbers from %s and from its bucket, delete the run here (`archipelago rm %s --force`), and start a "
            "merger with --resume. Invited members need new invitations then.",
            manifest.run, closed, number, later[number], store.folder, manifest.run, extra={"code": "restore.older"},
        )  # fmt: skip


# -- from Redis ------------------------------------------------------------------------------------------------------


def _from_redis(
    transport: MergerTransport, rules: RoundMerge, go_on: Callable[[], object], *, has_checkpoints: bool
) -> Loaded:
    """Read one fragment after another: the payloads of all of them would take a third of the merger's memory.

    The tape is read as far back as the oldest compaction and, if the merger takes some, the newest checkpoint. Raises
    WireError, ConfigError or DifferenceError if something is lost or damaged.
    """
    manifest, heads = rules.manifest, transport.reader.heads()
    state = RunState.from_json(transport.reader.merger_state())
    if state.closed == 0:
        if transport.reader.tape(1):
            raise WireError("the merger's state is missing")
        state = _with_refusals(transport, state)  # before the first round, nothing else shows that it is missing
    snapshots = {p: _head(manifest, state.closed, p, heads[p]) for p in manifest.own_fragments}
    full, fragments = dict[int, Snapshot](), dict[int, FragmentState]()
    tape: dict[int, TapeEntry] = {}
    read_after = state.closed
    for p, snapshot in snapshots.items():
        compacted = _full(transport, manifest, p, snapshot.version)
        held = compacted.snapshot
        if (after := min(held.round, state.covered) if has_checkpoints else held.round) < read_after:
            tape, read_after = _rounds(transport, manifest, after, state.closed), after
        fragment = fragment_of(rules, compacted)
        numbers = [manifest.round_of(version, p) for version in range(held.version + 1, snapshot.version + 1)]
        if missing := [number for number in numbers if number not in tape]:
            raise WireError(f"the tape lacks round {missing[0]}")
        rounds = [tape[number] for number in numbers]
        fragment = _merged_again(transport, rules, p, fragment, rounds, go_on)
        full[p], fragments[p] = held, fragment
        go_on()
    return Loaded(state, fragments, snapshots, full, list(tape.values()))


def _rounds(transport: MergerTransport, manifest: Manifest, after: int, last: int) -> dict[int, TapeEntry]:
    """Return the rounds after `after` up to `last` that are on the tape, in order.

    The whole tape is read only if the newest entries lack some of them, because others have added entries.
    """
    tape: dict[int, TapeEntry] = {}
    own, wanted = manifest.own_fragments, manifest.own_rounds.between(after, last)
    for count in sorted({min(wanted, WHOLE_TAPE), WHOLE_TAPE}):
        for entry in transport.reader.tape(count):
            if after < entry.round <= last and manifest.fragment_of(entry.round) == entry.fragment in own:
                tape.setdefault(entry.round, entry)
        if len(tape) == wanted:
            break
    return dict(sorted(tape.items()))


def _head(manifest: Manifest, closed: int, p: int, head: Snapshot | None) -> Snapshot:
    version = manifest.version_at(closed, p)
    if head is None or (head.fragment, head.round, head.version) != (p, manifest.round_of(version, p), version):
        raise WireError(f"the header of fragment {p} is not of version {version}, and round {closed} was closed")
    return head


def _full(transport: MergerTransport, manifest: Manifest, p: int, version: int) -> FullState:
    """Return the newest full state of a fragment. Raises WireError if it is lost or damaged."""
    snapshot, published_N = full_snapshot(transport.reader, manifest, p)[:2]
    if snapshot.version > version:
        raise WireError(f"the snapshot of fragment {p} is of version {snapshot.version}, and {version} is the newest")
    if snapshot.held and digest_of(published_N) != snapshot.held:
        raise WireError(f"the parameters in the snapshot of fragment {p} are not the published ones")
    own = separated(transport.merger.outer(p, snapshot.version)) if snapshot.version else {}
    return FullState(snapshot, published_N, own)


def _merged_again(
    transport: MergerTransport,
    rules: RoundMerge,
    p: int,
    fragment: FragmentState,
    rounds: Sequence[TapeEntry],
    go_on: Callable[[], object],
) -> FragmentState:
    """Return a fragment after the rounds that its compaction does not cover.

    Another processor, or another version of a library, may round differently. If the parameters are off by no more than
    NEARLY of what the rounds have changed, the momentum that these rounds have here is kept, with the parameters that
    the islands hold.
    """

    def merged(*, exactly: bool) -> FragmentState:
        after = fragment
        for tape in rounds:
            before = state_before(tape)
            deliveries = transport.merger.read([member.entry for member in tape.members])
            after = replay_round(rules, before, after, tape, deliveries, exactly=exactly)
            go_on()
        return after

    try:
        return merged(exactly=True)
    except DifferenceError as error:
        if error.code != DifferenceError.code:
            raise
        difference = error
    nearly = merged(exactly=False)
    holding = newest(transport.reader, rules.manifest, p)
    if holding.snapshot.version != rounds[-1].version:
        raise difference
    moved, off = (float(np.linalg.norm(holding.params_N - np.asarray(x.published_N))) for x in (fragment, nearly))
    if not off <= NEARLY * moved:
        raise difference
    log.warning(
        "fragment %s keeps its momentum, but merging its rounds again gives other bits here: its parameters are off by "
        "%.1e of what they changed. Was the last merger on another kind of processor, or of another version?",
        p,
        off / moved if moved else 0.0,
        extra={"code": "restore.nearly"},
    )
    return replace(nearly, published_N=jax.device_put(holding.params_N))


# -- from a checkpoint -------------------------------------------------------------------------------------------------


def _newest_image(store: CheckpointStore | None, manifest: Manifest) -> Image | None:
    """Return the newest checkpoint that can be read, if there is one of this run."""
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
    return image if image is not None and image.manifest.to_fields() == manifest.to_fields() else None


def _from_checkpoint(
    transport: MergerTransport, rules: RoundMerge, image: Image, go_on: Callable[[], object]
) -> Loaded:
    """Return the shard after its checkpoint and those rounds on the tape that can be merged again, in order."""
    manifest = rules.manifest
    state = RunState.from_json(image.state)
    fragments = {full.snapshot.fragment: fragment_of(rules, full) for full in image.fragments}
    state.covered = covered = state.closed
    snapshots, merged = {full.snapshot.fragment: full.snapshot for full in image.fragments}, []
    tape = _rounds(transport, manifest, 0, COUNT_MAX)
    for entry in (entry for entry in tape.values() if entry.round > covered):
        p = entry.fragment
        try:
            deliveries = transport.merger.read([member.entry for member in entry.members])
            fragments[p] = replay_round(rules, state, fragments[p], entry, deliveries)
        except (DifferenceError, WireError) as error:
            log.warning("the tape ends before round %s: %s", entry.round, error.what, extra={"code": "restore.tape"})
            break
        snapshots[p] = snapshot_of(manifest, entry, fragments[p].published_N, 0)
        merged.append(entry)
        go_on()
    state = replace(_with_refusals(transport, state), covered=covered)
    wire = manifest.config.wire
    compactions = [full_state(snapshots[p], fragment).packed(wire) for p, fragment in fragments.items()]
    full = {compaction.snapshot.fragment: compaction.snapshot for compaction in compactions}
    log.warning(
        "restored from checkpoint %s and %s rounds on the tape: the run goes on after %s",
        image.number,
        len(merged),
        manifest.described(state.closed),
        extra={"code": "restore.rebuilt"},
    )
    is_whole = bool(tape) and max(tape) == state.closed
    known = None if is_whole else [*(e for e in image.tape if e.round <= image.round), *merged]
    rewrite = Rewrite(state.to_json(), compactions, known)
    return Loaded(state, fragments, full, full, merged, rewrite)


def _with_refusals(transport: MergerTransport, state: RunState) -> RunState:
    """Return the state with what no tape knows: the refusals, as far as Redis still knows them."""
    try:
        stored = RunState.from_json(transport.reader.merger_state())
    except ConfigError:
        stored = RunState()
    if stored.closed == state.closed:
        state = stored
    counters, known = transport.reader.counters(), sum(state.refused.values())
    if counters.refused > known:
        state.refused["lost"] = state.refused.get("lost", 0) + counters.refused - known
        state.refused_tokens = max(state.refused_tokens, counters.refused_tokens)
    return state
