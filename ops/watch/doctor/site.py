"""Judge this machine and its link for `archipelago doctor`: what an island here would have, and need.

Only `accelerators` and `spectra` load JAX.
"""

from __future__ import annotations

import math
import os
import shutil
import statistics
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from archipelago.broker.codecs import codec
from archipelago.broker.errors import ArchipelagoError
from archipelago.broker.footprint import Footprint
from archipelago.broker.machine import install_hint, usable_cores
from archipelago.broker.manifest import Corpus, Manifest
from archipelago.broker.observe.merge_load import SPECTRA_REMEDY
from archipelago.broker.redis.checkup import Bandwidth
from archipelago.ops.simulation.cycle import SpectraWay, spectra_loads
from archipelago.ops.watch.doctor.checks import Finding, ok, problem, warning
from archipelago.ops.watch.formatting import seconds_text, size

#: Room for logs, a Redis of the run's own and small checkpoints.
DISK_BYTES = 2e9
#: Bytes of checkpoints per parameter: the three newest checkpoints of merger and island, at 12 bytes each.
CHECKPOINT_BYTES = 72
#: A faster connection is memory of this machine, or was measured too briefly.
MBITS_MAX = 10_000
NVIDIA = Path("/proc/driver/nvidia/version")
#: Above this round trip, rounds wait longer for their announcements than for anything else.
SLOW_SECONDS = 0.5


def machine(available_bytes: int, needed: Footprint | None) -> Finding:
    """Compare the memory with what an island and the merger of the run need; None if no run is known."""
    what = (
        f"This machine has {usable_cores()} cores, {size(available_bytes)} of free memory, and Python "
        f"{sys.version.split()[0]}."
    )
    if needed is None:
        return ok("machine", what)
    what += f" The merger of the run needs about {size(needed.merger)}, and an island here {size(needed.island)}."
    if needed.island <= available_bytes:
        return ok("machine", what)
    return warning("machine.small", what, "Train on an accelerator, or choose a smaller model.")


def free_bytes(folder: Path) -> int:
    """Return the free space on the disk that `folder` is or will be on."""
    existing = next((path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()), Path("/"))
    return shutil.disk_usage(existing).free


def disk(free: int, folder: Path, parameters: int) -> Finding:
    """Compare the free disk space with the size of checkpoints."""
    need = CHECKPOINT_BYTES * parameters
    what = f"{size(free)} are free for {folder}/."
    what += f" Checkpoints take up to {size(need)}." if parameters else ""
    remedy = "Free some space, or keep the run elsewhere (--folder)."
    if free < need:
        return problem("disk.full", what, remedy)
    tight = free < need + DISK_BYTES
    return warning("disk.tight", what, remedy) if tight else ok("disk", what)


def corpus(wanted: Corpus) -> Finding:
    """Check that the corpus of the run is here."""
    name = wanted.name
    from archipelago.islands.data.corpus import KNOWN, is_prepared, open_corpus, prepared

    try:
        if not is_prepared(name):
            present = ", ".join(prepared()) or "none"
            what = f"The corpus {name!r} is not on this machine (prepared: {present})."
            if name in KNOWN:
                return ok("corpus", f"{what} `archipelago prepare {name}` makes it.")
            return problem("corpus.missing", what, "Copy its folder from the machine that created the run.")
        found = open_corpus(name, verifies=True)
    except ArchipelagoError as error:
        return problem("corpus.damaged", error.what, error.remedy)
    if found.digest != wanted.digest:
        return problem(
            "corpus.different",
            f"The corpus {name!r} has the digest {found.digest[:8]}…, and the run's has {wanted.digest[:8]}….",
            "Copy its folder from the machine that created the run. The same name may be another text elsewhere.",
        )
    return ok("corpus", f"The corpus {name!r} of the run is here ({size(wanted.bytes)}, digest {found.digest[:8]}…).")


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


