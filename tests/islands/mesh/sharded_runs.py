"""A run in virtual time of a small model with matrices, whose islands are on meshes of any shape."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from archipelago.broker.config import (
    AdoptConfig,
    DataConfig,
    InnerConfig,
    OuterConfig,
    RunConfig,
    SyncConfig,
    WireConfig,
)
from archipelago.broker.manifest import Corpus, Manifest, Tensor, balanced
from archipelago.islands.computation import Computation
from archipelago.islands.data.batches import Batches, range_order
from archipelago.islands.inner import InnerSteps
from archipelago.islands.mesh import MeshShape
from archipelago.islands.models.interface import Model, Params
from archipelago.islands.models.layers import mean_cross_entropy
from archipelago.islands.placement import Placement, placement_of
from archipelago.islands.tasks.ours import first_snapshots
from archipelago.islands.worker import Island
from tests.harness.played import PlayedRun
from tests.islands.models.mini import steps_of

CONFIG = RunConfig(
    record=True,
    data=DataConfig(sequence_length=8, batch_size=8, shards=4),
    inner=InnerConfig(steps=1000, learning_rate=0.01, warmup_steps=0, moments_warmup_steps=0),
    sync=SyncConfig(interval=4, fragments=1, window=2, quorum=1, grace=0.0),
    adopt=AdoptConfig(rule="carry"),
    outer=OuterConfig(momentum=0.5),
    wire=WireConfig(up="int4", thin="", down="float32"),
)
#: A scale of 24 elements puts every later tensor across the blocks of a codec.
TENSORS = (
    Tensor("embedding", (256, 24), "embedding"),
    Tensor("hidden.gate.kernel", (24, 60)),
    Tensor("hidden.down.kernel", (60, 24)),
    Tensor("norm.scale", (24,)),
)
TEXT = np.random.default_rng(0).integers(0, 256, 4096, np.uint8)
ONE, SQUARE, FOUR = MeshShape(), MeshShape(data=2, fsdp=2), MeshShape(data=4)
COLUMNS = MeshShape(fsdp=2, tensor=2)


def _logits(params: Params, tokens_BxT: jax.Array) -> jax.Array:
    x_BxTxW = params["embedding"][tokens_BxT] * params["norm.scale"][None, None, :]
    hidden = jnp.tanh(x_BxTxW @ params["hidden.gate.kernel"])
    return (x_BxTxW + hidden @ params["hidden.down.kernel"]) @ params["embedding"].T


def _loss(params: Params, tokens_BxT1: jax.Array) -> jax.Array:
    return mean_cross_entropy(_logits(params, tokens_BxT1[:, :-1]), tokens_BxT1[:, 1:])


@cache
def _steps(inner: InnerConfig) -> InnerSteps:
    return steps_of(Model(lambda seed: {}, _loss, TENSORS, _logits), inner)


@cache
def on_mesh(shape: MeshShape, config: RunConfig) -> tuple[Placement | None, InnerSteps]:
    """Return the places on a mesh and the inner steps there, compiled once for all tests."""
    placement = placement_of(shape, manifest(config), config.data.batch_size, jax.devices())
    steps = _steps(config.inner)
    return placement, steps if placement is None else placement.steps(steps)


def manifest(config: RunConfig = CONFIG) -> Manifest:
    """Return a run of the model."""
    fragments = balanced(TENSORS, config.sync.fragments)
    return Manifest("meshes", config, TENSORS, fragments, Corpus("text", "0" * 32, TEXT.size), {})


def _first(of: Manifest) -> Params:
    rng = np.random.default_rng(1)
    made = {t.name: jnp.asarray(rng.standard_normal(t.shape) / 5, jnp.float32) for t in of.tensors}
    return made | {"norm.scale": jnp.ones(24)}


class MeshRun(PlayedRun):
    """A run of the model, whose islands are on meshes."""

    def __init__(self, of: Manifest | None = None) -> None:
        of = of or manifest()
        super().__init__(of, first_snapshots(of, _first(of)))

    def island(self, shape: MeshShape, name: str = "a", batch_size: int = CONFIG.data.batch_size) -> Island:
        """Return an island on a mesh that has joined and leased a range of the text."""
        config = self.manifest.config
        own = replace(config, data=replace(config.data, batch_size=batch_size))
        link = self.link(f"{name}/x", range_order(config.data.shards, config.seed))
        arrivals, (placement, steps) = link.join(), on_mesh(shape, config)
        island = Island(
            name, self.manifest, Computation(self.manifest, steps, None, placement),
            Batches(TEXT, own, link.lease), link, arrivals, self.clock, "x",
        )  # fmt: skip
        island.beat("joining")
        link.pump()
        return island
