"""`archipelago bench accelerator`: what an island costs, on an accelerator or on a CPU, as one table by one command.

Of a model: an inner step with syncing over one without, its processor time and memory, tokens a second beside the same
model in plain JAX, and a profile of syncs for xprof or TensorBoard; and the same step in PyTorch. Then the time to
quantise the elements of 124 M parameters to int4, against a copy of the same memory, what differs from numpy in every
codec and in a merger's spectra, and the time of these.

A real island with its link, a merger and a Redis, each a process. In the island's process, steps with syncing and steps
without take turns, each over whole intervals, so that other work on the machine slows both. A second process only
trains; the difference of the two peaks is the memory that syncing takes. Merger and Redis run on one half of the cores
and the island on the other, because in a real run they are different machines. On a CPU, steps and syncs share cores.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from archipelago.broker.config import DataConfig, RunConfig, WireConfig, checked
from archipelago.broker.process import keep_compiled
from archipelago.islands.mesh import parsed
from archipelago.islands.models.llama import DENSE
from archipelago.merger.accelerator import MEMORY_SHARE as SPECTRA_SHARE
from archipelago.ops.bench.accelerator_codecs import CODEC, change_spectra, compare_bits, quantise_and_copy
from archipelago.ops.bench.accelerator_processes import (
    RUN,
    IslandTurns,
    TimedTurn,
    TorchTurns,
    create_run,
    sync_and_not,
    sync_in_torch,
    train_only,
)
from archipelago.ops.bench.harness import Spent, child, halves_of_the_cores, own_redis, require_linux, serve_merger
from archipelago.ops.bench.output import OutputOptions, compared, finish, ratio_row
from archipelago.ops.launch.devices import MEMORY_SHARE, accelerators, memory_share
from archipelago.ops.settings import is_given, say

Part = Literal["steps", "pytorch", "quantiser", "bits", "spectra"]

#: What is measured unless flags say otherwise: int4 both ways, and a batch for a CPU (`settled`).
MEASURED = RunConfig(data=DataConfig(batch_size=1, sequence_length=64), wire=WireConfig(up="int4", down="int4"))
PARTS: tuple[Part, ...] = ("steps", "pytorch", "quantiser", "bits", "spectra")
ELEMENTS, ELEMENTS_QUICK = 124_000_000, 1_000_000
#: The most elements of a matrix whose spectrum is changed on a CPU. Mergers cut larger ones into blocks.
ELEMENTS_CPU = 40_000_000
#: A step with syncing on an accelerator takes at most this many times as long as one without.
GOAL_STEP = 1.01
#: A turn with a smaller share of the syncs that its steps should have is not compared.
SYNCS_LEAST = 0.9
STRETCHED = (
    "the merger was slower than the island, so rounds were stretched: steps with syncing had too few syncs to compare. "
    "Use a faster rule (--merge.rest rda --merge.embedding rda), a longer --sync.interval, or more cores"
)
#: The largest fragments that an island may use in addition to the training and one held copy of the model.
GOAL_MEMORY = 4.0
#: The turns, and the shortest time of one, which takes as many whole intervals as fill it.
TURNS, TURNS_QUICK = (5, 2.0), (2, 0.2)


@dataclass(frozen=True)
class AcceleratorOptions(OutputOptions):
    """Measure an island on this machine's device: steps with syncing, tokens beside plain JAX, memory, codecs."""

    quick: bool = False
    """Use few elements and short turns, as a trial of the command on any machine."""
    parts: tuple[Part, ...] = PARTS
    """What to measure: steps with syncing (`steps`), also of a Llama in PyTorch (`pytorch`, which needs the extra
    llama), quantising against a copy (`quantiser`), the bytes of each codec that differ between this device and numpy
    (`bits`), or the same and the time of spectra of matrices (`spectra`)."""
    spectra: Literal["cpu", "gpu"] = "cpu"
    """Where the merger changes spectra, as for `archipelago merger`. It runs beside the island."""
    pieces: bool = False
    """Show also where the time of syncs goes, in the island and in the merger. Pieces of several threads overlap."""
    mesh: str | None = None
    """Spread the island over devices, as `island --mesh` does. Plain JAX uses one device."""
    config: Path | None = None
    """A TOML file with settings. Flags win over it."""
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=lambda: MEASURED)


def main(options: AcceleratorOptions) -> int:
    config = checked(options.settings)
    require_linux()
    keep_compiled()
    if options.mesh is not None:
        parsed(options.mesh)

    from archipelago.islands.models.registry import build

    build(config.model)  # an unknown one is refused before anything is measured
    return finish("accelerator", accelerator(config, options), options)


