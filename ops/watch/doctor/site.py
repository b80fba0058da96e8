"""Check this machine for `archipelago doctor`: disk, memory, corpus, packages, accelerators.

Only `accelerators` loads JAX.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from archipelago.broker.errors import ArchipelagoError
from archipelago.broker.machine import install_hint, usable_cores
from archipelago.broker.manifest import MISSING, Corpus
from archipelago.ops.watch.doctor.checks import Finding, ok, problem, warning
from archipelago.ops.watch.formatting import size

#: Packages whose other minor versions may round differently, or cannot read the files of the run's version.
MINOR_MATTERS = ("jax", "flax", "archipelago-train")
#: Room for logs, a Redis of the run's own and small checkpoints.
DISK_BYTES = 2e9
#: Bytes of checkpoints per parameter: the three newest checkpoints of merger and island, at 12 bytes each.
CHECKPOINT_BYTES = 72
#: The least bytes of training per parameter: parameters, gradients, two moments and the link's copies, in float32.
TRAINING_BYTES = 28
NVIDIA = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Site:
    """This machine in numbers.

    Attributes:
        cores: The cores that this process may use.
        memory_bytes: All memory.
        available_bytes: Memory that is available now.
        disk_free_bytes: Free space on the disk of the runs.
    """

    cores: int
    memory_bytes: int
    available_bytes: int
    disk_free_bytes: int


def measure(folder: Path) -> Site:
    """Measure this machine, and the disk that `folder` is or will be on."""
    existing = next((path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()), Path("/"))
    memory = psutil.virtual_memory()
    return Site(usable_cores(), memory.total, memory.available, shutil.disk_usage(existing).free)


def checks(site: Site, folder: Path, parameters: int) -> list[Finding]:
    """Compare the machine with a model of that many parameters. 0 means that no model is known."""
    return [machine(site, parameters), disk(site, folder, parameters)]


def machine(site: Site, parameters: int) -> Finding:
    """Compare cores and memory with the needs of an island."""
    what = (
        f"This machine has {site.cores} cores and {size(site.memory_bytes)} of memory, of which "
        f"{size(site.available_bytes)} are free, and Python {sys.version.split()[0]}."
    )
    need = TRAINING_BYTES * parameters
    if need > site.available_bytes:
        return warning(
            "machine.small",
            f"{what} An island on this processor needs at least {size(need)}.",
            "Train on an accelerator, or choose a smaller model.",
        )
    return ok("machine", what)


def disk(site: Site, folder: Path, parameters: int) -> Finding:
    """Compare the free disk space with the size of checkpoints."""
    need = CHECKPOINT_BYTES * parameters
    what = f"{size(site.disk_free_bytes)} are free for {folder}/."
    what += f" Checkpoints take up to {size(need)}." if parameters else ""
    remedy = "Free some space, or keep the run elsewhere (--folder)."
    if site.disk_free_bytes < need:
        return problem("disk.full", what, remedy)
    if site.disk_free_bytes < need + DISK_BYTES:
        return warning("disk.tight", what, remedy)
    return ok("disk", what)


def own_data(task: str) -> Finding:
    """Say that the run has no corpus. `task` is the name of the task that it trains; empty for a run of scripts."""
    who = f"The islands train the task {task!r}" if task else "The islands are training scripts"
    return ok("corpus", f"{who} of the run's users, which {'brings its' if task else 'bring their'} own data.")


def corpus(name: str, wanted: Corpus | None) -> Finding:
    """Check that the corpus is here, and that it is the run's. `wanted` is None without a run."""
    from archipelago.islands.data.corpus import KNOWN, is_prepared, open_corpus, prepared

    try:
        if not is_prepared(name):
            present = ", ".join(prepared()) or "none"
            what = f"The corpus {name!r} is not on this machine (prepared: {present})."
            if name in KNOWN:
                return ok("corpus", f"{what} `archipelago prepare {name}` makes it.")
            copy = "Copy its folder from the machine that created the run"
            how = copy if wanted else "Run `archipelago prepare FILE`"
            return problem("corpus.missing", what, f"{how}, or see `island --corpus`.")
        found = open_corpus(name)
    except ArchipelagoError as error:
        return problem("corpus.damaged", error.what, error.remedy)
    if wanted is not None and found.digest != wanted.digest:
        return problem(
            "corpus.different",
            f"The corpus {name!r} has the digest {found.digest[:8]}…, and the run's has {wanted.digest[:8]}….",
            "Copy its folder from the machine that created the run. The same name may be another text elsewhere.",
        )
    same = " It is the run's." if wanted else ""
    return ok(
        "corpus", f"The corpus {name!r} is here ({size(found.identity.bytes)}, digest {found.digest[:8]}…).{same}"
    )


def versions(here: Mapping[str, str], in_run: Mapping[str, str] | None) -> Finding:
    """Compare the versions of packages `here` with those `in_run`, which is None without a run."""
    what = f"Installed are {', '.join(f'{name} {found}' for name, found in here.items())}."
    if missing := [name for name, found in here.items() if found == MISSING and name != "archipelago-train"]:
        return problem(
            "packages.missing",
            f"Not installed: {', '.join(missing)}.",
            install_hint(),
        )
    if in_run is None:
        return ok("packages", what)
    differ = [
        f"{name} {here[name]} here and {in_run[name]} in the run"
        for name in MINOR_MATTERS
        if name in in_run and _minor(here[name]) != _minor(in_run[name])
    ]
    if differ:
        return warning(
            "packages.different",
            f"Versions differ: {'; '.join(differ)}. Training works, but a replay may not find the same bits.",
            "Install the run's versions.",
        )
    return ok("packages", f"{what} The run has the same minor versions.")


def _minor(text: str) -> tuple[str, ...]:
    return tuple(text.split(".")[:2])


def accelerators() -> Finding:
    """List the devices that JAX finds. Loading JAX takes seconds."""
    try:
        import jax

        devices = jax.devices()
    except Exception as error:  # noqa: BLE001 - any error of a driver is the finding
        return problem(
            "devices.broken",
            f"JAX cannot start ({' '.join(str(error).split())[:200]}).",
            "Repair the driver, or set JAX_PLATFORMS=cpu.",
        )
    kinds: dict[str, int] = {}
    for device in devices:
        kinds[device.device_kind] = kinds.get(device.device_kind, 0) + 1
    found = ", ".join(f"{count} × {kind}" if count > 1 else kind for kind, count in kinds.items())
    if devices[0].platform == "cpu" and NVIDIA.exists() and os.environ.get("JAX_PLATFORMS", "") != "cpu":
        return warning(
            "devices.unused-gpu",
            f"JAX finds only {found}, although the driver of a GPU is installed.",
            install_hint("cuda"),
        )
    limit = (devices[0].memory_stats() or {}).get("bytes_limit", 0) if devices[0].platform != "cpu" else 0
    each = f" with {size(limit)} each" if limit else ""
    return ok("devices", f"JAX finds {found}{each}. An island uses all of them, unless --mesh says otherwise.")
