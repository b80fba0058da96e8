"""Tensors of a module that are not trained: whether the script has changed one of them.

PyTorch counts the changes of each tensor, which costs nothing to compare. It does not count writes through `.data`, so
the bits are added up, too: those of one tensor after another while the island trains, and all of them when it leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from typing import Any

import torch

from archipelago.islands.own_loop.trained import frozen_changed
from archipelago.islands.pytorch.host import HostCopy
from archipelago.islands.pytorch.shards import own_part


class FrozenTensors:
    """Compares the frozen tensors with what they were at first."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        """Note which tensors there are, by name."""
        self._tensors = tensors
        self._versions = {name: _version(tensor) for name, tensor in tensors.items()}
        self._expected: dict[str, int] = {}
        self._next = cycle(tensors)
        self._pending: tuple[str, HostCopy] | None = None

    def note(self) -> None:
        """Add up the bits of all tensors as they should be. This reads each of them once."""
        self._expected = {name: int(_sum(tensor)) for name, tensor in self._tensors.items()}

    def look(self) -> None:
        """Compare all counts of changes, and the bits of one tensor after another, without waiting for the device.

        Raises:
            ConfigError: A tensor has changed (`loop.frozen-changed`).
        """
        for name, tensor in self._tensors.items():
            if _version(tensor) != self._versions[name]:
                raise frozen_changed(name)
        if not self._expected:
            return
        if self._pending is not None:
            name, found = self._pending
            if not found.is_ready():
                return
            self._require_same(name, int(found.__array__()))
        name = next(self._next)
        self._pending = name, HostCopy(_sum(self._tensors[name]))

    def require_same(self) -> None:
        """Compare the bits of all tensors, which waits for the device. Raises ConfigError (`loop.frozen-changed`)."""
        for name in self._expected:
            self._require_same(name, int(_sum(self._tensors[name])))

    def _require_same(self, name: str, found: int) -> None:
        if found != self._expected[name]:
            raise frozen_changed(name)


def _version(tensor: Any) -> int:
    """Return a count that PyTorch raises whenever the tensor is changed in place."""
    return 0 if tensor.is_inference() else int(tensor._version)


def _sum(tensor: Any) -> Any:
    """Return the sum of the bits of what this process holds of a tensor, as a tensor of one integer."""
    flat = own_part(tensor).detach().reshape(-1).view(torch.uint8)
    widths = (torch.int64, torch.int32, torch.int16, torch.uint8)  # wide integers are added up faster
    fitting = (width for width in widths if not (flat.numel() | flat.storage_offset()) % width.itemsize)
    return flat.view(next(fitting)).sum(dtype=torch.int64)
