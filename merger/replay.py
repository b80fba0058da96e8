"""Replay: merge a recorded round again and compare the result with its tape entry, bit for bit.

Everything here is pure. The decisions on the tape are inputs: the members of the round, the number of live
islands, and the operator's changes. The weights, clip factors and the outer step are computed again. Restarts and
`archipelago replay` use this module.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields, replace

import numpy as np

from archipelago.broker import control
from archipelago.broker.commits import Delivery
from archipelago.broker.errors import ArchipelagoError, WireError
from archipelago.broker.messages import Member, TapeEntry
from archipelago.broker.wire import digest_of
from archipelago.merger.round_merge import MergedRound, RoundMerge, RoundSum
from archipelago.merger.state import FragmentState, RunState


class DifferenceError(ArchipelagoError):
    """A replayed round differs from the tape. `what` names the first difference.

    The codes are `replay.round` and `replay.fragment` (the entry is not of the run's next round), `replay.steering`,
    `replay.contribution` (one cannot be read), and `replay.members`, `replay.member`, `replay.gain`, `replay.digest`,
    `replay.step`.
    """

    code = "replay"


def replay_round(
    rules: RoundMerge, state: RunState, fragment: FragmentState, tape: TapeEntry, deliveries: Sequence[Delivery]
) -> FragmentState:
    """Return the fragment after a recorded round, and advance `state` by it.

    Raises:
        DifferenceError: The entry is not of this run's next round, or a result differs. `state` keeps its round then.
    """
    where = f"round {tape.round}"
    if tape.round != state.closed + 1:
        raise DifferenceError(f"{where} is on the tape where round {state.closed + 1} should be", code="replay.round")
    if tape.fragment != rules.manifest.fragment_of(tape.round):
        raise DifferenceError(
            f"{where} does not sync fragment {tape.fragment}, which the tape names", code="replay.fragment"
        )
    try:
        apply_steering(rules, state, tape)
    except WireError as error:
        raise DifferenceError(f"{where}: {error.reason}", code="replay.steering") from None
    try:
        merged, round_sum = merge_recorded(rules, state, fragment, tape, deliveries)
    except WireError as error:
        raise DifferenceError(
            f"{where}: a contribution cannot be read ({error.reason})", code="replay.contribution"
        ) from None
    require_same(tape, merged)
    if not state.step <= tape.step <= max([state.step, *(a.contribution.global_step for a in round_sum.addends)]):
        raise DifferenceError(f"{where}: no member explains step {tape.step}", code="replay.step")
    rules.advance(state, tape.round, tape.step, merged, round_sum)
    return merged.state


def apply_steering(rules: RoundMerge, state: RunState, tape: TapeEntry, pinned: Collection[str] = ()) -> None:
    """Apply the settings that an operator changed with that round, except `pinned` ones. Raises WireError."""
    after = control.after_changes(rules.manifest.config, state.steered, tape.steered)
    state.steered = {name: value for name, value in after.items() if name not in pinned}


def merge_recorded(
    rules: RoundMerge, state: RunState, fragment: FragmentState, tape: TapeEntry, deliveries: Sequence[Delivery]
) -> tuple[MergedRound, RoundSum]:
    """Merge these contributions in the order of the tape, and change nothing.

    Raises:
        WireError: A contribution cannot be read.
    """
    places = {member.identity_text: place for place, member in enumerate(tape.members)}
    known = [(places.get(d.contribution.identity_text, len(places)) if d.contribution else -1, d) for d in deliveries]
    round_sum = rules.begin(tape.fragment, fragment, tape.version - 1, state.steered)
    for place, delivery in sorted(known, key=lambda each: each[0]):
        is_on_tape = 0 <= place < len(places)
        rules.add(round_sum, as_merged(delivery, tape.members[place]) if is_on_tape else delivery)
    return rules.close(fragment, state, round_sum, tape.live), round_sum


def as_merged(delivery: Delivery, member: Member) -> Delivery:
    """Return a delivery with the claims that the merger believed (`merger.claims`), which the tape records."""
    assert delivery.contribution is not None  # noqa: S101 - only readable contributions are merged
    believed = replace(delivery.contribution, tokens=member.tokens, steps=member.steps, data=member.data)
    return replace(delivery, contribution=believed)


def require_same(tape: TapeEntry, merged: MergedRound) -> None:
    """Raise DifferenceError at the first place where a replayed round differs from its tape entry."""
    where = f"round {tape.round} (fragment {tape.fragment}, version {tape.version})"
    replayed = {member.identity_text: member for member in merged.members}
    recorded = {member.identity_text: member for member in tape.members}
    if replayed.keys() != recorded.keys():
        raise DifferenceError(
            f"{where}: the tape has members {sorted(recorded)}, the replay {sorted(replayed)}", code="replay.members"
        )
    for name, member in recorded.items():
        for f in fields(member):
            old, new = getattr(member, f.name), getattr(replayed[name], f.name)
            both_nan = old != old and new != new
            if f.name != "entry" and old != new and not both_nan:
                raise DifferenceError(
                    f"{where}: the tape has {f.name} {old} for {name}, the replay {new}", code="replay.member"
                )
    if tape.gain != merged.gain:
        raise DifferenceError(f"{where}: the tape has gain {tape.gain}, the replay {merged.gain}", code="replay.gain")
    found = digest_of(np.asarray(merged.state.published_N))
    if found != tape.digest:
        raise DifferenceError(f"{where}: the tape has digest {tape.digest}, the replay {found}", code="replay.digest")
