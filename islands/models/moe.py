"""Mixture-of-experts transformers: in each layer a router sends every token through a few of many MLPs.

Dispatch is dense, by einsum over as many slots as each expert has for a sequence (GShard, arXiv 2006.16668), so that
shapes are static. Experts are tensors of their own, not one stacked tensor: they spread over fragments, and RDA weighs
each expert's progress by itself, which matters where islands route differently much to it.

Shapes in names: B sequences, T positions, W width, H hidden width, E experts, K choices of a token, C slots an expert
has in one sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from archipelago.broker.config import BYTES
from archipelago.islands.models.interface import Model
from archipelago.islands.models.layers import GAIN, GatedMLP, Penalty, Size, decoder, linear, next_token_model, wired
from archipelago.islands.models.transformer import Transformer


@dataclass(frozen=True)
class Routing:
    """How tokens find experts."""

    experts: int
    choices: int
    """experts that a token goes through, at most"""
    capacity_factor: float = 1.25
    """slots of all experts together, for each choice of each token; who finds none is left to the residual stream"""
    balance: float = 0.01
    """factor α of the load-balancing loss"""
    router_z: float = 0.001
    """factor of the router's z-loss, which keeps its logits small"""

    def slots(self, positions: int) -> int:
        """C, of each expert in a sequence of T `positions`."""
        return math.ceil(self.capacity_factor * self.choices * positions / self.experts)


SIZES: dict[str, tuple[Size, Routing]] = {
    "tiny-moe": (Size(width=64, layers=2, heads=2, hidden=88), Routing(experts=8, choices=2)),
    "small-moe": (Size(width=128, layers=5, heads=4, hidden=176), Routing(experts=8, choices=2)),
}
"""`hidden` is of one expert: two of them do the work of the MLP of the dense size"""


class Routes(NamedTuple):
    """Where tokens go. All float32."""

    dispatch_BxTxExC: jax.Array
    """1 where a token takes an expert's slot"""
    combine_BxTxExC: jax.Array
    """the same, times the weight of that expert's answer"""
    balance: jax.Array
    """E · Σ f·P (Switch Transformer, arXiv 2101.03961, Eq. 4 without α): 1 when all experts are named equally often"""
    router_z: jax.Array
    """mean squared log-sum-exp of the router's logits (ST-MoE, arXiv 2202.08906, Eq. 5)"""


def route(logits_BxTxE: jax.Array, choices: int, slots: int) -> Routes:
    """Each token's `choices` most probable experts, as long as they have one of `slots` free for its sequence.

    Slots are taken in the order of positions, all choices of one before the next's: a causal model may not learn from
    who was left out what comes later. Weights are probabilities, divided by their sum when there is more than one.
    """
    experts = logits_BxTxE.shape[-1]
    probabilities_BxTxE = jax.nn.softmax(logits_BxTxE, axis=-1)
    weights_BxTxK, chosen_BxTxK = jax.lax.top_k(probabilities_BxTxE, choices)
    if choices > 1:
        weights_BxTxK = weights_BxTxK / jnp.sum(weights_BxTxK, axis=-1, keepdims=True)
    picks_BxTxKxE = jax.nn.one_hot(chosen_BxTxK, experts)
    batch, positions = logits_BxTxE.shape[:2]
    in_order = picks_BxTxKxE.reshape(batch, positions * choices, experts)
    slot = jnp.sum((jnp.cumsum(in_order, axis=1) - 1) * in_order, axis=-1).astype(jnp.int32)
    taken_BxTxKxC = jax.nn.one_hot(slot.reshape(chosen_BxTxK.shape), slots)  # no 1 at all past the last slot
    named_E = jnp.mean(picks_BxTxKxE, axis=(0, 1, 2))
    return Routes(
        dispatch_BxTxExC=jnp.einsum("btke,btkc->btec", picks_BxTxKxE, taken_BxTxKxC),
        combine_BxTxExC=jnp.einsum("btk,btke,btkc->btec", weights_BxTxK, picks_BxTxKxE, taken_BxTxKxC),
        balance=experts * jnp.sum(named_E * jnp.mean(probabilities_BxTxE, axis=(0, 1))),
        router_z=jnp.mean(jnp.square(jax.nn.logsumexp(logits_BxTxE, axis=-1))),
    )


class RoutedMLP(nnx.Module):
    """A router over gated MLPs, whose two losses are its `Penalty`."""

    def __init__(self, routing: Routing, size: Size, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.routing, self.dtype = routing, dtype
        self.router = linear(size.width, routing.experts, GAIN, jnp.float32, rngs)
        self.experts = nnx.List([GatedMLP(size, dtype, rngs) for _ in range(routing.experts)])

    def __call__(self, x_BxTxW: jax.Array) -> jax.Array:
        routing = self.routing
        routes = route(self.router(x_BxTxW.astype(jnp.float32)), routing.choices, routing.slots(x_BxTxW.shape[1]))
        self.penalty = Penalty(routing.balance * routes.balance + routing.router_z * routes.router_z)
        gate_ExWxH, up_ExWxH, down_ExHxW = (
            jnp.stack([getattr(expert, part).kernel[...] for expert in self.experts]).astype(self.dtype)
            for part in ("gate", "up", "down")
        )
        x_ExBxCxW = jnp.einsum("btec,btw->ebcw", routes.dispatch_BxTxExC.astype(self.dtype), x_BxTxW)
        hidden = jax.nn.silu(jnp.einsum("ebcw,ewh->ebch", x_ExBxCxW, gate_ExWxH))
        hidden = hidden * jnp.einsum("ebcw,ewh->ebch", x_ExBxCxW, up_ExWxH)
        out_ExBxCxW = jnp.einsum("ebch,ehw->ebcw", hidden, down_ExHxW)
        return jnp.einsum("btec,ebcw->btw", routes.combine_BxTxExC.astype(self.dtype), out_ExBxCxW)


def transformer(size: tuple[Size, Routing], compute_dtype: DTypeLike, vocabulary: int = BYTES) -> Model:
    """The transformer of this size with a routed MLP in each layer; routing is float32 in any dtype.

    Its decoder leaves no token out that comes alone: each expert has a slot in a sequence of one.
    """
    numbers, routing = size
    mlp = partial(RoutedMLP, routing)
    network = wired(lambda rngs: Transformer(numbers, compute_dtype, rngs, mlp, vocabulary))
    return next_token_model(network, decoder(network, numbers, compute_dtype), penalised=True)
