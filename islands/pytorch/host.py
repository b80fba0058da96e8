"""Tensors on their way to the memory of the host, and what an island says about its machine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from archipelago.islands.sync.memory_use import MemoryMeter, measured
from archipelago.islands.sync.participant import Host

#: A tensor of PyTorch.
Tensor = Any


class HostCopy:
    """A copy of a tensor in the memory of the host, for numpy.

    The training thread begins the copy and goes on. Another thread waits for it, when it reads the values.
    """

    def __init__(self, tensor: Tensor) -> None:
        """Begin the copy. A tensor of the CPU is not copied, so it must not change later."""
        self._copied: Any = None
        self._host = tensor.detach()
        if tensor.is_cuda:
            self._host = self._host.to("cpu", non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(tensor.device))
        elif tensor.device.type != "cpu":
            self._host = self._host.cpu()

    def copy_to_host_async(self) -> None:
        """Do nothing: the copy began when this object was made."""

    def is_ready(self) -> bool:
        """Return whether the values can be read without waiting."""
        return self._copied is None or bool(self._copied.query())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Wait for the copy, and return it. The bits of bfloat16 numbers, which are int16 here, become uint16."""
        if self._copied is not None:
            self._copied.synchronize()
        values: np.ndarray[Any, Any] = self._host.numpy()
        return values.view(np.uint16) if values.dtype == np.int16 else values


def on_device(values: np.ndarray[Any, Any], device: Any) -> Tensor:
    """Return an array of the host on a device, without waiting for the device's earlier work.

    On the CPU the tensor shares the array's memory, so neither may be changed.
    """
    tensor = torch.from_numpy(values if values.flags.writeable else values.copy())
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class _CudaMemory:
    """The memory of one CUDA device, as `measured` asks for it."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def memory_stats(self) -> dict[str, int]:
        """Return the bytes that this process has reserved, and those of the device."""
        _, limit = torch.cuda.mem_get_info(self._device)
        return {"bytes_in_use": torch.cuda.memory_reserved(self._device), "bytes_limit": limit}


def torch_host(device: Any, clock: Callable[[], float]) -> Host:
    """Return what an island with PyTorch says about its machine."""
    is_cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_cuda else device.type
    return Host(name[:200], MemoryMeter(clock, partial(measured, [_CudaMemory(device)] if is_cuda else [])))
