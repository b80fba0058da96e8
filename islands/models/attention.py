"""Attention in the form that suits the device: cuDNN's flash attention on NVIDIA GPUs, XLA's elsewhere.

Flash attention never holds the matrix of all pairs of positions, so its memory grows with T instead of T². It works in
bfloat16 and float16 only. We compare it once with XLA's on the device, because a driver or a library may lack it.

Shapes in names: B sequences, T positions, N heads, D elements of a head.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

Implementation = Literal["cudnn", "xla"]

#: The largest difference from XLA's gradients, as a share of the largest of them. bfloat16 has 8 bits.
TOLERANCE = 0.05
#: Positions of the comparison. Whether cuDNN supports a case depends on D and the dtype, and not on T.
POSITIONS = 128

log = logging.getLogger(__name__)


def attend(query_BxTxNxD: jax.Array, key_BxTxNxD: jax.Array, value_BxTxNxD: jax.Array) -> jax.Array:
    """Return the mean of the values so far, weighted by the softmax of scaled products of queries and keys."""
    heads, size = query_BxTxNxD.shape[2:]
    flash = flash_kind(jax.default_backend(), query_BxTxNxD.dtype.name, heads, size)
    return jax.nn.dot_product_attention(query_BxTxNxD, key_BxTxNxD, value_BxTxNxD, is_causal=True, implementation=flash)


@cache
def flash_kind(backend: str, dtype: str, heads: int, size: int) -> Implementation | None:
    """Return the implementation of flash attention for these inputs; None for the default one of JAX."""
    if backend != "gpu" or dtype not in ("bfloat16", "float16"):
        return None
    return "cudnn" if agrees("cudnn", dtype, heads, size) else None


def agrees(kind: Implementation, dtype: DTypeLike, heads: int, size: int) -> bool:
    """Return whether an implementation works on this device, with the results and gradients of XLA's."""
    random = np.random.default_rng(0)
    inputs = [random.normal(size=(2, POSITIONS, heads, size)).astype(dtype) for _ in range(3)]
    try:
        pairs = list(zip(_gradients(kind, inputs), _gradients("xla", inputs), strict=True))
    except Exception as error:  # noqa: BLE001 - each version of JAX and cuDNN has its own errors
        log.info("attention by XLA, because cuDNN's flash attention does not work here: %.200s", error)
        return False
    differs = [np.abs(found - wanted).max() > TOLERANCE * np.abs(wanted).max() for found, wanted in pairs]
    if any(differs) or not all(np.isfinite(found).all() for found, _ in pairs):
        log.warning("attention by XLA, because cuDNN's flash attention gives other numbers here")
        return False
    return True


def _gradients(kind: Implementation, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Return the gradients of the mean square of attention. Its programs are compiled and run at once.

    A model that is being traced calls this, so nothing here may depend on its tracers.
    """

    def mean_square(*inputs: jax.Array) -> jax.Array:
        mixed = jax.nn.dot_product_attention(*inputs, is_causal=True, implementation=kind)
        return jnp.mean(jnp.square(mixed.astype(jnp.float32)))

    found = jax.jit(jax.grad(mean_square, argnums=(0, 1, 2))).lower(*inputs).compile()(*inputs)
    return [np.asarray(each, np.float32) for each in found]
