"""`archipelago init`: create a run in a Redis, in one transaction."""

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
from archipelago.ops.weights.tokenizers import require_tokenizer


@dataclass(frozen=True)
class InitOptions:
    """Create a run: its config, its corpus and its first parameters. Workers then join it with its URL and name."""

    url: Annotated[str | None, tyro.conf.Positional] = None
    """redis://HOST:PORT, rediss://… or unix://…; default $ARCHIPELAGO_URL"""
    run: str = "demo"
    """name of the run"""
    config: Path | None = None
    """a TOML file with settings; flags override it"""
    from_: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """weights to begin with: a .safetensors file or its folder, such as `archipelago export` writes"""
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)
    json: bool = False
    """print one JSON object"""


def main(options: InitOptions) -> int:
    """Create the run, or report that it exists already."""
    config = checked(options.settings)
    transport = connect_to(options.url, checked_name(options.run, "the run name"))
    manifest, created = create(transport, config, options.from_)
    if options.json:
        print_json({"run": manifest.run, "created": created, "parameters": manifest.parameters,
                    "fragments": len(manifest.fragments), "config_digest": manifest.config.digest()})  # fmt: skip
    else:
        done = "created" if created else "exists already, with this config"
        say(f"run {manifest.run!r} {done}: {manifest.parameters:,} parameters in {len(manifest.fragments)} fragments")
        say(f"  text:      {text_of(manifest)}")
        say(f"  serve it:  archipelago merger URL --run {manifest.run}")
        say(f"  join it:   archipelago island URL --run {manifest.run}")
    return 0


def text_of(manifest: Manifest) -> str:
    """Return where the run's text came from, and what of it was read, skipped and held out."""
    from archipelago.islands.data.corpus import open_corpus

    return open_corpus(manifest.corpus.name).describe()


def require_usable(config: RunConfig, weights: Path | None = None) -> tuple[RunConfig, OpenCorpus]:
    """Return the config with the vocabulary of its corpus, and that corpus. Prepare the default corpus if needed.

    Raises:
        ConfigError: The model is not known.
        DataError: The corpus is missing or too small, or the weights do not fit the model.
    """
    from archipelago.islands.creation import fitted, require_readable
    from archipelago.islands.data.batches import Batches
    from archipelago.islands.data.corpus import open_corpus
    from archipelago.islands.data.sharding import held_out

    corpus = open_corpus(config.data.corpus)
    config = fitted(config, corpus)
    require_readable(config, corpus)
    if weights is not None:
        require_fitting(WeightFiles(weights), config, corpus)
    Batches(corpus.train, config, lambda: None)
    held_out(corpus.valid, config.data.held_out_sequences, config.data.sequence_length)
    return config, corpus


def require_fitting(files: WeightFiles, config: RunConfig, corpus: OpenCorpus) -> bool:
    """Check that the weights fit the model, and that the corpus was made with the tokenizer of the weights.

    Returns:
        False if the weights do not say which tokenizer they were trained with.

    Raises:
        DataError: They do not fit (`weights.unfit`, `weights.tokenizer`).
    """
    from archipelago.islands.models.registry import build

    model = build(config.model)
    is_known = model.decoder is None or require_tokenizer(files, corpus)
    files.require(model.tensors)
    return is_known


def create(transport: Transport, config: RunConfig, weights: Path | None = None) -> tuple[Manifest, bool]:
    """Return the run's manifest, and whether this call created it, from `weights` or from fresh parameters.

    Raises:
        MismatchError: The run exists with another config.
        DataError: The weights do not fit the model.
    """
    keep_compiled()

    from archipelago.islands.creation import describe, first_snapshots

    fitting, corpus = require_usable(config)
    manifest = describe(transport.run, fitting, corpus.identity)
    params = None
    if weights is not None and transport.run not in transport.reader.runs():
        files = WeightFiles(weights)
        if not require_fitting(files, fitting, corpus):
            say(f"warning: the weights in {weights} do not say which tokenizer they were trained with; it must be that "
                f"of the corpus {corpus.name!r}. A tokenizer.json beside them is compared.")  # fmt: skip
        params = files.load(manifest.tensors)
        manifest = replace(manifest, versions={**manifest.versions, "weights": files.describe()})
    try:
        transport.create(manifest, first_snapshots(manifest, params))
        return manifest, True
    except RunExistsError:
        found = transport.reader.manifest()
    require_same(found, config)
    return found, False


def require_same(found: Manifest, config: RunConfig) -> None:
    """Raise MismatchError, with a remedy for the user who starts a run, unless that run has this config."""
    from archipelago.islands.creation import describe

    try:
        fitting, corpus = require_usable(config)
        found.require_same(describe(found.run, fitting, corpus.identity))
    except MismatchError as error:
        raise MismatchError(
            error.subject,
            error.run_value,
            error.worker_value,
            "Use the run's own settings, or name another run with --run.",
        ) from None
