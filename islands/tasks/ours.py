"""Our models as tasks: a language model or a mixture of experts, on a corpus; and the first snapshots of their runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from archipelago.broker.config import BYTES, RunConfig
from archipelago.broker.errors import ConfigError
from archipelago.broker.manifest import Corpus, Manifest
from archipelago.broker.messages import Snapshot
from archipelago.islands.data.batches import Batches, range_order
from archipelago.islands.data.corpus import OpenCorpus, open_corpus
from archipelago.islands.evaluation import CorpusEvaluation
from archipelago.islands.inner import require_divisible
from archipelago.islands.models.interface import Params
from archipelago.islands.sync.arrays import plain_templates
from archipelago.islands.tasks.batches import TaskRun
from archipelago.islands.tasks.task import NamedTask, Task
from archipelago.islands.tasks.workload import Workload
from archipelago.islands.user_loop.new_run import first_snapshots as user_loop_snapshots


@dataclass(frozen=True)
class OurTask(NamedTask):
    """One of our models on a corpus. The settings of the run name both."""

    corpus: OpenCorpus

    @property
    def data(self) -> Corpus:
        return self.corpus.identity

    def under(self, config: RunConfig) -> OurTask:
        return our_task(config, self.corpus)


def our_task(config: RunConfig, corpus: OpenCorpus) -> OurTask:
    """Return the task of the model that the settings name."""
    from archipelago.islands.models.registry import build  # loads flax, which users' tasks do not need

    def batches(run: TaskRun) -> Batches:
        run.offer(range_order(config.data.shards, config.seed))
        return Batches(corpus.train, config, run.lease, fallback=run.seed)

    model = build(config.model)
    kinds = {tensor.name: tensor.kind for tensor in model.tensors}
    task = Task(
        init=model.init,
        loss=model.training_loss,
        batches=batches,
        evaluate=CorpusEvaluation(config, corpus),
        kinds=kinds.__getitem__,
        tokens=config.tokens_per_step,
        shapes=plain_templates(model.tensors),
    )
    return OurTask(task, corpus)


def our_work(config: RunConfig, corpus: OpenCorpus) -> Workload:
    """Return the model that the settings name, with those settings, on its corpus."""
    return Workload.of(our_task(config, corpus), config)


def task_here(manifest: Manifest, batch_size: int = 0) -> OurTask:
    """Return the task of a run of our models, on the text of this machine.

    Args:
        batch_size: The sequences of the island's inner step; 0 for those of the run.

    Raises:
        MismatchError: The text, or what this code makes of the settings, is not the run's.
    """
    config, corpus = manifest.config, open_corpus(manifest.corpus.name)
    manifest.require_same(replace(manifest, corpus=corpus.identity))
    if batch_size:
        config = replace(config, data=replace(config.data, batch_size=batch_size))
    return our_task(config, corpus)


# -- the creation of a run ---------------------------------------------------------------------------------------------


def fitted(config: RunConfig, corpus: OpenCorpus) -> RunConfig:
    """Return the config with the tokenizer's vocabulary and the model's learning rate where these are not set.

    Raises ConfigError if the model cannot read this corpus in its batches.
    """
    from archipelago.islands.models.registry import learning_rate

    require_divisible(config.data.batch_size, config.inner.micro_batches)
    if config.inner.learning_rate is None:
        config = replace(config, inner=replace(config.inner, learning_rate=learning_rate(config.model.size)))
    if config.model.vocabulary == BYTES:
        config = replace(config, model=replace(config.model, vocabulary=corpus.vocabulary))
    if corpus.vocabulary > config.model.vocabulary:
        raise ConfigError(
            f"the corpus {corpus.name!r} has {corpus.vocabulary:,} tokens, but the model has "
            f"{config.model.vocabulary:,} (model.vocabulary)",
            f"Set --model.vocabulary {corpus.vocabulary}, or name another corpus with --data.corpus.",
            code="config.value",
        )
    return config


def first_snapshots(manifest: Manifest, params: Params) -> Sequence[tuple[Snapshot, bytes]]:
    """Return version 0 of every fragment with its payload."""
    return user_loop_snapshots(manifest, lambda name: np.asarray(params[name], np.float32).reshape(-1))
