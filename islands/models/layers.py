"""The parts of transformers, as flax modules, and their conversion to pure functions.

`language_model` turns a module into functions over a flat dict of arrays. The rest of Archipelago moves named tensors
and never looks inside a model. The names decide how a tensor is treated: one that ends in `embedding` is merged by the
rule for embeddings. Muon trains no tensor with `embedding`, `router` or `output` in its name; AdamW does.

Attention has the form that suits the device: cuDNN's flash attention on NVIDIA GPUs, XLA's elsewhere. Flash attention
never holds the matrix of all pairs of positions, so its memory grows with T instead of T². It works in bfloat16 and
float16 only.

Shapes in names: B sequences, T positions, W width, N heads, D elements of a head, V vocabulary.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.typing import DTypeLike

from archipelago.broker.manifest import Tensor
from archipelago.islands.models.interface import Model, Params
from archipelago.islands.models.llama import NORM_EPSILON, ROTARY_BASE, Size

#: The root mean square of a projection's first outputs, for normalised input.
GAIN = 0.5
#: Positions of the trial. Whether cuDNN supports a case depends on D and the dtype, and not on T.
POSITIONS = 128

log = logging.getLogger(__name__)


def random_keys(key: jax.Array) -> nnx.Rngs:
    """Return the keys of `nnx.Rngs(key)`. It counts them in JAX, which took most of the time to make a model."""
    numbers = itertools.count()
    return cast("nnx.Rngs", SimpleNamespace(params=lambda: jax.random.fold_in(key, next(numbers))))


class Penalty(nnx.Variable[jax.Array]):
    """A term (float32, []) that a module adds to the training loss. The module sets it as an attribute when called."""


def rms_norm(width: int, dtype: DTypeLike) -> nnx.RMSNorm:
    """RMSNorm with a learned scale. The scale starts at one, so the norm needs no key of the model."""
    return nnx.RMSNorm(width, epsilon=NORM_EPSILON, dtype=dtype, rngs=random_keys(jax.random.key(0)))


def rotate(x_BxTxNxD: jax.Array, positions_T: jax.Array) -> jax.Array:
    """Apply rotary positions (RoFormer): rotate elements i and i + D/2 by the angle position · base^(−2i/D).

    The dot product of two rotated vectors then depends only on the difference of their positions. The rotation is
    computed in float32 and returned in the dtype of the input.
    """
    half = x_BxTxNxD.shape[-1] // 2
    frequency = jnp.exp(jnp.arange(half, dtype=jnp.float32) * (-math.log(ROTARY_BASE) / half))
    angle = positions_T.astype(jnp.float32)[None, :, None, None] * frequency[None, None, None, :]
    sine, cosine = jnp.sin(angle), jnp.cos(angle)
    low, high = jnp.split(x_BxTxNxD.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1)
    return rotated.astype(x_BxTxNxD.dtype)


def residual_gain(size: Size) -> float:
    """Return the gain of a residual branch. It keeps the scale of the sum of all 2 · layers branches."""
    return GAIN / math.sqrt(2 * size.layers)


def linear(fan_in: int, fan_out: int, gain: float, dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.Linear:
    """A projection without bias. Its weights are normal with standard deviation gain / √fan_in."""
    init = partial(normal, gain / math.sqrt(fan_in))
    return nnx.Linear(fan_in, fan_out, use_bias=False, kernel_init=init, dtype=dtype, rngs=rngs)


_normal = jax.jit(lambda key, deviation, size: jax.random.normal(key, (size,)) * deviation, static_argnums=2)


def normal(deviation: float, key: jax.Array, shape: Sequence[int], *_: object) -> Any:
    """Draw a float32 tensor of mean 0. That takes half a second to compile, so tensors of one size share a program."""
    return _normal(key, deviation, math.prod(shape)).reshape(shape)


def attend(query_BxTxNxD: jax.Array, key_BxTxNxD: jax.Array, value_BxTxNxD: jax.Array) -> jax.Array:
    """Return the mean of the values so far, weighted by the softmax of scaled products of queries and keys."""
    heads, size = query_BxTxNxD.shape[2:]
    flash = flash_kind(jax.default_backend(), query_BxTxNxD.dtype.name, heads, size)
    return jax.nn.dot_product_attention(query_BxTxNxD, key_BxTxNxD, value_BxTxNxD, is_causal=True, implementation=flash)


@cache
def flash_kind(backend: str, dtype: str, heads: int, size: int) -> Literal["cudnn"] | None:
    """Return the implementation of flash attention for these inputs; None for the default one of JAX.

    A driver or a library may lack it, so its gradient is computed once. A model that is being traced calls this, so
    nothing here may depend on its tracers.
    """
    if backend != "gpu" or dtype not in ("bfloat16", "float16"):
        return None
    inputs = [np.ones((2, POSITIONS, heads, size), dtype)] * 3

    def total(*inputs: jax.Array) -> jax.Array:
        mixed = jax.nn.dot_product_attention(*inputs, is_causal=True, implementation="cudnn")
        return jnp.sum(mixed.astype(jnp.float32))

    try:
        found = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(*inputs).compile()(*inputs)
        is_sound = all(np.isfinite(np.asarray(each, np.float32)).all() for each in found)
    except Exception as error:  # noqa: BLE001 - each version of JAX and cuDNN has its own errors
        log.info("attention by XLA, because cuDNN's flash attention does not work here: %.200s", error)
        return None
    return "cudnn" if is_sound else None


#: The largest vocabulary whose rows are chosen by a product. Its matrix has a number for each token and each row.
ROWS_BY_PRODUCT = 4096


def rows_of(table_VxW: jax.Array, tokens_BxT: jax.Array) -> jax.Array:
    """Return the rows of a table [B, T, W].

    On accelerators a product with ones and zeros chooses the rows of a small table: bytes of a text are so unequally
    frequent that adding their gradients row by row took 14 ms of a step of 34 ms of `124m` on an H100.
    """
    if jax.default_backend() == "cpu" or table_VxW.shape[0] > ROWS_BY_PRODUCT:
        return table_VxW[tokens_BxT.astype(jnp.int32)]
    chosen_BxTxV = jax.nn.one_hot(tokens_BxT, table_VxW.shape[0], dtype=table_VxW.dtype)
    return jnp.einsum("btv,vw->btw", chosen_BxTxV, table_VxW, precision=jax.lax.Precision.HIGHEST)


class Attention(nnx.Module):
    """Causal multi-head attention with rotary positions."""

    def __init__(self, size: Size, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.heads = size.heads
        self.query = linear(size.width, size.width, GAIN, dtype, rngs)
        self.key = linear(size.width, size.width, GAIN, dtype, rngs)
        self.value = linear(size.width, size.width, GAIN, dtype, rngs)
        self.out = linear(size.width, size.width, residual_gain(size), dtype, rngs)

    def __call__(self, x_BxTxW: jax.Array) -> jax.Array:
        batch, time, width = x_BxTxW.shape
        positions_T, shape = jnp.arange(time), (batch, time, self.heads, width // self.heads)
        query = rotate(self.query(x_BxTxW).reshape(shape), positions_T)
        key = rotate(self.key(x_BxTxW).reshape(shape), positions_T)
        mixed = attend(query, key, self.value(x_BxTxW).reshape(shape))
        return self.out(mixed.reshape(x_BxTxW.shape))


class GatedMLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) · up(x))."""

    def __init__(self, size: Size, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.gate = linear(size.width, size.hidden, GAIN, dtype, rngs)
        self.up = linear(size.width, size.hidden, GAIN, dtype, rngs)
        self.down = linear(size.hidden, size.width, residual_gain(size), dtype, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


#: Creates the part of a layer that works on each position by itself, from [B, T, W] to [B, T, W].
CreateMLP = Callable[[Size, DTypeLike, nnx.Rngs], Callable[[jax.Array], jax.Array]]


class Layer(nnx.Module):
    """Attention and an MLP. Each has a norm before it and is added to the residual stream."""

    def __init__(self, size: Size, dtype: DTypeLike, rngs: nnx.Rngs, mlp: CreateMLP = GatedMLP) -> None:
        self.attention_norm = rms_norm(size.width, dtype)
        self.attention = Attention(size, dtype, rngs)
        self.mlp_norm = rms_norm(size.width, dtype)
        self.mlp = mlp(size, dtype, rngs)

    def __call__(self, x_BxTxW: jax.Array) -> jax.Array:
        x_BxTxW = x_BxTxW + self.attention(self.attention_norm(x_BxTxW))
        return x_BxTxW + self.mlp(self.mlp_norm(x_BxTxW))


def _dotted(path: tuple[object, ...]) -> str:
    """Return the parameter name of a path in the tree of modules."""
    return ".".join(map(str, path))


def mean_cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the mean of −ln p(target) over all targets, in nats (float32, []).

    Args:
        logits: float32, the shape of `targets` and one more axis for the classes.
        targets: Integers of any dtype.
    """
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets.astype(jnp.int32)))


def language_model(
    create: Callable[[nnx.Rngs], Callable[[jax.Array], jax.Array]], *, has_penalty: bool = False
) -> Model:
    """Return the module that `create` makes as pure functions of its `nnx.Param`s by name.

    Args:
        create: Makes a module from tokens [B, T] to logits [B, T, V] of the token that follows each position.
        has_penalty: Whether its parts have `Penalty` terms, whose sum training adds to the loss.
    """
    abstract = nnx.eval_shape(lambda: create(random_keys(jax.random.key(0))))
    graph, state = nnx.split(abstract, nnx.Param)
    shapes = {path: leaf.shape for path, leaf in nnx.to_flat_state(state)}
    paths = {_dotted(path): path for path in shapes}

    def init(seed: int) -> Params:
        model = create(random_keys(jax.random.key(seed)))
        return {_dotted(path): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}

    def apply(params: Params, tokens_BxT: jax.Array) -> tuple[jax.Array, jax.Array]:
        model: Any = nnx.merge(graph, nnx.from_flat_state([(paths[name], value) for name, value in params.items()]))
        logits_BxTxV: jax.Array = model(tokens_BxT)
        return logits_BxTxV, sum(jax.tree.leaves(nnx.pop(model, Penalty)), jnp.zeros((), jnp.float32))

    def loss_and_penalty(params: Params, tokens_BxT1: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits_BxTxV, penalty = apply(params, tokens_BxT1[:, :-1])
        return mean_cross_entropy(logits_BxTxV, tokens_BxT1[:, 1:]), penalty

    def loss(params: Params, tokens_BxT1: jax.Array) -> jax.Array:
        return loss_and_penalty(params, tokens_BxT1)[0]

    def logits(params: Params, tokens_BxT: jax.Array) -> jax.Array:
        return apply(params, tokens_BxT)[0]

    tensors = tuple(
        Tensor(name, tuple(shapes[path]), "embedding" if path[-1] == "embedding" else "rest")
        for name, path in sorted(paths.items())
    )
    return Model(init, loss, tensors, logits, loss_and_penalty if has_penalty else None)
