"""`archipelago init`: create a run in a Redis, in one transaction."""

from __future__ import annotations

import math
import os
import shlex
import uuid
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from archipelago.broker import invitation as invitations
from archipelago.broker.address import redacted
from archipelago.broker.config import RunConfig, checked, differing
from archipelago.broker.control import STEPS
from archipelago.broker.errors import MismatchError, RunExistsError, UnknownRunError
from archipelago.broker.footprint import available_here, memory_text
from archipelago.broker.manifest import Manifest
from archipelago.broker.observe.progress import progress
from archipelago.broker.process import URL_VARIABLE, connect_to, keep_compiled, name_of_new_run, print_json
from archipelago.broker.redis.keys import checked_name
from archipelago.broker.shards.transport import create as create_run
from archipelago.broker.shards.transport import require_shards, with_shards
from archipelago.broker.transport import Memory, Transport, refusal
from archipelago.islands.mesh import usable_devices
from archipelago.islands.user_loop.new_run import require_no_islands
from archipelago.ops.settings import say, setting_text
from archipelago.ops.simulation.cycle import footprint_here
from archipelago.ops.weights.safetensors_files import WeightFiles, require_model, require_tokenizer

if TYPE_CHECKING:
    from archipelago.islands.models.interface import Params
    from archipelago.islands.tasks.workload import Workload


@dataclass(frozen=True)
class InitOptions:
    """Create a run: its config, its corpus and its first parameters. Workers then join it with its URL and name."""

    url: Annotated[str | None, tyro.conf.Positional] = None
    """The URL of the Redis: redis://HOST:PORT, rediss://… or unix://…. The default is $ARCHIPELAGO_URL."""
    run: str = field(default_factory=name_of_new_run)
    """The name of the run. The default is $ARCHIPELAGO_RUN, or else `demo`."""
    config: Path | None = None
    """A TOML file with settings. Flags override it."""
    task: str | None = None
    """A task of your own to train, FILE.py:NAME, in place of one of our models (docs/guide/tasks.md)."""
    from_: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """The weights to begin with: a .safetensors file or its folder, such as `archipelago export` writes."""
    shards: int = 1
    """How many mergers share the work. Each merges fragments of its own, so a model that is too large for one merger
    needs several. One process serves all shards until others come (docs/guide/scaling.md#shards)."""
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)
    json: bool = False
    """Print one JSON object."""


def main(options: InitOptions) -> int:
    """Create the run, or report that it exists already."""
    config = checked(options.settings)
    transport = connect_to(options.url, checked_name(options.run, "the run name"))
    manifest, created = create(transport, config, options.from_, task=options.task, shards=options.shards)
    if options.json:
        print_json({"run": manifest.run, "created": created, "parameters": manifest.parameters,
                    "fragments": len(manifest.fragments), "config_digest": manifest.config.digest()})  # fmt: skip
    else:
        done = "created" if created else "exists already, with this config"
        if not created and not transport.reader.is_served() and (why := refusal(transport.reader)):
            say(f"warning: its merger does not serve it: {why}")
        say(f"run {manifest.run!r} {done}: {manifest.parameters:,} parameters in {len(manifest.fragments)} fragments")
        say(f"  data: {text_of(manifest)}")
        for line in next_steps(options.url or os.environ.get(URL_VARIABLE, ""), manifest, options.task):
            say(f"  {line}")
    return 0


def next_steps(url: str, manifest: Manifest, task: str | None = None) -> list[str]:
    """Return what to start next, as lines for a shell. A password is never repeated."""
    run, is_invited = manifest.run, invitations.is_join_file(url)
    flag = f" --task {shlex.quote(task or 'FILE.py:NAME')}" if manifest.task else ""
    island = f"archipelago island {'FILE' if is_invited else f'--run {run}'}{flag}"
    if manifest.has_scripts:
        island = "your training script"
    if is_invited:
        return [
            f"invite its processes:  archipelago invite NAME --role merger --run {run}   (and --role island)",
            f"start each of them with its join file: archipelago merger FILE, {island}",
        ]
    shown = redacted(url).replace("***", "PASSWORD")
    comment = "   # with its password, which is not repeated here" if shown != url else ""
    return [
        "start next, in any order, with the same URL:",
        f"export {URL_VARIABLE}={shlex.quote(shown)}{comment}",
        f"archipelago merger --run {run}   # on one machine; a second one stands by",
        f"{island}   # on every machine; it takes all of its devices",
    ]


