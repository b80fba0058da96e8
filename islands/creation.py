"""Creating a run: its manifest, and version 0 of every fragment, from the seed or from weights that are there."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import jax
import numpy as np

from archipelago.broker.config import BYTES, SMALLEST_RATE, ModelConfig, RunConfig
from archipelago.broker.errors import ConfigError
from archipelago.broker.manifest import Corpus, Manifest, Tensor, balanced
from archipelago.broker.messages import Snapshot
from archipelago.broker.wire import digest, pack
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.islands.models.interface import Params
from archipelago.islands.programs import Programs
from archipelago.islands.sync.replica import flatten

PACKAGES = ("archipelago-train", "jax", "jaxlib", "flax", "optax", "numpy", "redis")


class Outline(NamedTuple):
    """What there is to know of a model before it is used; as in `islands.interface.Model`."""

    tensors: tuple[Tensor, ...]
    example_bytes: int | None


def outline(config: ModelConfig, programs: Programs | None = None) -> Outline:
    """Of the model of that config. Where `programs` has noted it, neither the model nor what it is made with loads."""

    def made() -> Any:
        from archipelago.islands.models.registry import build

        model = build(config)
        return [[[t.name, t.shape, t.kind] for t in model.tensors], model.example_bytes]

    tensors, example_bytes = made() if programs is None else programs.noted(("outline", config), made)
    return Outline(tuple(Tensor(name, tuple(shape), kind) for name, shape, kind in tensors), example_bytes)


def describe(run: str, config: RunConfig, corpus: Corpus, programs: Programs | None = None) -> Manifest:
    """The manifest that this config and this machine's code give."""
    tensors = outline(config.model, programs).tensors
    return Manifest(run, config, tensors, balanced(tensors, config.sync.fragments), corpus, _versions())


def fitted(config: RunConfig, corpus: OpenCorpus) -> RunConfig:
    """The config with the vocabulary of the corpus's tokenizer, and the inner learning rate of the model's size.

    Unless it names them itself.
    """
    from archipelago.islands.models.registry import RATES

    if config.inner.learning_rate is None:
        rate = RATES.get(config.model.size, SMALLEST_RATE)
        config = replace(config, inner=replace(config.inner, learning_rate=rate))
    if not corpus.tokenizer or config.model.vocabulary != BYTES:
        return config
    return replace(config, model=replace(config.model, vocabulary=corpus.vocabulary))


def require_readable(
    config: RunConfig, corpus: OpenCorpus, tokenizer: str | None = None, programs: Programs | None = None
) -> None:
    """Raises ConfigError when the config's model is not there, or cannot read this corpus, or when this is made of the
    tokens of another `tokenizer` than the one of that digest.
    """
    if corpus.vocabulary > config.model.vocabulary:
        raise ConfigError(
            f"the corpus {corpus.name!r} has {corpus.vocabulary:,} tokens, and the model knows "
            f"{config.model.vocabulary:,} (model.vocabulary)",
            f"Set --model.vocabulary {corpus.vocabulary}, or name another corpus with --data.corpus.",
        )
    if tokenizer is not None and corpus.tokenizer != tokenizer:
        mine, theirs = (f"the tokenizer {name}" if name else "bytes" for name in (corpus.tokenizer, tokenizer))
        raise ConfigError(
            f"the corpus {corpus.name!r} is made of {mine}, and the run's of {theirs}",
            "The same tokens must stand for the same text: name a corpus that the run's tokenizer made.",
        )
    wanted = outline(config.model, programs).example_bytes
    found = corpus.train.shape[1] if corpus.train.ndim == 2 else None
    if wanted is not None and found != wanted:
        holds = "running text" if found is None else f"examples of {found:,}"
        raise ConfigError(
            f"the model {config.model.size!r} reads examples of {wanted:,} bytes; corpus {corpus.name!r} is {holds}",
            "Name another corpus with --data.corpus (`archipelago prepare digits` makes one), or another --model.size.",
        )


def first_snapshots(manifest: Manifest, params: Params | None = None) -> list[tuple[Snapshot, bytes]]:
    """Version 0 of every fragment with its payload: of `params`, or freshly initialised from the run's seed."""
    config = manifest.config
    if params is None:
        from archipelago.islands.models.registry import build

        params = build(config.model).init(config.seed)
    out = []
    for p, rows in enumerate(manifest.layout):
        payload = pack(np.asarray(jax.device_get(flatten(rows, params))), config.wire.full, config.wire.full_zstd_level)
        snapshot = Snapshot(0, p, 0, 0, config.wire.full, len(payload), digest(payload), merged="")
        out.append((snapshot, payload))
    return out


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
