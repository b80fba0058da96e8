"""What a person may change on the page, and the sentence that answers. No Redis, no clock."""

from __future__ import annotations

from collections.abc import Mapping

from archipelago.broker.control import CHECKPOINT, DRAIN, EXPEL, GRACE, ISLAND, MERGING, OUTER_RATE, QUORUM

_NAMES = {OUTER_RATE: "The outer rate", QUORUM: "The quorum K", GRACE: "The grace γ"}


def stamped(changes: Mapping[str, str], unix_seconds: float) -> dict[str, str]:
    """The same, with a text for `checkpoint` that no checkpoint was asked for with before."""
    return {name: f"{unix_seconds:.3f}" if name == CHECKPOINT else value for name, value in changes.items()}


def sentence(changes: Mapping[str, str]) -> str:
    """What was asked for, in words; `changes` are checked ones, and an empty value takes a setting back."""
    return " ".join(_said(name, value) for name, value in changes.items()) or "Nothing was asked for."


def _said(name: str, value: str) -> str:
    if name in _NAMES:
        return (
            f"{_NAMES[name]} is {value} from the next round on." if value else f"{_NAMES[name]} is the run's own again."
        )
    if name == MERGING:
        return "Merging pauses; islands train on." if value else "Merging goes on."
    if name == CHECKPOINT:
        return "The merger takes a checkpoint."
    if name.startswith(ISLAND):
        return _of_island(name.removeprefix(ISLAND), value)
    return f"{name} is {value}." if value else f"{name} is taken back."


def _of_island(island: str, value: str) -> str:
    if value == DRAIN:
        return f"{island} sends what it has and leaves."
    if value == EXPEL:
        return f"{island} leaves, and is refused from now on."
    return f"{island} may come again."