def text_of(manifest: Manifest) -> str:
    """Return where the run's text came from, and what of it was read, skipped and held out."""
    if manifest.task:
        return f"that of the task {manifest.task!r}"
    from archipelago.islands.data.corpus import open_corpus

    return open_corpus(manifest.corpus.name).describe()


def tell_of_memory(manifest: Manifest, server: Memory) -> None:
    """Say how much memory each part of the run takes, and warn if the Redis or this machine has less."""
    parts, available = footprint_here(manifest), available_here()
    needed = ", ".join(f"{part} {memory_text(size)}" for part, size in parts.items())
    say(f"memory: {needed}; {memory_text(available)} are available here")
    if manifest.config.model.recomputes_layers:
        say("memory: the backward pass computes each layer again (--model.rematerialise never keeps the activations)")
    room = {"Redis": max(0, server.limit - server.used) if server.limit else math.inf}
    for part, size in parts.items():
        if size > (left := room.get(part, available)):
            say(f"warning: {memory_text(left)} are too little for {part}, which may be killed. Free some, use another "
                "machine, or choose a smaller model or batch.")  # fmt: skip


def create(
    transport: Transport, config: RunConfig, weights: Path | None = None, *, task: str | None = None, shards: int = 1
) -> tuple[Manifest, bool]:
    """Return the run's manifest, and whether this call created it, from `weights` or from fresh parameters.

    Raises:
        ConfigError: Islands of a lost run of that name are alive (`init.islands-live`), or there are more shards than
            fragments (`config.value`).
        MismatchError: The run exists with another config or number of shards, or began without the given weights.
        DataError: The weights do not fit the model.
    """
    keep_compiled()

    from archipelago.islands.tasks.ours import first_snapshots

    try:
        found = transport.reader.manifest()
    except UnknownRunError:  # There is no such run, or only its name.
        require_no_islands(transport)
        manifest, params = _new(workload_of(config, task, weights), transport.run, weights)
        manifest = replace(with_shards(manifest, shards), uid=uuid.uuid4().hex)
        if weights is not None:
            manifest = replace(manifest, versions={**manifest.versions, "weights": weights.resolve().name})
        tell_of_memory(manifest, transport.reader.memory())
        with progress(f"making the first {manifest.parameters:,} parameters"):
            snapshots = first_snapshots(manifest, params)
        with suppress(RunExistsError), progress("writing the first parameters to Redis"):
            create_run(transport, manifest, snapshots)
            return manifest, True
        found = transport.reader.manifest()
    require_same(found, config, weights, task=task, shards=shards)
    return found, False


def _require_began_with(found: Manifest, weights: Path | None) -> None:
    """Raise MismatchError if a run began with fresh parameters, and the user gives weights. Warn of other names."""
    if weights is None:
        return
    began, name = found.versions.get("weights", "").partition(" ")[0], weights.resolve().name
    if not began:
        raise MismatchError(
            "weights", "none", name,
            "Leave out --from to go on with the run, or name another run with --run.",
            code="config.other-settings",
            what=f"the run {found.run!r} is there already. It began with fresh parameters, and not with {weights}",
        )  # fmt: skip
    if began != name:
        say(f"warning: the run {found.run!r} is there already, and began with weights of the name {began!r}: --from "
            "changes nothing")  # fmt: skip


