"""What a merger knows beside the waiting contributions, and how it is written down: with every commit, to the bit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import jax

from archipelago.broker.control import read_fields, read_settings
from archipelago.broker.corpus_shards import advanced, parse_places
from archipelago.broker.errors import ConfigError
from archipelago.broker.messages import Contribution
from archipelago.merger.admission import Sequences
from archipelago.merger.clip import NormWindow
from archipelago.merger.round_timing import Pace
from archipelago.merger.weights import RunningMean

INCARNATIONS_MAX = 4096
"""Lives of islands whose contributions are remembered; those that were silent longest are forgotten first."""


@dataclass(frozen=True)
class FragmentState:
    """One fragment: exact parameters (float32, N elements), the outer optimiser's state, and the norms it has seen.

    `published_N` is what the islands hold: `params_N`, rounded where the codec of snapshots rounds.
    """

    params_N: jax.Array
    outer: Any
    norms: NormWindow
    published_N: jax.Array


@dataclass
class RunState:
    """What is not of one fragment. `seen` holds the contributions that were merged or refused, by incarnation."""

    closed: int = 0
    step: int = 0
    tokens: int = 0
    staleness: RunningMean = field(default_factory=RunningMean)
    pace: Pace = field(default_factory=Pace)
    norms: dict[int, NormWindow] = field(default_factory=dict)
    seen: dict[str, Sequences] = field(default_factory=dict)
    cursors: dict[str, tuple[int, int]] = field(default_factory=dict)
    """pass and sequence from which each shard of the data is to be read"""
    step_seconds: dict[str, float] = field(default_factory=dict)
    """of each island's inner step, as it reported last"""
    island_tokens: dict[str, int] = field(default_factory=dict)
    """merged tokens of each island, summed over the fragments"""
    covered: int = 0
    """the last round that a finished checkpoint on disk holds"""
    steered: dict[str, float] = field(default_factory=dict)
    """settings that the last closed round had in place of the run's own (`broker.control`)"""
    control: dict[str, str] = field(default_factory=dict)
    """the operator's wishes that were acted on last"""

    def after_round(self, number: int, merged: Sequence[Contribution], pace: Pace) -> None:
        """Takes in that a round closed with these contributions."""
        self.closed = number
        self.pace = pace
        self.step = max([self.step, *(c.global_step for c in merged)])
        self.tokens += sum(c.tokens for c in merged)
        for c in sorted(merged, key=lambda c: c.identity):  # what comes out does not depend on who arrived first
            self.see(c.identity)
            self.step_seconds[c.island] = c.step_seconds
            self.island_tokens[c.island] = self.island_tokens.get(c.island, 0) + c.tokens
            self.cursors |= advanced(self.cursors, parse_places(c.data))

    def has_seen(self, identity: tuple[str, str, int]) -> bool:
        """Whether this contribution has ended already."""
        island, incarnation, sequence = identity
        return sequence in self.seen.get(f"{island}/{incarnation}", ())

    def see(self, identity: tuple[str, str, int]) -> None:
        """Marks a contribution as ended."""
        island, incarnation, sequence = identity
        who = f"{island}/{incarnation}"
        found = self.seen.pop(who, None) or Sequences()
        found.add(sequence)
        self.seen[who] = found  # at the end: the dictionary's order is that of the last use, and JSON keeps it
        while len(self.seen) > INCARNATIONS_MAX:
            del self.seen[next(iter(self.seen))]

    def to_json(self) -> str:
        """JSON for the commit."""
        values = {
            "closed": self.closed,
            "step": self.step,
            "tokens": self.tokens,
            "staleness": asdict(self.staleness),
            "pace": asdict(self.pace),
            "norms": {p: list(window.norms) for p, window in self.norms.items()},
            "seen": {who: [s.floor, *sorted(s.above)] for who, s in self.seen.items()},
            "cursors": {shard: list(cursor) for shard, cursor in self.cursors.items()},
            "step_seconds": self.step_seconds,
            "island_tokens": self.island_tokens,
            "covered": self.covered,
            "steered": self.steered,
            "control": self.control,
        }
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str) -> RunState:
        """The state that `to_json` wrote; a fresh one for empty text. Raises ConfigError for anything else."""
        if not text:
            return cls()
        try:
            values = json.loads(text)
            return cls(
                closed=int(values["closed"]),
                step=int(values["step"]),
                tokens=int(values["tokens"]),
                staleness=RunningMean(**values["staleness"]),
                pace=Pace(**values["pace"]),
                norms={int(p): NormWindow(tuple(norms)) for p, norms in values["norms"].items()},
                seen={who: Sequences(floor, set(above)) for who, (floor, *above) in values["seen"].items()},
                cursors={str(s): (int(n), int(at)) for s, (n, at) in values["cursors"].items()},
                step_seconds={str(who): float(seconds) for who, seconds in values["step_seconds"].items()},
                island_tokens={str(who): int(tokens) for who, tokens in values["island_tokens"].items()},
                covered=int(values["covered"]),
                steered=read_settings(values["steered"]),
                control=read_fields(values["control"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ConfigError(
                f"the merger's state cannot be read ({error!r})",
                "Was it written by another version of archipelago?",
                code="config.merger-state",
            ) from None
