"""Replay: merge a recorded round again and compare the result with its tape entry, bit for bit.

The decisions on the tape are inputs: the members of the round, the number of live islands, and the operator's changes.
The weights, clip factors and the outer step are computed again. `archipelago replay` uses this module. So does a merger
that starts: it rebuilds each fragment from a full state and the contributions that were merged after it. The full state
is that of a checkpoint, for the whole run, or that of a compaction in Redis, for one fragment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np

from archipelago.broker import control
from archipelago.broker.commits import Delivery
from archipelago.broker.errors import ArchipelagoError, WireError
from archipelago.broker.full_state import FullState
from archipelago.broker.messages import RoundMember, TapeEntry, to_fields
from archipelago.broker.wire import digest_of
from archipelago.merger import outer
from archipelago.merger.round_merge import Addend, MergedRound, RoundMerge, new_state
from archipelago.merger.state import FragmentState, RunState


class DifferenceError(ArchipelagoError):
    """A replayed round differs from the tape. `what` names the first difference.

    Other codes are `replay.round` (the entry is not of the run's next round), and `replay.contribution` (one cannot be
    read).
    """

    code = "replay.difference"


def replay_round(
    rules: RoundMerge,
    state: RunState,
    fragment: FragmentState,
    tape: TapeEntry,
    deliveries: Sequence[Delivery],
    *,
    exactly: bool = True,
) -> FragmentState:
    """Return the fragment after a recorded round, and advance `state` by it.

    Raises:
        DifferenceError: The entry is not of this run's next round, or, with `exactly`, a result differs. `state` stays
            as it is then.
    """
    where = f"round {tape.round}"
    if tape.round != (number := rules.manifest.own_rounds.next(state.closed)):
        raise DifferenceError(f"{where} is on the tape where round {number} should be", code="replay.round")
    p, version = rules.manifest.fragment_of(tape.round), rules.manifest.version_after(tape.round)
    if (tape.fragment, tape.version) != (p, version):
        what = f"fragment {tape.fragment} with version {tape.version}"
        raise DifferenceError(f"{where} does not sync {what}, which the tape names", code="replay.round")
    try:
        steered = control.after_changes(rules.manifest.config, state.steered, tape.steered)
    except WireError as error:
        raise DifferenceError(f"{where}: {error.reason}") from None
    try:
        addends = _addends(rules, tape, deliveries)
    except WireError as error:
        raise DifferenceError(
            f"{where}: a contribution cannot be read ({error.reason})", code="replay.contribution"
        ) from None
    merged = rules.close(fragment, replace(state, steered=steered), addends, tape.live, tape)
    if exactly:
        require_same(tape, merged)
    if not state.step <= tape.step <= max([state.step, *(a.contribution.global_step for a in addends)]):
        raise DifferenceError(f"{where}: no member explains step {tape.step}")
    state.steered = steered
    merged.advance(state, tape, tape.step, [addend.contribution for addend in addends])
    return merged.state


def _addends(rules: RoundMerge, tape: TapeEntry, deliveries: Sequence[Delivery]) -> list[Addend]:
    """Return the contributions in the order of the tape. Raises WireError if one cannot be read."""
    places = {member.identity_text: place for place, member in enumerate(tape.members)}
    known = [(places.get(d.contribution.identity_text, len(places)) if d.contribution else -1, d) for d in deliveries]
    return [
        rules.opened(as_merged(delivery, tape.members[place]) if 0 <= place < len(places) else delivery)
        for place, delivery in sorted(known, key=lambda each: each[0])
    ]


def as_merged(delivery: Delivery, member: RoundMember) -> Delivery:
    """Return a delivery with the claims that the merger believed (`merger.claims`), which the tape records."""
    assert delivery.contribution is not None  # noqa: S101 - only readable contributions are merged
    believed = replace(delivery.contribution, tokens=member.tokens, steps=member.steps, data=member.data)
    return replace(delivery, contribution=believed)


def require_same(tape: TapeEntry, merged: MergedRound) -> None:
    """Raise DifferenceError at the first place where a replayed round differs from its tape entry."""
    where = f"round {tape.round} (fragment {tape.fragment}, version {tape.version})"
    replayed = {member.identity_text: to_fields(member) for member in merged.members}
    recorded = {member.identity_text: to_fields(member) for member in tape.members}
    if replayed.keys() != recorded.keys():
        raise DifferenceError(f"{where}: the tape has members {sorted(recorded)}, the replay {sorted(replayed)}")
    for name, member in recorded.items():
        for field, old in member.items():
            if field != "entry" and old != (new := replayed[name][field]):
                raise DifferenceError(f"{where}: the tape has {field} {old} for {name}, the replay {new}")
    if tape.gain != merged.gain:
        raise DifferenceError(f"{where}: the tape has gain {tape.gain}, the replay {merged.gain}")
    found = digest_of(np.asarray(merged.state.published_N))
    if found != tape.digest:
        raise DifferenceError(f"{where}: the tape has digest {tape.digest}, the replay {found}")


def fragment_of(rules: RoundMerge, full: FullState) -> FragmentState:
    """Return a fragment from its full state. Raises WireError if that does not fit the run."""
    if not full.own:
        return new_state(full.published_N, rules.outer)
    size, wire = rules.manifest.sizes[full.snapshot.fragment], rules.manifest.config.wire
    template = new_state(np.zeros(size, np.float32), rules.outer)
    params_N, state = outer.of_named(template.outer, full.own, size)
    exact = wire.full == "float32" and not wire.sends_differences
    return FragmentState(params_N, state, params_N if exact else jax.device_put(full.published_N))
