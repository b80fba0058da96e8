"""What models are made of: the parts of transformers, as flax modules.

Modules are read as pure functions over flat dicts of arrays (`wired`): nothing else of Archipelago looks inside a
model; it moves named tensors. Names say how they are treated: one that ends in `embedding` is merged as embeddings are,
and with `embedding`, `router` or `output` in its name it is left to AdamW where others are trained by Muon.

Shapes in names: B sequences, T positions, W width, N heads, D elements of a head, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from archipelago.broker.manifest import Tensor
from archipelago.islands.models.interface import Decoder, Memory, Model, Params

ROTARY_BASE = 10_000.0
NORM_EPSILON = 1e-6
GAIN = 0.5
"""root mean square of a projection's first outputs, for normalised input"""


class Penalty(nnx.Variable[jax.Array]):
    """What a module adds to what training descends (float32, []); it sets one as an attribute while it is called."""


@dataclass(frozen=True)
class Size:
    """The numbers that make a transformer."""

    width: int
    layers: int
    heads: int
    hidden: int
    """width inside the gated MLP, about 8/3 of `width`"""


def rms_norm(x: jax.Array, scale_W: jax.Array) -> jax.Array:
    """`x` [..., W] over its root mean square along W, times `scale_W`; computed in float32, returned in x's dtype."""
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + NORM_EPSILON)
    scale = scale_W.reshape((1,) * (x.ndim - 1) + scale_W.shape)
    return (wide * inverse * scale).astype(x.dtype)


def rotate(x_BxTxNxD: jax.Array, positions_T: jax.Array) -> jax.Array:
    """Rotary positions (RoFormer): turns element i and element i + D/2 by an angle of position · base^(−2i/D).

    The dot product of two rotated vectors then depends on the difference of their positions only. Computed in float32.
    """
    half = x_BxTxNxD.shape[-1] // 2
    frequency = jnp.exp(jnp.arange(half, dtype=jnp.float32) * (-math.log(ROTARY_BASE) / half))
    angle = positions_T.astype(jnp.float32)[None, :, None, None] * frequency[None, None, None, :]
    sine, cosine = jnp.sin(angle), jnp.cos(angle)
    low, high = jnp.split(x_BxTxNxD.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1)
    return turned.astype(x_BxTxNxD.dtype)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """−ln p(target) for each target, in nats; float32, the shape of `targets`, which `logits` has and one axis more."""
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def residual_gain(size: Size) -> float:
    """Gain of what is added to the residual stream, so that the sum of all 2 · layers additions keeps its scale."""
    return GAIN / math.sqrt(2 * size.layers)


