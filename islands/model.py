"""The models that islands train: byte-level decoder-only transformers, as pure functions over flat dicts of arrays.

Another size is another row of `SIZES`. Another architecture is another entry of `BUILDERS`: a function from the dtype
to compute in to a `Model`. Nothing else of Archipelago looks inside a model; it moves named tensors.

Shapes in names: B sequences, T positions, W width, N heads, D elements of a head, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from broker.errors import ConfigError
from broker.manifest import Tensor

Params = dict[str, jax.Array]
"""Parameters by dotted name, such as `layers.0.attention.query.kernel`; every one float32."""

VOCABULARY = 256
"""a token is a byte"""
_ROTARY_BASE = 10_000.0
_NORM_EPSILON = 1e-6
_GAIN = 0.5
"""root mean square of a projection's first outputs, for normalised input"""
_LOGIT_DEVIATION = 0.5
"""deviation of the first logits at every width: the first loss is near ln 256, and smaller embeddings learn slower"""


class Model(NamedTuple):
    """One architecture at one size. All functions are pure, differentiable and can be jitted."""

    init: Callable[[int], Params]
    """from a seed to fresh parameters; equal seeds give equal parameters"""
    loss: Callable[[Params, jax.Array], jax.Array]
    """from integer tokens [B, T + 1] to the mean cross-entropy of the B · T targets, in nats a token (float32, [])"""
    tensors: tuple[Tensor, ...]
    """what `init` returns, without allocating it; sorted by name"""
    logits: Callable[[Params, jax.Array], jax.Array]
    """from integer tokens [B, T] to the float32 logits [B, T, 256] of the token that follows each"""


@dataclass(frozen=True)
class Size:
    """The numbers that make a transformer."""

    width: int
    layers: int
    heads: int
    hidden: int
    """width inside the gated MLP, about 8/3 of `width`"""


SIZES = {
    "tiny": Size(width=64, layers=2, heads=2, hidden=176),
    "small": Size(width=128, layers=5, heads=4, hidden=344),
    "base": Size(width=512, layers=8, heads=8, hidden=1368),
    "124m": Size(width=896, layers=13, heads=14, hidden=2368),
    "1b": Size(width=2048, layers=20, heads=16, hidden=5504),
}


def rms_norm(x: jax.Array, scale_W: jax.Array) -> jax.Array:
    """`x` [..., W] over its root mean square along W, times `scale_W`; computed in float32, returned in x's dtype."""
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + _NORM_EPSILON)
    scale = scale_W.reshape((1,) * (x.ndim - 1) + scale_W.shape)
    return (wide * inverse * scale).astype(x.dtype)


def rotate(x_BxTxNxD: jax.Array, positions_T: jax.Array) -> jax.Array:
    """Rotary positions (RoFormer): turns element i and element i + D/2 by an angle of position · base^(−2i/D).

    The dot product of two rotated vectors then depends on the difference of their positions only. Computed in float32.
    """
    half = x_BxTxNxD.shape[-1] // 2
    frequency = jnp.exp(jnp.arange(half, dtype=jnp.float32) * (-math.log(_ROTARY_BASE) / half))
    angle = positions_T.astype(jnp.float32)[None, :, None, None] * frequency[None, None, None, :]
    sine, cosine = jnp.sin(angle), jnp.cos(angle)
    low, high = jnp.split(x_BxTxNxD.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1)
    return turned.astype(x_BxTxNxD.dtype)


