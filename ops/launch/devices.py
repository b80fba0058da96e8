"""The accelerators of this machine, and the share of them that `up` gives to each island."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from archipelago.broker.errors import ConfigError
from archipelago.islands.mesh import MeshShape, require_present, usable_devices

#: The packages that bring JAX an accelerator. Without one of them, JAX computes on the processor.
PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin", "jax_rocm60_plugin", "jax_rocm7_plugin", "libtpu")
#: The variable that hides devices from a process, by platform.
VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "rocm": "HIP_VISIBLE_DEVICES", "tpu": "TPU_VISIBLE_CHIPS"}
#: The arrangements of chips of one TPU host that a process can have.
TPU_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
ASK_SECONDS = 120.0
#: The share of an accelerator's memory that JAX takes, in all processes on it together. The driver takes some as well.
MEMORY_SHARE = 0.9
_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
#: What another process prints, because asking JAX here would take the devices from the islands.
_QUESTION = """
import json, jax
devices = jax.local_devices()
platform = devices[0].platform
if platform == "gpu":
    platform = "rocm" if "rocm" in devices[0].client.platform_version.lower() else "cuda"
chips = {tuple(getattr(device, "coords", None) or (device.id,)) for device in devices}
print(json.dumps([platform, len(chips), devices[0].device_kind]))
"""


@dataclass(frozen=True)
class Accelerators:
    """The accelerators of this machine.

    Attributes:
        platform: `cuda`, `rocm` or `tpu`.
        names: Their names, as the variable of the platform takes them.
        kind: Their kind in words.
    """

    platform: str
    names: tuple[str, ...]
    kind: str


def accelerators(environ: Mapping[str, str] = os.environ) -> Accelerators | None:
    """Return the accelerators that this process may use; None if JAX computes on the processor."""
    if environ.get("JAX_PLATFORMS", "") == "cpu" or not any(find_spec(plugin) for plugin in PLUGINS):
        return None
    try:
        asked = subprocess.run(
            [sys.executable, "-P", "-c", _QUESTION], capture_output=True, text=True, timeout=ASK_SECONDS, check=True
        )
        platform, count, kind = json.loads(asked.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, OSError, ValueError, LookupError):
        return None  # the islands will say what is wrong with the driver
    if platform not in VISIBLE:
        return None
    names = tuple(name.strip() for name in environ.get(VISIBLE[platform], "").split(",") if name.strip())
    return Accelerators(platform, names if len(names) == count else tuple(map(str, range(count))), kind)


def memory_share(processes: int, together: float = MEMORY_SHARE) -> dict[str, str]:
    """Return the variables that give each of several processes on one accelerator its share of the memory.

    JAX takes the memory at once if there is one process, and as it needs it otherwise. Variables that the user has set
    are left as they are.
    """
    share = {
        _PREALLOCATE: "true" if processes == 1 else "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{together / processes:.3f}",
    }
    # JAX has renamed one of them, and refuses to have both names.
    given = {name.replace("XLA_CLIENT", "XLA_PYTHON_CLIENT") for name in os.environ}
    return {name: value for name, value in share.items() if name not in given}


def leave_to_children(platform: str = "") -> None:
    """Let JAX in this process leave the accelerators to its children.

    A process has the chips of a TPU alone, so this one computes on its cores. Of other devices it takes memory as it
    needs it, where JAX would take three quarters at its first program. JAX reads the variable when it first looks for
    devices, and children do not inherit it.
    """
    if platform == "tpu":
        import jax

        jax.config.update("jax_platforms", "cpu")  # type: ignore[no-untyped-call]
        return
    is_given = _PREALLOCATE in os.environ
    os.environ.setdefault(_PREALLOCATE, "false")
    try:
        usable_devices()
    finally:
        if not is_given:
            del os.environ[_PREALLOCATE]


@dataclass(frozen=True)
class DeviceShares:
    """The accelerators of this machine, the names of those that each island gets, and the memory that all take."""

    found: Accelerators
    names: tuple[tuple[str, ...], ...]
    standbys: int = 0
    memory: float = MEMORY_SHARE

    def environment(self, number: int) -> dict[str, str]:
        """Return the variables that show an island its own accelerators only, and its share of their memory."""
        names = self.names[number % len(self.names)]
        shown = {VISIBLE[self.found.platform]: ",".join(names)}
        if self.found.platform == "tpu":
            return {**shown, "TPU_PROCESS_BOUNDS": "1,1,1", "TPU_CHIPS_PER_PROCESS_BOUNDS": TPU_BOUNDS[len(names)]}
        users = [*range(len(self.names)), *range(self.standbys)]
        processes = sum(self.names[user % len(self.names)] == names for user in users)
        return {**shown, **memory_share(processes, self.memory)}

    def describe(self, island_names: Sequence[str]) -> list[str]:
        """Return one line for each island, and one for those that are not used."""
        variable, kind = VISIBLE[self.found.platform], self.found.kind
        lines = [
            f"{island} uses {len(names)} × {kind} ({variable}={','.join(names)})"
            for island, names in zip(island_names, self.names, strict=True)
        ]
        unused = [name for name in self.found.names if not any(name in names for names in self.names)]
        return [*lines, f"not used: {len(unused)} × {kind} ({', '.join(unused)})"] if unused else lines


def shared_out(
    found: Accelerators | None,
    islands: int,
    standbys: int = 0,
    *,
    may_share: bool = False,
    mesh: MeshShape | None = None,
) -> DeviceShares | None:
    """Return the share of each island: equally many accelerators; None on a machine without any.

    Each standby shares the devices of an island, and `mesh` is that of each island, if one is given. Raises ConfigError
    if there are fewer accelerators than islands or a TPU cannot be shared as asked (`up.devices`), or if the mesh needs
    more devices than an island gets (`mesh.size`).
    """
    if found is None:
        return None
    count = len(found.names)
    if islands > count and (not may_share or found.platform == "tpu"):
        sharing = "" if found.platform == "tpu" else ", or let islands share them with --share-devices"
        raise ConfigError(
            f"{islands} islands on {count} × {found.kind}: some would get none",
            f"Give --islands {count} or fewer{sharing}.",
            code="up.devices",
        )
    each = max(1, count // islands)
    if found.platform == "tpu":
        each = max(size for size in TPU_BOUNDS if size <= each)
        if standbys:
            raise ConfigError(
                "a standby needs the chips of its island, and two processes cannot use one TPU chip",
                "Leave --standbys out. An island that dies is started again.",
                code="up.devices",
            )
    if mesh is not None:
        require_present(mesh, each, f"its share of {count} × {found.kind}")
    starts = [number * each if islands <= count else number % count for number in range(islands)]
    return DeviceShares(found, tuple(found.names[start : start + each] for start in starts), standbys)
