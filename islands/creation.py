"""The creation of a run: its manifest, and version 0 of every fragment, from the seed or from given weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from archipelago.broker.config import BYTES, RunConfig
from archipelago.broker.errors import ConfigError
from archipelago.broker.manifest import Corpus, Manifest, balanced, installed_versions
from archipelago.broker.messages import Snapshot
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.islands.inner import require_divisible
from archipelago.islands.models.interface import Params
from archipelago.islands.models.registry import build, learning_rate
from archipelago.islands.own_loop import new_run


def describe(run: str, config: RunConfig, corpus: Corpus) -> Manifest:
    """Return the manifest that this config and this machine's code give."""
    tensors = tuple(build(config.model).tensors)
    return Manifest(run, config, tensors, balanced(tensors, config.sync.fragments), corpus, installed_versions())


def fitted(config: RunConfig, corpus: OpenCorpus) -> RunConfig:
    """Return the config with the tokenizer's vocabulary and the model's learning rate where these are not set."""
    if config.inner.learning_rate is None:
        config = replace(config, inner=replace(config.inner, learning_rate=learning_rate(config.model.size)))
    if not corpus.tokenizer or config.model.vocabulary != BYTES:
        return config
    return replace(config, model=replace(config.model, vocabulary=corpus.vocabulary))


def require_readable(config: RunConfig, corpus: OpenCorpus) -> None:
    """Raise ConfigError unless the config's model can read this corpus in its batches."""
    require_divisible(config.data.batch_size, config.inner.micro_batches)
    if corpus.vocabulary > config.model.vocabulary:
        raise ConfigError(
            f"the corpus {corpus.name!r} has {corpus.vocabulary:,} tokens, but the model has "
            f"{config.model.vocabulary:,} (model.vocabulary)",
            f"Set --model.vocabulary {corpus.vocabulary}, or name another corpus with --data.corpus.",
            code="config.vocabulary",
        )


def first_snapshots(manifest: Manifest, params: Params | None = None) -> Sequence[tuple[Snapshot, bytes]]:
    """Return version 0 of every fragment with its payload, from `params` or initialised from the run's seed."""
    values = params if params is not None else build(manifest.config.model).init(manifest.config.seed)
    return new_run.first_snapshots(manifest, lambda name: np.asarray(values[name], np.float32).reshape(-1))
