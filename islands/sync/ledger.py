"""An island's bookkeeping: which round it owes a contribution to, and whose progress is in it. No arrays, no clocks.

Every `H / P` inner steps (a stride) an island owes one contribution, to the earliest open round that it has not
answered. A round that another island has called is answered at the next step boundary, and settles the stride. Each
inner step is counted, for each fragment, from the last time that fragment was sent or adopted.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from archipelago.broker.messages import Call, Event, Refusal, Snapshot


@dataclass
class FragmentCount:
    """Progress on one fragment that no contribution holds yet, and the version it is measured from."""

    version: int = 0
    newest: int = 0
    """newest version that was announced"""
    steps: int = 0
    tokens: int = 0


class Ledger:
    """Counts of one island; `global_step` is the clock of the learning-rate schedule."""

    def __init__(self, island: str, incarnation: str, fragments: int, interval: int, window: int) -> None:
        self.island = island
        self.incarnation = incarnation
        self.interval = interval
        self.window = min(window, fragments)
        self.counts = [FragmentCount() for _ in range(fragments)]
        self.formerly = ""
        """the incarnation that it was before the whole run went back to a checkpoint: it answers for that one too"""
        self.closed = 0
        self.global_step = 0
        self.refused = 0
        self.last_refusal = ""
        self._called: set[int] = set()
        self._answered: set[int] = set()
        self._owed = 0  # in units of 1/P inner step: a stride is owed at `interval`

    def stepped(self, steps: int, tokens: int) -> None:
        """So many inner steps were made, on so many tokens in all."""
        for count in self.counts:
            count.steps += steps
            count.tokens += tokens
        self.global_step += steps
        # What could not be sent before these steps lapses, however long the window was shut: no burst when it opens.
        self._owed = min(self._owed, self.interval - 1) + steps * len(self.counts)

    def heard(self, event: Event) -> None:
        """Takes in what the merger announced."""
        match event:
            case Call(round=number):
                if number > self.closed:
                    self._called.add(number)
            case Snapshot(round=number, fragment=p, version=version):
                self.counts[p].newest = max(self.counts[p].newest, version)
                self._close(number)
            case Refusal(island=self.island, incarnation=who, round=number, reason=reason, repeat=False) if who in (
                self.incarnation,
                self.formerly,
            ):
                self._answered.discard(number)  # what was refused has not answered its round
                self.refused += 1
                self.last_refusal = reason
            case _:
                pass

    def resumed(self, closed: int, unresolved: Collection[int]) -> None:
        """A merger begins again after round `closed`. If we knew of later ones, a broker has lost them: go back."""
        if closed < self.closed:
            self.closed = closed
            self._called.clear()
            for count in self.counts:
                count.newest = 0
        self._answered = {number for number in unresolved if number > self.closed}

    def due(self) -> int | None:
        """The round to contribute to at this step boundary, if any; ask again until there is none."""
        for number in sorted(self._called):
            if self._may_answer(number):
                return number
        if self._owed >= self.interval:
            for number in range(self.closed + 1, self.closed + 1 + self.window):
                if self._may_answer(number):
                    return number
        return None

    def sent(self, number: int) -> None:
        """The progress on that round's fragment is on its way; it is measured from here until the next adoption."""
        self._owed = max(0, self._owed - self.interval)
        self._answered.add(number)
        self._zero(self._fragment(number))

    def adopted(self, snapshot: Snapshot, keeps_progress: bool) -> None:
        """The fragment is measured from that snapshot now. `keeps_progress`: unsent steps stay in the parameters."""
        count = self.counts[snapshot.fragment]
        count.version = snapshot.version
        count.newest = max(count.newest, snapshot.version)
        if not keeps_progress:
            self._zero(snapshot.fragment)
        self._close(snapshot.round)
        self.global_step = max(self.global_step, snapshot.step)

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "counts": [asdict(count) for count in self.counts],
            "closed": self.closed,
            "global_step": self.global_step,
            "refused": self.refused,
            "answered": sorted(self._answered),
            "owed": self._owed,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from `state()`."""
        self.counts = [FragmentCount(**count) for count in state["counts"]]
        self.closed, self.global_step, self.refused = state["closed"], state["global_step"], state["refused"]
        self._answered, self._owed = set(state["answered"]), state["owed"]
        self._called.clear()

    def farewells(self) -> list[int]:
        """For every fragment with unsent progress its next round: what an island sends when it leaves."""
        fragments = len(self.counts)
        rounds = range(self.closed + 1, self.closed + 1 + fragments)
        return [number for number in rounds if self.counts[self._fragment(number)].steps]

    @property
    def staleness(self) -> float:
        """Mean over the fragments of the newest announced version minus the version held."""
        return sum(max(0, c.newest - c.version) for c in self.counts) / len(self.counts)

    def _fragment(self, number: int) -> int:
        return (number - 1) % len(self.counts)

    def _may_answer(self, number: int) -> bool:
        unanswered = number > self.closed and number not in self._answered
        return unanswered and self.counts[self._fragment(number)].steps > 0

    def _zero(self, fragment: int) -> None:
        self.counts[fragment].steps = self.counts[fragment].tokens = 0

    def _close(self, number: int) -> None:
        self.closed = max(self.closed, number)
        self._called = {n for n in self._called if n > self.closed}
        self._answered = {n for n in self._answered if n > self.closed}
