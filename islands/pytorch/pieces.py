"""Tensors that are split over the processes of one island (FSDP2), and their way to the leader and back.

Each tensor travels alone. The leader gets one whole tensor at a time, and each other process only its own piece.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

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


@dataclass(frozen=True)
class TensorPieces:
    """The pieces of one tensor. Ranks are those of the whole process group.

    Attributes:
        dim: The dimension that is split; None if each process holds the whole tensor.
        places: The start and the length of each rank's piece along that dimension. Some pieces may be empty.
        givers: The ranks whose pieces make up the whole tensor. With replicas (HSDP), these are the leader's replica.
    """

    dim: int | None
    places: Mapping[int, tuple[int, int]]
    givers: Sequence[int]

    @classmethod
    def of(cls, name: str, tensor: Tensor, mesh: Any) -> TensorPieces:
        """Return the places of a tensor.

        Raises ConfigError (`loop.sharded`) if it is split along several dimensions, as tensor parallelism does, or over
        other processes than the rest of the model.
        """
        if not is_split(tensor):
            return cls(None, {}, ())
        if tensor.device_mesh != mesh:
            raise _refused(name, f"over the mesh {tensor.device_mesh}, and another parameter over {mesh}")
        axes = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
        if not axes:
            return cls(None, {}, ())
        axis, placement = axes[0], tensor.placements[axes[0]]
        if len(axes) > 1 or type(placement).__name__ != "Shard":
            raise _refused(name, f"as {tensor.placements}")
        size, count = tensor.shape[placement.dim], mesh.size(axis)
        width = -(-size // count)
        places, givers = {}, []
        for place in itertools.product(*(range(mesh.size(each)) for each in range(mesh.ndim))):
            rank, start = int(mesh.mesh[place]), min(place[axis] * width, size)
            places[rank] = (start, min(width, size - start))
            if not any(at for each, at in enumerate(place) if each != axis):
                givers.append(rank)
        return cls(placement.dim, places, givers)

    def piece(self, whole: Tensor, rank: int) -> Tensor:
        """Return a view of a rank's piece of the whole tensor."""
        if self.dim is None:
            return whole
        start, length = self.places[rank]
        return whole.narrow(self.dim, start, length)


def _refused(name: str, how: str) -> ConfigError:
    return ConfigError(
        f"the parameter {name!r} is split over processes {how}, which an island cannot gather",
        "Use `fully_shard` on one mesh, with one dimension that splits and others that replicate (FSDP2, HSDP).",
        code="loop.sharded",
    )


class Courier:
    """Carries tensors between the leader and the other processes of an island."""

    def __init__(self, group: Any, ranks: Sequence[int]) -> None:
        """Note the processes.

        Args:
            group: Their process group, for tensors of the model's device.
            ranks: Their ranks in the whole process group. The first one leads.
        """
        self._group, self._ranks = group, ranks
        self.rank: int = dist.get_rank()
        self.leads: bool = self.rank == ranks[0]

    def gather(self, pieces: TensorPieces, own: Tensor, whole: Tensor | None) -> None:
        """Give this process's piece to the leader, who writes all pieces to `whole`. All processes call this."""
        if self.leads:
            pieces.piece(whole, self.rank).copy_(own)
            for rank in pieces.givers[1:]:
                part = pieces.piece(whole, rank)
                if part.numel():
                    arrived = torch.empty(part.shape, dtype=part.dtype, device=own.device)
                    dist.recv(arrived, rank, group=self._group)
                    part.copy_(arrived)
        elif self.rank in pieces.givers and own.numel():
            dist.send(own.detach().contiguous(), self._ranks[0], group=self._group)

    def scatter(self, pieces: TensorPieces, whole: Tensor | None, own: Tensor) -> None:
        """Write this process's piece of the leader's `whole` to `own`. All processes call this."""
        if not self.leads:
            if own.numel():
                dist.recv(own, self._ranks[0], group=self._group)
            return
        own.copy_(pieces.piece(whole, self.rank), non_blocking=True)
        for rank in self._ranks[1:]:
            part = pieces.piece(whole, rank)
            if part.numel():
                dist.send(part.to(own.device, non_blocking=True).contiguous(), rank, group=self._group)
