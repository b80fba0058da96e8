"""A round done again from its tape entry and the contributions it names: to the same bits, or the first difference.

Pure. What the tape decided (who is in, how many lived, what was steered) goes in; what follows from it (weights, clips,
the step) is computed anew and compared. Restarts, `archipelago replay` and its what-if questions all go through here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from archipelago.broker import control
from archipelago.broker.errors import ArchipelagoError, WireError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import TapeEntry
from archipelago.broker.transport import Delivery
from archipelago.broker.wire import digest, digest_of, unpack_encoded
from archipelago.merger import merge_rules, outer
from archipelago.merger.clip import path
from archipelago.merger.closing import Closed, Gathering, close_fragment
from archipelago.merger.merge_rules import Group
from archipelago.merger.outer import OuterOptimizer, Round
from archipelago.merger.snapshot_codec import sent_down
from archipelago.merger.state import FragmentState, RunState


class DifferenceError(ArchipelagoError):
    """What was done again did not come out as the tape says; `what` names the first difference."""


@dataclass(frozen=True)
class Rules:
    """What closing a round needs to know of the run."""

    manifest: Manifest
    groups: tuple[tuple[Group, ...], ...]
    outer: OuterOptimizer

    @classmethod
    def of(cls, manifest: Manifest) -> Rules:
        """The rules in the manifest's config."""
        merge = manifest.config.merge
        groups = tuple(merge_rules.groups(rows, merge) for rows in manifest.layout)
        return cls(manifest, groups, outer.build(manifest.config.outer))

    def outer_of(self, state: RunState) -> OuterOptimizer:
        """The outer optimiser with what is steered of it."""
        return outer.build(control.steered(self.manifest.config, state.steered).outer)

    def gather(self, p: int, fragment: FragmentState, version: int) -> Gathering:
        """The sum of what will wait for the fragment's next round, with nothing in it yet."""
        config = self.manifest.config
        return Gathering(
            self.groups[p],
            config.merge,
            norms=fragment.norms,
            version=version,
            path=lambda c: path(config, c.steps, c.global_step),
        )

    def take(self, gathered: Gathering, delivery: Delivery) -> None:
        """Adds a contribution. Raises WireError, and adds nothing, for one that is not what it says."""
        contribution = delivery.contribution
        if contribution is None or delivery.fault:
            raise WireError(delivery.fault or "unreadable")
        if digest(delivery.payload) != contribution.digest:
            raise WireError("the payload's digest is not the announced one")
        if len(delivery.payload) != contribution.bytes:  # the tape adds them up
            raise WireError(f"a payload of {len(delivery.payload)} bytes where {contribution.bytes} were said")
        size = self.manifest.sizes[contribution.fragment]
        gathered.take(delivery.entry, contribution, unpack_encoded(delivery.payload, size, contribution.codec))

    def close(self, number: int, fragment: FragmentState, state: RunState, gathered: Gathering, live: int) -> Closed:
        """Steps with what was gathered; changes nothing."""
        config = self.manifest.config
        now = Round(progress=min(1.0, state.step / config.inner.steps), interval=float(config.sync.interval))
        closed = close_fragment(
            fragment,
            state.staleness,
            gathered,
            live=live,
            config=config.merge,
            outer=self.outer_of(state),
            now=now,
        )
        held_N, difference = sent_down(config.wire, fragment.published_N, closed.state.published_N)
        return replace(closed, state=replace(closed.state, published_N=held_N), difference=difference)

    def take_in(self, number: int, closed: Closed, state: RunState, gathered: Gathering) -> None:
        """Brings the run's state up to the closed round, but for its pace, which is made of wall-clock times."""
        p = self.manifest.fragment_of(number)
        state.staleness, state.norms[p] = closed.staleness, closed.state.norms
        state.after_round(number, [w.contribution for w in gathered.waiting], state.pace)


def redo(
    rules: Rules, state: RunState, fragment: FragmentState, tape: TapeEntry, deliveries: Sequence[Delivery]
) -> FragmentState:
    """The fragment after the round; `state` is brought up to it.

    Raises DifferenceError when the tape is not of this run's next round, or when anything comes out differently.
    """
    if tape.round != state.closed + 1:
        raise DifferenceError(f"round {tape.round} is on the tape where round {state.closed + 1} should be")
    if tape.fragment != rules.manifest.fragment_of(tape.round):
        raise DifferenceError(f"round {tape.round} does not sync fragment {tape.fragment}, which the tape names")
    try:
        steer(rules, state, tape)
    except WireError as error:
        raise DifferenceError(f"round {tape.round}: {error.reason}") from None
    try:
        closed, gathered = again(rules, state, fragment, tape, deliveries)
    except WireError as error:
        raise DifferenceError(f"round {tape.round}: a contribution cannot be read ({error.reason})") from None
    if difference := first_difference(tape, closed):
        raise DifferenceError(difference)
    rules.take_in(tape.round, closed, state, gathered)
    return closed.state


def steer(rules: Rules, state: RunState, tape: TapeEntry, pinned: Collection[str] = ()) -> None:
    """Brings the state up to what was steered with that round, but for `pinned` settings. Raises WireError."""
    after = control.after_changes(rules.manifest.config, state.steered, tape.steered)
    state.steered = {name: value for name, value in after.items() if name not in pinned}


def again(
    rules: Rules, state: RunState, fragment: FragmentState, tape: TapeEntry, deliveries: Sequence[Delivery]
) -> tuple[Closed, Gathering]:
    """The round with these contributions, in the order in which the tape has them; changes nothing.

    Raises WireError for one that cannot be read.
    """
    places = {member.identity_text: place for place, member in enumerate(tape.members)}
    known = [(places.get(d.contribution.identity_text, len(places)) if d.contribution else -1, d) for d in deliveries]
    gathered = rules.gather(tape.fragment, fragment, tape.version - 1)
    for _, delivery in sorted(known, key=lambda each: each[0]):
        rules.take(gathered, delivery)
    return rules.close(tape.round, fragment, state, gathered, tape.live), gathered


def first_difference(tape: TapeEntry, closed: Closed) -> str:
    """Where what was computed departs from the tape, in words; empty where it does not."""
    where = f"round {tape.round} (fragment {tape.fragment}, version {tape.version})"
    mine = {member.identity_text: member for member in closed.members}
    theirs = {member.identity_text: member for member in tape.members}
    if mine.keys() != theirs.keys():
        return f"{where}: members {sorted(theirs)} on the tape, {sorted(mine)} done again"
    for name, member in theirs.items():
        for f in fields(member):
            old, new = getattr(member, f.name), getattr(mine[name], f.name)
            if f.name != "entry" and old != new and not (old != old and new != new):
                return f"{where}: {f.name} of {name} is {old} on the tape, {new} done again"
    if tape.gain != closed.gain:
        return f"{where}: the gain is {tape.gain} on the tape, {closed.gain} done again"
    found = digest_of(np.asarray(closed.state.published_N))
    return "" if found == tape.digest else f"{where}: digest {tape.digest} on the tape, {found} done again"
