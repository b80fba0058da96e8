"""What a merger knows beside the waiting contributions, and how it is written down: with every commit, to the bit."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import jax

from broker.errors import ConfigError
from merger.admission import Sequences
from merger.clip import NormWindow
from merger.pace import Pace
from merger.weights import RunningMean


@dataclass(frozen=True)
class FragmentState:
    """One fragment: exact parameters (float32, N elements), the outer optimiser's state, and the norms it has seen."""

    params_N: jax.Array
    outer: Any
    norms: NormWindow


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

    def has_seen(self, identity: tuple[str, str, int]) -> bool:
        """Whether this contribution has ended already."""
        island, incarnation, sequence = identity
        return sequence in self.seen.get(f"{island}/{incarnation}", ())

    def see(self, identity: tuple[str, str, int]) -> None:
        """Marks a contribution as ended."""
        island, incarnation, sequence = identity
        self.seen.setdefault(f"{island}/{incarnation}", Sequences()).add(sequence)

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
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ConfigError(
                f"the merger's state cannot be read ({error!r})", "Was it written by another version of archipelago?"
            ) from None
