"""`archipelago bench start`: the processor time from the start of an island to the end of its first inner step.

Each start is a separate island process. The first one finds empty caches; the others find its caches, like an island
that was killed and restarts. We measure processor time because a storm restarts several islands on busy cores. The
islands take turns with the floor: a Python that loads JAX and runs one trivial program from its cache.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from archipelago.broker.config import DataConfig, ModelConfig, RunConfig, checked
from archipelago.broker.errors import BrokerError
from archipelago.broker.process import RUN_VARIABLE, URL_VARIABLE, keep_compiled
from archipelago.broker.redis.transport import connect
from archipelago.islands.main import Assignment
from archipelago.islands.turn_log import VARIABLE as TURN_LOG_VARIABLE
from archipelago.ops.bench.output import OutputOptions, finish
from archipelago.ops.bench.process import cpu_seconds, require_linux
from archipelago.ops.launch import parent_death
from archipelago.ops.launch.embedded_redis import start_server
from archipelago.ops.launch.standbys import ISLAND, Standby
from archipelago.ops.settings import say

RUN, NAME = "bench-start", "island"
PACE = ("--scan-steps", "1", "--step-seconds-min", "0.05")
STARTS, STARTS_QUICK = 5, 2
GOAL_SECONDS = 1.2
WAIT_SECONDS = 600.0
POLL_SECONDS = 0.002
FLOOR = """
import time, jax
jax.jit(lambda x: x + 1)(1.0).block_until_ready()
print(time.process_time())
"""


@dataclass(frozen=True)
class Start:
    """The parts of one island's start, in seconds of processor time; `wall` is wall time.

    Attributes:
        wall: Until the first inner step has ended.
        total: The same in processor time, to the clock tick (10 ms on most machines).
        imports: The interpreter, and everything it loads before it joins.
        joining: Joining the run.
        programs: Finding or compiling the programs, and trying each once.
        state: The optimiser's state, from the island's own checkpoint if there is one.
    """

    wall: float
    total: float
    imports: float
    joining: float
    programs: float
    state: float

    @property
    def first_step(self) -> float:
        """The rest of the total: the first inner step."""
        return max(0.0, self.total - self.imports - self.joining - self.programs - self.state)


@dataclass(frozen=True)
class StartOptions(OutputOptions):
    """Measure the processor time to start an island: with empty caches, with warm ones, and from a standby."""

    quick: bool = False
    """Use the tiny model, and fewer starts."""
    config: Path | None = None
    """A TOML file with settings. Flags win over it."""
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)


def main(options: StartOptions) -> int:
    """Measure, and write the results."""
    config = checked(options.settings)
    keep_compiled()
    return finish("start", start(config, options.quick, say), options)


def start(config: RunConfig, quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure the parts of a start. Return plain data with `rows`."""
    require_linux()
    from archipelago.ops.launch.init import create

    config = settled(config, quick)
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        server = held.enter_context(start_server(folder / "redis"))
        transport = connect(server.url, RUN)
        held.callback(transport.close)
        create(transport, config)
        environment = {
            **os.environ,
            URL_VARIABLE: server.url,
            RUN_VARIABLE: RUN,
            TURN_LOG_VARIABLE: str(folder / "turns"),
            "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        cold = started(folder, environment)
        say(f"{_what(config)}: {cold.total:.2f} s of processor time with empty caches")
        _floor(environment)  # From now on the cache has this program.
        warm, floors, standbys = [], [], []
        for number in range(STARTS_QUICK if quick else STARTS):
            warm.append(started(folder, environment))
            floors.append(_floor(environment))
            standbys.append(taken_over(folder, environment))
            say(
                f"again, {number + 1}: {warm[-1].total:.2f} s, {floors[-1]:.2f} s for JAX alone, "
                f"{standbys[-1][1]:.2f} s of a standby"
            )
    found = summary(cold, warm, floors, standbys)
    return {**found, "what": _what(config), "rows": rows(found)}


def settled(config: RunConfig, quick: bool) -> RunConfig:
    """Return the config with the `small` model (unless `quick`) and short steps where it has the usual defaults."""
    return replace(
        config,
        model=ModelConfig("small") if config.model == ModelConfig() and not quick else config.model,
        data=replace(config.data, batch_size=1, sequence_length=16) if config.data == DataConfig() else config.data,
        inner=replace(config.inner, steps=1 << 30),
    )


def _what(config: RunConfig) -> str:
    return f"{config.model.size}, {config.data.batch_size} x {config.data.sequence_length} tokens a step"


def started(folder: Path, environment: Mapping[str, str]) -> Start:
    """Start an island, let it make its first step, and end it. Raise BrokerError if it ends before that."""
    turn_log, log = _fresh(environment), folder / "log"
    began = time.monotonic()
    with (
        log.open("w", encoding="utf-8") as errors,
        subprocess.Popen(
            parent_death.command([sys.executable, "-P", *ISLAND, *_arguments(folder)]),
            env=environment, stdout=subprocess.PIPE, stderr=errors, text=True,
        ) as process,
    ):  # fmt: skip
        try:
            _await(lambda: _has_stepped(turn_log), process, log)
            wall, total = time.monotonic() - began, cpu_seconds(process.pid)
            process.send_signal(signal.SIGTERM)
            output, _ = process.communicate(timeout=WAIT_SECONDS)
        finally:
            process.kill()
    _require_success(process, log)
    return Start(wall, total, **json.loads(output)["start_seconds"])


def taken_over(folder: Path, environment: Mapping[str, str]) -> tuple[float, float]:
    """Let a standby become the island. Return wall and processor seconds until the end of its first step."""
    turn_log, log = _fresh(environment), folder / "log"
    log.unlink(missing_ok=True)
    standby = Standby("standby", [*ISLAND, "--standby", *PACE], environment, log)
    standby.start()
    process = standby.process
    assert process is not None  # noqa: S101
    try:
        _await(standby.is_ready, process, log)
        began, before = time.monotonic(), cpu_seconds(process.pid)
        standby.become(Assignment(tuple(_arguments(folder)), {}, str(log)))
        _await(lambda: _has_stepped(turn_log), process, log)
        wall, total = time.monotonic() - began, cpu_seconds(process.pid) - before
        process.send_signal(signal.SIGTERM)
        process.wait(WAIT_SECONDS)
    finally:
        process.kill()
        standby.end()
    _require_success(process, log)
    return wall, total


def _arguments(folder: Path) -> list[str]:
    return [
        "--name",
        NAME,
        "--folder",
        str(folder / "island"),
        *PACE,
        "--evaluate-every",
        "0",
        "--no-tensorboard",
        "--json",
    ]


def _fresh(environment: Mapping[str, str]) -> Path:
    """The turn log, with nothing in it yet."""
    turn_log = Path(environment[TURN_LOG_VARIABLE])
    turn_log.unlink(missing_ok=True)
    return turn_log


def _has_stepped(turn_log: Path) -> bool:
    return turn_log.exists() and turn_log.stat().st_size > 0


def _await(holds: Callable[[], bool], process: subprocess.Popen[Any], log: Path) -> None:
    """Poll until `holds()`. Raise BrokerError if the process ends first, or after WAIT_SECONDS."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not holds():
        if process.poll() is not None:
            raise BrokerError(
                "an island of the measurement failed", f"It wrote: {_end_of(log)}", code="bench.process-failed"
            )
        if time.monotonic() > deadline:
            raise BrokerError(
                f"an island made no step for {WAIT_SECONDS:g} s", f"It wrote: {_end_of(log)}", code="bench.timeout"
            )
        time.sleep(POLL_SECONDS)


def _require_success(process: subprocess.Popen[Any], log: Path) -> None:
    if process.returncode:
        raise BrokerError(
            "an island of the measurement failed", f"It wrote: {_end_of(log)}", code="bench.process-failed"
        )


def _end_of(log: Path) -> str:
    return " / ".join(log.read_text(encoding="utf-8").splitlines()[-3:]) or "nothing"


def _floor(environment: Mapping[str, str]) -> float:
    found = subprocess.run([sys.executable, "-c", FLOOR], env=environment, capture_output=True, text=True, check=False)
    if found.returncode:
        raise BrokerError(
            "a Python with nothing but JAX failed", f"It wrote: {found.stderr[-300:]}", code="bench.process-failed"
        )
    return float(found.stdout)


def summary(
    cold: Start, warm: Sequence[Start], floors: Sequence[float], standbys: Sequence[tuple[float, float]]
) -> dict[str, Any]:
    """Return the medians, and the ratios of each start to the floor measured after it.

    Args:
        cold: The start with empty caches.
        warm: The starts with warm caches.
        floors: Seconds of a Python that only loads JAX, measured after each warm start.
        standbys: Wall and processor seconds of each standby that became an island.
    """
    ratios = [each.total / floor for each, floor in zip(warm, floors, strict=True)]

    def median(of: Callable[[Start], float]) -> float:
        return statistics.median(map(of, warm))

    return {
        "cold_cpu_seconds": cold.total,
        "cpu_seconds": median(lambda each: each.total),
        "wall_seconds": median(lambda each: each.wall),
        "imports_cpu_seconds": median(lambda each: each.imports),
        "joining_cpu_seconds": median(lambda each: each.joining),
        "programs_cpu_seconds": median(lambda each: each.programs),
        "state_cpu_seconds": median(lambda each: each.state),
        "first_step_cpu_seconds": median(lambda each: each.first_step),
        "floor_cpu_seconds": statistics.median(floors),
        "ratio": statistics.median(ratios),
        "ratio_from": min(ratios),
        "ratio_to": max(ratios),
        "standby_wall_seconds": statistics.median(wall for wall, _ in standbys),
        "standby_cpu_seconds": statistics.median(total for _, total in standbys),
    }


def rows(s: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a summary as a table for people."""
    floor = s["floor_cpu_seconds"]

    def row(what: str, seconds: float, goal: float | str = "") -> dict[str, Any]:
        return {"what": what, "seconds": seconds, "jax_alone": floor, "ratio": seconds / floor, "goal": goal}

    return [
        row("processor time to the end of the first step", s["cpu_seconds"], GOAL_SECONDS),
        row("  interpreter and imports", s["imports_cpu_seconds"]),
        row("  joining", s["joining_cpu_seconds"]),
        row("  programs, each tried once", s["programs_cpu_seconds"]),
        row("  optimiser state, from its checkpoint", s["state_cpu_seconds"]),
        row("  the first step", s["first_step_cpu_seconds"]),
        row("wall time to the end of the first step", s["wall_seconds"]),
        row("a standby, from the order on: processor time", s["standby_cpu_seconds"]),
        row("  its wall time", s["standby_wall_seconds"]),
        row("processor time with empty caches", s["cold_cpu_seconds"]),
    ]
