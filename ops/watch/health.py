"""The health of a run: its merger, the controls that operators have set, its refusals and its recent events."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from archipelago.broker.control import DRAIN, EXPEL, Control
from archipelago.broker.messages import Note, Refusal
from archipelago.broker.shards.reader import numbered
from archipelago.broker.transport import MergerStatus, ReaderTransport, Standby
from archipelago.ops.watch.run_view import RunView

REFUSALS_SHOWN = 3
#: A run has stalled when it closed no round for this long and for this number of strides.
STALL_SECONDS = 60.0
STALL_STRIDES = 3.0


@dataclass(frozen=True)
class Health:
    """The facts about a run that a terminal shows in addition to its `RunView`.

    Attributes:
        merger_status: The merger that holds the lease, and the time since the last round closed.
        control: The controls that operators have set.
        refusals: The newest refusals without repeats, oldest first, each with the broker's unix time in seconds.
        refused: How many contributions were refused, by code; those of `claims.…` were merged for less.
        standbys: The mergers that wait for the lease.
        covered: The last round in a finished checkpoint; 0 if there is none.
    """

    merger_status: MergerStatus
    control: Control = field(default_factory=Control)
    refusals: tuple[tuple[float, Refusal], ...] = ()
    refused: Mapping[str, int] = field(default_factory=dict)
    standbys: tuple[Standby, ...] = ()
    covered: int = 0


@dataclass(frozen=True)
class Event:
    """A note, a refusal or a problem's begin or end, as one line of a run's history.

    Attributes:
        remedy: What to do about it; empty if its kind says so (`remedies`).
    """

    unix_seconds: float
    who: str
    kind: str
    text: str
    remedy: str = ""


def read_health(transport: ReaderTransport, refusals: int = REFUSALS_SHOWN) -> Health:
    """Return the run's health now, with at most `refusals` refusals. Raise BrokerError."""
    found = [(at, refusal) for at, refusal in transport.reader.refusals(8 * refusals) if not refusal.repeat]
    state = transport.reader.merger_state()
    return Health(
        transport.reader.merger_status() or MergerStatus(),
        Control.of(transport.reader.control()),
        tuple(found[-refusals:]),
        refused_by_code(state),
        tuple(transport.reader.standbys()),
        covered_round(state),
    )


def refused_by_code(state: str) -> dict[str, int]:
    """Return how many contributions were refused or lowered, by code, from the merger's state."""
    try:
        found = json.loads(state or "{}").get("refused", {})
        return {str(code): int(count) for code, count in found.items()}
    except (ValueError, AttributeError, TypeError, RecursionError):
        return {}


def covered_round(state: str) -> int:
    """Return the last round in a finished checkpoint, from the merger's state; 0 if there is none."""
    try:
        return int(json.loads(state or "{}").get("covered", 0))
    except (ValueError, AttributeError, TypeError, RecursionError):
        return 0


def events_of(notes: Sequence[Note], refusals: Sequence[tuple[float, Refusal]]) -> list[Event]:
    """Return notes and refusals (without repeats) as one list, oldest first."""
    out = [Event(note.unix_seconds, note.who, note.kind, note.text) for note in notes]
    out += [
        Event(at, refusal.island, "refused", f"round {refusal.round:,}: {refusal.reason}")
        for at, refusal in refusals
        if not refusal.repeat
    ]
    return sorted(out, key=lambda event: event.unix_seconds)


def describe_control(control: Control) -> str:
    """Describe the changes of operators in words. Return an empty string if there are none."""
    words = ["merging is paused"] if control.is_paused else []
    words += [f"{name} = {value}" for name, value in control.settings.items()]
    for wish, action in ((DRAIN, "is asked to leave"), (EXPEL, "is expelled")):
        words += [f"{island} {action}" for island, wanted in control.islands.items() if wanted == wish]
    words += [f"{name} is ignored ({why})" for name, why in control.faults.items()]
    return ", ".join(words)


def lacks_merger(status: MergerStatus) -> bool:
    """Return whether no merger serves a run that had one, or whose islands have sent contributions."""
    return not status.holder and (status.epoch > 0 or status.still_seconds > 0.0)


def stalled_shards(status: MergerStatus, seconds: float) -> list[int]:
    """Return the shards in which no round has closed for longer than that, if others do; none for one shard."""
    found = [shard for shard, each in enumerate(status.shards) if each.still_seconds > seconds]
    return found if len(found) < len(status.shards) else []


def trouble(view: RunView, health: Health, interval: int) -> str:
    """Return why an operator should look at the run; empty if it is fine, has ended, or is paused.

    Args:
        interval: H, the inner steps between two contributions to the same fragment.
    """
    if view.unreachable:
        return f"{numbered('shard', sorted(view.unreachable))} cannot be reached, so its figures are missing"
    if view.steps <= view.step:
        return ""
    if not view.live:
        return "no island is live"
    status, seconds = health.merger_status, stall_seconds(view, interval)
    if not health.control.is_paused and status.still_seconds > seconds:
        return f"nothing was merged{in_shards(stalled_shards(status, seconds))} for {status.still_seconds:,.0f} s"
    return ""


def in_shards(shards: Sequence[int]) -> str:
    """Return the words ` in shard 1` for some shards; empty for none."""
    return f" in {numbered('shard', shards)}" if shards else ""


def stall_seconds(view: RunView, interval: int) -> float:
    """Return the seconds without a closed round after which a run counts as stalled, for an interval of H steps."""
    return max(STALL_SECONDS, STALL_STRIDES * stride_seconds(view, interval))


def as_json(view: RunView, health: Health, problem: str) -> dict[str, Any]:
    """Return the view and the run's health as one object for `print_json`."""
    return {
        **asdict(view),
        "merger": asdict(health.merger_status),
        "standbys": [asdict(standby) for standby in health.standbys],
        "steered": dict(health.control.fields),
        "steered_words": describe_control(health.control),
        "refusals": [{"unix_seconds": at, **asdict(refusal)} for at, refusal in health.refusals],
        "refused_by_code": dict(health.refused),
        "trouble": problem,
    }


def stride_seconds(view: RunView, interval: int) -> float:
    """Return the seconds between two contributions of the fastest live island."""
    steps = [island.step_seconds for island in view.islands if island.live and island.step_seconds > 0]
    return min(steps, default=0.0) * interval / max(1, view.fragments)