def cross_entropy(logits_BxTxV: jax.Array, targets_BxT: jax.Array) -> jax.Array:
    """−ln p(target) for each target, in nats; float32 [B, T]."""
    chosen = jnp.take_along_axis(logits_BxTxV, targets_BxT[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits_BxTxV, axis=-1) - chosen


def _residual_gain(size: Size) -> float:
    """Gain of what is added to the residual stream, so that the sum of all 2 · layers additions keeps its scale."""
    return _GAIN / math.sqrt(2 * size.layers)


def _linear(fan_in: int, fan_out: int, gain: float, dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.Linear:
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
    """Causal multi-head attention with rotary positions."""

    def __init__(self, size: Size, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.heads = size.heads
        self.query = _linear(size.width, size.width, _GAIN, dtype, rngs)
        self.key = _linear(size.width, size.width, _GAIN, dtype, rngs)
        self.value = _linear(size.width, size.width, _GAIN, dtype, rngs)
        self.out = _linear(size.width, size.width, _residual_gain(size), dtype, rngs)

    def __call__(self, x_BxTxW: jax.Array) -> jax.Array:
        batch, time, width = x_BxTxW.shape
        shape = (batch, time, self.heads, width // self.heads)
        positions = jnp.arange(time)
        query = rotate(self.query(x_BxTxW).reshape(shape), positions)
        key = rotate(self.key(x_BxTxW).reshape(shape), positions)
        value = self.value(x_BxTxW).reshape(shape)
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.reshape(x_BxTxW.shape))


class GatedMLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) · up(x))."""

    def __init__(self, size: Size, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.gate = _linear(size.width, size.hidden, _GAIN, dtype, rngs)
        self.up = _linear(size.width, size.hidden, _GAIN, dtype, rngs)
        self.down = _linear(size.hidden, size.width, _residual_gain(size), dtype, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Layer(nnx.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, size: Size, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.attention_norm = Norm(size.width)
        self.attention = Attention(size, dtype, rngs)
        self.mlp_norm = Norm(size.width)
        self.mlp = GatedMLP(size, dtype, rngs)

    def __call__(self, x_BxTxW: jax.Array) -> jax.Array:
        x_BxTxW = x_BxTxW + self.attention(self.attention_norm(x_BxTxW))
        return x_BxTxW + self.mlp(self.mlp_norm(x_BxTxW))


class Transformer(nnx.Module):
    """Embedding, layers, norm, and the embedding again as the output projection.

    The layers are unrolled, not stacked, because a fragment is a set of whole tensors.
    """

    def __init__(self, size: Size, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.dtype = dtype
        init = jax.nn.initializers.normal(_LOGIT_DEVIATION / math.sqrt(size.width))
        self.embedding = nnx.Param(init(rngs.params(), (VOCABULARY, size.width), jnp.float32))
        self.layers = nnx.List([Layer(size, dtype, rngs) for _ in range(size.layers)])
        self.norm = Norm(size.width)

    def __call__(self, tokens_BxT: jax.Array) -> jax.Array:
        """Integer tokens [B, T] to float32 logits [B, T, V]."""
        embedding_VxW = self.embedding[...].astype(self.dtype)
        x_BxTxW = embedding_VxW[tokens_BxT.astype(jnp.int32)]
        for layer in self.layers:
            x_BxTxW = layer(x_BxTxW)
        return jnp.einsum("btw,vw->btv", self.norm(x_BxTxW), embedding_VxW, preferred_element_type=jnp.float32)


def default_compute_dtype() -> DTypeLike:
    """bfloat16 where the default device is an accelerator, float32 on a CPU (which computes bfloat16 slowly)."""
    dtype: DTypeLike = jnp.bfloat16 if jax.default_backend() in ("gpu", "tpu") else jnp.float32
    return dtype


def _dotted(path: tuple[object, ...]) -> str:
    """A path in the tree of modules as a parameter's name."""
    return ".".join(map(str, path))


def transformer(size: Size, compute_dtype: DTypeLike) -> Model:
    """The transformer of this size. Parameters, softmax and cross-entropy are float32 whatever `compute_dtype` is."""
    abstract = nnx.eval_shape(lambda: Transformer(size, compute_dtype, nnx.Rngs(0)))
    graph, state = nnx.split(abstract, nnx.Param)
    shapes = {path: leaf.shape for path, leaf in nnx.to_flat_state(state)}
    paths = {_dotted(path): path for path in shapes}

    @jax.jit
    def fresh(key: jax.Array) -> Params:
        model = Transformer(size, compute_dtype, nnx.Rngs(key))
        return {_dotted(path): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}

    def logits(params: Params, tokens_BxT: jax.Array) -> jax.Array:
        leaves = nnx.from_flat_state([(paths[name], value) for name, value in params.items()])
        logits_BxTxV: jax.Array = nnx.merge(graph, leaves)(tokens_BxT)
        return logits_BxTxV

    def loss(params: Params, tokens_BxT1: jax.Array) -> jax.Array:
        targets_BxT = tokens_BxT1[:, 1:].astype(jnp.int32)
        return jnp.mean(cross_entropy(logits(params, tokens_BxT1[:, :-1]), targets_BxT))

    tensors = tuple(
        Tensor(name, tuple(shapes[path]), "embedding" if name == "embedding" else "rest")
        for name, path in sorted(paths.items())
    )
    return Model(lambda seed: fresh(jax.random.key(seed)), loss, tensors, logits)


BUILDERS: dict[str, Callable[[DTypeLike], Model]] = {name: partial(transformer, size) for name, size in SIZES.items()}


@cache
def build(size: str, compute_dtype: DTypeLike | None = None) -> Model:
    """The model of that name, computing in `compute_dtype` (default: what suits the default device).

    Raises ConfigError that lists the names when there is no such model.
    """
    if size not in BUILDERS:
        raise ConfigError(f"there is no model of size {size!r:.80}", f"Choose one of {', '.join(BUILDERS)}.")
    return BUILDERS[size](default_compute_dtype() if compute_dtype is None else compute_dtype)