def accelerator(config: RunConfig, options: AcceleratorOptions) -> dict[str, Any]:
    """Measure the model, and the quantiser. Return plain data with `rows`."""
    parts = options.parts or PARTS
    backend = device.platform if (device := accelerators()) else "cpu"
    config = settled(config, backend, options.config)
    model: dict[str, Any] = {"what": _what(config), "backend": backend}
    rows: list[dict[str, Any]] = []
    if "steps" in parts:
        profile = options.output / f"profile-{config.model.size}"
        turns, alone, merger = measured_turns(config, options, profile)
        model |= {"turns": asdict(turns), "alone": asdict(alone), "profile": str(profile)}
        rows += [*step_rows(config, backend, turns, alone), *piece_rows(turns, merger)]
    if "pytorch" in parts and (in_torch := torch_turns(config, options)):
        model["pytorch"] = in_torch._asdict()
        rows += torch_rows(config, backend, in_torch)
    elements = ELEMENTS_QUICK if options.quick else ELEMENTS
    largest = min(elements, ELEMENTS_CPU) if backend == "cpu" else elements
    for part, measure, count, what in (
        ("quantiser", quantise_and_copy, elements, f"quantising {elements:,} elements to {CODEC}, against a copy"),
        ("bits", compare_bits, elements // 8, "every codec on this device and by numpy"),
        ("spectra", change_spectra, largest, "spectra of matrices on this device and by numpy"),
    ):
        if part in parts:
            say(what)
            with child(measure, count) as measuring:
                while found := measuring.receive():
                    rows.append(found)
                    say(found["what"] + f": {found['ours']:g}")
    return {"model": model, "elements": elements, "rows": rows}


def settled(config: RunConfig, backend: str, file: Path | None = None) -> RunConfig:
    """Return the config with a batch that suits the backend, unless one was given, perhaps in a file of settings."""
    data, is_own = config.data, any(is_given(f"--data.{name}", file) for name in ("batch-size", "sequence-length"))
    if backend != "cpu" and data == MEASURED.data and not is_own:
        data = replace(data, batch_size=16, sequence_length=512)
    return replace(config, data=data, inner=replace(config.inner, steps=1 << 30))


def _what(config: RunConfig) -> str:
    data, sync, wire = config.data, config.sync, config.wire
    sizes = f"{config.model.size} {data.batch_size} × {data.sequence_length}, H = {sync.interval}, P = {sync.fragments}"
    again = ", layers computed again" if config.model.recomputes_layers else ""
    return f"{sizes}, {wire.up}/{wire.down}{again}"


def measured_turns(
    config: RunConfig, options: AcceleratorOptions, profile: Path
) -> tuple[IslandTurns, TimedTurn, dict[str, Spent]]:
    """Let steps with syncing and without take turns.

    JAX's profile of two more intervals with syncing goes to the folder `profile`.

    Returns:
        What was found, the turn of a process that only trains, and the time of the merger's pieces in all turns but
        the first.
    """
    mine, others = halves_of_the_cores()
    pairs, seconds = TURNS_QUICK if options.quick else TURNS
    share = memory_share(1, MEMORY_SHARE - (SPECTRA_SHARE if options.spectra == "gpu" else 0.0))  # as `up` gives it
    with ExitStack() as held:
        server = held.enter_context(own_redis())
        os.sched_setaffinity(server.pid, others)
        with child(create_run, server.url, config) as creating:
            creating.receive()
        serving = server.url, RUN, others, 1, options.pieces, options.spectra
        merger = held.enter_context(child(serve_merger, *serving))
        merger.receive()
        say(f"{_what(config)}: steps with syncing and without take turns")
        turns = server.url, mine, pairs, seconds, options.mesh, str(profile.absolute()), options.pieces
        spent: list[dict[str, Spent]] = []
        with child(sync_and_not, *turns, environment=share) as trainer:
            for number in range(pairs):
                on, off = trainer.receive()
                say(
                    f"{number + 1} of {pairs}: {on.seconds / off.seconds:.3f} of the time without, {on.synced:,} synced"
                )
                if options.pieces:
                    merger.pipe.send("pieces")
                    spent.append(merger.receive())
            found: IslandTurns = trainer.receive()
        say(f"profile: {profile} (open it with xprof or TensorBoard); now the same training without syncing")
        with child(train_only, server.url, mine, found.steps, environment=share) as trainer:
            alone: TimedTurn = trainer.receive()
    return found, alone, {piece: each - spent[0][piece] for piece, each in (spent[-1] if spent else {}).items()}


def torch_turns(config: RunConfig, options: AcceleratorOptions) -> TorchTurns | None:
    """Let turns of a user's loop in PyTorch with syncing and without follow each other; None if it cannot run."""
    if find_spec("transformers") is None or config.model.size not in DENSE:
        say(f"PyTorch is left out: it needs the extra llama, and one of the models {', '.join(DENSE)}")
        return None
    mine, others = halves_of_the_cores()
    pairs, seconds = TURNS_QUICK if options.quick else TURNS
    say(f"{_what(config)}: the same in PyTorch")
    with own_redis() as server, child(sync_in_torch, server.url, mine, config, pairs, seconds) as looping:
        os.sched_setaffinity(server.pid, others)
        looping.receive()
        with child(serve_merger, server.url, RUN, others, 1, False, options.spectra) as merger:
            merger.receive()
            looping.pipe.send("served")
            found: TorchTurns = looping.receive()
    return found


# -- figures ----------------------------------------------------------------------------------------------------------


def step_rows(config: RunConfig, backend: str, found: IslandTurns, alone: TimedTurn) -> list[dict[str, Any]]:
    """Return the lines of a model's steps, tokens and memory: medians over pairs of neighbouring turns."""
    step = [turn.seconds for turn in found.on], [turn.seconds for turn in found.off]
    cpu = compared([turn.cpu_seconds for turn in found.on], [turn.cpu_seconds for turn in found.off])
    syncs = statistics.median(on.synced for on in found.on) / (2 * found.parameters)
    each = 1e3 / found.steps
    tokens, turn = config.tokens_per_step * found.steps, statistics.median(on.seconds for on in found.on)
    a_parameter = statistics.median(
        (on.cpu_seconds - off.cpu_seconds) / on.synced for on, off in zip(found.on, found.off, strict=True)
    )
    largest = 4 * found.largest

    def memory(what: str, size: int, goal: float | str = "") -> dict[str, Any]:
        return ratio_row(f"{what}, MiB", size / 2**20, "largest fragment", largest / 2**20, goal=goal)

    beside, between = (max(turn.peak_bytes for turn in turns) - alone.peak_bytes for turns in (found.on, found.off))
    return [
        *_turn_rows(_what(config), config, backend, found.steps, *step, syncs),
        ratio_row("  its processor time, ms", each * cpu.first, "no sync", each * cpu.second, cpu.ratio),
        ratio_row("  tokens a second with syncing", tokens / turn, "plain JAX", tokens / alone.seconds),
        ratio_row("  processor time a synced parameter, ns", 1e9 * a_parameter, "", "", ""),
        *_device_rows(found),
        memory("  peak memory beside the training", beside, GOAL_MEMORY + found.held_bytes / largest),
        memory("    also between syncs", between),
        memory("    snapshots held for differences", found.held_bytes),
    ]


def _device_rows(found: IslandTurns) -> list[dict[str, Any]]:
    """Return how long the accelerator waited in two intervals with syncing, and its copies beside programs."""
    if found.device is None:
        return []
    copies, hidden, whole, waits = (1e3 * each for each in found.device)
    share = hidden / copies if copies else ""
    return [
        ratio_row("  the device waits between programs, by the profile, ms", waits, "two intervals", whole),
        ratio_row("  copies behind programs, by the profile, ms", hidden, "all copies", copies, share),
    ]


def piece_rows(found: IslandTurns, merger: Mapping[str, Spent]) -> list[dict[str, Any]]:
    """Return the milliseconds of each piece of a sync of the model, and its milliseconds of processor time."""
    syncs = sum(on.synced for on in found.on[1:]) / (2 * found.parameters)
    return [
        ratio_row(
            f"  {who}: {piece}, ms", 1e3 * spent.seconds / syncs, "processor", 1e3 * spent.cpu_seconds / syncs, ""
        )
        for who, pieces in (("merger", merger), ("island", found.pieces))
        for piece, spent in pieces.items()
    ]


def torch_rows(config: RunConfig, backend: str, found: TorchTurns) -> list[dict[str, Any]]:
    """Return the lines of the same steps in a user's loop in PyTorch."""
    what = f"{_what(config)}, PyTorch"
    return _turn_rows(what, config, backend, found.steps, found.on, found.off, statistics.median(found.syncs))


def _turn_rows(
    what: str,
    config: RunConfig,
    backend: str,
    steps: int,
    on: Sequence[float],
    off: Sequence[float],
    syncs: float,
) -> list[dict[str, Any]]:
    """Return the lines of a step with syncing, and of the syncs of a turn. With too few of these there is no ratio."""
    step, expected, each = compared(on, off), steps / config.sync.interval, 1e3 / steps
    ratio: float | str = step.ratio
    goal: float | str = GOAL_STEP if backend != "cpu" else ""
    if syncs < SYNCS_LEAST * expected:
        say(STRETCHED)
        ratio = goal = ""
    return [
        ratio_row(f"{what}: a step, ms", each * step.first, "no sync", each * step.second, ratio, goal),
        ratio_row("  syncs of the model in a turn", syncs, "one each H steps", expected),
    ]
