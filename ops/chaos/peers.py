"""The benchmark that other fault-tolerant trainers report: three islands, with kills, and with one slow island."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from archipelago.broker.config import RunConfig, checked
from archipelago.broker.process import finite
from archipelago.ops.chaos.report.figures import Figures, as_data
from archipelago.ops.chaos.schedule import Fault, periodic
from archipelago.ops.settings import say

KILL_SECONDS, AWAY_SECONDS, SLOW = 15.0, 2.0, 2.0
ISLANDS, STEP_SECONDS = 3, 0.05


@dataclass(frozen=True)
class Case:
    """One storm of the benchmark. `slow` multiplies the last island's step duration."""

    name: str
    seed: int
    faults: Sequence[Fault]
    slow: float = 1.0


def settings_of(config: RunConfig) -> RunConfig:
    """Return the config of the benchmark: about 1 M parameters, H = 40."""
    return checked(dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, size="small"),
        data=dataclasses.replace(config.data, batch_size=1, sequence_length=16),
        sync=dataclasses.replace(config.sync, interval=40),
    ))  # fmt: skip


def cases(islands: Sequence[str], seconds: float, seeds: Sequence[int]) -> list[Case]:
    """Return the cases: no faults, a kill every 15 s with each seed, and one slow island."""
    kills = [
        Case(f"kill every {KILL_SECONDS:g} s", seed, periodic(KILL_SECONDS, islands, AWAY_SECONDS, seconds, seed))
        for seed in seeds
    ]
    return [Case("no faults", 0, []), *kills, Case(f"one island {SLOW:g} times slower", 0, [], SLOW)]


def run_cases(
    chosen: Sequence[Case], folder: Path, run: Callable[[Case, Path], Figures], command: str
) -> list[dict[str, Any]]:
    """Run each case in a separate folder. Write the figures of all cases into peers.json and print a table.

    Args:
        chosen: The cases.
        folder: The folder of the benchmark.
        run: Runs one case in a folder.
        command: The command that started the benchmark.
    """
    rows: list[dict[str, Any]] = []
    for case in chosen:
        own = folder / f"case-{len(rows)}"
        own.mkdir()
        say(f"\n{case.name}, seed {case.seed}")
        rows.append({"case": case.name, "seed": case.seed, **finite(as_data(run(case, own)))})
    (folder / "peers.json").write_text(json.dumps({"command": command, "rows": rows}, indent=2) + "\n", "utf-8")
    say(f"\n{'case':<28}{'goodput':>9}{'of live':>9}{'restarts':>10}{'ceiling':>9}  worst stall, net")
    for name in dict.fromkeys(row["case"] for row in rows):
        say(_line(name, [row for row in rows if row["case"] == name]))
    return rows


def _line(case: str, rows: Sequence[dict[str, Any]]) -> str:
    mean = statistics.fmean
    goodput, live = mean(row["goodput"] for row in rows), mean(row["goodput_of_live_time"] for row in rows)
    restarts = mean(row["shares"]["dead"] + row["shares"]["recovering"] for row in rows)
    worst = [max(r["stalls"]["idle"][key] for r in rows) for key in ("worst_seconds", "net_worst_seconds")]
    return (
        f"{case:<28}{goodput:>9.1%}{live:>9.1%}{restarts:>10.1%}{rows[0]['ceiling']:>9.1%}"
        f"  {worst[0] * 1e3:.0f} ms, {worst[1] * 1e3:.0f} ms"
    )