def spectra(manifest: Manifest | None, step_seconds: float) -> Finding:
    """Try how a merger here changes spectra of matrices, and predict whether it keeps up with the run.

    Args:
        manifest: The run; None if no run is known.
        step_seconds: The time of an inner step; NaN if it is unknown.
    """
    import jax

    from archipelago.merger.spectra import default_threads
    from archipelago.merger.xla_spectra import has_same_bits, on_device, trial

    found, threads = trial(), default_threads()
    what = f"A merger here changes spectra by {'XLA' if found.power else 'numpy'}, {found.rate / 1e9:.0f} GFLOP/s a "
    what += f"thread, on {threads} thread{'s' * (threads != 1)} (--threads)."
    device = jax.local_devices()[0]
    ways = {"XLA": found.has_same_bits}
    if device.platform == "gpu":
        with suppress(RuntimeError):  # islands may have all of its memory
            ways["--spectra gpu"] = has_same_bits(on_device(device), device.device_kind)
    for name, is_same in ways.items():
        what += f" {name} has {'the same bits' if is_same else 'OTHER BITS'}{' as numpy' if name == 'XLA' else ''}."
    if not all(ways.values()):
        return warning("spectra.bits", what, "Numpy computes them, so nothing goes wrong. Please report it.")
    if manifest is None:
        return ok("spectra", what)
    merge, way = manifest.config.merge, SpectraWay("here", threads * found.rate)
    interval_seconds = step_seconds * manifest.config.sync.interval
    loads = spectra_loads(manifest.tensors, merge, interval_seconds, ways=[way])
    if not loads:
        return ok("spectra", "The merge rules of the run change no spectra.")
    if math.isnan(interval_seconds):
        return ok("spectra", f"{what} Those of a cycle of the run take {seconds_text(loads[0].seconds)}.")
    what += f" In this run, {loads[0].describe()}."
    is_slow = loads[0].stretch > 1.0
    return warning("spectra.slow", what, SPECTRA_REMEDY) if is_slow else ok("spectra", what)


# -- the link ----------------------------------------------------------------------------------------------------------


def latency(samples: Sequence[float]) -> Finding:
    """Judge round trips, in seconds."""
    median, slowest = statistics.median(samples), sorted(samples)[math.ceil(0.99 * len(samples)) - 1]
    what = f"The round trip takes {seconds_text(median)}, p99 {seconds_text(slowest)} ({len(samples)} pings)."
    if median < SLOW_SECONDS:
        return ok("latency", what)
    what += " Islands do not wait for it, but learn about each round that much later."
    return warning("latency.slow", what, "Choose longer intervals (--sync.interval).")


def bandwidth(link: Bandwidth) -> Finding:
    """Judge the rates of one connection."""
    if link.why_not:
        what = f"The bandwidth was not measured ({link.why_not})."
        return warning("bandwidth.unknown", what, "Free memory there, then run doctor again.")
    up, down = (_rate_text(rate) for rate in (link.up, link.down))
    return ok("bandwidth", f"One connection carries {up} up, {down} down.")


def _rate_text(bytes_per_second: float) -> str:
    mbits = 8e-6 * bytes_per_second
    return "over 10 Gbit/s" if mbits > MBITS_MAX else f"{mbits:,.{0 if mbits > 100 else 2}f} Mbit/s"


def sync(link: Bandwidth, round_trip_seconds: float, manifest: Manifest, step_seconds: float) -> Finding:
    """Predict what an island here sends and receives in a sync of the largest fragment, and whether steps hide it.

    Args:
        link: The rates of the link to the Redis; 0 if they are unknown, or if the Redis is on this machine.
        round_trip_seconds: The median round trip to it.
        manifest: The run.
        step_seconds: The time of an inner step; NaN if it is unknown.
    """
    wire, sizes = manifest.config.wire, manifest.sizes
    stride = step_seconds * manifest.config.sync.interval / len(sizes)
    up, down = (codec(name).encoded_size(max(sizes)) for name in (wire.up, wire.down))
    what = f"An island here sends {size(up)} and receives {size(down)} in a sync of the largest fragment"
    what += "." if math.isnan(stride) else f", every {seconds_text(stride)}."
    if not (link.up and link.down):
        return ok("sync", what)
    seconds = max(up / link.up, down / link.down)  # Both directions run at once.
    ways = (f"{seconds_text(round_trip_seconds + each)}" for each in (up / link.up, down / link.down))
    what += " That takes {} up and {} down on this link.".format(*ways)
    if math.isnan(stride):
        return ok("sync", f"{what} Syncs should be at least {seconds_text(seconds)} apart (--sync.interval).")
    if seconds <= stride:
        return ok("sync", what)
    thin = codec(manifest.config.thin).encoded_size(max(sizes)) if manifest.config.thin else up
    if max(thin / link.up, down / link.down) <= stride:
        return ok(
            "sync", f"{what} It would send {size(thin)} instead ({manifest.config.thin}), because this is a thin link."
        )
    return warning(
        "sync.slow",
        f"{what} Inner steps hide {stride / seconds:.0%} of it: intervals would stretch {seconds / stride:.1f} times.",
        "Begin a run with a longer interval (--sync.interval) or fewer bits (--wire.up, --wire.down).",
    )
