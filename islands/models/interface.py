"""What the rest of Archipelago knows of a model: named tensors, and pure functions of them.

Apart from `islands.layers`, so that who only moves tensors need not load what modules are made with.

Shapes in names: B sequences, T positions, N heads, D elements of a head, V vocabulary, S places.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax

from archipelago.broker.manifest import Tensor

Params = dict[str, jax.Array]
"""Parameters by dotted name, such as `layers.0.attention.query.kernel`; every one float32."""


class Memory(NamedTuple):
    """What attention keeps of the tokens before: S places in each layer, the first `length` of them taken."""

    keys: tuple[jax.Array, ...]
    """of each layer, [B, S, N, D], rotated to their positions"""
    values: tuple[jax.Array, ...]
    """of each layer, [B, S, N, D]"""
    length: jax.Array
    """int32, []"""


class Decoder(NamedTuple):
    """A model of text that goes on from what it has read, at the cost of the new tokens alone."""

    empty: Callable[[int], Memory]
    """from S, the most tokens that it will hold, to a memory of nothing, for B = 1"""
    extend: Callable[[Params, Memory, jax.Array, jax.Array], tuple[jax.Array, Memory]]
    """reads the first `count` (int32, [], at least 1) of integer tokens [1, T], which must find room: float32 logits
    [1, V] of the token after them, and the memory with them. The rest only fills up a shape."""


class Model(NamedTuple):
    """One architecture at one size. All functions are pure, differentiable and can be jitted."""

    init: Callable[[int], Params]
    """from a seed to fresh parameters; equal seeds give equal parameters"""
    loss: Callable[[Params, jax.Array], jax.Array]
    """from integer tokens [B, T + 1] to the mean cross-entropy of all targets, in nats a target (float32, []): of the
    B · T tokens that follow each, or of the B labels at the end of examples. What islands and evaluations report."""
    tensors: tuple[Tensor, ...]
    """what `init` returns, without allocating it; sorted by name"""
    logits: Callable[[Params, jax.Array], jax.Array]
    """from integer tokens [B, T] to float32 logits: [B, T, V] of the token that follows each, or [B, classes] of an
    example's label"""
    penalised: Callable[[Params, jax.Array], tuple[jax.Array, jax.Array]] | None = None
    """from the same as `loss` to that loss and what training adds to it (float32, [] both), in one pass; None: nothing
    is added"""
    example_bytes: int | None = None
    """bytes of one example, T + 1, its label last, for a model that reads only these; None for a model of text"""
    decoder: Decoder | None = None
    """what writes text, token by token; None for a model that reads only examples"""

    def objective(self, params: Params, tokens_BxT1: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What training descends, and the loss that it reports: the same, but for what `penalised` adds."""
        if self.penalised is None:
            loss = self.loss(params, tokens_BxT1)
            return loss, loss
        loss, penalty = self.penalised(params, tokens_BxT1)
        return loss + penalty, loss
