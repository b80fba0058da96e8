"""A description of this machine in one line, for reports and the heartbeats of islands."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path

import psutil

_CPUINFO = Path("/proc/cpuinfo")
_LONGEST = 200


@cache
def describe() -> str:
    """Return operating system, processor, cores, memory and Python of this machine, such as it is in a report."""
    memory = f"{psutil.virtual_memory().total / 1e9:.1f} GB"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    parts = (system, processor(), f"{cores} cores", memory, f"Python {platform.python_version()}")
    return ", ".join(part for part in parts if part)[:_LONGEST]


def processor() -> str:
    """Return the model of the processor; empty if it cannot be found out."""
    if sys.platform == "darwin":
        return _answer_of(["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"])
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return " ".join(named[0].split()) if named else ""


def _answer_of(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=5).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
