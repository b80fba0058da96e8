"""Which fragments each shard of a run has, and which rounds it closes. All of it is pure.

Fragments and rounds have the same numbers in all shards. A shard closes the rounds of its own fragments, in order.
Those of different shards close in any order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

#: More shards than this share one host badly, and each takes connections of every island.
SHARDS_MAX = 64


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
class OwnRounds:
    """The rounds of a run, or of one of its shards, in order. Arguments may be those of other shards. `count` is P."""

    fragments: Sequence[int]
    count: int

    def until(self, number: int) -> int:
        """Return how many of these rounds there are up to that one."""
        cycles, fragment = divmod(number, self.count)
        return cycles * len(self.fragments) + bisect_left(self.fragments, fragment)

    def between(self, after: int, until: int) -> int:
        """Return how many of these rounds there are after the first one, up to the second one."""
        return self.until(until) - self.until(after)

    def following(self, closed: int, count: int) -> list[int]:
        """Return the `count` of these rounds after that one."""
        first, mine = self.until(closed), self.fragments
        places = (divmod(place, len(mine)) for place in range(first, first + count))
        return [cycles * self.count + mine[own] + 1 for cycles, own in places]

    def next(self, closed: int) -> int:
        """Return the first of these rounds after that one."""
        return self.following(closed, 1)[0]


@dataclass(frozen=True)
class Layout:
    """The fragments of each shard, in ascending order. Together they are 0 … P − 1."""

    fragments: tuple[tuple[int, ...], ...]

    @property
    def shards(self) -> int:
        """The number of shards."""
        return len(self.fragments)

    @cached_property
    def count(self) -> int:
        return sum(map(len, self.fragments))

    def count_without(self, shards: Collection[int]) -> int:
        """Return the number of fragments of the other shards."""
        return sum(len(mine) for shard, mine in enumerate(self.fragments) if shard not in shards)

    @cached_property
    def _shards(self) -> dict[int, int]:
        return {p: shard for shard, mine in enumerate(self.fragments) for p in mine}

    def shard_of(self, number: int) -> int:
        """Return the shard that closes a round."""
        return self._shards[(number - 1) % self.count]

    @cached_property
    def rounds(self) -> tuple[OwnRounds, ...]:
        return tuple(OwnRounds(mine, self.count) for mine in self.fragments)
