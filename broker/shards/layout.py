"""Which fragments each shard of a run has, and how the rounds of shards are numbered. All of it is pure.

Inside a shard, fragments and rounds count from the shard's own first one, so a shard is a run of its own fragments to
its merger and to Redis. Islands, readers and people see the fragments and rounds of the whole run:

    round = cycle · P + fragment + 1,   with cycle = (the shard's round − 1) // (the shard's fragments)

Each fragment has one round in each cycle, as in a run without shards, so `fragment = (round − 1) mod P` and the version
of a fragment are the same. The rounds of one shard close in order. Those of different shards do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from archipelago.broker.messages import Call, Contribution, Event, Refusal, Snapshot, TapeEntry

#: More shards than this share one host badly, and each takes connections of every island.
SHARDS_MAX = 64

Placed = TypeVar("Placed", bound=Call | Snapshot | Refusal | TapeEntry | Contribution)


def dealt(sizes: Sequence[int], shards: int) -> tuple[tuple[int, ...], ...]:
    """Deal fragments out to shards of similar size: each fragment, largest first, goes to the lightest shard.

    Args:
        sizes: The elements of each fragment.
        shards: The number of shards, at most that of the fragments.

    Returns:
        The fragments of each shard, in ascending order. No shard is empty.
    """
    hands: list[list[int]] = [[] for _ in range(shards)]
    loads = [0] * shards
    for fragment in sorted(range(len(sizes)), key=lambda p: (-sizes[p], p)):
        lightest = min(range(shards), key=lambda k: (loads[k], len(hands[k]), k))
        hands[lightest].append(fragment)
        loads[lightest] += sizes[fragment]
    return tuple(tuple(sorted(hand)) for hand in hands)


@dataclass(frozen=True)
class Layout:
    """The fragments of each shard.

    Attributes:
        fragments: The fragments of each shard, in ascending order. Together they are 0 … P − 1.
    """

    fragments: tuple[tuple[int, ...], ...]

    @classmethod
    def whole(cls, fragments: int) -> Layout:
        """Return the layout of a run with one shard."""
        return cls((tuple(range(fragments)),))

    @property
    def shards(self) -> int:
        """The number of shards."""
        return len(self.fragments)

    @cached_property
    def count(self) -> int:
        """P, the number of fragments of the run."""
        return sum(map(len, self.fragments))

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        return {p: (k, own) for k, mine in enumerate(self.fragments) for own, p in enumerate(mine)}

    def place(self, fragment: int) -> tuple[int, int]:
        """Return the shard of a fragment, and the fragment's number there."""
        return self._places[fragment]

    def shard_of(self, number: int) -> int:
        """Return the shard that closes a round of the run."""
        return self._places[(number - 1) % self.count][0]

    def own_round(self, number: int) -> int:
        """Return the number that a round of the run has in its shard; 0 for 0."""
        if number == 0:
            return 0
        cycle, fragment = divmod(number - 1, self.count)
        k, own = self._places[fragment]
        return cycle * len(self.fragments[k]) + own + 1

    def run_round(self, shard: int, number: int) -> int:
        """Return the number that a round of a shard has in the run; 0 for 0."""
        if number == 0:
            return 0
        mine = self.fragments[shard]
        cycle, own = divmod(number - 1, len(mine))
        return cycle * self.count + mine[own] + 1

    def next_rounds(self, shard: int, closed: int, count: int) -> Iterator[int]:
        """Yield the `count` rounds of a shard after its closed one. All are numbers of the run."""
        own = self.own_round(closed)
        return (self.run_round(shard, number) for number in range(own + 1, own + 1 + count))

    def in_run(self, shard: int, message: Placed) -> Placed:
        """Return a message of a shard with the fragment and round that it has in the run."""
        if self.shards == 1:
            return message
        mine, number = self.fragments[shard], self.run_round(shard, message.round)
        # Version 0 belongs to no round. A forged refusal may name any fragment, so its round decides.
        fragment = (number - 1) % self.count if number else mine[message.fragment % len(mine)]
        return replace(message, round=number, fragment=fragment)

    def event_in_run(self, shard: int, event: Event) -> Event:
        """Return an announcement of a shard's merger with the numbers of the run."""
        if isinstance(event, Call | Snapshot | Refusal):
            return self.in_run(shard, event)
        if self.shards == 1:
            return event
        return replace(event, round=self.run_round(shard, event.round))
