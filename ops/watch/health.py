"""How a run is doing beside its numbers: who serves it, what is steered, what was refused, what happened lately."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from archipelago.broker.control import DRAIN, EXPEL, Control
from archipelago.broker.messages import Note, Refusal
from archipelago.broker.redis.checkup import RedisCheckup, Standing
from archipelago.broker.redis.connection import RedisConnection
from archipelago.broker.transport import Transport
from archipelago.ops.watch.run_view import RunView

REFUSALS_SHOWN = 3
STILL_SECONDS = 60.0
STRIDES_STILL = 3.0
"""strides without a round that are long, however slow the islands are"""


@dataclass(frozen=True)
class Situation:
    """Everything that a terminal shows beside the view."""

    standing: Standing
    control: Control = field(default_factory=Control)
    refusals: tuple[tuple[float, Refusal], ...] = ()
    """the newest, oldest first, each with its unix seconds by the broker's clock; no repeats"""


@dataclass(frozen=True)
class Happening:
    """A line of what happened."""

    unix_seconds: float
    who: str
    kind: str
    text: str


def situation(transport: Transport, refusals: int = REFUSALS_SHOWN) -> Situation:
    """As it is now. Raises BrokerError."""
    found = [(at, refusal) for at, refusal in transport.refusals(8 * refusals) if not refusal.repeat]
    return Situation(standing(transport) or Standing(), Control.of(transport.control()), tuple(found[-refusals:]))


def standing(transport: Transport) -> Standing | None:
    """Who serves the run now; None where there is no server to ask, as in virtual time. Raises BrokerError."""
    return RedisCheckup.beside(transport).standing() if isinstance(transport, RedisConnection) else None


def happened(notes: Sequence[Note], refusals: Sequence[tuple[float, Refusal]]) -> list[Happening]:
    """Notes and refusals as one list, oldest first."""
    out = [Happening(note.unix_seconds, note.who, note.kind, note.text) for note in notes]
    out += [
        Happening(at, refusal.island, "refused", f"round {refusal.round:,}: {refusal.reason}")
        for at, refusal in refusals
        if not refusal.repeat
    ]
    return sorted(out, key=lambda happening: happening.unix_seconds)


def steered(control: Control) -> str:
    """What is other than the run's own settings say, in words; empty for nothing."""
    said = ["merging is paused"] if control.is_paused else []
    said += [f"{name} = {value:g}" for name, value in control.settings.items()]
    for wish, words in ((DRAIN, "is to leave"), (EXPEL, "is expelled")):
        said += [f"{island} {words}" for island, wanted in control.islands.items() if wanted == wish]
    said += [f"{name} is ignored ({why})" for name, why in control.faults.items()]
    return ", ".join(said)


def trouble(view: RunView, found: Situation, interval: int) -> str:
    """Why somebody should look; empty when the run is fine, has ended, or is paused. `interval` is H."""
    if view.steps <= view.step:
        return ""
    if not view.live:
        return "no island is live"
    if not found.control.is_paused and found.standing.still_seconds > longest_still(view, interval):
        return f"nothing was merged for {found.standing.still_seconds:,.0f} s"
    return ""


def longest_still(view: RunView, interval: int) -> float:
    """Seconds after which a run in which no round closes has stalled. `interval` is H."""
    return max(STILL_SECONDS, STRIDES_STILL * _stride_seconds(view, interval))


def as_json(view: RunView, found: Situation, wrong: str) -> dict[str, Any]:
    """The view, and beside it who serves the run, what is steered, refused and wrong, for `print_json`."""
    return {
        **asdict(view),
        "merger": asdict(found.standing),
        "steered": dict(found.control.fields),
        "steered_words": steered(found.control),
        "refusals": [{"unix_seconds": at, **asdict(refusal)} for at, refusal in found.refusals],
        "trouble": wrong,
    }


def _stride_seconds(view: RunView, interval: int) -> float:
    """Between two rounds, of the fastest island that is live."""
    steps = [island.step_seconds for island in view.islands if island.live and island.step_seconds > 0]
    return min(steps, default=0.0) * interval / max(1, view.fragments)
