"""`archipelago init`: creates a run in a Redis, whole or not at all."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro

from archipelago.broker.config import RunConfig, checked
from archipelago.broker.errors import MismatchError, RunExistsError
from archipelago.broker.manifest import Manifest
from archipelago.broker.process import connect_to, keep_compiled, print_json
from archipelago.broker.redis.keys import checked_name
from archipelago.broker.transport import Transport
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.ops.settings import say
from archipelago.ops.weights.safetensors_files import WeightFiles


@dataclass(frozen=True)
class InitOptions:
    """Create a run: its config, its corpus and its first parameters. Workers then join it by URL and name."""

    url: Annotated[str | None, tyro.conf.Positional] = None
    """redis://HOST:PORT, rediss://… or unix://…; default $ARCHIPELAGO_URL"""
    run: str = "demo"
    """name of the run"""
    config: Path | None = None
    """a TOML file with settings; flags win over it"""
    from_: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """weights to begin with: a .safetensors file, or a folder with one, such as `archipelago export` writes"""
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)
    json: bool = False
    """print one JSON object"""


def main(options: InitOptions) -> int:
    """Creates the run, or says that it is there already."""
    config = checked(options.settings)
    transport = connect_to(options.url, checked_name(options.run, "the run name"))
    manifest, created = create(transport, config, options.from_)
    if options.json:
        print_json({"run": manifest.run, "created": created, "parameters": manifest.parameters,
                    "fragments": len(manifest.fragments), "config_digest": manifest.config.digest()})  # fmt: skip
    else:
        done = "created" if created else "is there already, with this very config"
        say(f"run {manifest.run!r} {done}: {manifest.parameters:,} parameters in {len(manifest.fragments)} fragments")
        say(f"  serve it:  archipelago merger URL --run {manifest.run}")
        say(f"  join it:   archipelago island URL --run {manifest.run}")
    return 0


def require_usable(config: RunConfig, weights: Path | None = None) -> tuple[RunConfig, OpenCorpus]:
    """The config with the vocabulary of its corpus, and that corpus; prepares the default one.

    Raises ConfigError or DataError unless it is here and large enough, the model known, and shaped like the weights.
    """
    from archipelago.islands.creation import fitted, require_readable
    from archipelago.islands.data.batches import Batches, held_out
    from archipelago.islands.data.corpus import open_corpus
    from archipelago.islands.models.registry import build

    corpus = open_corpus(config.data.corpus)
    config = fitted(config, corpus)
    require_readable(config, corpus)
    if weights is not None:
        WeightFiles(weights).require(build(config.model).tensors)
    Batches(corpus.train, config, lambda: None)
    held_out(corpus.valid, config.data.held_out_sequences, config.data.sequence_length)
    return config, corpus


def create(transport: Transport, config: RunConfig, weights: Path | None = None) -> tuple[Manifest, bool]:
    """The run's manifest, and whether it was created just now, from fresh parameters or from those `weights`.

    Raises MismatchError if it is there with another, and DataError for weights that do not fit the model.
    """
    keep_compiled()

    from archipelago.islands.creation import describe, first_snapshots

    fitting, corpus = require_usable(config)
    manifest = describe(transport.run, fitting, corpus.identity)
    params = None
    if weights is not None and transport.run not in transport.runs():
        files = WeightFiles(weights)
        params = files.load(manifest.tensors)
        manifest = replace(manifest, versions={**manifest.versions, "weights": files.describe()})
    try:
        transport.create(manifest, first_snapshots(manifest, params))
        return manifest, True
    except RunExistsError:
        found = transport.manifest()
    require_same(found, config)
    return found, False


def require_same(found: Manifest, config: RunConfig) -> None:
    """Raises MismatchError, in the words of who starts a run, unless that run has this config on this corpus."""
    from archipelago.islands.creation import describe

    try:
        fitting, corpus = require_usable(config)
        found.require_same(describe(found.run, fitting, corpus.identity))
    except MismatchError as error:
        raise MismatchError(
            error.subject, error.theirs, error.ours, "Use the run's own settings, or name another run with --run."
        ) from None
