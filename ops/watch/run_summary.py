"""The report of `archipelago up`: `report.json`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from archipelago.broker.files import make_untracked, write_atomically
from archipelago.broker.manifest import LossUnit
from archipelago.broker.observe.merge_load import FEW_SYNCS_REMEDY
from archipelago.broker.process import finite
from archipelago.ops.watch.formatting import seconds_text
from archipelago.ops.watch.run_view import RunView

TEXT = "report.json"
#: Pairs of tokens and bits per byte, in order.
Curve = Sequence[tuple[int, float]]
#: The figures that a report has under the same names as the view.
_OF_VIEW = (
    "run", "unit", "parameters", "frozen_parameters", "fragments", "rounds", "held_out_first", "held_out_last",
    "pending", "tokens_trained", "tokens_merged", "tokens_refused", "tokens_pending", "tokens_unsent", "tokens_lost",
    "passes", "bytes_up", "bytes_down",
)  # fmt: skip
#: The figures are those of docs/results/learning.md, which were measured on models of up to 1 M parameters.
_GAPS = (
    "Islands train apart in between: four of them ended above data-parallel training by about 5 % after 10 syncs, and "
    "not at all after 50 or more (--inner.steps, --sync.interval)"
)


def summary(
    view: RunView,
    one_process: Curve,
    unit: LossUnit,
    *,
    tokens_per_second: float,
    seconds: float,
    server: str,
) -> dict[str, Any]:
    """Return the report as plain data. Speed and seconds are those of this session, and `server` is in words.

    `one_process` has the results of the comparison as evaluations have them; it is empty if none ran.
    """
    return {
        **{name: getattr(view, name) for name in _OF_VIEW},
        "finished": not view.unfinished,
        "held_out_one_process": unit.from_evaluation(one_process[-1][1]) if one_process else math.nan,
        "training_loss": view.loss,
        "syncs": view.syncs,
        "syncs_in_words": syncs_in_words(view),
        "steps": view.step,
        "islands": view.known,
        "contributions": view.counters.published,
        "merged": view.counters.merged,
        "refused": view.counters.refused,
        "counters_balance": view.balanced,
        "tokens_per_second": tokens_per_second,
        "seconds": seconds,
        "server": server,
        "curve": [[e.tokens, unit.from_evaluation(e.bits_per_byte)] for e in view.evaluations],
        "curve_one_process": [[tokens, unit.from_evaluation(bits)] for tokens, bits in one_process],
    }


def result_in_words(report: Mapping[str, Any]) -> str:
    """Return how the run ended, as one sentence: the time it took, and its loss beside that of one process."""
    last, single = report["held_out_last"], report["held_out_one_process"]
    ended = "finished" if report["finished"] else "interrupted"
    took = f" in {seconds_text(report['seconds'])}" if report["seconds"] else ""
    islands = f"{report['islands']} {'island' if report['islands'] == 1 else 'islands'}"
    if math.isnan(last):
        return f"{ended}{took} with {islands}; nothing was evaluated"
    side = "above" if last > single else "below"
    gap = f", {abs(last / single - 1.0):.1%} {side} one process on as many tokens ({single:.4f})"
    reached = f"{ended}{took}: {islands} reached {last:.4f} {report['unit']} on held-out data"
    return reached if math.isnan(single) else reached + gap


def syncs_in_words(view: RunView) -> str:
    """Return how many syncs there were, and which gap to data-parallel training that usually leaves."""
    if fault := view.few_syncs:
        return f"{fault} {FEW_SYNCS_REMEDY}"
    count = round(view.syncs)
    text = f"each fragment was synchronised {count:,} {'time' if count == 1 else 'times'}"
    return text if view.known < 2 else f"{text}. {_GAPS}"


def write(folder: Path, report: Mapping[str, Any]) -> None:
    """Write report.json into the folder."""
    make_untracked(folder)
    write_atomically(folder / TEXT, json.dumps(finite(report), indent=2) + "\n")


def read(folder: Path) -> dict[str, Any] | None:
    """Return the report in the folder, with null as NaN, or None if there is none."""
    try:
        found = json.loads((folder / TEXT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict):
        return None
    return {key: math.nan if value is None else value for key, value in found.items()}
