"""Where an island's arrays are on a mesh of its devices: parameters, optimiser state, batches and results.

One table, `RULES`, says how tensors are split.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from archipelago.broker.errors import ConfigError
from archipelago.broker.manifest import Manifest, Tensor
from archipelago.islands.inner import InnerState, InnerSteps
from archipelago.islands.mesh import AXES, MeshShape, by_default, require_divided, require_present
from archipelago.islands.models.interface import Params
from archipelago.islands.sync.arrays import put, spec

#: From a pattern of the tensor's name to the axes that split each of its dimensions. The first row that is found
#: counts. The optimiser's state and gradients are split as their parameters are. Where only the first dimension is
#: split, a device has a contiguous piece of its fragment, which is cut without moving anything between devices.
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
    """Return how each tensor is split, by name. Raises ConfigError (`mesh.size`) if an axis of the mesh splits none."""
    axes = {tensor.name: axes_of(tensor, shape.sizes()) for tensor in tensors}
    used = {axis for each in axes.values() for dimension in each for axis in dimension}
    for axis in ("fsdp", "tensor"):
        if shape.sizes()[axis] > 1 and axis not in used:
            raise ConfigError(
                f"--mesh {shape} splits tensors into {shape.sizes()[axis]} parts over {axis}, which divides no tensor "
                "of this model",
                f"Choose a size of {axis} that divides the model's dimensions, such as 2.",
                code="mesh.size",
            )
    return {name: spec(*(dimension or None for dimension in each)) for name, each in axes.items()}


class Placement:
    """The places of an island's arrays."""

    def __init__(self, shape: MeshShape, tensors: Sequence[Tensor], devices: Sequence[jax.Device]) -> None:
        """Build the mesh. Raises ConfigError (`mesh.size`) for an axis that splits no tensor."""
        sizes = tuple(shape.sizes().values())
        self.shape = shape
        self.mesh = jax.make_mesh(sizes, AXES, (AxisType.Auto,) * len(AXES), devices=devices[: shape.devices])
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._places = {name: NamedSharding(self.mesh, each) for name, each in specs(tensors, shape).items()}
        self._everywhere = NamedSharding(self.mesh, spec())

    @property
    def device(self) -> str:
        """The devices in words."""
        return f"{self.shape.devices} {self.mesh.devices.flat[0].device_kind} ({self.shape})"

    @cached_property
    def templates(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shape and place of each synced tensor by name."""
        return {
            name: jax.ShapeDtypeStruct(tensor.shape, jnp.float32, sharding=self._places[name])  # type: ignore[no-untyped-call]
            for name, tensor in self._tensors.items()
        }

    # -- parameters and optimiser state -------------------------------------------------------------------------------

    def place(self, params: Mapping[str, Any]) -> Params:
        """Return parameters on the mesh. Each device gets its own pieces only."""
        placed: Params = put(dict(params), {name: self._places[name] for name in params})
        return placed

    def begin(self, fresh: Callable[[Params], InnerState], params: Params) -> InnerState:
        """Return these parameters with fresh optimiser state, which is made where it will be."""
        abstract = jax.eval_shape(fresh, params)
        state: InnerState = jax.jit(fresh, out_shardings=self.state_places(abstract))(params)
        return state

    def state_places(self, state: InnerState) -> Any:
        return jax.tree_util.tree_map_with_path(self._place_of, state)

    def _place_of(self, path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        """Return the place of the tensor of that name, or of all tensors of that shape. Others are on each device."""
        for key in reversed(path):
            name = getattr(key, "key", None)
            if isinstance(name, str) and name in self._places and self._tensors[name].shape == leaf.shape:
                return self._places[name]
        alike = {self._places[name] for name, tensor in self._tensors.items() if tensor.shape == leaf.shape}
        return alike.pop() if len(alike) == 1 else self._everywhere

    # -- steps --------------------------------------------------------------------------------------------------------

    def place_batches(self, batches_n: Any) -> Any:
        """Return batches, arrays [n, B, …], on the mesh. Each device gets its own sequences only.

        An array whose second dimension is not that of the batch, such as a scalar, is on each device.
        """
        arrays = jax.tree.map(np.asarray, batches_n)
        return put(arrays, jax.tree.map(lambda leaf: self._batch_place(leaf.shape), arrays))

    def _batch_place(self, shape: Sequence[int]) -> NamedSharding:
        is_split = len(shape) > 1 and shape[1] % self.shape.batch_parts == 0
        return NamedSharding(self.mesh, spec(None, ("data", "fsdp"))) if is_split else self._everywhere

    def steps(self, steps: InnerSteps) -> InnerSteps:
        """Return inner steps whose results are in their places, so that no program is compiled again."""
        compiled: list[Any] = []

        def placed(state: InnerState, *arguments: Any) -> tuple[InnerState, jax.Array]:
            if not compiled:
                places = (self.state_places(state), self._everywhere)
                compiled.append(jax.jit(steps, donate_argnums=0, out_shardings=places))
            found: tuple[InnerState, jax.Array] = compiled[0](state, *arguments)
            return found

        return placed


def placement_of(
    shape: MeshShape | None, manifest: Manifest, batch_size: int, devices: Sequence[jax.Device]
) -> Placement | None:
    """Return the placement of an island; None for one device, on which everything is where JAX puts it.

    Args:
        shape: The shape of the mesh; None for the default: all devices on `data`.
        batch_size: The sequences of the island's inner step.

    Raises:
        ConfigError: The mesh does not fit the devices, the batch or the model (`mesh.size`).
    """
    shape = shape or by_default(len(devices), batch_size)
    require_present(shape, len(devices), devices[0].device_kind)
    require_divided(shape, batch_size)
    return Placement(shape, manifest.tensors, devices) if shape.devices > 1 else None
