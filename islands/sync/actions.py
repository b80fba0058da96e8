"""What an island did, action by action, as text: with the tape and the payloads, enough to do it all again.

An action is a word. `join:V0,V1,…` begins from those versions with fresh moments; `moments:ISLAND/INCARNATION@K` takes
over the inner optimiser state that one had after K actions, and `whole:ISLAND/INCARNATION@K` all that it was;
`d17:0:96:0` begins a pass over a shard, `f17,3` forgets leases; `n4` makes four inner steps in one scan; `a2:7` adopts
version 7 of fragment 2; `s9` measures the contribution to round 9, `s9:top3` with that codec.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from archipelago.broker.errors import WireError
from archipelago.broker.messages import Actions

ACTIONS_MAX = 1 << 24
"""Of one incarnation, that are unfolded: actions come from outside, and a short text can say many."""
_REPEATED = re.compile(r"(\S+?)\*([0-9]{1,18})")


@dataclass
class ActionLog:
    """Collects the actions of one incarnation. `index` counts all that were taken away."""

    island: str
    incarnation: str
    enabled: bool
    index: int = 0

    def __post_init__(self) -> None:
        self._words: list[tuple[str, int]] = []

    @property
    def done(self) -> int:
        """Actions in all."""
        return self.index + sum(count for _, count in self._words)

    def did(self, action: str) -> None:
        """One more action."""
        if not self.enabled:
            return
        if self._words and self._words[-1][0] == action:
            self._words[-1] = (action, self._words[-1][1] + 1)
        else:
            self._words.append((action, 1))

    def take(self) -> Actions | None:
        """What was done since it was asked last, None for nothing."""
        actions = self.peek()
        self.index, self._words = self.done, []
        return actions

    def peek(self) -> Actions | None:
        """The same, and it stays: it may be told twice."""
        return Actions(self.island, self.incarnation, self.index, _text(self._words)) if self._words else None


def _text(words: Iterable[tuple[str, int]]) -> str:
    return " ".join(action if count == 1 else f"{action}*{count}" for action, count in words)


def _words(text: str) -> Iterator[tuple[str, int]]:
    for word in text.split():
        found = _REPEATED.fullmatch(word)
        yield (found[1], int(found[2])) if found else (word, 1)


def unfolded(logged: Sequence[Actions]) -> list[str]:
    """The actions of one incarnation in order, from parts that may overlap, up to the first gap."""
    out: list[str] = []
    for actions in sorted(logged, key=lambda t: t.index):
        if actions.index > len(out):
            break
        skip = len(out) - actions.index
        for action, count in _words(actions.text):
            done = min(skip, count)
            skip -= done
            if len(out) + count - done > ACTIONS_MAX:
                raise WireError(f"the actions of {actions.island} are more than {ACTIONS_MAX:,} actions")
            out += [action] * (count - done)
    return out
