"""A model of eleven parameters, and a run in virtual time whose islands train it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from archipelago.broker.config import DataConfig, InnerConfig, OuterConfig, RunConfig, SyncConfig, WireConfig
from archipelago.broker.manifest import Corpus, Manifest, Tensor
from archipelago.islands.computation import Computation
from archipelago.islands.data.batches import Batches, range_order
from archipelago.islands.inner import InnerSteps
from archipelago.islands.models.interface import Model, Params
from archipelago.islands.sync.leaving import leave
from archipelago.islands.sync.participant import Participant
from archipelago.islands.worker import Island
from tests import samples
from tests.harness.played import Connect, PlayedRun
from tests.islands.models.mini import steps_of

CONFIG = RunConfig(
    record=True,
    data=DataConfig(sequence_length=4, batch_size=2, shards=4),
    inner=InnerConfig(steps=1000, learning_rate=0.01, warmup_steps=0, moments_warmup_steps=0),
    sync=SyncConfig(interval=4, fragments=2, window=2, quorum=1, grace=0.0),
    outer=OuterConfig(momentum=0.5),
    wire=WireConfig(up="bfloat16", thin="int4", down="float32"),
)
TENSORS = (Tensor("kernel", (2, 3)), Tensor("scale", (5,)))
TEXT = np.random.default_rng(0).integers(0, 256, 4096, np.uint8)


def _loss(params: Params, tokens_BxT1: jax.Array) -> jax.Array:
    """Return a quadratic loss whose minimum depends on the text."""
    middle = jnp.mean(tokens_BxT1.astype(jnp.float32)) / 100.0
    return jnp.sum((params["kernel"] - middle) ** 2) + jnp.sum((params["scale"] - middle) ** 2)


def _no_logits(params: Params, tokens_BxT: jax.Array) -> jax.Array:
    raise NotImplementedError


@cache
def steps_by(inner: InnerConfig) -> InnerSteps:
    """Return the compiled inner steps of the model."""
    return steps_of(Model(lambda seed: {}, _loss, TENSORS, _no_logits), inner)


STEPS = steps_by(CONFIG.inner)
#: Muon trains the kernel, and Adam trains the scale.
MUON = replace(CONFIG, inner=replace(CONFIG.inner, optimizer="muon"))


def manifest(run: str = "tiny", tensors: tuple[Tensor, ...] = TENSORS, config: RunConfig = CONFIG) -> Manifest:
    """Return a run of the model. Each tensor is a fragment."""
    return Manifest(run, config, tensors, tuple((t.name,) for t in tensors), Corpus("text", "0" * 32, TEXT.size), {})


def leaf_bytes(tree: Any) -> list[bytes]:
    """Return the bits of every array in a tree."""
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


class TinyRun(PlayedRun):
    """A run of the model. The test decides when each island acts."""

    def __init__(self, of: Manifest | None = None, connect: Connect | None = None) -> None:
        of = of or manifest()
        super().__init__(of, samples.first_snapshots(of, 1.0), connect)

    def island(
        self,
        name: str = "a",
        incarnation: str = "x",
        shards: Sequence[str] | None = None,
        silent: bool = False,
        on_marker: Callable[[Participant], object] | None = None,
    ) -> Island:
        """Return an island that has joined and leased a shard. A `silent` one has sent nothing yet."""
        if shards is None:
            shards = range_order(self.manifest.config.data.shards, self.manifest.config.seed)
        link = self.link(f"{name}/{incarnation}", shards)
        arrivals = link.join()
        batches = Batches(TEXT, self.manifest.config, link.lease)
        computation = Computation(self.manifest, steps_by(self.manifest.config.inner))
        island = Island(
            name, self.manifest, computation, batches, link, arrivals, self.clock, incarnation, on_marker=on_marker
        )
        if not silent:
            island.beat("joining")
            link.pump()
        return island

    def depart(self, island: Island, state: str = "left") -> None:
        """Let an island leave, and the merger process its contributions."""
        leave(island, state, flush_seconds=0.0)
        island.link.pump()
        self.merger.turn(0.0)


def played(steps: int, config: RunConfig = CONFIG) -> tuple[TinyRun, Island]:
    """Return a run, and its only island after some steps."""
    run = TinyRun(manifest(config=config))
    island = run.island()
    run.play(island, steps)
    return run, island
