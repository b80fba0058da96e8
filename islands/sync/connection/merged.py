"""Contributions that were merged, kept in case a failover of the broker undoes their rounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Set
from typing import Generic, Protocol, TypeVar

#: How many merged contributions are kept in any case. In int4, they take half the bytes of one float32 fragment.
KEPT_MIN = 4
#: Others are kept for this long, because a failover forgets about a second, and as long as all have few bytes.
KEPT_SECONDS = 10.0
KEPT_BYTES_MAX = 64 << 20


class Sent(Protocol):
    """A contribution that was sent."""

    @property
    def identity_text(self) -> str:
        """Its identity."""
        ...

    @property
    def payload(self) -> bytes:
        """Its payload."""
        ...


Kind = TypeVar("Kind", bound=Sent)


class Merged(Generic[Kind]):
    """The newest merged contributions of one island, oldest first."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, float, Kind]] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, round_number: int, contribution: Kind, now: float) -> None:
        """Keep a contribution that was merged in that round, and drop those that are no longer needed."""
        self._kept.append((round_number, now, contribution))
        self._bytes += len(contribution.payload)
        while len(self._kept) > KEPT_MIN:
            _, since, oldest = self._kept[0]
            if now - since <= KEPT_SECONDS and self._bytes <= KEPT_BYTES_MAX:
                break
            self._kept.popleft()
            self._bytes -= len(oldest.payload)

    @property
    def first_round(self) -> int | None:
        """The first round that merged one of them; None if there are none."""
        return min((number for number, _, _ in self._kept), default=None)

    def undone(self, closed: int, tape: Mapping[int, Set[str]]) -> list[Kind]:
        """Return the contributions that no round has merged after all, and keep them no longer.

        Args:
            closed: The last closed round.
            tape: The contributions that the tape names, by round. A contribution of a round that it lacks stays merged.
        """
        named = frozenset().union(*tape.values())

        def is_undone(number: int, contribution: Kind) -> bool:
            return contribution.identity_text not in named and (number > closed or number in tape)

        out = [contribution for number, _, contribution in self._kept if is_undone(number, contribution)]
        self._kept = deque(each for each in self._kept if not is_undone(each[0], each[2]))
        self._bytes = sum(len(contribution.payload) for _, _, contribution in self._kept)
        return out
