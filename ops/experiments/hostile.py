"""Hostile islands for runs in virtual time: what they send instead of their work, and on which labels they train.

A hostile island follows the protocol: it joins, adopts snapshots and answers every round. Only what it sends is wrong.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from archipelago.broker.codecs import Vector
from archipelago.broker.config import InnerConfig, ModelConfig
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Contribution
from archipelago.broker.transport import IslandClient
from archipelago.broker.wire import digest, pack, unpack
from archipelago.islands.inner import InnerSteps, compile_steps
from archipelago.islands.models.interface import Model, Params
from archipelago.islands.models.registry import build

#: From a fragment's outer gradient, its tensors' lengths and random numbers to what the island sends.
Forgery = Callable[[Vector, list[int], np.random.Generator], Vector]
#: The attack `claims` multiplies its tokens by this. A merger admits batches that are this much larger than usual.
CLAIMED = 64


def _noise(delta_N: Vector, lengths: list[int], random: np.random.Generator) -> Vector:
    """Return noise in which every tensor has the norm that it had."""
    out = random.standard_normal(delta_N.size, np.float32)
    at = 0
    for length in lengths:
        part = slice(at, at + length)
        out[part] *= np.linalg.norm(delta_N[part]) / max(1e-30, float(np.linalg.norm(out[part])))
        at += length
    return out


def _collude(delta_N: Vector, lengths: list[int], random: np.random.Generator) -> Vector:
    """Return the same noise for every island, so that hostile islands agree with each other more than honest ones."""
    return _noise(delta_N, lengths, np.random.default_rng(1))


def _same(delta_N: Vector, lengths: list[int], random: np.random.Generator) -> Vector:
    return delta_N


#: What an island sends by the name of the attack. `labels` trains on wrong labels instead (`wrong_labels`), and
#: `claims` also claims CLAIMED times its tokens. `stale` claims a base that is two versions older.
FORGERIES: dict[str, Forgery] = {
    "flip": lambda delta_N, lengths, random: -delta_N,
    "noise": _noise,
    "scale": lambda delta_N, lengths, random: 3 * delta_N,
    "collude": _collude,
    "labels": _same,
    "claims": lambda delta_N, lengths, random: -100 * delta_N,
    "stale": lambda delta_N, lengths, random: -delta_N,
}


class HostileClient:
    """An island's client that replaces each contribution by a forgery.

    Args:
        client: The honest client.
        manifest: The run.
        attack: A name of FORGERIES.
        seed: The seed of its random numbers.
    """

    def __init__(self, client: IslandClient, manifest: Manifest, attack: str, seed: int) -> None:
        self._client, self._manifest, self._attack = client, manifest, attack
        self._random = np.random.default_rng(seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def publish(self, contribution: Contribution, payload: bytes) -> str:
        """Publish the forgery, with a header that fits it."""
        p, codec = contribution.fragment, contribution.codec
        lengths = [tensor.size for tensor, _ in self._manifest.layout[p]]
        delta_N = unpack(payload, self._manifest.sizes[p], codec)
        forged_N = FORGERIES[self._attack](delta_N, lengths, self._random)
        sent = pack(forged_N, codec, self._manifest.config.wire.zstd_level)
        header = dataclasses.replace(contribution, bytes=len(sent), digest=digest(sent))
        if self._attack == "claims":
            header = dataclasses.replace(header, tokens=CLAIMED * header.tokens)
        if self._attack == "stale":
            header = dataclasses.replace(header, base=max(0, header.base - 2))
        return self._client.publish(header, sent)


def wrong_labels(model: Model) -> Model:
    """Return a text model that is trained to predict the tokens of each sequence in reverse order."""

    def loss(params: Params, tokens_BxT1: jax.Array) -> jax.Array:
        logits_BxTxV = model.logits(params, tokens_BxT1[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits_BxTxV, tokens_BxT1[:, :0:-1])
        return jnp.mean(losses)

    return model._replace(loss=loss, loss_and_penalty=None)


@cache
def compiled_wrong(model: ModelConfig, inner: InnerConfig) -> InnerSteps:
    """Return the inner steps of an island that trains on wrong labels."""
    return compile_steps(wrong_labels(build(model)), inner)
