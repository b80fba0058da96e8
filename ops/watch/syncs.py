"""How often a run has synchronised its fragments, and what that means for its loss. Pure.

The figures are those of docs/results/learning.md. They were measured on models of up to 1 M parameters.
"""

from __future__ import annotations

import math

#: After so many syncs of each fragment, the studies of the defaults end.
SYNCS_ENOUGH = 160
#: After fewer syncs than the first number: how far islands end above data-parallel training on as many tokens.
_GAPS = ((30, "about 6 %, measured after 10 syncs"), (110, "about 3 %, measured after 50 syncs with 4 islands"))
_GAP_OF_LONG_RUNS = "1 to 3 %, with 2 to 16 islands"


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
    syncs = syncs_of(rounds, fragments)
    text = f"each fragment was synchronised {syncs:,.0f} times"
    if islands < 2:
        return text
    gap = next((words for most, words in _GAPS if syncs < most), _GAP_OF_LONG_RUNS)
    text += f"; islands then end above one process on as many tokens: {gap}"
    if syncs >= SYNCS_ENOUGH:
        return text
    steps = steps_for_enough(rounds, fragments, step, interval)
    return (
        f"{text}. Between two syncs each island follows its own text, and the outer momentum needs many rounds, so a "
        f"short run shows the largest gap. {SYNCS_ENOUGH} syncs ({_GAP_OF_LONG_RUNS}) take about {steps:,} steps here "
        "(--inner.steps), or fewer with a smaller --sync.interval"
    )
