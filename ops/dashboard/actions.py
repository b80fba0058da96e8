"""The changes that a person can make on the page, and the sentences that confirm them. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from archipelago.broker.control import CHECKPOINT, DRAIN, EXPEL, GRACE, ISLAND, MERGING, OUTER_RATE, QUORUM

_NAMES = {OUTER_RATE: "The outer rate", QUORUM: "The quorum K", GRACE: "The grace γ"}


def stamped(changes: Mapping[str, str], unix_seconds: float) -> dict[str, str]:
    """Return the changes with the time as the value of `checkpoint`, so that each request is a new one."""
    return {name: f"{unix_seconds:.3f}" if name == CHECKPOINT else value for name, value in changes.items()}


def sentence(changes: Mapping[str, str]) -> str:
    """Describe checked changes in words. An empty value removes a setting."""
    return " ".join(_sentence(name, value) for name, value in changes.items()) or "No change was requested."


def _sentence(name: str, value: str) -> str:
    if name in _NAMES:
        return (
            f"{_NAMES[name]} is {value} from the next round on."
            if value
            else f"{_NAMES[name]} has the run's own value again."
        )
    if name == MERGING:
        return "Merging is paused; islands continue to train." if value else "Merging continues."
    if name == CHECKPOINT:
        return "The merger takes a checkpoint now."
    if name.startswith(ISLAND):
        return _island_sentence(name.removeprefix(ISLAND), value)
    return f"{name} is {value}." if value else f"{name} is removed."


def _island_sentence(island: str, value: str) -> str:
    if value == DRAIN:
        return f"{island} sends its last contributions and leaves."
    if value == EXPEL:
        return f"{island} leaves, and its contributions are refused from now on."
    return f"{island} may join again."
