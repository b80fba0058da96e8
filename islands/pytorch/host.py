"""Tensors on their way from and to the host, the frozen tensors, and the name of a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from archipelago.islands.pytorch.pieces import own_piece
from archipelago.islands.user_loop.tensors import frozen_changed

#: A tensor of PyTorch.
Tensor = Any


class HostCopy:
    """A copy of a tensor in the memory of the host, for numpy.

    The training thread begins the copy and goes on, since the tensor may change with the next step. Another thread
    waits for the copy, when it reads the values.
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

    def is_ready(self) -> bool:
        """Return whether the values can be read without waiting."""
        return self._copied is None or bool(self._copied.query())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Wait for the copy, and return it. The bits of bfloat16 numbers, which are int16 here, become uint16."""
        if self._copied is not None:
            self._copied.synchronize()
        values: np.ndarray[Any, Any] = self._host.numpy()
        return values.view(np.uint16) if values.dtype == np.int16 else values


class CopyStream:
    """A stream of a CUDA device for copies beside the training steps. The link's threads make and await them."""

    def __init__(self, device: Any) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def mark(self) -> Any:
        """Return an event after all work that the calling thread has given to the device so far."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def to_host(self, tensor: Tensor, after: Any) -> Tensor:
        """Return a copy in the memory of the host, made after an event of `mark`."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            copied = tensor.to("cpu", non_blocking=True)
        self._stream.synchronize()
        return copied

    def to_device(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor of the host on the device."""
        with torch.cuda.stream(self._stream):
            copied = tensor.pin_memory().to(self._device, non_blocking=True)
        self._stream.synchronize()
        return copied

    def use(self, tensor: Tensor) -> Tensor:
        """Return a tensor of `to_device` for the calling thread's own work, after which its memory may be used anew."""
        tensor.record_stream(torch.cuda.current_stream(self._device))
        return tensor


class LateCopy(HostCopy):
    """A copy of a tensor that does not change any more. The thread that reads the values makes it."""

    def __init__(self, tensor: Tensor, copies: CopyStream) -> None:
        """Note the tensor, which the device may still compute."""
        self._tensor: Tensor | None = tensor.detach()
        self._copies, self._computed, self._copied = copies, copies.mark(), None

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Copy the tensor the first time, free it, and return the copy as `HostCopy` does."""
        tensor = self._tensor
        if tensor is not None:
            self._host = self._copies.to_host(tensor, self._computed)
            self._tensor = None
        return super().__array__(dtype, copy)


def of_host(values: np.ndarray[Any, Any]) -> Tensor:
    """Return a tensor that shares the memory of an array, so neither may be changed. A read-only array is copied."""
    return torch.from_numpy(values if values.flags.writeable else values.copy())


def device_name(device: Any) -> str:
    """Return the name of a device, as its island says it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device.type)


class FrozenTensors:
    """Compares the frozen tensors with what they were at first."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = tensors
        self._versions = {name: _version(tensor) for name, tensor in tensors.items()}
        self._expected: dict[str, int] = {}

    def note(self) -> None:
        """Add up the bits of all tensors as they should be. This reads each of them once."""
        self._expected = {name: int(_sum(tensor)) for name, tensor in self._tensors.items()}

    def look(self) -> None:
        """Compare all counts of changes. Raises ConfigError (`loop.frozen-changed`)."""
        for name, tensor in self._tensors.items():
            if _version(tensor) != self._versions[name]:
                raise frozen_changed(name)

    def require_same(self) -> None:
        """Compare the bits of all tensors, which waits for the device. Raises ConfigError (`loop.frozen-changed`)."""
        for name, expected in self._expected.items():
            if int(_sum(self._tensors[name])) != expected:
                raise frozen_changed(name)


def _version(tensor: Any) -> int:
    """Return a count that PyTorch raises whenever the tensor is changed in place."""
    return 0 if tensor.is_inference() else int(tensor._version)


def _sum(tensor: Any) -> Any:
    """Return the sum of the bits of what this process holds of a tensor, as a tensor of one integer."""
    flat = own_piece(tensor).detach().reshape(-1).view(torch.uint8)
    widths = (torch.int64, torch.int32, torch.int16, torch.uint8)  # wide integers are added up faster
    fitting = (width for width in widths if not (flat.numel() | flat.storage_offset()) % width.itemsize)
    return flat.view(next(fitting)).sum(dtype=torch.int64)
