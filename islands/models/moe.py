"""Mixture-of-experts transformers: in each layer a router sends every token through a few of many MLPs.

Dispatch is dense, by einsum over a fixed number of slots per expert and sequence (GShard, arXiv 2006.16668), so that
shapes are static. Each expert has its own tensors instead of a part of a stacked tensor. Experts can then spread over
fragments, and RDA weighs the progress of each expert separately, which matters when islands route different numbers of
tokens to it.

Shapes in names: B sequences, T positions, W width, H hidden width, E experts, K choices of a token, C slots of an
expert in one sequence.
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
from archipelago.islands.models.layers import GAIN, GatedMLP, Penalty, language_model, linear
from archipelago.islands.models.llama import Size
from archipelago.islands.models.transformer import UNROLLED, Depth, Transformer


@dataclass(frozen=True)
class Routing:
    """Settings of the assignment of tokens to experts.

    Attributes:
        choices: The most experts that process a token.
        capacity_factor: Slots of all experts together, per choice of each token. A token without a slot passes only
            through the residual stream.
        balance: The factor α of the load-balancing loss.
        router_z: The factor of the router's z-loss, which keeps its logits small.
    """

    experts: int
    choices: int
    capacity_factor: float = 1.25
    balance: float = 0.01
    router_z: float = 0.001

    def slots(self, positions: int) -> int:
        """Return C, the slots of each expert in a sequence of T `positions`."""
        return math.ceil(self.capacity_factor * self.choices * positions / self.experts)


class Routes(NamedTuple):
    """The assignment of tokens to slots. All arrays are float32.

    Attributes:
        dispatch_BxTxExC: 1 where a token takes an expert's slot, else 0.
        combine_BxTxExC: The same, times the weight of that expert's output.
        balance: E · Σ f·P (Switch Transformer, arXiv 2101.03961, Eq. 4 without α). It is 1 when all experts are chosen
            equally often.
        router_z: The mean squared log-sum-exp of the router's logits (ST-MoE, arXiv 2202.08906, Eq. 5).
    """

    dispatch_BxTxExC: jax.Array
    combine_BxTxExC: jax.Array
    balance: jax.Array
    router_z: jax.Array


def route(logits_BxTxE: jax.Array, choices: int, slots: int) -> Routes:
    """Assign each token to its `choices` most probable experts, as long as these have one of `slots` slots free.

    Slots are filled in the order of positions, with all choices of one position before those of the next. Otherwise a
    causal model could learn about later tokens from the slots that they take. The weights are the router's
    probabilities, divided by their sum when a token has more than one choice.
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
    taken_BxTxKxC = jax.nn.one_hot(slot.reshape(chosen_BxTxK.shape), slots)  # all zeros past the last slot
    frequency_E = jnp.mean(picks_BxTxKxE, axis=(0, 1, 2))
    return Routes(
        dispatch_BxTxExC=jnp.einsum("btke,btkc->btec", picks_BxTxKxE, taken_BxTxKxC),
        combine_BxTxExC=jnp.einsum("btk,btke,btkc->btec", weights_BxTxK, picks_BxTxKxE, taken_BxTxKxC),
        balance=experts * jnp.sum(frequency_E * jnp.mean(probabilities_BxTxE, axis=(0, 1))),
        router_z=jnp.mean(jnp.square(jax.nn.logsumexp(logits_BxTxE, axis=-1))),
    )


class RoutedMLP(nnx.Module):
    """A router over gated MLPs. Its `Penalty` is the sum of the load-balancing loss and the z-loss."""

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


def transformer(
    size: Size, routing: Routing, compute_dtype: DTypeLike, vocabulary: int = BYTES, depth: Depth = UNROLLED
) -> Model:
    """The transformer of this size with a routed MLP in each layer. Routing is float32 in any `compute_dtype`."""
    mlp = partial(RoutedMLP, routing)
    return language_model(lambda rngs: Transformer(size, compute_dtype, rngs, mlp, vocabulary, depth), has_penalty=True)
