"""What `archipelago doctor` looks at on this machine: disk, memory, text, packages, accelerators.

Only `accelerators` loads JAX.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from archipelago.broker.errors import ArchipelagoError
from archipelago.broker.manifest import Corpus
from archipelago.ops.watch.doctor.checks import Finding, ok
from archipelago.ops.watch.formatting import size

PACKAGES = ("archipelago-train", "jax", "flax", "optax", "numpy")
MINOR_MATTERS = ("jax", "flax", "archipelago-train")
"""another minor version of these may round otherwise, or not read what the run's wrote"""
PREPARED_BY_NAME = ("stdlib", "digits", "enwik8")
DISK_BYTES = 2e9
"""what logs, a Redis of the run's own and small checkpoints fit into with ease"""
CHECKPOINT_BYTES = 72
"""a parameter: three checkpoints (the newest are kept) of merger and island, at 12 bytes each"""
TRAINING_BYTES = 28
"""a parameter, at least: parameters, gradients, two moments, and what the link keeps, in float32"""
NVIDIA = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Site:
    """This machine in numbers; 0 where it does not say."""

    cores: int
    memory_bytes: int
    available_bytes: int
    disk_free_bytes: int


def measure(folder: Path) -> Site:
    """Of this process: the cores that it may use, and the disk that `folder` is or will be on."""
    there = next((path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()), Path("/"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0
    return Site(cores, *_memory(), shutil.disk_usage(there).free)


def _memory() -> tuple[int, int]:
    """Bytes of memory, and those that are available."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        found = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.endswith("kB")}
        return found.get("MemTotal", 0), found.get("MemAvailable", 0)
    except OSError:  # not Linux
        pages = os.sysconf("SC_PHYS_PAGES") if "SC_PHYS_PAGES" in os.sysconf_names else 0
        return pages * os.sysconf("SC_PAGE_SIZE"), 0


def checks(site: Site, folder: Path, parameters: int) -> list[Finding]:
    """Of the machine's sizes against a model's; 0 parameters where none is known."""
    return [machine(site, parameters), disk(site, folder, parameters)]


def machine(site: Site, parameters: int) -> Finding:
    """Cores, and memory for an island."""
    free = f", {size(site.available_bytes)} free" if site.available_bytes else ""
    what = f"{site.cores} cores, {size(site.memory_bytes)} of memory{free}; Python {sys.version.split()[0]}"
    need = TRAINING_BYTES * parameters
    if site.available_bytes and need > site.available_bytes:
        what += f": an island on this processor needs at least {size(need)}"
        return Finding("warning", "machine", what, "Train on an accelerator, or a smaller model.")
    return ok("machine", what)


def disk(site: Site, folder: Path, parameters: int) -> Finding:
    """Room for checkpoints."""
    need = CHECKPOINT_BYTES * parameters
    what = f"{size(site.disk_free_bytes)} free for {folder}/"
    what += f", checkpoints take up to {size(need)}" if parameters else ""
    remedy = "Free some, or keep the run elsewhere (--folder)."
    if site.disk_free_bytes < need:
        return Finding("problem", "disk", what, remedy)
    if site.disk_free_bytes < need + DISK_BYTES:
        return Finding("warning", "disk", what, remedy)
    return ok("disk", what)


def corpus(name: str, wanted: Corpus | None) -> Finding:
    """Whether the text is here, and is the run's; `wanted` is None without a run."""
    from archipelago.islands.data.corpus import is_prepared, open_corpus, prepared

    try:
        if not is_prepared(name):
            here = ", ".join(prepared()) or "none"
            if name in PREPARED_BY_NAME:
                return ok("corpus", f"{name} is not here yet (here: {here}); `archipelago prepare {name}` makes it")
            how = "Copy its folder from the machine that made the run" if wanted else "`archipelago prepare FILE`"
            return Finding(
                "problem", "corpus", f"{name} is not here (here: {here})", f"{how}, or see `island --corpus`."
            )
        found = open_corpus(name)
    except ArchipelagoError as error:
        return Finding("problem", "corpus", error.what, error.remedy)
    if wanted is not None and found.digest != wanted.digest:
        return Finding(
            "problem", "corpus", f"{name} is here with digest {found.digest[:8]}…, the run's is {wanted.digest[:8]}…",
            "Copy its folder from the machine that made the run; prepared alone, the same name may be another text.",
        )  # fmt: skip
    same = ", the run's own" if wanted else ""
    return ok("corpus", f"{name} is here{same} ({size(found.identity.bytes)}, digest {found.digest[:8]}…)")


def installed() -> dict[str, str]:
    """Versions of what matters, of this machine."""
    out = {}
    for package in PACKAGES:
        try:
            out[package] = version(package)
        except PackageNotFoundError:
            out[package] = "not installed"
    return out


def versions(ours: Mapping[str, str], theirs: Mapping[str, str] | None) -> Finding:
    """Ours against the run's; None without a run."""
    what = ", ".join(f"{name} {found}" for name, found in ours.items())
    if missing := [name for name, found in ours.items() if found == "not installed" and name != "archipelago-train"]:
        return Finding("problem", "packages", f"{', '.join(missing)} not installed", "pip install archipelago-train")
    if theirs is None:
        return ok("packages", what)
    differ = [
        f"{name} {ours[name]}, the run's is {theirs[name]}"
        for name in MINOR_MATTERS
        if name in theirs and _minor(ours[name]) != _minor(theirs[name])
    ]
    if differ:
        remedy = "They train together over such differences; replay may not find the same bits."
        return Finding("warning", "packages", "; ".join(differ), remedy)
    return ok("packages", f"{what}; the run's minor versions are the same")


def _minor(text: str) -> tuple[str, ...]:
    return tuple(text.split(".")[:2])


def accelerators() -> Finding:
    """What JAX sees. Loads it: seconds."""
    try:
        import jax

        devices = jax.devices()
    except Exception as error:  # noqa: BLE001 - whatever a driver raises is the finding
        said = " ".join(str(error).split())[:200]
        return Finding("problem", "devices", f"JAX cannot start ({said})", "Mend the driver, or set JAX_PLATFORMS=cpu.")
    kinds: dict[str, int] = {}
    for device in devices:
        kinds[device.device_kind] = kinds.get(device.device_kind, 0) + 1
    what = ", ".join(f"{count} × {kind}" if count > 1 else kind for kind, count in kinds.items())
    if devices[0].platform == "cpu" and NVIDIA.exists() and os.environ.get("JAX_PLATFORMS", "") != "cpu":
        remedy = "pip install 'archipelago-train[cuda]'"
        return Finding("warning", "devices", f"JAX sees {what} only, and a GPU's driver is here", remedy)
    limit = (devices[0].memory_stats() or {}).get("bytes_limit", 0) if devices[0].platform != "cpu" else 0
    return ok("devices", f"JAX sees {what}{f' with {size(limit)} each' if limit else ''}; an island uses the first")
