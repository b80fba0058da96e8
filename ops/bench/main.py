"""`archipelago bench`: measurements, each as ratios within one run, with a table for people and JSON for programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.table import Table

from archipelago.broker.config import RunConfig, checked
from archipelago.broker.errors import ConfigError
from archipelago.broker.process import finite, keep_compiled, print_json
from archipelago.ops.settings import say, table_console


@dataclass(frozen=True)
class BenchOptions:
    """Measure, as ratios within one run: loss, returns, steps, links, the wire, merging, bytes.

    In virtual time: `parity` (loss against one process, data-parallel and DiLoCo), `time` (time to loss where one
    island is slow, with scavenged islands and without), `returns` (what an island's return costs). `steps`: scan or
    single. `link`: an island behind a proxy that throttles. `wire`: through Redis against bare sockets. `merge`: codecs
    and merging against bare numpy. `bytes`: what each pair of codecs sends.
    `sync`: one outer synchronisation of 10 M parameters against torchft's.
    `island`: what syncing costs an island in time and memory. `start`: what starting one costs, with warm caches.
    `largest`: the largest model that passes the wire here.
    """

    what: Annotated[
        Literal[
            "parity", "time", "returns", "steps", "link", "wire", "merge", "bytes", "sync", "island", "start", "largest"
        ],
        tyro.conf.Positional,
    ]
    """which measurement"""
    quick: bool = False
    """a shorter run that says less: 400 global steps, smaller payloads and vectors"""
    islands: tuple[int, ...] = (3,)
    """parity: numbers of islands; time: the first of them"""
    slow: float = 1.0
    """parity, time: the last island's steps take this many times longer"""
    scavenged: tuple[int, ...] = (3,)
    """time: how many islands more for half of the run; a run for each number"""
    seeds: tuple[int, ...] = ()
    """parity, time: seeds to take means and spreads over, such as 0 1 2; default the settings' own"""
    tune: bool = False
    """parity: baselines take the best of four inner learning rates, found with the first seed"""
    torchft_python: str = ""
    """sync: a Python that has torchft (`ops/bench_torchft.py` says how); default $ARCHIPELAGO_TORCHFT_PYTHON"""
    parameters: float = 0.0
    """largest: of the model that is to pass; default 1e9, or 2e7 with --quick"""
    output: Path = Path("runs/bench")
    """folder for the JSON and the picture"""
    config: Path | None = None
    """a TOML file with settings; flags win over it"""
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)
    json: bool = False
    """print one JSON object"""


def main(options: BenchOptions) -> int:
    """Runs one measurement."""
    config = checked(options.settings)
    if not options.islands or not all(1 <= count <= 64 for count in options.islands):
        raise ConfigError(f"--islands cannot be {options.islands}", "Give numbers from 1 to 64.")
    if not options.slow >= 1:
        raise ConfigError(f"--slow cannot be {options.slow}", "Give a factor of at least 1.")
    keep_compiled()
    measures: dict[str, Callable[[BenchOptions, RunConfig], dict[str, Any]]] = {
        "parity": _parity, "time": _time, "returns": _returns, "steps": _steps, "link": _link,
        "wire": _wire, "merge": _merge, "bytes": _bytes, "sync": _sync,
        "island": _island, "start": _start, "largest": _largest,
    }  # fmt: skip
    found = measures[options.what](options, config)
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"{options.what}.json"
    path.write_text(json.dumps(finite(found), indent=2) + "\n", encoding="utf-8")
    if options.json:
        print_json(found)
    else:
        console = table_console()
        console.print(_table(found["rows"], console.width))
    say(f"written: {path}" + (f"  picture: {found['picture']}" if "picture" in found else ""))
    return 0


def _parity(options: BenchOptions, config: RunConfig) -> dict[str, Any]:
    from archipelago.ops.experiments.parity import parity

    config = _quick(config) if options.quick else config
    return parity(config, options.islands, options.slow, options.output, say, options.seeds, options.tune)


def _time(options: BenchOptions, config: RunConfig) -> dict[str, Any]:
    from archipelago.ops.experiments.time_to_loss import time_to_loss

    if not all(1 <= more <= 64 for more in options.scavenged):
        raise ConfigError(f"--scavenged cannot be {options.scavenged}", "Give numbers from 1 to 64.")
    config = _quick(config) if options.quick else config
    seeds = options.seeds or (config.seed,)
    return time_to_loss(config, options.islands[0], options.slow, options.scavenged, seeds, options.output, say)


def _returns(options: BenchOptions, config: RunConfig) -> dict[str, Any]:
    from archipelago.ops.experiments.returns import returns

    return returns(_quick(config) if options.quick else config, say)


def _quick(config: RunConfig) -> RunConfig:
    return dataclasses.replace(config, inner=dataclasses.replace(config.inner, steps=400, warmup_steps=40))


def _steps(options: BenchOptions, config: RunConfig) -> dict[str, Any]:
    from archipelago.ops.bench.steps import steps

    return steps(config, repeats=5 if options.quick else 20)


def _link(options: BenchOptions, config: RunConfig) -> dict[str, Any]:
    from archipelago.ops.bench.link import link

    return link(say, quick=options.quick)


def _wire(options: BenchOptions, config: RunConfig) -> dict[str, Any]:
    from archipelago.ops.bench.wire import wire

    return _drawn(options, wire(options.quick, say))


def _merge(options: BenchOptions, config: RunConfig) -> dict[str, Any]:
    from archipelago.ops.bench.merge import merge

    return _drawn(options, merge(options.quick))


def _drawn(options: BenchOptions, found: dict[str, Any]) -> dict[str, Any]:
    """With a picture, of what has nothing but ratios."""
    from archipelago.ops.watch.run_summary import draw_ratios

    picture = options.output / f"{options.what}.png"
    options.output.mkdir(parents=True, exist_ok=True)
    draw_ratios(picture, f"archipelago bench {options.what}", found["rows"])
    return found | {"picture": str(picture)}


def _bytes(options: BenchOptions, config: RunConfig) -> dict[str, Any]:
    from archipelago.ops.bench.bytes import weigh

    return weigh(config, 12 if options.quick else 48, say)


def _sync(options: BenchOptions, config: RunConfig) -> dict[str, Any]:
    from archipelago.ops.bench.sync import QUICK, sync

    return sync(say, options.torchft_python, QUICK if options.quick else None)


def _island(options: BenchOptions, config: RunConfig) -> dict[str, Any]:
    from archipelago.ops.bench.island import island

    return island(config, options.quick, say)


def _start(options: BenchOptions, config: RunConfig) -> dict[str, Any]:
    from archipelago.ops.bench.start import start

    return start(config, options.quick, say)


def _largest(options: BenchOptions, config: RunConfig) -> dict[str, Any]:
    from archipelago.ops.bench.largest import PARAMETERS, PARAMETERS_QUICK, largest

    return largest(options.parameters or (PARAMETERS_QUICK if options.quick else PARAMETERS), say)


def _table(rows: list[dict[str, Any]], width: int) -> Table:
    """Names and numbers stay whole: where they do not fit, columns stand closer, and heads on several lines."""
    cells = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    heads, *body = cells
    fits = sum(max(map(len, column)) + 2 for column in zip(*cells, strict=True)) - 2 <= width
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 1) if fits else (0, 1, 0, 0))
    for index, head in enumerate(heads):
        table.add_column(head.replace("_", " " if fits else "\n"), justify="right" if index else "left")
    for row in body:
        table.add_row(*row)
    return table


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
