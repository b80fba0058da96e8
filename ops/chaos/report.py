"""The report of a storm: its figures as text and in report.json."""

from __future__ import annotations

import json
import math
from pathlib import Path

from archipelago.broker.process import finite
from archipelago.ops.chaos.figures import Figures
from archipelago.ops.watch.formatting import number, size

REPORT = "report.json"
SHARE_LABELS = {
    "useful": "merged", "lost": "trained, never merged", "idle": "slower than the step duration",
    "stopped": "stopped", "recovering": "starting again", "dead": "dead",
}  # fmt: skip


def write(folder: Path, found: Figures, command: str) -> None:
    """Write report.json into the folder. `command` is the one that ran the storm."""
    text = json.dumps(finite({"command": command, **found}), indent=2)
    (folder / REPORT).write_text(f"{text}\n", encoding="utf-8")


def headlines(found: Figures) -> list[tuple[str, str]]:
    """Return the name and the value of each figure."""
    ceiling = "" if found["ceiling"] > 0.999 else f" (at most {found['ceiling']:.1%}: an island is slow)"
    spent = found["shares"]
    rows = [
        ("goodput: merged inner steps over possible ones", f"{found['goodput']:.1%}{ceiling}"),
        ("goodput of the time in which islands trained", f"{found['goodput_of_live_time']:.1%}"),
        ("lost to restarts: dead, and starting again", f"{spent['dead'] + spent['recovering']:.1%}"),
        ("the islands' time", ", ".join(f"{label} {spent[name]:.1%}" for name, label in SHARE_LABELS.items())),
        ("uptime: at least one island trains", f"{found['uptime']:.1%}"),
        ("rounds, per minute", f"{found['rounds']:,}, {found['rounds_per_minute']:.0f}"),
        ("contributions per round", f"{found['contributions_per_round']:.2f}"),
        ("tokens trained", "{tokens_trained:,} = merged {tokens_merged:,} + refused {tokens_refused:,} + pending "
                           "{tokens_pending:,} + lost {tokens_lost:,}".format(**found)),
        ("from a kill to the first merged contribution", f"{number(found['rejoin_seconds_median'], 1)} s median, "
                                                         f"{number(found['rejoin_seconds_worst'], 1)} s worst"),
        ("device idle for over 10 ms, without waits for a core",
         "{over_10_ms:,} of {turns:,} turns, worst {worst_seconds:.3f} s".format(**found["stalls"])),
        ("bytes up, down", f"{size(found['bytes_up'])}, {size(found['bytes_down'])}"),
        _loss(found),
    ]  # fmt: skip
    if (control := found["control"]) is not None:
        name, loss = _loss(control)
        what = f"the same run without faults, after {control['tokens_merged']:,} merged tokens"
        rows.append((what, f"{name} {loss}, goodput {control['goodput']:.1%}"))
    if (baseline := found["baseline"]) is not None:
        columns = ("goodput {goodput:.1%}, uptime {uptime:.1%}, inner steps kept {steps_useful:,.0f}, lost "
                   "{steps_lost:,.0f}, longest time without a step {pause_seconds_worst:.1f} s")  # fmt: skip
        rows += [("islands, this storm", columns.format(**found)), ("data-parallel", columns.format(**baseline))]
    return rows


def _loss(found: Figures) -> tuple[str, str]:
    if math.isnan(found["held_out_loss"]):  # only the user's script can compute its model
        return "training loss in the last tenth of the rounds", number(found["training_loss"], 4)
    return f"held-out {found['unit']}", number(found["held_out_loss"], 4)
