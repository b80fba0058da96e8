"""`archipelago bench accelerator`: what an island costs, on an accelerator or on a CPU, as one table by one command.

For each model: an inner step with syncing over one without, its processor time and memory, tokens a second beside the
same model in plain JAX, and a profile of syncs, in which one can see whether copies hide behind steps. Then the time to
quantise the elements of 124 M parameters to int4, against a copy of the same memory. On request also what syncing costs
a user's own loop, and what starting an island costs. Each start is a process: the first one finds empty caches; the
others find its caches, like an island that was killed and restarts, and take turns with the same model in plain JAX.

A real island with its link, a merger and a Redis, each a process. In the island's process, steps with syncing and steps
without take turns, each over whole intervals, so that other work on the machine slows both. A second process only
trains; the difference of the two peaks is the memory that syncing takes. Merger and Redis run on one half of the cores
and the island on the other, because in a real run they are different machines. On a CPU, steps and syncs share cores.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from pydantic import TypeAdapter

from archipelago.broker.config import DataConfig, ModelConfig, RunConfig, WireConfig, checked
from archipelago.broker.errors import BrokerError
from archipelago.broker.process import RUN_VARIABLE, URL_VARIABLE, keep_compiled
from archipelago.islands.mesh import parsed
from archipelago.ops.bench.accelerator_codecs import CODEC, compare_bits, quantise_and_copy
from archipelago.ops.bench.accelerator_processes import (
    JOINED_RUN,
    RUN,
    IslandTurns,
    LoopFound,
    TimedTurn,
    create_run,
    say_backend,
    sync_and_not,
    sync_user_loop,
    train_only,
)
from archipelago.ops.bench.harness import child, halves_of_the_cores, own_redis, require_linux, serve_merger
from archipelago.ops.bench.output import OutputOptions, compared, finish
from archipelago.ops.launch import parent_death
from archipelago.ops.settings import say

Part = Literal["steps", "quantiser", "bits", "loop", "start"]

SIZES, SIZES_QUICK = ("124m", "1b"), ("tiny",)
#: What is measured unless flags say otherwise: int4 both ways, and a batch for a CPU (`settled`).
MEASURED = RunConfig(data=DataConfig(batch_size=1, sequence_length=64), wire=WireConfig(up="int4", down="int4"))
PARTS: tuple[Part, ...] = ("steps", "quantiser", "bits")
ELEMENTS, ELEMENTS_QUICK = 124_000_000, 1_000_000
#: A step with syncing on an accelerator takes at most this many times as long as one without.
GOAL_STEP = 1.01
#: A turn with a smaller share of the syncs that its steps should have is not compared with the goal.
SYNCS_LEAST = 0.9
STRETCHED = (
    "the merger was slower than the island, so rounds were stretched: steps with syncing had too few syncs to compare. "
    "Use a faster rule (--merge.rest rda --merge.embedding rda), a longer --sync.interval, or more cores"
)
#: The largest fragments that an island may use in addition to the training and one held copy of the model.
GOAL_MEMORY = 4.0
#: A call of `sync` without an event takes less.
GOAL_CALL_SECONDS = 50e-6
TURNS, TURNS_QUICK = 5, 2
#: The shortest turn. It takes as many whole intervals as fill this time.
TURN_SECONDS, TURN_SECONDS_QUICK = 2.0, 0.2
STARTS, STARTS_QUICK = 5, 2


@dataclass(frozen=True)
class AcceleratorOptions(OutputOptions):
    """Measure an island on this machine's device: steps with syncing, tokens beside plain JAX, memory, codecs."""

    quick: bool = False
    """Use the tiny model, few elements and short turns, as a trial of the command on any machine."""
    sizes: tuple[str, ...] = ()
    """The models. The default is --model.size if it is given, else 124m and 1b."""
    parts: tuple[Part, ...] = PARTS
    """What to measure: steps with syncing (`steps`), quantising against a copy (`quantiser`), the bytes of each codec
    that differ between this device and numpy (`bits`), `run.sync` in a user's own loop (`loop`), or the processor time
    of an island's start, against the same model in plain JAX (`start`)."""
    mesh: str | None = None
    """Spread the island over devices, as `island --mesh` does. Plain JAX uses one device."""
    config: Path | None = None
    """A TOML file with settings. Flags win over it."""
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=lambda: MEASURED)


