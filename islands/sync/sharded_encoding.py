"""The encoding of a fragment on its devices, as `slices` plans it: encoded blocks, and what the receiver will read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from archipelago.broker.codecs import Codec, Parts
from archipelago.broker.codecs import codec as codec_of
from archipelago.islands.sync.arrays import DeviceLayout, Rows, Tensors, spec
from archipelago.islands.sync.slices import SlicePlan, Spread, TensorAxes, plan_slices


@cache
def split_measure(rows: Rows, codec: str, devices: DeviceLayout) -> Callable[[Tensors, Tensors], tuple[Parts, Tensors]]:
    """Return what measures a fragment where its shards lie.

    The host puts together what several devices have encoded.
    """
    chosen, plan = codec_of(codec), slice_plan(rows, devices, codec)
    compiled = compiled_measure(rows, codec, devices)

    def measured(reference: Tensors, part: Tensors) -> tuple[Parts, Tensors]:
        parts, after = compiled(reference, part)
        if plan.spread:
            parts = tuple(AssembledPart(i, chosen, plan, each) for i, each in enumerate(parts))
        return parts, after

    return measured


def slice_plan(rows: Rows, devices: DeviceLayout, codec: str) -> SlicePlan:
    """Return how a fragment is sliced for a codec."""
    placed = [_axes(there) for there in devices.tensors]
    return plan_slices(rows, placed, dict(devices.mesh.shape) if devices.mesh else {}, codec_of(codec).block)


def _axes(there: Sharding | None) -> TensorAxes:
    if not isinstance(there, NamedSharding):
        return ()
    return tuple((part,) if isinstance(part, str) else tuple(part or ()) for part in there.spec)


def compiled_measure(rows: Rows, codec: str, devices: DeviceLayout) -> Any:
    """Return the program that encodes a fragment where its shards lie, and moves its references.

    It returns the codec's arrays of all devices along the plan's axes.
    """
    mesh = devices.mesh
    assert mesh is not None  # noqa: S101
    plan = slice_plan(rows, devices, codec)
    encode: Any = partial(_encode_pieces, codec_of(codec), plan)
    spread = {one.tensor.name: one for one in plan.spread}
    if spread:
        places = {t.name: spec(spread[t.name].axes) if t.name in spread else spec() for t, _ in rows}
        outs = spec(plan.axes), places
        encode = jax.shard_map(encode, mesh=mesh, in_specs=(places,), out_specs=outs, check_vma=False)

    def measure(reference: Tensors, part: Tensors) -> tuple[Parts, Tensors]:
        values = {tensor.name: reference[tensor.name] - part[tensor.name].astype(jnp.float32) for tensor, _ in rows}
        pieces = values | {name: _rows(mesh, one, values[name]) for name, one in spread.items()}
        parts, restored = encode(pieces)
        restored |= {name: _whole(mesh, one, restored[name]) for name, one in spread.items()}
        return parts, {name: reference[name] - restored[name] for name in values}

    # The leader of several hosts sends what all of them have encoded.
    is_here = all(device.process_index == jax.process_index() for device in mesh.devices.flat)
    encoded = NamedSharding(mesh, spec(plan.axes) if plan.axes and is_here else spec())
    return jax.jit(measure, out_shardings=(encoded, devices.by_name(rows)))


def _constrained(values: jax.Array, sharding: NamedSharding) -> jax.Array:
    constrained: jax.Array = jax.lax.with_sharding_constraint(values, sharding)  # type: ignore[no-untyped-call]
    return constrained


def _rows(mesh: Mesh, one: Spread, whole: jax.Array) -> jax.Array:
    """Return a tensor as rows, spread over the devices in the order of the fragment's vector."""
    rows = whole.reshape(one.rows, *one.tensor.shape[one.merged :])
    if one.padded_rows > one.rows:
        rows = jnp.pad(rows, ((0, one.padded_rows - one.rows), *((0, 0) for _ in rows.shape[1:])))
    for step in one.steps:
        rows = _constrained(rows, NamedSharding(mesh, spec(*step)))
    return rows


def _whole(mesh: Mesh, one: Spread, rows: jax.Array) -> jax.Array:
    """Invert `_rows`."""
    for step in one.steps[::-1]:
        rows = _constrained(rows, NamedSharding(mesh, spec(*step)))
    return rows[: one.rows].reshape(one.tensor.shape)


