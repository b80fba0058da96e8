"""The figures of a storm as rows of text, for the terminal and for the page."""

from __future__ import annotations

import math

from archipelago.ops.chaos.lockstep.results import MethodResult
from archipelago.ops.chaos.report.figures import ISLANDS, Control, Figures, as_method_result
from archipelago.ops.chaos.report.goodput import Waits
from archipelago.ops.chaos.report.record import StormRecord
from archipelago.ops.watch.formatting import number, size

SHARE_LABELS = {
    "useful": "merged", "lost": "trained, never merged", "idle": "slower than the step duration",
    "stopped": "stopped", "recovering": "starting again", "dead": "dead",
}  # fmt: skip
#: The order in which methods are shown.
METHOD_ORDER = (ISLANDS, "synchronous DiLoCo", "elastic data-parallel", "data-parallel")
COLUMNS = (
    "", "goodput", "tokens in the parameters", "held-out bits per byte", "from a kill to its next step",
    "longest time without a step",
)  # fmt: skip


def headlines(found: Figures) -> list[tuple[str, str]]:
    """Return the name and the value of each figure."""
    stalls = found.stalls
    ceiling = "" if found.ceiling > 0.999 else f" (at most {found.ceiling:.1%}: an island is slow)"
    rows = [
        ("goodput: merged inner steps over possible ones", f"{found.goodput:.1%}{ceiling}"),
        ("goodput of the time in which islands trained", f"{found.goodput_of_live_time:.1%}"),
        ("lost to restarts: dead, and starting again", f"{found.shares.dead + found.shares.recovering:.1%}"),
        ("uptime: at least one island trains", f"{found.uptime:.1%}"),
        ("rounds, per minute", f"{found.rounds:,}, {found.rounds_per_minute:.0f}"),
        ("contributions per round", f"{found.contributions_per_round:.2f}"),
        ("tokens trained", f"{found.tokens_trained:,} = merged {found.tokens_merged:,} + refused "
                           f"{found.tokens_refused:,} + pending {found.tokens_pending:,} + lost {found.tokens_lost:,}"),
        ("from a kill to the first merged contribution", f"{number(found.rejoin_seconds_median, 1)} s median, "
                                                         f"{number(found.rejoin_seconds_worst, 1)} s worst"),
        ("device idle for over 10 ms", _waits(stalls.idle, stalls.turns)),
        ("training thread busy between two steps for over 10 ms", _waits(stalls.between, stalls.turns)),
        ("bytes up, down", f"{size(found.bytes_up)}, {size(found.bytes_down)}"),
        _loss_row(found),
    ]  # fmt: skip
    return [*rows, *(_control_rows(found.control) if found.control else [])]


def _loss_row(found: Figures) -> tuple[str, str]:
    if math.isnan(found.held_out_loss):  # only the user's script can compute its model
        return "training loss in the last tenth of the rounds", number(found.training_loss, 4)
    return f"held-out {found.unit}", number(found.held_out_loss, 4)


def _control_rows(control: Control) -> list[tuple[str, str]]:
    stalls = control.stalls
    return [
        (f"the same run without faults, after {control.tokens_merged:,} merged tokens",
                                                                 f"{_control_loss(control)}, "
                                                                 f"goodput {control.goodput:.1%}"),
        ("its device idle for over 10 ms", _waits(stalls.idle, stalls.turns)),
        ("its training thread busy between two steps for over 10 ms", _waits(stalls.between, stalls.turns)),
    ]  # fmt: skip


def _control_loss(control: Control) -> str:
    if math.isnan(control.held_out_loss):
        return f"training loss {number(control.training_loss, 4)}"
    return f"{number(control.held_out_loss, 4)} {control.unit}"


def _waits(waits: Waits, turns: int) -> str:
    return (
        f"{waits.over_10_ms:,} of {turns:,}, worst {waits.worst_seconds * 1e3:.0f} ms; without waits for a core "
        f"{waits.net_over_10_ms:,}, worst {waits.net_worst_seconds * 1e3:.0f} ms"
    )


def methods(storm: StormRecord, found: Figures) -> list[MethodResult]:
    """Return our own result and those of the baselines, in METHOD_ORDER."""
    return sorted([as_method_result(storm, found), *found.baselines], key=lambda one: METHOD_ORDER.index(one.method))


def comparison(storm: StormRecord, found: Figures) -> list[tuple[str, ...]]:
    """Return one row of COLUMNS for each method."""
    return [
        (
            f"{one.method}, this run" if one.method == ISLANDS else one.method,
            f"{one.goodput:.1%}",
            f"{one.tokens:,}",
            number(one.bits_per_byte, 4),
            f"{number(one.return_seconds_median, 1)} s",
            f"{number(one.pause_seconds_worst, 1)} s",
        )
        for one in methods(storm, found)
    ]
