"""Tensors that are split over the processes of one island (FSDP2): whole in each for a moment, and cut again."""

from __future__ import annotations

import sys
from typing import Any

import torch

from archipelago.broker.errors import ConfigError

#: A tensor of PyTorch.
Tensor = Any


def is_split(tensor: Tensor) -> bool:
    """Return whether a tensor is spread over processes (a DTensor)."""
    return hasattr(tensor, "device_mesh")


def own_piece(tensor: Tensor) -> Tensor:
    """Return what this process holds of a tensor. Changing it changes the tensor."""
    with torch.no_grad():
        return tensor.to_local() if is_split(tensor) else tensor


def joined_like(own: Tensor, example: Tensor) -> Tensor:
    """Return the tensor of which this process holds `own`, split as the example is."""
    if not is_split(example):
        return own
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        own, example.device_mesh, example.placements, run_check=False, shape=example.shape, stride=example.stride()
    )


def whole_of(own: Tensor, example: Tensor) -> Tensor:
    """Return the whole tensor of which this process holds `own`, split as the example is. All processes call this."""
    if not is_split(example):
        return own
    with torch.no_grad():
        return joined_like(own, example).full_tensor().to(own.device)  # with CPU offload, the mesh is of GPUs


def piece_of(whole: Tensor, example: Tensor) -> Tensor:
    """Return this process's piece of a tensor that all processes have, split as the example is."""
    if not is_split(example):
        return whole
    from torch.distributed.tensor import DTensor, Replicate

    mesh = example.device_mesh
    with torch.no_grad():
        everywhere = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return everywhere.redistribute(mesh, example.placements).to_local().to(whole.device)


def put_back(model: Any) -> None:
    """Let a model of FSDP2 free the whole parameters that a forward pass without a backward pass has left."""
    wrappers = sys.modules.get("torch.distributed.fsdp")  # the script that uses it has imported it
    if wrappers is None:
        return
    for module in model.modules():
        if isinstance(module, wrappers.FSDPModule):
            module.reshard()
        elif isinstance(module, wrappers.FullyShardedDataParallel):
            raise ConfigError(
                "the model is wrapped by FullyShardedDataParallel, whose parameters have lost their names and shapes",
                "Use `torch.distributed.fsdp.fully_shard` (FSDP2), which keeps them.",
                code="loop.sharded",
            )


def mesh_of(model: Any) -> Any:
    """Return the mesh of processes that a model's parameters are split over; None if they are whole."""
    put_back(model)
    return next((parameter.device_mesh for parameter in model.parameters() if is_split(parameter)), None)


def require_gatherable(name: str, tensor: Tensor, mesh: Any) -> None:
    """Raise ConfigError (`loop.sharded`) for a tensor that is split otherwise than FSDP2 splits the model over `mesh`.

    Tensor parallelism splits it along several dimensions.
    """
    if not is_split(tensor):
        return
    if tensor.device_mesh != mesh:
        raise _refused(name, f"over the mesh {tensor.device_mesh}, and another parameter over {mesh}")
    splits = [type(placement).__name__ for placement in tensor.placements if not placement.is_replicate()]
    if splits not in ([], ["Shard"]):
        raise _refused(name, f"as {tensor.placements}")


def _refused(name: str, how: str) -> ConfigError:
    return ConfigError(
        f"the parameter {name!r} is split over processes {how}, which an island cannot gather",
        "Use `fully_shard` on one mesh, with one dimension that splits and others that replicate (FSDP2, HSDP).",
        code="loop.sharded",
    )
