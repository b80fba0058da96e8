"""The accounts of a run's tokens. Pure.

They add up: trained = merged + refused + pending + unsent + lowered + lost.

A token counts once, although each fragment is synchronised on its own: every account is the mean over the fragments.

- *Trained*: tokens of the inner steps that islands have made, by their heartbeats. Islands that return go on counting.
- *Merged*, *refused*, *pending*: what became of the contributions, by the books. A run that went back to a checkpoint
  has the books of that checkpoint.
- *Unsent*: work that islands which are alive have not sent yet.
- *Lowered*: work that was merged, and that counts for less than its island says (`merger/claims.py`).
- *Lost*: all other trained tokens. They were not sent when their island died, or they were merged after the checkpoint
  to which the run went back, or the island had to adopt newer parameters over them.

Heartbeats are up to a second older than the books, so the newest steps may be missing from trained and lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from archipelago.broker.messages import Books, Pending
from archipelago.broker.presence import Presence


@dataclass(frozen=True)
class TokenAccounts:
    """Where a run's trained tokens are."""

    merged: int
    refused: int
    pending: int
    unsent: int
    lowered: int
    lost: int

    @property
    def trained(self) -> int:
        """All of them."""
        return self.merged + self.refused + self.pending + self.unsent + self.lowered + self.lost


def token_accounts(
    presences: Iterable[Presence],
    merged: Mapping[str, int],
    books: Books,
    pending: Pending,
    fragments: int,
    lowered: int = 0,
) -> TokenAccounts:
    """Return the accounts of a run.

    Args:
        presences: The islands that are known.
        merged: Merged tokens of each island, summed over the fragments. It also has islands of long ago.
        books: The run's books.
        pending: Contributions that wait to be merged.
        fragments: The number of fragments.
        lowered: Tokens that merged contributions claim and that are not counted, summed over the fragments. Those that
            no heartbeat has are false claims, and appear nowhere.
    """
    of_island = {island: tokens // fragments for island, tokens in merged.items()}
    unsent = 0
    for presence in presences:
        beat = presence.heartbeat
        of_island[beat.island] = max(beat.tokens, of_island.get(beat.island, 0))
        unsent += beat.tokens_unsent if presence.is_live else 0
    counts = (books.merged_tokens, books.refused_tokens, pending.tokens)
    settled_merged, refused, waiting = (tokens // fragments for tokens in counts)
    rest = max(0, sum(of_island.values()) - settled_merged - refused - waiting)
    unsent = min(unsent, rest)
    uncounted = min(lowered // fragments, rest - unsent)
    return TokenAccounts(settled_merged, refused, waiting, unsent, uncounted, rest - unsent - uncounted)
