"""The results of a study: a table of mean and spread over seeds, against data-parallel."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from archipelago.ops.bench.output import table
from archipelago.ops.experiments import study as studies
from archipelago.ops.experiments.study import Study
from archipelago.ops.experiments.trial import Record, TrialRow, grouped
from archipelago.ops.settings import say, table_console

#: Two runs are compared when their tokens differ by at most this share. Islands end within a few steps of each other.
SAME_TOKENS = 0.03
#: The settings of the merger's rule against hostile islands.
_RULES = ("merge.scores", "merge.share_cap")


def show(study: Study, known: Mapping[str, Record], quiet: bool = False) -> dict[str, Any]:
    """Print the table. Return the rows as plain data, best first for each number of islands."""
    rows = grouped([known[trial.key] for trial in study.trials if trial.key in known])
    if not rows:
        say(f"{study.name}: nothing is recorded yet")
        return {"study": study.name, "about": study.about, "rows": []}
    varying = ["kind", *studies.varying([row.settings for row in rows])]
    found = [_plain(row, rows, varying) for row in sorted(rows, key=lambda row: (row.settings["islands"], row.mean))]
    if not quiet:
        console = table_console()
        console.print(study.about)
        console.print(table([{**row, **{name: str(row[name]) for name in varying}} for row in found], console.width))
    return {"study": study.name, "about": study.about, "rows": found}


def baseline(row: TrialRow, rows: Sequence[TrialRow]) -> TrialRow | None:
    """Return the row that a row is compared with.

    For a row with hostile islands this is the run in which they are absent, and for an honest row with the merger's
    scores the same row without them, if the study has it. All others are compared with the best data-parallel row with
    the same number of islands and of tokens.
    """
    honest = [other for other in rows if not other.settings["hostile"] and _identity(other) == _identity(row)]
    if row.settings["hostile"] or row.settings.get("merge.scores"):
        without = [other for other in honest if not other.settings.get("merge.scores")]
        cap = row.settings.get("merge.share_cap")
        others = without or (honest if row.settings["hostile"] else [])
        if others or row.settings["hostile"]:
            return min(others, key=lambda other: other.settings.get("merge.share_cap") != cap, default=None)
    same = [
        other for other in rows
        if other.settings["kind"] == "parallel" and other.settings["islands"] == row.settings["islands"]
        and abs(other.tokens / row.tokens - 1) <= SAME_TOKENS
    ]  # fmt: skip
    return min(same, key=lambda other: other.mean, default=None)


def _identity(row: TrialRow) -> tuple[Any, ...]:
    """Return what a row shares with the row that it is compared with: all but the attack and the merger's rule."""
    others = {k: v for k, v in row.settings.items() if k not in ("islands", "hostile", "attack", *_RULES)}
    honest = row.settings["islands"] - row.settings["hostile"]
    return honest, sorted(others.items(), key=str)


def _plain(row: TrialRow, rows: Sequence[TrialRow], varying: Sequence[str]) -> dict[str, Any]:
    best = baseline(row, rows)
    ratios, tests = row.ratios(best), row.ratios(best, "test")
    rounds = [r["rounds"] for r in row.records if "rounds" in r]
    return {
        **{name: row.settings.get(name, "") for name in varying},
        "seeds": len(row.records),
        "diverged": row.diverged,
        "tokens": round(row.tokens),
        "rounds": round(fmean(rounds)) if rounds else 0,
        "bits_per_byte": row.mean,
        "spread": row.spread,
        "to_parallel": row.ratio(best),
        "ratio_spread": stdev(ratios) if len(ratios) > 1 else 0.0,
        "to_parallel_on_test": fmean(tests) if tests else math.nan,
        "seconds": fmean(r["seconds"] for r in row.records),
    }
