"""The figures of a storm: goodput, what the islands' time went to, and returns after kills; as data and as text.

The islands' *allocated* time is the window times their number. *Useful* inner steps are those that were merged.
*Possible* ones are those that fit into the allocated time at the run's step duration. Goodput is useful over possible.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from archipelago.broker.process import finite
from archipelago.ops.chaos.record import (
    RECOVERING,
    SERVING,
    STANDBY_USED,
    STOPPED,
    ProcessEvent,
    StormRecord,
    Timelines,
    checks,
    seconds_in,
    timelines,
    uptime,
)
from archipelago.ops.watch.formatting import number, size

REPORT = "report.json"
SHARE_LABELS = {
    "useful": "merged", "lost": "trained, never merged", "idle": "slower than the step duration",
    "stopped": "stopped", "recovering": "starting again", "dead": "dead",
}  # fmt: skip
#: Figures by name, as report.json has them.
Figures = dict[str, Any]


def figures(storm: StormRecord, control: Figures | None = None, baseline: Figures | None = None) -> Figures:
    """Return all figures of a storm, beside those of the same run without faults and of the baseline."""
    states, step = timelines(storm), storm.step_seconds
    trained = round(storm.steps_between(-math.inf, math.inf).total() * storm.tokens_per_step)
    settled = (storm.counters.merged_tokens, storm.counters.refused_tokens, storm.counters.pending_tokens)
    merged, refused, pending = (tokens // storm.layout.count for tokens in settled)
    losses = [entry.loss for entry in storm.tape[-max(1, len(storm.tape) // 10) :] if math.isfinite(entry.loss)]
    members = [member for entry in storm.tape for member in entry.members]
    turned = [turn.at for island in storm.islands for turn in storm.turns.get(island, ())]
    useful, spent, returned = merged_steps(storm), shares(storm, states), rejoins(storm)
    totals = [total for each in returned if not math.isnan(total := each["total_seconds"])]
    return {
        "seconds": storm.seconds,
        "islands": len(storm.islands),
        "step_seconds": step,
        "goodput": spent["useful"],
        "uptime": uptime(storm, states),
        "steps_useful": useful,
        "steps_lost": storm.steps_between(storm.begin, storm.end).total() - useful,
        "pause_seconds_worst": max(after - before for before, after in pauses(turned, storm.begin, storm.end)),
        "shares": spent,
        "rounds": storm.rounds_in_window,
        "rounds_per_minute": storm.rounds_in_window / storm.seconds * 60,
        "contributions_per_round": len(members) / max(1, len(storm.tape)),
        "faults": dict(sorted(Counter(f"{f.kind} {f.target}" for f in storm.faults).items())),
        "rejoins": returned,
        "rejoin_seconds_median": statistics.median(totals) if totals else math.nan,
        "rejoin_seconds_worst": max(totals, default=math.nan),
        "staleness": dict(sorted(Counter(member.staleness for member in members).items())),
        "tokens_trained": trained,
        "tokens_merged": merged,
        "tokens_refused": refused,
        "tokens_pending": pending,
        # Trained and not sent, mostly by islands that were killed.
        "tokens_lost": trained - merged - refused - pending,
        "bytes_up": storm.counters.bytes_up,
        "bytes_down": storm.bytes_down,
        "held_out_loss": storm.held_out_loss,
        "unit": storm.unit,
        # The mean of what the islands reported in the last tenth of the rounds.
        "training_loss": statistics.fmean(losses) if losses else math.nan,
        "checks": [asdict(check) for check in checks(storm)],
        "holds": all(check.holds for check in checks(storm)),
        "control": control,
        "baseline": baseline,
        "standbys": storm.standbys,
        "standbys_used": sum(event.what == STANDBY_USED for event in storm.events),
        "events": [asdict(replace(event, at=round(event.at - storm.begin, 3))) for event in storm.events],
    }


def shares(storm: StormRecord, states: Timelines) -> dict[str, float]:
    """Return the shares of the islands' allocated time, which sum to one, up to rounding.

    `useful` inner steps were merged, and `lost` ones trained and never merged. `idle` is training slower than the step
    duration allows: a stall, a loaded machine, a slow island. `recovering` islands were started and do not train yet:
    they import, compile and join. The others were `stopped` by SIGSTOP, or `dead`.
    """
    allocated = storm.seconds * len(storm.islands)
    step = storm.step_seconds

    def share(state: str) -> float:
        return sum(seconds_in(states[i], state, storm.begin, storm.end) for i in storm.islands) / allocated

    trained = storm.steps_between(storm.begin, storm.end).total() * step / allocated
    useful = merged_steps(storm) * step / allocated
    return {
        "useful": useful,
        "lost": trained - useful,
        "idle": share(SERVING) - trained,
        "stopped": share(STOPPED),
        "recovering": share(RECOVERING),
        "dead": 1.0 - sum(share(state) for state in (SERVING, STOPPED, RECOVERING)),
    }


def merged_steps(storm: StormRecord) -> float:
    """Return the inner steps of the window that were merged, as a mean over the fragments.

    This is a lower bound: an incarnation's steps outside of the window count as merged before those within.
    """
    merged = Counter[tuple[str, str]]()
    for member in (member for entry in storm.tape for member in entry.members):
        merged[member.island, member.incarnation] += member.steps
    outside = storm.steps_between(-math.inf, storm.begin) + storm.steps_between(storm.end, math.inf)
    return sum(max(0.0, steps / storm.layout.count - outside[one]) for one, steps in merged.items())


def pauses(times: Iterable[float], begin: float, end: float) -> list[tuple[float, float]]:
    """Return the parts into which these times cut a window."""
    inside = sorted(at for at in times if begin < at < end)
    return list(itertools.pairwise([begin, *inside, end]))


# -- islands that were killed -----------------------------------------------------------------------------------------


def rejoins(storm: StormRecord) -> list[Figures]:
    """Return the parts of each island's return after each kill, in seconds.

    `away_seconds` go by until the island is started again, then `start_seconds` until its first inner step, then
    `merge_seconds` until a round with a contribution of the new incarnation closes. A part is NaN if it did not happen
    before the end of the storm or the next kill.
    """
    kills = [e for e in storm.events if e.what in ("kill", "died") and e.process in storm.islands]
    return [_rejoin(storm, kill) for kill in kills]


def _rejoin(storm: StormRecord, kill: ProcessEvent) -> Figures:
    later = [e for e in storm.events if e.process == kill.process and e.at > kill.at]
    end = min((e.at for e in later if e.what in ("kill", "died")), default=storm.end)
    started = min((e.at for e in later if e.what == "start" and e.at < end), default=math.nan)
    turns = [turn for turn in storm.turns.get(kill.process, ()) if kill.at < turn.at < end]
    first, contributed = math.nan, math.nan
    if turns:
        first, newcomer = turns[0].at, (kill.process, turns[0].who)
        merged = [
            storm.closed_at.get(entry.round, math.inf)
            for entry in storm.tape
            if any((m.island, m.incarnation) == newcomer for m in entry.members)
        ]
        contributed = min((at for at in merged if at < end), default=math.nan)
    return {
        "island": kill.process,
        "at": kill.at - storm.begin,
        "away_seconds": started - kill.at,
        "start_seconds": first - started,
        "merge_seconds": contributed - first,
        "total_seconds": contributed - kill.at,
    }


# -- the report -------------------------------------------------------------------------------------------------------


def write(folder: Path, found: Figures, command: str) -> None:
    """Write report.json into the folder. `command` is the one that ran the storm."""
    text = json.dumps(finite({"command": command, **found}), indent=2)
    (folder / REPORT).write_text(f"{text}\n", encoding="utf-8")


def headlines(found: Figures) -> list[tuple[str, str]]:
    """Return the name and the value of each figure."""
    spent = found["shares"]
    rows = [
        ("goodput: merged inner steps over possible ones, at least", f"{found['goodput']:.1%}"),
        ("lost to restarts: dead, and starting again", f"{spent['dead'] + spent['recovering']:.1%}"),
        ("the islands' time", ", ".join(f"{label} {spent[name]:z.1%}" for name, label in SHARE_LABELS.items())),
        ("uptime: at least one island trains", f"{found['uptime']:.1%}"),
        ("rounds, per minute", f"{found['rounds']:,}, {found['rounds_per_minute']:.0f}"),
        ("contributions per round", f"{found['contributions_per_round']:.2f}"),
        ("tokens trained", "{tokens_trained:,} = merged {tokens_merged:,} + refused {tokens_refused:,} + pending "
                           "{tokens_pending:,} + lost {tokens_lost:,}".format(**found)),
        ("from a kill to the first merged contribution", _returns(found)),
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


def _returns(found: Figures) -> str:
    kills, back = len(found["rejoins"]), sum(math.isfinite(each["total_seconds"]) for each in found["rejoins"])
    times = f"{number(found['rejoin_seconds_median'], 1)} s median, {number(found['rejoin_seconds_worst'], 1)} s worst"
    why = "after the others, nothing was merged before the next kill or the storm's end"
    return times + (f", over {back} of {kills} kills: {why}" if back < kills else "")


def _loss(found: Figures) -> tuple[str, str]:
    if math.isnan(found["held_out_loss"]):  # only the user's script can compute its model
        return "training loss in the last tenth of the rounds", number(found["training_loss"], 4)
    return f"held-out {found['unit']}", number(found["held_out_loss"], 4)