def main(options: AcceleratorOptions) -> int:
    """Measure, and write the results and the profiles."""
    config = checked(options.settings)
    require_linux()
    keep_compiled()
    if options.mesh is not None:
        parsed(options.mesh)
    own = (config.model.size,) if config.model.size != ModelConfig().size else ()
    sizes = options.sizes or own or (SIZES_QUICK if options.quick else SIZES)

    from archipelago.islands.models.registry import build

    for size in sizes:
        build(ModelConfig(size))  # an unknown one is refused before anything is measured
    return finish("accelerator", accelerator(config, sizes, options), options)


def accelerator(config: RunConfig, sizes: Sequence[str], options: AcceleratorOptions) -> dict[str, Any]:
    """Measure each model, and the quantiser. Return plain data with `rows`."""
    parts = options.parts or PARTS
    with child(say_backend) as probe:
        backend = str(probe.receive())
    models: dict[str, dict[str, Any]] = {}
    rows: list[dict[str, Any]] = []
    for size in sizes:
        own = settled(replace(config, model=replace(config.model, size=size)), backend)
        models[size] = {"what": _what(own), "backend": backend}
        if "steps" in parts:
            profile = options.output / f"profile-{size}"
            found, alone = measured_turns(own, options, profile)
            models[size] |= {"turns": asdict(found), "alone": asdict(alone), "profile": str(profile)}
            rows += step_rows(own, backend, found, alone)
        if "loop" in parts:
            say(f"{_what(own)}: calls of `sync` in a loop of its own")
            with own_redis() as server, child(sync_user_loop, server.url, own) as looping:
                times: LoopFound = looping.receive()
            models[size]["loop_seconds"] = times._asdict()
            rows += loop_rows(size, times)
        if "start" in parts:
            models[size]["start"] = start_times(own, STARTS_QUICK if options.quick else STARTS)
            rows += start_rows(size, models[size]["start"])
    elements = ELEMENTS_QUICK if options.quick else ELEMENTS
    if "quantiser" in parts:
        say(f"quantising {elements:,} elements to {CODEC}, against a copy")
        with child(quantise_and_copy, elements) as measuring:
            quantise, copy = measuring.receive()
        rows.append(_row(f"{elements / 1e6:g} M elements to {CODEC}, ms", 1e3 * quantise, "a copy", 1e3 * copy))
    if "bits" in parts:
        say("every codec on this device and by numpy")
        with child(compare_bits, elements // 8) as comparing:
            for framework, name, differing, total in comparing.receive():
                what = f"{framework}, {name}: bytes that differ from numpy's"
                rows.append(_row(what, differing, "all", total, goal=0.0))
    return {"models": models, "elements": elements, "rows": rows}


def settled(config: RunConfig, backend: str) -> RunConfig:
    """Return the config with a batch that suits the backend, unless one was given."""
    data = config.data
    if backend != "cpu" and data == MEASURED.data:
        data = replace(data, batch_size=16, sequence_length=512)
    return replace(config, data=data, inner=replace(config.inner, steps=1 << 30))


def _what(config: RunConfig) -> str:
    data, sync, wire = config.data, config.sync, config.wire
    sizes = f"{config.model.size} {data.batch_size} × {data.sequence_length}, H = {sync.interval}, P = {sync.fragments}"
    return f"{sizes}, {wire.up}/{wire.down}"


def measured_turns(config: RunConfig, options: AcceleratorOptions, profile: Path) -> tuple[IslandTurns, TimedTurn]:
    """Let steps with syncing and without take turns. Return what was found, and the turn of a process that only trains.

    Args:
        config: The settings of the run.
        options: The mesh, and whether to take fewer and shorter turns.
        profile: The folder for JAX's profile of one more turn with syncing.
    """
    mine, others = halves_of_the_cores()
    pairs, seconds = (TURNS_QUICK, TURN_SECONDS_QUICK) if options.quick else (TURNS, TURN_SECONDS)
    with ExitStack() as held:
        server = held.enter_context(own_redis())
        os.sched_setaffinity(server.pid, others)
        with child(create_run, server.url, config) as creating:
            creating.receive()
        held.enter_context(child(serve_merger, server.url, RUN, others)).receive()
        say(f"{_what(config)}: steps with syncing and without take turns")
        with child(sync_and_not, server.url, mine, pairs, seconds, options.mesh, str(profile.absolute())) as trainer:
            for number in range(pairs):
                say(f"{number + 1} of {pairs}: {float(trainer.receive()):.3f} of the time without")
            found: IslandTurns = trainer.receive()
        say(f"profile: {profile} (open it with xprof or TensorBoard); now the same training without syncing")
        with child(train_only, server.url, mine, found.scan_steps, found.steps) as trainer:
            alone: TimedTurn = trainer.receive()
    return found, alone


# -- figures ----------------------------------------------------------------------------------------------------------


def step_rows(config: RunConfig, backend: str, found: IslandTurns, alone: TimedTurn) -> list[dict[str, Any]]:
    """Return the lines of a model's steps, tokens and memory: medians over pairs of neighbouring turns.

    Args:
        config: The settings of the run.
        backend: The kind of the device.
        found: What the island's process measured.
        alone: The turn of the process that only trains.
    """
    step = compared([turn.seconds for turn in found.on], [turn.seconds for turn in found.off])
    cpu = compared([turn.cpu_seconds for turn in found.on], [turn.cpu_seconds for turn in found.off])
    syncs = statistics.median(on.synced for on in found.on) / (2 * found.parameters)
    expected, each = found.steps / config.sync.interval, 1e3 / found.steps
    goal: float | str = GOAL_STEP if backend != "cpu" else ""
    if syncs < SYNCS_LEAST * expected:
        say(STRETCHED)
        goal = ""
    tokens, turn = config.tokens_per_step * found.steps, statistics.median(on.seconds for on in found.on)
    a_parameter = statistics.median(
        (on.cpu_seconds - off.cpu_seconds) / on.synced for on, off in zip(found.on, found.off, strict=True)
    )
    largest = 4 * found.largest

    def memory(what: str, size: int, goal: float | str = "") -> dict[str, Any]:
        return _row(f"{what}, MiB", size / 2**20, "largest fragment", largest / 2**20, goal=goal)

    beside, between = (max(turn.peak_bytes for turn in turns) - alone.peak_bytes for turns in (found.on, found.off))
    return [
        _row(f"{_what(config)}: a step, ms", each * step.first, "no sync", each * step.second, step.ratio, goal),
        _row("  syncs of the model in a turn", syncs, "one each H steps", expected),
        _row("  its processor time, ms", each * cpu.first, "no sync", each * cpu.second, cpu.ratio),
        _row("  tokens a second with syncing", tokens / turn, "plain JAX", tokens / alone.seconds),
        _row("  processor time a synced parameter, ns", 1e9 * a_parameter, "", "", ""),
        memory("  peak memory beside the training", beside, GOAL_MEMORY + found.held_bytes / largest),
        memory("    also between syncs", between),
        memory("    snapshots held for differences", found.held_bytes),
    ]


def loop_rows(size: str, times: LoopFound) -> list[dict[str, Any]]:
    """Return the lines of a user's own loop, in comparison with its training step."""
    calling, goal = 1e6 * statistics.median(times.calls), 1e6 * GOAL_CALL_SECONDS
    rows = [_row(f"{size}: `sync` without an event, µs", calling, "goal", goal, goal=1.0)]
    step = 1e3 * statistics.median(times.steps)
    for name, seconds in (("send", times.send), ("adopt", times.adopt)):
        rows.append(_row(f"  {name} the whole model, ms", 1e3 * statistics.median(seconds), "a step", step))
    return rows


def start_rows(size: str, s: dict[str, float]) -> list[dict[str, Any]]:
    """Return the lines of an island's start, in comparison with that of plain JAX."""
    names = {
        "total": f"{size}: processor time to the end of the first step, s",
        "imports": "  interpreter and imports",
        "joining": "  joining",
        "programs": "  programs, each tried once",
        "state": "  optimiser state",
        "first_step": "  the first step",
    }
    rows = [_row(text, s[name], "plain JAX", s["plain"]) for name, text in names.items()]
    return [*rows, _row("  all with empty caches", s["cold"], "plain JAX", s["plain_cold"])]


def _row(
    what: str, ours: float, against: str, theirs: float | str, ratio: float | str | None = None, goal: float | str = ""
) -> dict[str, Any]:
    """Return a line of the table. The ratio is that of both values, unless it is given as a median of ratios."""
    if ratio is None:
        assert not isinstance(theirs, str)  # noqa: S101
        ratio = ours / theirs
    return {"what": what, "ours": ours, "against": against, "theirs": theirs, "ratio": ratio, "goal": goal}


# -- starts ------------------------------------------------------------------------------------------------------------

WAIT_SECONDS = 600.0
#: An island that tells when its first step has ended, and then leaves as if somebody had stopped it.
ISLAND = """
import os, runpy, signal, time
import jax
from archipelago.islands.worker import Island

make_steps = Island.make_steps

def first(island):
    Island.make_steps = make_steps
    made = make_steps(island)
    jax.block_until_ready(island.inner)
    print(time.process_time(), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    return made

Island.make_steps = first
runpy.run_module("archipelago.islands", run_name="__main__")
"""
PLAIN = """
import sys, time
import jax, numpy
from pydantic import TypeAdapter
from archipelago.broker.config import RunConfig
from archipelago.islands.inner import begin, compile_steps
from archipelago.islands.models.registry import build

config = TypeAdapter(RunConfig).validate_json(sys.argv[1])
model = build(config.model)
state = begin(config.inner, model.init(config.seed))
batch = numpy.zeros((1, config.data.batch_size, config.data.sequence_length + 1), numpy.uint8)
jax.block_until_ready(compile_steps(model, config.inner)(state, batch, numpy.int32(0)))
print(time.process_time())
"""


def start_times(config: RunConfig, starts: int) -> dict[str, float]:
    """Measure a start with empty caches, and `starts` with warm ones.

    Returns:
        Medians in seconds of processor time: of an island in all (`total`) and by part, of plain JAX (`plain`), and of
        both with empty caches (`cold`, `plain_cold`).
    """
    with tempfile.TemporaryDirectory() as folder, own_redis() as server:
        with child(create_run, server.url, config, JOINED_RUN) as creating:
            creating.receive()
        environment = {
            **os.environ,
            URL_VARIABLE: server.url,
            RUN_VARIABLE: JOINED_RUN,
            "JAX_COMPILATION_CACHE_DIR": str(Path(folder) / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        cold, plain_cold = _island(folder, environment), _plain(config, environment)
        say(f"a start with empty caches: {cold['total']:.2f} s of processor time; plain JAX: {plain_cold:.2f} s")
        islands, plain = [], []
        for number in range(starts):
            islands.append(_island(folder, environment))
            plain.append(_plain(config, environment))
            say(f"again, {number + 1} of {starts}: {islands[-1]['total']:.2f} s; plain JAX: {plain[-1]:.2f} s")
    medians = {part: statistics.median(island[part] for island in islands) for part in cold}
    return {**medians, "plain": statistics.median(plain), "cold": cold["total"], "plain_cold": plain_cold}


def _island(folder: str, environment: Mapping[str, str]) -> dict[str, float]:
    """Return the parts of an island's start, and their sum."""
    flags = ["--name", "island", "--folder", f"{folder}/island", "--scan-steps", "1", "--evaluate-every", "0"]
    total, summary = _output([ISLAND, *flags, "--no-tensorboard", "--json"], environment).split("\n", 1)
    parts: dict[str, float] = json.loads(summary)["start_seconds"]
    return {"total": float(total), **parts, "first_step": max(0.0, float(total) - sum(parts.values()))}


def _plain(config: RunConfig, environment: Mapping[str, str]) -> float:
    return float(_output([PLAIN, TypeAdapter(RunConfig).dump_json(config).decode()], environment))


def _output(script: list[str], environment: Mapping[str, str]) -> str:
    """Run a script with its arguments, and return its output. Raise BrokerError if it fails."""
    command: list[Any] = parent_death.command([sys.executable, "-P", "-c", *script])
    try:
        found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise BrokerError(
            f"a process of the measurement made no step for {WAIT_SECONDS:g} s", f"It wrote: {error.stderr!r:.300}",
            code="bench.timeout",
        ) from None  # fmt: skip
    if found.returncode:
        last = " / ".join(found.stderr.splitlines()[-3:]) or "nothing"
        raise BrokerError("a process of the measurement failed", f"It wrote: {last}", code="bench.process-failed")
    return found.stdout
