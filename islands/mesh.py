"""The devices that JAX finds, and the shape of a mesh of them, as `--mesh` gives it. Only the first loads JAX."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

from archipelago.broker.errors import ConfigError

#: The axes of a mesh: sequences of a batch, rows of tensors (and sequences), and columns of tensors.
AXES = ("data", "fsdp", "tensor")
#: No machine has as many devices.
DEVICES_MAX = 4096


@dataclass(frozen=True)
class MeshShape:
    """The number of devices along each axis.

    Attributes:
        data: Each has all parameters, and its share of a batch.
        fsdp: Each has its share of parameters, gradients and optimiser state, and its share of a batch.
        tensor: Each has its share of each matrix. They compute every sequence together.
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    @property
    def devices(self) -> int:
        return self.data * self.fsdp * self.tensor

    @property
    def batch_parts(self) -> int:
        return self.data * self.fsdp

    def sizes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    def __str__(self) -> str:
        """Return the shape as `--mesh` takes it."""
        return ",".join(f"{axis}={size}" for axis, size in self.sizes().items() if size > 1) or "data=1"


def usable_devices() -> list[Any]:
    """Return the devices of all connected processes. Raise ConfigError (`devices.broken`) if JAX cannot start."""
    try:
        import jax

        return jax.devices()
    except Exception as error:  # noqa: BLE001 - drivers fail with errors of any type
        asked = f" with JAX_PLATFORMS={asked}" if (asked := os.environ.get("JAX_PLATFORMS")) else ""
        raise ConfigError(
            f"JAX cannot start{asked} ({' '.join((str(error) or type(error).__name__).split())[:200]})",
            "Repair the driver, or set JAX_PLATFORMS=cpu.",
            code="devices.broken",
        ) from None


def parsed(text: str) -> MeshShape:
    """Return the shape in a text such as `data=2,fsdp=2`.

    Raises ConfigError (`config.value`) if it is no list of axes, has an unknown axis or one twice, or a size that is no
    number from 1 on.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        found = re.fullmatch(rf"\s*({'|'.join(AXES)})\s*=\s*([0-9]{{1,4}})\s*", part, re.ASCII)
        if not found or found[1] in sizes or not 1 <= int(found[2]) <= DEVICES_MAX:
            raise ConfigError(
                f"--mesh {text!r:.80} is no list of axes with their sizes, at {part.strip()!r:.40}",
                f"Give each axis at most once, with 1 to {DEVICES_MAX} devices, as data=2,fsdp=2,tensor=1.",
                code="config.value",
            )
        sizes[found[1]] = int(found[2])
    return MeshShape(**sizes)


def by_default(devices: int, batch_size: int) -> MeshShape:
    """Return the default: as many devices as divide the batch evenly, all on `data`."""
    return MeshShape(data=max(n for n in range(1, max(1, devices) + 1) if batch_size % n == 0))


def require_divided(shape: MeshShape, batch_size: int) -> None:
    """Raise ConfigError (`mesh.size`) unless each device gets equally many sequences of a batch."""
    if batch_size % shape.batch_parts:
        raise ConfigError(
            f"--mesh {shape} splits a batch into {shape.batch_parts} parts, and a batch (or micro-batch) has "
            f"{batch_size} sequences",
            "Choose sizes of data and fsdp whose product divides that number.",
            code="mesh.size",
        )


def require_present(shape: MeshShape, devices: int, what: str) -> None:
    """Raise ConfigError (`mesh.size`) unless this process has as many devices.

    Args:
        what: Their kind.
    """
    if shape.devices > devices:
        raise ConfigError(
            f"--mesh {shape} needs {shape.devices} devices, and this process has {devices} ({what})",
            "Give a smaller mesh, or make more devices visible to this process.",
            code="mesh.size",
        )
