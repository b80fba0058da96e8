"""`archipelago bench island`: the time, processor time and memory that syncing costs an island.

A real island with its link, a merger and a Redis, each a process. In the island's process, steps with syncing and steps
without take turns, each over whole intervals, so that other work on the machine slows both. A second process only
trains; the difference of the two peaks is the memory that syncing takes. Merger and Redis run on one half of the cores
and the island on the other, because in a real run they are different machines.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from archipelago.broker.config import DataConfig, ModelConfig, RunConfig, WireConfig, checked
from archipelago.broker.process import keep_compiled
from archipelago.islands.mesh.shape import parsed
from archipelago.ops.bench.output import OutputOptions, finish
from archipelago.ops.bench.process import child, halves_of_the_cores, keep_to, require_linux
from archipelago.ops.bench.turns import Found, say_backend, serve_run, sync_and_not, train_only
from archipelago.ops.launch.embedded_redis import start_server
from archipelago.ops.settings import say

GOAL_STEP = 1.03
#: The largest fragments that an island may use in addition to the training and one held copy of the model.
GOAL_MEMORY = 4.0
PAIRS, PAIRS_QUICK = 5, 2
#: The shortest turn. It takes as many whole intervals as fill this time.
TURN_SECONDS, TURN_SECONDS_QUICK = 2.0, 0.2


@dataclass(frozen=True)
class IslandBenchOptions(OutputOptions):
    """Measure what syncing costs an island: time of inner steps, processor time a parameter, additional memory."""

    quick: bool = False
    """Use the tiny model, and fewer and shorter turns."""
    mesh: str | None = None
    """Spread the island over devices, as `island --mesh` does. The memory is compared with training on one device."""
    config: Path | None = None
    """A TOML file with settings. Flags win over it."""
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)


def main(options: IslandBenchOptions) -> int:
    """Measure, and write the results."""
    config = checked(options.settings)
    keep_compiled()
    if options.mesh is not None:
        parsed(options.mesh)
    return finish("island", island(config, options.quick, say, options.mesh), options)


def island(
    config: RunConfig, quick: bool, say: Callable[[str], None], mesh: str | None = None, profile: str | None = None
) -> dict[str, Any]:
    """Measure time, processor time and memory. Return plain data with `rows`.

    Args:
        config: The settings of the run.
        quick: Whether to use the tiny model, and fewer and shorter turns.
        say: Called with each line for people.
        mesh: The devices of the island; None for one.
        profile: A folder for JAX's profile of one more turn with syncing; None for none.
    """
    require_linux()
    with child(say_backend) as probe:
        backend = str(probe.receive())
    config = settled(config, quick, backend)
    mine, others = halves_of_the_cores()
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        server = held.enter_context(start_server(folder / "redis"))
        keep_to(others, server.pid)
        merger = held.enter_context(child(serve_run, server.url, config, others))
        merger.receive()
        say(f"{_what(config)} on {backend}: steps with syncing and without take turns")
        pairs, seconds = (PAIRS_QUICK, TURN_SECONDS_QUICK) if quick else (PAIRS, TURN_SECONDS)
        with child(sync_and_not, server.url, mine, pairs, seconds, mesh, profile) as trainer:
            for number in range(pairs):
                say(f"{number + 1} of {pairs}: {float(trainer.receive()):.3f} of the time without")
            found = trainer.receive()
    say("the same training without syncing, for its memory")
    with child(train_only, config, mine, found.scan_steps, found.steps) as trainer:
        alone = trainer.receive()
    figures = summary(found, alone.peak_bytes)
    return {
        **figures,
        "what": _what(config),
        "tokens_a_second": config.tokens_per_step / figures["step_seconds_on"],
        "tokens_a_second_plain": config.tokens_per_step * found.steps / alone.seconds,
        "rows": rows(found, alone.peak_bytes, _what(config)),
    }


def settled(config: RunConfig, quick: bool, backend: str) -> RunConfig:
    """Return the config with this measurement's defaults where it has the usual ones.

    They are the `base` model (unless `quick`), int4 both ways, and a batch that suits the backend.
    """
    short = backend == "cpu"
    data = replace(config.data, batch_size=1 if short else 16, sequence_length=64 if short else 512)
    return replace(
        config,
        model=replace(config.model, size="base")
        if config.model.size == ModelConfig().size and not quick
        else config.model,
        data=data if config.data == DataConfig() else config.data,
        wire=replace(config.wire, up="int4", down="int4") if config.wire == WireConfig() else config.wire,
        inner=replace(config.inner, steps=1 << 30),
    )


def _what(config: RunConfig) -> str:
    data, sync, wire = config.data, config.sync, config.wire
    sizes = f"{config.model.size} {data.batch_size} × {data.sequence_length}, H = {sync.interval}, P = {sync.fragments}"
    return f"{sizes}, {wire.up}/{wire.down}"


def summary(found: Found, alone_peak: int) -> dict[str, Any]:
    """Return the figures: medians over pairs of neighbouring turns.

    Args:
        found: What the island's process measured.
        alone_peak: The peak of memory of the process that only trains, in bytes.
    """
    pairs = list(zip(found.on, found.off, strict=True))
    ratios = [on.seconds / off.seconds for on, off in pairs]
    beside = max(turn.peak_bytes for turn in found.on) - alone_peak
    always = max(turn.peak_bytes for turn in found.off) - alone_peak
    return {
        "backend": found.backend,
        "scan_steps": found.scan_steps,
        "turn_steps": found.steps,
        "parameters": found.parameters,
        "step_seconds_on": statistics.median(on.seconds for on in found.on) / found.steps,
        "step_seconds_off": statistics.median(off.seconds for off in found.off) / found.steps,
        "step_ratio": statistics.median(ratios),
        "step_ratio_from": min(ratios),
        "step_ratio_to": max(ratios),
        "cpu_seconds_a_synced_parameter": statistics.median(
            (on.cpu_seconds - off.cpu_seconds) / on.synced for on, off in pairs
        ),
        "cpu_ratio": statistics.median(on.cpu_seconds / off.cpu_seconds for on, off in pairs),
        "synced_parameters_a_turn": statistics.median(on.synced for on in found.on),
        "largest_fragment_bytes": 4 * found.largest,
        "peak_bytes_alone": alone_peak,
        "peak_bytes_beside": beside,
        "peak_bytes_beside_between_syncs": always,
        "held_bytes": found.held_bytes,
        "reference_bytes": found.reference_bytes,
    }


def rows(found: Found, alone_peak: int, what: str) -> list[dict[str, Any]]:
    """Return the figures as a table for people."""
    s = summary(found, alone_peak)
    largest = s["largest_fragment_bytes"]

    def memory(name: str, size: int, goal: float | str = "") -> dict[str, Any]:
        return _row(f"{name}, MiB", size / 2**20, "largest fragment", largest / 2**20, size / largest, goal)

    goal = GOAL_STEP if found.backend != "cpu" else ""  # On a CPU, steps and syncing share the cores.
    on, off = 1e3 * s["step_seconds_on"], 1e3 * s["step_seconds_off"]
    on_cpu, off_cpu = (
        1e3 * statistics.median(turn.cpu_seconds for turn in turns) / found.steps for turns in (found.on, found.off)
    )
    cpu = 1e9 * s["cpu_seconds_a_synced_parameter"]
    return [
        _row(f"{what}: a step, ms", on, "no sync", off, s["step_ratio"], goal),
        _row("  its processor time, ms", on_cpu, "no sync", off_cpu, s["cpu_ratio"], ""),
        _row("processor time a synced parameter, ns", cpu, "", "", "", ""),
        memory(
            "peak memory in addition to the training", s["peak_bytes_beside"], GOAL_MEMORY + s["held_bytes"] / largest
        ),
        memory("  also between syncs", s["peak_bytes_beside_between_syncs"]),
        memory("  snapshots held for differences", s["held_bytes"]),
        memory("  references of contributions", s["reference_bytes"]),
    ]


def _row(what: str, ours: float, against: str, theirs: float | str, ratio: float | str, goal: Any) -> dict[str, Any]:
    return {"what": what, "ours": ours, "against": against, "theirs": theirs, "ratio": ratio, "goal": goal}
