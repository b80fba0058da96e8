"""The step times that islands report, with the median of each island's others at hand. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import ItemsView, Mapping


def is_step_seconds(seconds: float) -> bool:
    """Return whether this is a measured time of an inner step."""
    return seconds > 0.0 and math.isfinite(seconds)


class StepTimes:
    """Seconds per inner step by island, and those that were measured in order.

    Each contribution is judged by the median of the other islands. Sorting all of them again for each would make a
    round's work quadratic in its islands.
    """

    def __init__(self, reported: Mapping[str, float]) -> None:
        self._by_island = dict(reported)
        self._ordered = sorted(filter(is_step_seconds, reported.values()))

    @classmethod
    def of(cls, reported: Mapping[str, float] | StepTimes) -> StepTimes:
        """Return these times; a mapping is put in order first."""
        return reported if isinstance(reported, StepTimes) else cls(reported)

    def items(self) -> ItemsView[str, float]:
        """Return the pairs of an island and what it reports."""
        return self._by_island.items()

    def put(self, island: str, seconds: float) -> None:
        """Set what an island reports."""
        self.drop(island)
        self._by_island[island] = seconds
        if is_step_seconds(seconds):
            insort(self._ordered, seconds)

    def drop(self, island: str) -> None:
        """Forget an island."""
        before = self._by_island.pop(island, 0.0)
        if is_step_seconds(before):
            del self._ordered[bisect_left(self._ordered, before)]

    def count_of_others(self, island: str) -> int:
        """Return how many other islands have measured a time."""
        return len(self._ordered) - is_step_seconds(self._by_island.get(island, 0.0))

    def median_of_others(self, island: str) -> float | None:
        """Return the lower median of the times that the other islands have measured; None if there are none."""
        count = self.count_of_others(island)
        if not count:
            return None
        middle = (count - 1) // 2
        if count < len(self._ordered) and bisect_left(self._ordered, self._by_island[island]) <= middle:
            middle += 1
        return self._ordered[middle]
