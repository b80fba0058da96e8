"""The supply of batches that an island trains on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

from archipelago.broker.ranges import ReadPosition


class Supply(ABC):
    """An endless supply of batches, for one thread. Batches are trees of arrays, all of the same shapes.

    Attributes:
        tokens: The tokens of all batches that `next` returned last.
    """

    tokens: int = 0

    @abstractmethod
    def next(self, steps: int) -> Any:
        """Return the next `steps` batches: one tree whose arrays have an axis of steps in front."""

    @abstractmethod
    def sample(self, steps: int) -> Any:
        """Return batches as `next` does, to compile with. They are not used up, and their values do not matter."""

    @abstractmethod
    def places(self) -> tuple[ReadPosition, ...]:
        """Return how far each leased shard was read."""

    def held(self) -> list[str]:
        """Return the shards in `places()`."""
        return [place.range for place in self.places()]

    @abstractmethod
    def forget(self, shards: Collection[str]) -> None:
        """Forget leases that have ended or were lost."""

    @abstractmethod
    def state(self) -> dict[str, int | str]:
        """Return the position of the supply, for a checkpoint."""

    @abstractmethod
    def restore(self, state: Mapping[str, int | str]) -> None:
        """Continue from a `state()`."""
