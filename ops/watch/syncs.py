"""How often a run has synchronised its fragments, and what that means for its loss. Pure.

The figures are those of docs/results/learning.md. They were measured on models of up to 1 M parameters.
"""

from __future__ import annotations

import math

#: After as many syncs of each fragment, up to four islands ended no worse than data-parallel training.
SYNCS_ENOUGH = 50
#: How far four islands ended above data-parallel training on as many tokens.
_GAPS = "about 5 % after 10 syncs, and not at all after 50 or more"


def syncs_of(rounds: int, fragments: int) -> float:
    """Return how often each fragment was synchronised. A round synchronises one of them."""
    return rounds / max(1, fragments)


def steps_for_enough(rounds: int, fragments: int, step: int, interval: int) -> int:
    """Return after how many steps each fragment has SYNCS_ENOUGH syncs, at the pace of the run so far."""
    syncs = syncs_of(rounds, fragments)
    return math.ceil(SYNCS_ENOUGH * max(interval, step / syncs if syncs else 0.0))


def in_words(rounds: int, fragments: int, step: int, interval: int, islands: int) -> str:
    """Return how many syncs there were, which gap to data-parallel that usually leaves, and how many steps close it.

    Args:
        rounds: The closed rounds.
        fragments: The number of fragments.
        step: The run's step.
        interval: H, the inner steps between two syncs of a fragment.
        islands: The islands that have trained.
    """
    count = round(syncs_of(rounds, fragments))
    text = f"each fragment was synchronised {count:,} {'time' if count == 1 else 'times'}"
    if islands < 2:
        return text
    text += f". Islands train apart in between. Four of them ended above data-parallel training by {_GAPS}"
    if count >= SYNCS_ENOUGH:
        return text
    steps = steps_for_enough(rounds, fragments, step, interval)
    return (
        f"{text}. Here, {SYNCS_ENOUGH} syncs take {steps:,} steps (--inner.steps), fewer with a smaller --sync.interval"
    )
