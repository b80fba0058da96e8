"""Runs with parameters, which tests export, import and generate text from."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from archipelago.broker.config import ModelConfig, RunConfig
from archipelago.islands.data.corpus import open_corpus
from archipelago.islands.models.interface import Params
from archipelago.islands.models.registry import build
from archipelago.islands.tasks.ours import first_snapshots, fitted, our_work
from archipelago.merger.checkpoint import CheckpointStore
from archipelago.ops.weights.export import RunParameters
from tests import samples

#: A text, and how many tokens its tokenizer has.
LINES = [f"{n} islands and {n * n % 997} ships\n" for n in range(4000)]
VOCABULARY = 400
SMALL = replace(RunConfig(), data=replace(RunConfig().data, corpus="small", sequence_length=32, shards=8))
TINY = build(ModelConfig("tiny"))


@cache
def found_of(config: RunConfig = SMALL) -> RunParameters:
    """Return the parameters of a run. They differ from fresh ones, whose scales are all 1 and could change places."""
    manifest = our_work(config, open_corpus(config.data.corpus)).describe("mine")
    rng = np.random.default_rng(0)
    fresh = build(config.model).init(3)
    params = {n: p + 0.1 * jnp.asarray(rng.normal(size=p.shape), jnp.float32) for n, p in fresh.items()}
    return RunParameters(manifest, params, 7, 40, "a test")


def of_tokens() -> RunParameters:
    """Return the parameters of a run on a corpus with a tokenizer."""
    corpus = open_corpus("tokens")
    return found_of(fitted(replace(SMALL, data=replace(SMALL.data, corpus="tokens")), corpus))


def same(one: Params, other: Params) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def checkpointed(found: RunParameters, folder: Path = Path("runs/mine/merger")) -> None:
    """Write a checkpoint of the run into the folder of a merger."""
    image = replace(
        samples.image(found.manifest, []), tape=(), state="",
        fragments=samples.first_states(found.manifest, first_snapshots(found.manifest, found.params)),
    )  # fmt: skip
    CheckpointStore(folder / "checkpoints").save(image)