def _encode_pieces(chosen: Codec, plan: SlicePlan, pieces: dict[str, jax.Array]) -> tuple[Parts, dict[str, jax.Array]]:
    """Encode what this device encodes alone, and then the rest, as one vector of whole blocks."""
    sliced = [_sliced(one, pieces[one.tensor.name].reshape(-1)) for one in plan.spread]
    places_E = _joined([jax.lax.all_gather(edges, one.axes, tiled=True)
                        for one, (_, edges) in zip(plan.spread, sliced, strict=True) if one.has_edges])  # fmt: skip
    edges = places_E[plan.edges]
    rest = [pieces[what].reshape(-1) if isinstance(what, str) else edges[what[0] : what[1]] for what in plan.rest]
    vector_M = _joined([*(blocks for blocks, _ in sliced), *rest])
    parts = chosen.quantise(vector_M, jnp)
    restored_M = chosen.restore(parts, vector_M.size, jnp)
    return parts, _restored(plan, restored_M, pieces)


def _joined(vectors: Sequence[jax.Array]) -> jax.Array:
    return jnp.concatenate(vectors) if vectors else jnp.zeros(0, jnp.float32)


def _sliced(one: Spread, piece_L: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return a device's whole blocks of a tensor, and both edges [2 blocks]."""
    if not one.has_edges:
        return piece_L, piece_L[:0]
    head, count, _ = _own(one)
    padded = jnp.pad(piece_L, (0, one.block))  # a slice that would pass the end begins earlier
    blocks = jax.lax.dynamic_slice(padded, (head,), (one.blocks * one.block,))
    tail = jax.lax.dynamic_slice(padded, (head + count * one.block,), (one.block,))
    return blocks, jnp.concatenate([piece_L[: one.block], tail])


def _own(one: Spread) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return this device's elements before its whole blocks, its whole blocks, and its elements after them."""
    mine = jnp.asarray(np.array(one.pieces, np.int32))[jax.lax.axis_index(one.axes)]
    return mine[0], mine[1], mine[2]


def _restored(plan: SlicePlan, vector_M: jax.Array, pieces: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Return a device's piece of each tensor as the receiver will read it, from the vector that it has encoded."""
    at, found, edges = 0, {}, []
    for one in plan.spread:
        found[one.tensor.name] = vector_M[at : at + one.blocks * one.block]
        at += one.blocks * one.block
    for what in plan.rest:
        size = pieces[what].size if isinstance(what, str) else what[1] - what[0]
        if isinstance(what, str):
            found[what] = vector_M[at : at + size].reshape(pieces[what].shape)
        else:
            edges.append(vector_M[at : at + size])
        at += size
    places_E = _joined([*edges, jnp.zeros(1, jnp.float32)])[plan.edge_sources]
    at = 0
    for one in plan.spread:
        name, size = one.tensor.name, 2 * one.block
        if one.has_edges:
            mine = jax.lax.dynamic_slice(places_E, (at + size * jax.lax.axis_index(one.axes),), (size,))
            found[name] = _with_edges(one, found[name], mine)
            at += size * one.devices
        found[name] = found[name].reshape(pieces[name].shape)
    return found


def _with_edges(one: Spread, blocks: jax.Array, edges: jax.Array) -> jax.Array:
    """Return a device's piece of a tensor, from its whole blocks and its edges."""
    size = one.block
    head, count, _ = _own(one)
    out = jax.lax.dynamic_update_slice(jnp.zeros(one.length + size, jnp.float32), blocks, (head,))
    out = out.at[:size].set(jnp.where(jnp.arange(size) < head, edges[:size], out[:size]))
    out = jax.lax.dynamic_update_slice(out, edges[size:], (head + count * size,))  # zeros follow the last edge element
    return out[: one.length]


@dataclass(frozen=True, eq=False)
class AssembledPart:
    """One of a codec's arrays, whose pieces were encoded on several devices. The host puts them together.

    Attributes:
        index: Which of the codec's arrays it is.
        encoded: This array of all devices along the plan's axes.
    """

    index: int
    codec: Codec
    plan: SlicePlan
    encoded: jax.Array

    def block_until_ready(self) -> AssembledPart:
        """Wait for the devices."""
        self.encoded.block_until_ready()
        return self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Wait for the copies, and return the array."""
        by_device = np.asarray(self.encoded).reshape(self.plan.devices, -1)

        def at(blocks: int) -> int:
            return self.codec.layout(blocks * self.codec.block)[self.index][0]

        segments = self.plan.segments
        return np.concatenate([by_device[s.device, at(s.first) : at(s.first + s.blocks)] for s in segments])
