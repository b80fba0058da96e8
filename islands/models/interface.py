"""The interface of a model: named tensors, and pure functions of them.

It is apart from `layers`, so that code that only moves tensors need not load flax.

Shapes in names: B sequences, T positions, N heads, D elements of a head, V vocabulary, S places.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from archipelago.broker.manifest import Tensor

#: Parameters by dotted name, such as `layers.0.attention.query.kernel`. All of them are float32.
Params = dict[str, jax.Array]
#: From parameters and a batch, such as tokens [B, T + 1] of uint8 or int32, to gradients and the loss.
Gradient = Callable[[Params, Any], tuple[Params, jax.Array]]


class Model(NamedTuple):
    """One architecture at one size. All functions are pure, differentiable and can be jitted.

    Attributes:
        init: From a seed to fresh parameters. Equal seeds give equal parameters.
        loss: From integer tokens [B, T + 1] to the mean cross-entropy in nats (float32, []) of the B · T targets, each
            the token that follows. Islands and evaluations report this loss.
        tensors: The shapes that `init` returns, sorted by name. Computing them allocates nothing.
        logits: From integer tokens [B, T] to float32 logits [B, T, V] for the token that follows each position.
        loss_and_penalty: From the same arguments as `loss` to that loss and the penalty that training adds to it (both
            float32, []), in one pass. None where training adds nothing.
    """

    init: Callable[[int], Params]
    loss: Callable[[Params, jax.Array], jax.Array]
    tensors: tuple[Tensor, ...]
    logits: Callable[[Params, jax.Array], jax.Array]
    loss_and_penalty: Callable[[Params, jax.Array], tuple[jax.Array, jax.Array]] | None = None

    def training_loss(self, params: Params, tokens_BxT1: jax.Array) -> Any:
        """Return the loss, and the penalty if there is one, as the loss of a `Task` does."""
        return (self.loss_and_penalty or self.loss)(params, tokens_BxT1.astype(jnp.int32))
