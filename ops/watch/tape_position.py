"""How far a reader has read the tape of a run. Each shard has rounds of its own order."""

from __future__ import annotations

from collections.abc import Sequence

from archipelago.broker.messages import TapeEntry
from archipelago.broker.shards.layout import Layout


class TapePosition:
    """The newest round of each shard that a reader has seen.

    Args:
        layout: The fragments of each shard.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._newest: dict[int, TapeEntry] = {}

    def newest_like(self, entry: TapeEntry) -> TapeEntry | None:
        """Return the newest round that was seen of the shard of `entry`; None if there is none."""
        return self._newest.get(self._layout.shard_of(entry.round))

    def new(self, tape: Sequence[TapeEntry]) -> list[TapeEntry]:
        """Return the entries that were not seen yet."""
        found = []
        for entry in tape:
            seen = self.newest_like(entry)
            if seen is None or entry.round > seen.round:
                found.append(entry)
        return found

    def add(self, entry: TapeEntry) -> None:
        """Note that the entry was seen."""
        self._newest[self._layout.shard_of(entry.round)] = entry

    def has_gone_back(self, tape: Sequence[TapeEntry]) -> bool:
        """Return whether a shard closes earlier rounds again, as after a return to a checkpoint."""
        last = {self._layout.shard_of(entry.round): entry for entry in tape}
        return any(last[shard].round < seen.round for shard, seen in self._newest.items() if shard in last)

    def connects_to(self, tape: Sequence[TapeEntry]) -> bool:
        """Return whether no round is missing between those that were seen and these, and no shard has gone back.

        A shard that has closed no round for long may have none among the newest rounds of the run.
        """
        if not self._newest or not tape:
            return not self._newest and not tape
        here = {self._layout.shard_of(entry.round) for entry in tape}
        known = {entry.round: entry.digest for entry in tape}
        mine = [seen for shard, seen in self._newest.items() if shard in here]
        return (
            bool(mine) and all(known.get(seen.round) == seen.digest for seen in mine) and not self.has_gone_back(tape)
        )
