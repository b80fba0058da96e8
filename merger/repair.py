"""What a merger writes back: what Redis has lost, or holds damaged or differently from the run that was loaded."""

from __future__ import annotations

import logging
from collections.abc import Container, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

import numpy as np

from archipelago.broker.codecs import codec
from archipelago.broker.commits import START, Repair
from archipelago.broker.errors import ConfigError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Snapshot, TapeEntry
from archipelago.broker.transport import MergerTransport
from archipelago.broker.wire import digest_of
from archipelago.merger.committing import RoundLog, compaction_of
from archipelago.merger.state import FragmentState, RunState
from archipelago.merger.steering import OperatorControls

#: More events than the broker keeps.
EVENTS_SEARCHED = 1 << 16
#: The keys of one fragment, by the first part of their names. The number of the fragment follows.
OF_FRAGMENTS = frozenset(["head", "fragment", "outer", "log", "difference"])
#: The keys, by the first part of their names, that a serving merger can write again.
IN_MEMORY = frozenset(["state", "data", "snapshots"]) | OF_FRAGMENTS

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """A run between two rounds.

    Attributes:
        snapshots: The header of each fragment's newest version.
        full: The header of each fragment's full state in Redis.
        uncovered: The rounds that were merged after these full states, in order.
        repair: What Redis has lost, or holds differently, and must be written back.
    """

    state: RunState
    fragments: list[FragmentState]
    snapshots: list[Snapshot]
    full: list[Snapshot]
    uncovered: list[TapeEntry] = field(default_factory=list)
    repair: Repair = field(default_factory=Repair)


@dataclass(frozen=True)
class Found:
    """What Redis holds of a run, as far as it can be read.

    Attributes:
        state: The merger's state; a fresh one if it cannot be read.
        fault: Why the state cannot be read.
        closed: The last closed round, on which most of the records agree.
        heads: The header of each fragment's newest version; None if it is lost.
        full: The header of each fragment's newest full snapshot; None if that is lost.
        logs: The rounds of each fragment after that; fewer if some are lost.
        fragments: Each fragment whose own state can be read; None if it is lost.
    """

    state: RunState
    fault: ConfigError | None
    closed: int
    heads: list[Snapshot | None]
    full: list[Snapshot | None]
    logs: list[list[RoundLog]]
    fragments: list[FragmentState | None]

    @property
    def lost_state(self) -> bool:
        """Whether the state cannot be used."""
        return self.fault is not None or self.state.closed != self.closed

    @property
    def lost(self) -> list[int]:
        """The fragments of which anything is lost."""
        of_each = enumerate(zip(self.heads, self.full, self.fragments, strict=True))
        return [p for p, parts in of_each if None in parts]

    def uncovered(self, but: Container[int] = ()) -> list[TapeEntry]:
        """Return the rounds that no full state includes, in order, except those of the fragments `but`."""
        rounds = [log.tape for logs in self.logs for log in logs if log.tape.fragment not in but]
        return sorted(rounds, key=lambda tape: tape.round)


def repaired(
    transport: MergerTransport, manifest: Manifest, found: Found, state: RunState, fragments: list[FragmentState]
) -> Loaded:
    """Return the run with a repair that writes back whatever was not found.

    A fragment of which more than the header is lost gets a new full state, at its newest version.
    """
    announced = _announced(transport, found)
    snapshots, full, compactions, heads = [], [], [], []
    for p, fragment in enumerate(fragments):
        held, head = found.full[p], found.heads[p]
        version = manifest.version_at(found.closed, p)
        snapshot = head or _snapshot(manifest, p, fragment, version, announced.get((p, version)), state)
        if held is None or found.fragments[p] is None:
            compactions.append(compaction_of(manifest, snapshot, fragment))
            snapshot = compactions[-1].snapshot
            full.append(snapshot)
        else:
            full.append(held)
            heads += [] if head else [snapshot]
        snapshots.append(snapshot)
    written = {compaction.snapshot.fragment for compaction in compactions}
    repair = Repair(state.to_json() if found.lost_state else None, compactions, heads)
    return Loaded(state, fragments, snapshots, full, found.uncovered(written), repair)


def repair_from(
    manifest: Manifest,
    state: RunState,
    fragments: Sequence[FragmentState],
    snapshots: Sequence[Snapshot],
    damaged: AbstractSet[str],
) -> Repair:
    """Return the repair of damaged keys, by their names, from the memory of the merger that serves the run.

    A lost header is written again. For any other key, the fragment gets a new full state, so that nothing depends on
    its logs and differences.
    """
    parts = [name.split(":") for name in damaged]
    numbers = {part[1] for part in parts if part[0] in OF_FRAGMENTS - {"head"}}
    heads = {part[1] for part in parts if part[0] == "head"} - numbers
    both = zip(fragments, snapshots, strict=True)
    compactions = [
        compaction_of(manifest, snapshot, fragment) for fragment, snapshot in both if str(snapshot.fragment) in numbers
    ]
    lost = [snapshot for snapshot in snapshots if str(snapshot.fragment) in heads]
    return Repair(state.to_json() if state.closed else None, compactions, lost, state.cursors)


def _announced(transport: MergerTransport, found: Found) -> dict[tuple[int, int], Snapshot]:
    """Return the announcements of the versions that are lost, as far as they are still among the newest events."""
    if None not in found.heads:
        return {}
    entries = transport.reader.events(START, 0.0, EVENTS_SEARCHED)
    return {(event.fragment, event.version): event for _, event in entries if isinstance(event, Snapshot)}


def _snapshot(
    manifest: Manifest, p: int, fragment: FragmentState, version: int, announced: Snapshot | None, state: RunState
) -> Snapshot:
    wire, held = manifest.config.wire, digest_of(np.asarray(fragment.published_N))
    if announced is not None and announced.held == held:
        return announced
    number = manifest.round_of(version, p)
    size = codec(wire.full).encoded_size(fragment.published_N.size)
    step, merged = (announced.step, announced.merged) if announced else (state.step if version else 0, "")
    return Snapshot(number, p, version, step, wire.full, size, held, merged, held if version else "")


def lost_in_memory(
    transport: MergerTransport, controls: OperatorControls, manifest: Manifest, epoch: int, closed: int
) -> set[str]:
    """Return the names of the keys that are damaged or gone, and that a serving merger can write again."""
    damaged = {*put_aside(transport, controls, manifest, epoch), *transport.merger.lost(closed)}
    damaged = {name for name in damaged if name.partition(":")[0] in IN_MEMORY}
    if damaged:
        log.warning("writing damaged keys again: %s", ", ".join(sorted(damaged)), extra={"code": "repair.again"})
    return damaged


def put_aside(transport: MergerTransport, controls: OperatorControls, manifest: Manifest, epoch: int) -> list[str]:
    """Move keys of another type aside, and return their names."""
    damaged = transport.merger.put_aside(epoch, manifest)
    if damaged:
        controls.note("repaired", f"moved aside or written again: {', '.join(damaged)}")
    return damaged


def write_back(transport: MergerTransport, loaded: Loaded, epoch: int) -> None:
    """Write what was rebuilt, and what Redis holds differently from the merger's own state."""
    state, books = loaded.state, transport.reader.books()
    # The books count the tokens that contributions claim, which may be more than the merger believes.
    is_right = books.merged == state.merged and books.merged_tokens >= state.tokens
    repair = replace(
        loaded.repair,
        cursors=state.cursors if transport.reader.cursors() != state.cursors else None,
        books={} if is_right else {"merged": state.merged, "merged_tokens": state.tokens},
    )
    if repair:
        transport.merger.write_back(epoch, repair)