def linear(fan_in: int, fan_out: int, gain: float, dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.Linear:
    """A projection without bias, normal with deviation gain / √fan_in."""
    init = jax.nn.initializers.normal(gain / math.sqrt(fan_in))
    return nnx.Linear(fan_in, fan_out, use_bias=False, kernel_init=init, dtype=dtype, rngs=rngs)


class Norm(nnx.Module):
    """RMSNorm with a learnt scale."""

    def __init__(self, width: int) -> None:
        self.scale = nnx.Param(jnp.ones((width,), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.scale[...])


class Attention(nnx.Module):
    """Multi-head attention with rotary positions; causal unless it is told otherwise."""

    def __init__(self, size: Size, dtype: DTypeLike, rngs: nnx.Rngs, *, causal: bool = True) -> None:
        self.heads, self.causal = size.heads, causal
        self.query = linear(size.width, size.width, GAIN, dtype, rngs)
        self.key = linear(size.width, size.width, GAIN, dtype, rngs)
        self.value = linear(size.width, size.width, GAIN, dtype, rngs)
        self.out = linear(size.width, size.width, residual_gain(size), dtype, rngs)

    def __call__(self, x_BxTxW: jax.Array) -> jax.Array:
        query, key, value = self._projected(x_BxTxW, jnp.arange(x_BxTxW.shape[1]))
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=self.causal)
        return self.out(mixed.reshape(x_BxTxW.shape))

    def extend(
        self, x_BxTxW: jax.Array, keys_BxSxNxD: jax.Array, values_BxSxNxD: jax.Array, length: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The same for positions from `length` on, which see the `length` places before them; and these with theirs."""
        positions_T = length + jnp.arange(x_BxTxW.shape[1])
        query, key, value = self._projected(x_BxTxW, positions_T)
        start = (0, length, 0, 0)
        keys_BxSxNxD = jax.lax.dynamic_update_slice(keys_BxSxNxD, key.astype(keys_BxSxNxD.dtype), start)
        values_BxSxNxD = jax.lax.dynamic_update_slice(values_BxSxNxD, value.astype(values_BxSxNxD.dtype), start)
        seen_TxS = jnp.arange(keys_BxSxNxD.shape[1])[None, :] <= positions_T[:, None]
        mixed = jax.nn.dot_product_attention(query, keys_BxSxNxD, values_BxSxNxD, mask=seen_TxS[None, None])
        return self.out(mixed.reshape(x_BxTxW.shape)), keys_BxSxNxD, values_BxSxNxD

    def _projected(self, x_BxTxW: jax.Array, positions_T: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values, [B, T, N, D] each; the first two rotated to their positions."""
        batch, time, width = x_BxTxW.shape
        shape = (batch, time, self.heads, width // self.heads)
        query = rotate(self.query(x_BxTxW).reshape(shape), positions_T)
        key = rotate(self.key(x_BxTxW).reshape(shape), positions_T)
        return query, key, self.value(x_BxTxW).reshape(shape)


class GatedMLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) · up(x))."""

    def __init__(self, size: Size, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.gate = linear(size.width, size.hidden, GAIN, dtype, rngs)
        self.up = linear(size.width, size.hidden, GAIN, dtype, rngs)
        self.down = linear(size.hidden, size.width, residual_gain(size), dtype, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


CreateMLP = Callable[[Size, DTypeLike, nnx.Rngs], Callable[[jax.Array], jax.Array]]
"""makes what a layer does to each position, [B, T, W] to [B, T, W]"""


class Layer(nnx.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(
        self, size: Size, dtype: DTypeLike, rngs: nnx.Rngs, mlp: CreateMLP = GatedMLP, *, causal: bool = True
    ) -> None:
        self.attention_norm = Norm(size.width)
        self.attention = Attention(size, dtype, rngs, causal=causal)
        self.mlp_norm = Norm(size.width)
        self.mlp = mlp(size, dtype, rngs)

    def __call__(self, x_BxTxW: jax.Array) -> jax.Array:
        x_BxTxW = x_BxTxW + self.attention(self.attention_norm(x_BxTxW))
        return x_BxTxW + self.mlp(self.mlp_norm(x_BxTxW))

    def extend(
        self, x_BxTxW: jax.Array, keys_BxSxNxD: jax.Array, values_BxSxNxD: jax.Array, length: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The same with attention over the `length` places before; and these with the new ones."""
        normed_BxTxW = self.attention_norm(x_BxTxW)
        mixed_BxTxW, *kept = self.attention.extend(normed_BxTxW, keys_BxSxNxD, values_BxSxNxD, length)
        x_BxTxW = x_BxTxW + mixed_BxTxW
        keys_BxSxNxD, values_BxSxNxD = kept
        return x_BxTxW + self.mlp(self.mlp_norm(x_BxTxW)), keys_BxSxNxD, values_BxSxNxD


def _dotted(path: tuple[object, ...]) -> str:
    """A path in the tree of modules as a parameter's name."""
    return ".".join(map(str, path))


class Wired(NamedTuple):
    """A module as pure functions over named parameters."""

    init: Callable[[int], Params]
    apply: Callable[[Params, jax.Array], tuple[jax.Array, jax.Array]]
    """from parameters and integer tokens [B, T] to the logits and the sum of the parts' `Penalty`"""
    tensors: tuple[Tensor, ...]
    module: Callable[[Params], Any]
    """from parameters to the module that has them"""


def wired(create: Callable[[nnx.Rngs], Callable[[jax.Array], jax.Array]]) -> Wired:
    """The module that `create` makes, whose `nnx.Param`s become named tensors. It takes tokens and gives logits."""
    abstract = nnx.eval_shape(lambda: create(nnx.Rngs(0)))
    graph, state = nnx.split(abstract, nnx.Param)
    shapes = {path: leaf.shape for path, leaf in nnx.to_flat_state(state)}
    paths = {_dotted(path): path for path in shapes}

    @jax.jit
    def fresh(key: jax.Array) -> Params:
        model = create(nnx.Rngs(key))
        return {_dotted(path): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}

    def module(params: Params) -> Any:
        return nnx.merge(graph, nnx.from_flat_state([(paths[name], value) for name, value in params.items()]))

    def apply(params: Params, tokens_BxT: jax.Array) -> tuple[jax.Array, jax.Array]:
        model = module(params)
        logits: jax.Array = model(tokens_BxT)
        return logits, sum(jax.tree.leaves(nnx.pop(model, Penalty)), jnp.zeros((), jnp.float32))

    tensors = tuple(
        Tensor(name, tuple(shapes[path]), "embedding" if path[-1] == "embedding" else "rest")
        for name, path in sorted(paths.items())
    )
    return Wired(lambda seed: fresh(jax.random.key(seed)), apply, tensors, module)


def decoder(network: Wired, size: Size, dtype: DTypeLike) -> Decoder:
    """What writes text with a network of that size, whose module has `extend` as `Transformer` has."""

    def empty(places: int) -> Memory:
        shape = (1, places, size.heads, size.width // size.heads)
        keys, values = (tuple(jnp.zeros(shape, dtype) for _ in range(size.layers)) for _ in range(2))
        return Memory(keys, values, jnp.zeros((), jnp.int32))

    def extend(params: Params, memory: Memory, tokens_1xT: jax.Array, count: jax.Array) -> tuple[jax.Array, Memory]:
        logits_1xV, after = network.module(params).extend(memory, tokens_1xT, count)
        return logits_1xV, after

    return Decoder(empty, extend)


def next_token_model(network: Wired, decoder: Decoder, *, penalised: bool = False) -> Model:
    """A model of text: `network` gives logits [B, T, V] of the token that follows each."""

    def terms(params: Params, tokens_BxT1: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits_BxTxV, penalty = network.apply(params, tokens_BxT1[:, :-1])
        return jnp.mean(cross_entropy(logits_BxTxV, tokens_BxT1[:, 1:].astype(jnp.int32))), penalty

    def loss(params: Params, tokens_BxT1: jax.Array) -> jax.Array:
        return terms(params, tokens_BxT1)[0]

    def logits(params: Params, tokens_BxT: jax.Array) -> jax.Array:
        return network.apply(params, tokens_BxT)[0]

    return Model(network.init, loss, network.tensors, logits, terms if penalised else None, decoder=decoder)
