"""The supply of batches that our worker trains on."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from archipelago.broker.corpus_shards import Place


class Supply(Protocol):
    """An endless supply of batches, for one thread. Batches are trees of arrays, all of the same shapes."""

    @property
    def tokens(self) -> int:
        """The tokens of all batches that `next` returned last."""

    def next(self, steps: int) -> Any:
        """Return the next `steps` batches: one tree whose arrays have an axis of steps in front."""

    def sample(self, steps: int) -> Any:
        """Return batches as `next` does, to compile with. They are not used up, and their values do not matter."""

    def places(self) -> Sequence[Place]:
        """Return how far each leased shard was read."""

    def held(self) -> list[str]:
        """Return the shards in `places()`."""

    def forget(self, shards: Collection[str]) -> None:
        """Forget leases that have ended or were lost."""

    def take_begun(self) -> list[str]:
        """Return the passes that were begun since the last call, for the replay of the island."""

    def state(self) -> dict[str, int | str]:
        """Return the position of the supply, for a checkpoint."""

    def restore(self, state: Mapping[str, int | str]) -> None:
        """Continue from a `state()`."""