def workload_of(config: RunConfig, task: str | None, weights: Path | None = None) -> Workload:
    """Return the task FILE.py:NAME, or that of the model that the settings name, with the settings of its run.

    The default corpus is prepared if needed, and `weights` are compared with a model of ours.

    Raises:
        ConfigError: The model is not known, or the task is wrong. The code names the part.
        ConfigError: JAX cannot start (`devices.broken`).
        DataError: The corpus is missing or too small, or the weights do not fit the model.
    """
    usable_devices()
    from archipelago.islands.data.batches import Batches, held_out
    from archipelago.islands.data.corpus import open_corpus
    from archipelago.islands.tasks.ours import fitted, our_work
    from archipelago.islands.tasks.task import load_task
    from archipelago.islands.tasks.workload import Workload, task_config

    if task is not None:
        file = load_task(task)
        return Workload.of(file, task_config(config, file))
    corpus = open_corpus(config.data.corpus)
    config = fitted(config, corpus)
    work = our_work(config, corpus)
    if weights is not None:
        files = WeightFiles(weights)
        require_tokenizer(files, corpus)
        files.require(work.model.tensors)
        require_model(files, config.model.size)
    Batches(corpus.train, config, lambda: None)
    held_out(corpus.valid, config.data.held_out_sequences, config.data.sequence_length)
    return work


def trainable(config: RunConfig, task: str | None, weights: Path | None = None) -> Workload:
    """Return what a run trains, as `workload_of` does. Raise ConfigError if a user's task cannot be trained here."""
    from archipelago.islands.tasks.workload import require_trainable

    work = workload_of(config, task, weights)
    if task is not None:
        require_trainable(work)
    return work


def _new(work: Workload, run: str, weights: Path | None) -> tuple[Manifest, Params]:
    """Return the manifest of a new run, and its first parameters."""
    from archipelago.islands.tasks.ours import OurTask

    manifest = work.describe(run)
    if weights is None:
        return manifest, work.model.init()
    files = WeightFiles(weights)
    if isinstance(work.named, OurTask) and not require_tokenizer(files, work.named.corpus):
        say(f"warning: the weights in {weights} do not say which tokenizer they were trained with; it must be that of "
            f"the corpus {work.named.corpus.name!r}. A tokenizer.json beside them is compared.")  # fmt: skip
    return manifest, files.load(manifest.tensors)


def require_same(found: Manifest, config: RunConfig, weights: Path | None, *, task: str | None, shards: int) -> None:
    """Raise MismatchError, with a remedy for the user who starts a run, unless it has what `create` would give it."""
    from archipelago.islands.tasks.task import task_of
    from archipelago.islands.user_loop.tensors import require_same_tensors

    _require_began_with(found, weights)
    require_shards(found, shards)
    task_of(task, found, "Starting islands of ours")
    work = workload_of(config, task)
    _require_own_settings(found, work.config)
    if task is not None:
        require_same_tensors(found, work.model.tensors)
        return
    found.require_same(work.describe(found.run))


def _require_own_settings(found: Manifest, config: RunConfig) -> None:
    """Raise MismatchError unless the config is the run's. It names each setting that differs, with both values."""
    from archipelago.islands.models.registry import learning_rate

    changed = differing(found.config, config)
    sizes = [found.config.model.size, config.model.size]
    if sizes[0] != sizes[1] and changed.get("inner.learning_rate") == tuple(map(learning_rate, sizes)):
        del changed["inner.learning_rate"]  # The user has not given it: `init` chooses it by the model's size.
    if not changed:
        return
    remedy = "To go on with the run, give its own values. Islands and mergers take them by themselves."
    if STEPS in changed:
        remedy += f" To change the length of the run: `archipelago steer {STEPS}=N --run {found.run}`."
    said = "; ".join(f"{key} is {setting_text(a)} (given: {setting_text(b)})" for key, (a, b) in changed.items())
    theirs, ours = (", ".join(map(setting_text, values)) for values in zip(*changed.values(), strict=True))
    raise MismatchError(
        ", ".join(changed), theirs, ours, f"{remedy} For other settings, name another run with --run.",
        code="config.other-settings",
        what=f"the run {found.run!r} has other settings: {said}",
    )  # fmt: skip
