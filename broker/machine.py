"""This machine: its description, cores, processes, free ports and malloc, and which optional packages it has."""

from __future__ import annotations

import ctypes
import math
import os
import platform
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import psutil

from archipelago.broker.errors import ConfigError

_CPUINFO = Path("/proc/cpuinfo")
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_LONGEST = 200
LOOPBACK = "127.0.0.1"
#: Where `free_port` looks. Linux gives outgoing connections ports from 32768 on, macOS and Windows from 49152 on.
#: Such a port may be lost to a connection before the intended server listens.
OWN_PORTS = range(20_000, 32_000)
#: The packages of each extra that we import.
PACKAGES = {
    "dash": ("plotly", "starlette", "uvicorn"),
    "gcs": ("gcsfs",),
    "llama": ("torch", "transformers"),
    "s3": ("s3fs",),
    "torch": ("torch",),
}


@cache
def describe() -> str:
    """Return operating system, processor, cores, memory and Python of this machine, such as it is in a report."""
    memory = f"{psutil.virtual_memory().total / 1e9:.1f} GB"
    cores = usable_cores()
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    parts = (system, processor(), f"{cores} cores", memory, f"Python {platform.python_version()}")
    return ", ".join(part for part in parts if part)[:_LONGEST]


def usable_cores(cgroups: Path = _CGROUPS, own: Path = _OWN_CGROUP) -> int:
    """Return how many cores this process may keep busy, at least one.

    A container may see all cores of its machine and have the time of a few, so its quota counts as well. The file `own`
    names the control groups of this process.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, math.ceil(_quota(cgroups, own))))


def _quota(cgroups: Path, own: Path) -> float:
    """Return the smallest quota, in cores, of this process's control group and those above; all cores without one."""
    group = next((line[3:].lstrip("/") for line in _text_of(own).splitlines() if line.startswith("0::")), "")
    folders = [cgroups / group, *(cgroups / parent for parent in Path(group).parents)]
    limits = [_text_of(folder / "cpu.max").split() for folder in folders]
    limits.append([_text_of(cgroups / "cpu" / f"cpu.cfs_{part}_us").strip() for part in ("quota", "period")])  # v1
    # "max" and -1 stand for no quota.
    known = [limit for limit in limits if len(limit) == 2 and all(part.isdecimal() and int(part) for part in limit)]
    return min((int(quota) / int(period) for quota, period in known), default=float(os.cpu_count() or 1))


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def has_ended(pid: int) -> bool:
    """Return whether the process of that number, which was one of this machine, has ended. If unknown, it has not.

    A zombie has ended. Only its exit status is left, until its parent takes note of that. Numbers may come from other
    processes. One that is not positive names no process.
    """
    if pid <= 0:
        return False
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


def processor() -> str:
    """Return the model of the processor; empty if it cannot be found out."""
    if sys.platform == "darwin":
        return answer_of(["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"])
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return " ".join(named[0].split()) if named else ""


def answer_of(command: list[str]) -> str:
    """Return what a command prints; empty if it does not run or takes longer than 5 s."""
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=5).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def is_free(port: int) -> bool:
    """Return whether a server could listen on that port of this machine, at all addresses."""
    with socket.socket() as probe:
        # The server sets this too, so that connections in TIME_WAIT from the last server do not block the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def free_port() -> int:
    """Return a port that was free just now. No outgoing connection gets it."""
    while not is_free(port := secrets.choice(OWN_PORTS)):
        pass
    return port


def is_installed(package: str) -> bool:
    """Return whether a package can be imported. A folder without `__init__.py` does not count as one."""
    spec = find_spec(package)
    return spec is not None and spec.loader is not None


def require_extra(extra: str, purpose: str) -> None:
    """Raise ConfigError unless all packages of an extra are installed, which `purpose` ("The dashboard") needs."""
    if missing := [package for package in PACKAGES[extra] if not is_installed(package)]:
        said = f"{purpose} needs {' and '.join(missing)}, which this Python does not have"
        raise ConfigError(said, install_hint(extra), code="config.extra")


def install_hint(extra: str = "") -> str:
    """Return the sentence that says how to install Archipelago, also with an extra. No index has the distribution."""
    wanted = f"'.[{extra}]'" if extra else "."
    return f"In your checkout of Archipelago, run: pip install {wanted}"


# -- malloc -----------------------------------------------------------------------------------------------------------

#: Parameters of mallopt, from glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8
#: Blocks of at least this size go back to the system when they are freed (`return_freed_memory`).
RETURNED_BYTES = 32 << 20


def keep_freed_memory() -> None:
    """Let malloc reuse freed memory instead of returning it to the system. Works with glibc only.

    Page faults on fresh memory cost a merger more time than its arithmetic. The process keeps the largest amount of
    memory that it ever used. Call this before the process starts threads.
    """
    _mallopt({_M_ARENA_MAX: 1, _M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: 2**31 - 1})


def return_freed_memory() -> None:
    """Let malloc return large blocks to the system as soon as they are freed. Works with glibc only.

    By itself it learns to keep blocks of up to this size, but once for each thread. In an island, that was half of the
    memory that syncs took. So threads share one heap, and none keeps what another one could use. Smaller blocks are
    kept: they are the payloads of fragments, and the kernel would clear each page of them at each sync. The end of the
    heap is kept up to the same size. Call this before the process starts threads.
    """
    _mallopt({_M_ARENA_MAX: 1, _M_MMAP_THRESHOLD: RETURNED_BYTES, _M_TRIM_THRESHOLD: RETURNED_BYTES})


def _mallopt(parameters: Mapping[int, int]) -> None:
    """Set parameters of glibc's malloc, if that is the C library."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    for parameter, value in parameters.items():
        mallopt(parameter, value)
