"""Build the commit of a merged round: the difference, the tape entry and the merger's small state. Pure functions.

The full state of a fragment is far larger than all of these. It is written as a compaction (`merger.compaction`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from archipelago.broker.codecs import codec
from archipelago.broker.commits import Commit, Compaction
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Snapshot, TapeEntry
from archipelago.broker.wire import digest, digest_of, pack, pack_body
from archipelago.merger import outer
from archipelago.merger.round_log import log_of
from archipelago.merger.round_merge import MergedRound, RoundSum, mean_loss
from archipelago.merger.rounds import Close
from archipelago.merger.state import FragmentState, RunState


@dataclass(frozen=True)
class RoundRecord:
    """Facts about a round that its tape entry records besides the merge.

    Attributes:
        close: The decision to close it.
        epoch: The epoch of the merger that closed it.
        live: How many islands were live.
        steered: The settings that an operator changed with it.
        unix_seconds: When it was committed.
        merge_seconds: How long the arithmetic took.
        spectra_seconds: How long spectra took, a part of it.
        busy_seconds: How long the merger has worked since the previous round.
    """

    close: Close
    epoch: int
    live: int
    steered: str
    unix_seconds: float
    merge_seconds: float
    spectra_seconds: float
    busy_seconds: float


def build_commit(
    manifest: Manifest,
    record: RoundRecord,
    merged: MergedRound,
    round_sum: RoundSum,
    before: RunState,
    after: RunState,
    trim: Sequence[str],
    is_full: bool,
) -> Commit:
    """Return the commit of a round.

    Args:
        manifest: The run.
        record: What the tape notes about the round.
        merged: The merged round.
        round_sum: The contributions that it merged.
        before: The run's state before the round.
        after: The run's state after it.
        trim: Merged entries that the commit deletes from the stream.
        is_full: Whether the commit carries the fragment's full state.
    """
    wire, held_N = manifest.config.wire, merged.state.published_N
    difference = (
        pack_body(merged.difference, wire.down, held_N.size, wire.zstd_level) if wire.sends_differences else b""
    )
    snapshot = _snapshot(manifest, merged, after, len(difference))
    full = compaction_of(manifest, snapshot, merged.state) if is_full else None
    tape = _tape_entry(manifest, record, merged, round_sum, after, snapshot.held)
    return Commit(
        full.snapshot if full else snapshot,
        full.payload if full else b"",
        full.outer if full else b"",
        after.to_json(),
        tape,
        [addend.entry for addend in round_sum.addends],
        sum(addend.contribution.tokens for addend in round_sum.addends),
        trim=trim,
        cursors={s: c for s, c in after.cursors.items() if before.cursors.get(s) != c},
        after_round=before.closed,
        difference=difference,
        log="" if full else log_of(before, tape),
    )


def compaction_of(manifest: Manifest, snapshot: Snapshot, state: FragmentState) -> Compaction:
    """Return the full state of a fragment at the version of `snapshot`, whose size and digest become the payload's."""
    wire = manifest.config.wire
    payload = pack(np.asarray(state.published_N), wire.full, wire.full_zstd_level)
    header = replace(snapshot, bytes=len(payload), digest=digest(payload))
    return Compaction(header, payload, outer.dump(state.params_N, state.outer) if snapshot.version else b"")


def _snapshot(manifest: Manifest, merged: MergedRound, after: RunState, difference_bytes: int) -> Snapshot:
    """Return the header of a version without its full snapshot: the size is the largest one that this would have."""
    wire, held_N = manifest.config.wire, np.asarray(merged.state.published_N)
    held = digest_of(held_N)
    by_weight = sorted(merged.members, key=lambda member: -member.weight)
    return Snapshot(
        round=after.closed,
        fragment=manifest.fragment_of(after.closed),
        version=manifest.version_after(after.closed),
        step=after.step,
        codec=wire.full,
        bytes=codec(wire.full).encoded_size(held_N.size),
        digest=held,
        merged=" ".join(member.identity_text for member in by_weight),
        held=held,
        difference_bytes=difference_bytes,
    )


def _tape_entry(
    manifest: Manifest, record: RoundRecord, merged: MergedRound, round_sum: RoundSum, after: RunState, held: str
) -> TapeEntry:
    return TapeEntry(
        round=after.closed,
        fragment=manifest.fragment_of(after.closed),
        version=manifest.version_after(after.closed),
        epoch=record.epoch,
        step=after.step,
        gain=merged.gain,
        quorum_seconds=record.close.quorum_seconds,
        grace_seconds=record.close.grace_seconds,
        open_seconds=record.close.open_seconds,
        live=record.live,
        bytes_up=sum(addend.contribution.bytes for addend in round_sum.addends),
        loss=mean_loss(merged.members),
        digest=held,
        members=merged.members,
        unix_seconds=record.unix_seconds,
        merge_seconds=max(0.0, record.merge_seconds),
        spectra_seconds=max(0.0, record.spectra_seconds),
        busy_seconds=max(0.0, record.busy_seconds),
        steered=record.steered,
    )
