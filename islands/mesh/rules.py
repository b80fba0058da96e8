"""The one table that says how tensors are split over the devices of a mesh."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from jax.sharding import PartitionSpec

from archipelago.broker.errors import ConfigError
from archipelago.broker.manifest import Tensor
from archipelago.islands.mesh.shape import MeshShape

#: From a pattern of the tensor's name to the axes that split each of its dimensions. The first row that is found
#: counts. The optimiser's state and gradients are split as their parameters are. Where only the first dimension is
#: split, a shard is a contiguous piece of its fragment, which is cut without moving anything between devices.
RULES: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...] = (
    # The inputs of attention heads and of hidden units. Each device computes its heads and units.
    (r"\.(query|key|value|gate|up)\.kernel$", (("fsdp",), ("tensor",))),
    # The outputs of heads and units, which devices add up; and rows of a vocabulary.
    (r"\.(out|down)\.kernel$|(^|\.)embedding$", (("tensor", "fsdp"),)),
    # Any other matrix, such as a router, and those of users' tasks.
    (r"", (("fsdp",),)),
)


def axes_of(tensor: Tensor, sizes: Mapping[str, int]) -> tuple[tuple[str, ...], ...]:
    """Return the axes that split each dimension of a tensor.

    Vectors, such as the scales of norms, stay whole. An axis that does not divide a dimension leaves it whole, too.

    Args:
        tensor: The tensor.
        sizes: The size of each axis of the mesh.
    """
    if len(tensor.shape) < 2:
        return ()
    wanted = next(axes for pattern, axes in RULES if re.search(pattern, tensor.name))
    return tuple(_dividing(size, axes, sizes) for size, axes in zip(tensor.shape, wanted, strict=False))


def _dividing(size: int, axes: Sequence[str], sizes: Mapping[str, int]) -> tuple[str, ...]:
    chosen: tuple[str, ...] = ()
    for axis in axes:
        if sizes[axis] > 1 and size % sizes[axis] == 0:
            chosen, size = (*chosen, axis), size // sizes[axis]
    return chosen


def specs(tensors: Sequence[Tensor], shape: MeshShape) -> dict[str, PartitionSpec]:
    """Return how each tensor is split, by name.

    Raises:
        ConfigError: No tensor can be split over an axis of the mesh (`mesh.model`).
    """
    axes = {tensor.name: axes_of(tensor, shape.sizes()) for tensor in tensors}
    used = {axis for each in axes.values() for dimension in each for axis in dimension}
    for axis in ("fsdp", "tensor"):
        if shape.sizes()[axis] > 1 and axis not in used:
            raise ConfigError(
                f"--mesh {shape} splits tensors into {shape.sizes()[axis]} parts over {axis}, which divides no tensor "
                "of this model",
                f"Choose a size of {axis} that divides the model's dimensions, such as 2.",
                code="mesh.model",
            )
    return {name: _spec(each) for name, each in axes.items()}


def _spec(axes: tuple[tuple[str, ...], ...]) -> PartitionSpec:
    return PartitionSpec(*(each or None for each in axes))  # type: ignore[no-untyped-call]
