"""An island's ledger: the round that it owes a contribution to, and the steps in it. No arrays and no clocks.

Every `H / P` inner steps (a stride) an island owes one contribution, to the earliest open round that it has not
answered. A round that another island has called is answered at the next step boundary, and settles the stride. For
each fragment, steps are counted from the last time that the fragment was sent or adopted.

In a run with several shards, each shard has open rounds and a stride of its own: `H` divided by the number of its
fragments. So an island syncs each fragment as often as without shards, and the strides of one shard that is away are
not spent on the others.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from archipelago.broker.manifest import Layout, OwnRounds
from archipelago.broker.messages import Call, Event, Refusal, Snapshot

#: While a merger serves, the schedule may be at least this many steps ahead of the last merge: a round trip takes time.
AHEAD_STEPS_MIN = 64


@dataclass
class FragmentCount:
    """Unsent progress on one fragment.

    Attributes:
        version: The version from which the progress is measured.
        held: The digest of its parameters.
        round: The round that made it.
        step: The run's step at that round.
        newest: The newest version that was announced.
        steps: Inner steps since that version or since the last sending.
        tokens: Tokens of those steps.
    """

    version: int = 0
    held: str = ""
    round: int = 0
    step: int = 0
    newest: int = 0
    steps: int = 0
    tokens: int = 0


class ShardRounds:
    """The rounds of one shard, as an island knows and answers them.

    Attributes:
        called: The open rounds that were called.
        answered: The open rounds that the island has answered.
        owed: Inner steps since the last contribution, in units of one step over the shard's fragments. A stride is owed
            at `interval`.
    """

    def __init__(self, own: OwnRounds, window: int, owed: int) -> None:
        self.own, self._open = own, min(window, len(own.fragments))
        self.called: set[int] = set()
        self.answered: set[int] = set()
        self.owed = owed
        self.go_to(0)

    @property
    def window(self) -> list[int]:
        return self.own.following(self.closed, self._open)

    def go_to(self, closed: int) -> None:
        """Note that a round is the last closed one. It may be an earlier one than before."""
        self.closed = closed
        self.called = {number for number in self.called if number > closed}
        self.answered = {number for number in self.answered if number > closed}


class Ledger:
    """The counts of one island.

    Attributes:
        global_step: The clock of the learning-rate schedule. It goes back when the run does.
        merged_step: The run's step at the newest merge that the island knows of.
    """

    def __init__(self, island: str, incarnation: str, layout: Layout, interval: int, window: int) -> None:
        self.island = island
        self.incarnation = incarnation
        self.interval = interval
        self.window = min(window, layout.count)
        self.counts = [FragmentCount() for _ in range(layout.count)]
        self.global_step = 0
        self.merged_step = 0
        self.refused = 0
        self.last_refusal = ""
        # Shards begin apart, so that an island does not send to all of them at once.
        self.shards = [
            ShardRounds(own, window, interval * shard // layout.shards) for shard, own in enumerate(layout.rounds)
        ]
        self._shard_of = [layout.shard_of(p + 1) for p in range(layout.count)]

    @property
    def closed(self) -> int:
        """The last closed round of any shard whose events the training loop has processed."""
        return max(shard.closed for shard in self.shards)

    def is_held(self, *, is_served: bool, stretch: float = 1.0) -> bool:
        """Return whether the schedule waits for the merger, because the island is its window ahead of the last merge.

        An island without a merger trains on, but the run's steps are not its own to use up.

        Args:
            is_served: Whether a merger serves the run. It may be slow, or paused, or at the end of a slow link.
            stretch: The steps of the island's contributions as a share of the interval.
        """
        if is_served:
            allowed = max(AHEAD_STEPS_MIN, math.ceil(self.window * self.interval * max(1.0, stretch)))
        else:
            allowed = math.ceil(self.window * self.interval / len(self.counts))
        return self.global_step - self.merged_step >= allowed

    def stepped(self, steps: int, tokens: int, *, is_held: bool = False) -> None:
        """Count `steps` inner steps on `tokens` tokens. While the schedule is held, its clock stands still."""
        for count in self.counts:
            count.steps += steps
            count.tokens += tokens
        self.global_step += 0 if is_held else steps
        # At most one stride stays owed after the window was closed, so that no burst is sent when it opens.
        for shard in self.shards:
            shard.owed = min(shard.owed, self.interval - 1) + steps * len(shard.own.fragments)

    def heard(self, event: Event) -> None:
        """Process an announcement of the merger."""
        match event:
            case Call(round=number):
                if number > (shard := self._of(number)).closed:
                    shard.called.add(number)
            case Snapshot(round=number, fragment=p, version=version, step=step):
                self.counts[p].newest = max(self.counts[p].newest, version)
                self.merged_step = max(self.merged_step, step)
                self._close(number)
            case Refusal(island=self.island, incarnation=self.incarnation, round=number, reason=reason, repeat=False):
                self._of(number).answered.discard(number)  # a refused contribution has not answered its round
                self.refused += 1
                self.last_refusal = reason
            case _:
                pass

    def resumed(self, of: int, closed: int, unresolved: Collection[int]) -> None:
        """Continue after round `closed`, where the merger of a shard has resumed.

        If the island knew of later rounds, the broker has lost them.

        Args:
            of: The shard.
            unresolved: The rounds of undecided contributions to it.
        """
        shard = self.shards[of]
        if closed < shard.closed:
            shard.called.clear()
            shard.go_to(closed)
            for p in shard.own.fragments:
                self.counts[p].newest = 0
            # What was made later is no step of the run any more. The versions that arrive now set the clock forward.
            kept = [count.step for p, count in enumerate(self.counts) if count.round <= self._of(p + 1).closed]
            self.global_step = self.merged_step = max(kept, default=0)
        shard.answered = {number for number in unresolved if number > shard.closed}

    def due(self, blocked: Collection[int] = ()) -> int | None:
        """Return a round to contribute to now, or None; none of a `blocked` shard. Call it again after each sending."""
        free = [shard for number, shard in enumerate(self.shards) if number not in blocked]
        called = sorted(number for shard in free for number in shard.called)
        owed = (number for shard in free if shard.owed >= self.interval for number in shard.window)
        return next((number for number in (*called, *owed) if self._may_answer(number)), None)

    def sent(self, number: int) -> None:
        """Note that the progress on that round's fragment was sent. Progress is then measured from this point."""
        shard = self._of(number)
        shard.owed = max(0, shard.owed - self.interval)
        shard.answered.add(number)
        self._zero(self._fragment(number))

    def adopted(self, snapshot: Snapshot, keeps_progress: bool) -> None:
        """Measure a fragment from an adopted snapshot. With `keeps_progress`, its unsent steps stay counted."""
        count = self.counts[snapshot.fragment]
        count.version, count.held = snapshot.version, snapshot.held
        count.round, count.step = snapshot.round, snapshot.step
        count.newest = max(count.newest, snapshot.version)
        if not keeps_progress:
            self._zero(snapshot.fragment)
        self._close(snapshot.round)
        self.global_step = max(self.global_step, snapshot.step)
        self.merged_step = max(self.merged_step, snapshot.step)

    def holds(self, snapshot: Snapshot) -> bool:
        """Return whether a fragment's progress is measured from these parameters."""
        count = self.counts[snapshot.fragment]
        return (count.version, count.held) == (snapshot.version, snapshot.held)

    def farewells(self) -> list[int]:
        """Return the next round of each fragment with unsent progress. A departing island contributes to these."""
        rounds = (shard.own.following(shard.closed, len(shard.own.fragments)) for shard in self.shards)
        return [number for each in rounds for number in each if self.counts[self._fragment(number)].steps]

    def place(self, number: int) -> tuple[int, int]:
        """Return the shard and the fragment of a round."""
        fragment = self._fragment(number)
        return self._shard_of[fragment], fragment

    @property
    def staleness(self) -> float:
        """The mean over all fragments of the newest announced version minus the held one."""
        return sum(max(0, c.newest - c.version) for c in self.counts) / len(self.counts)

    @property
    def unsent_tokens(self) -> int:
        """Tokens of unsent progress, summed over the fragments."""
        return sum(count.tokens for count in self.counts)

    def _fragment(self, number: int) -> int:
        return (number - 1) % len(self.counts)

    def _of(self, number: int) -> ShardRounds:
        return self.shards[self._shard_of[self._fragment(number)]]

    def _may_answer(self, number: int) -> bool:
        shard = self._of(number)
        unanswered = number > shard.closed and number not in shard.answered
        return unanswered and self.counts[self._fragment(number)].steps > 0

    def _zero(self, fragment: int) -> None:
        self.counts[fragment].steps = self.counts[fragment].tokens = 0

    def _close(self, number: int) -> None:
        if number and number > (shard := self._of(number)).closed:  # version 0 belongs to no round
            shard.go_to(number)
