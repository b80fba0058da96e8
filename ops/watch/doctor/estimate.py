"""Estimate the traffic of an island on a link, and the work and memory of a merger, for `archipelago doctor`.

Everything is pure except `step_seconds_here`, which trains a few steps, and `spectra`, which multiplies some matrices.
The sizes of syncs come from `broker.codecs`, the load from `ops.simulation.links`, and the choice of the codec from the
island's own `islands.sync.uplink`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from archipelago.broker.codecs import codec
from archipelago.broker.config import RunConfig
from archipelago.broker.footprint import memory_text
from archipelago.broker.manifest import Tensor
from archipelago.broker.redis.checkup import Bandwidth
from archipelago.merger.spectra import cycle_operations, default_threads, measured_rate
from archipelago.ops.simulation.cycle import SHARE_MAX, Cycle, SpectraLoad, spectra_load
from archipelago.ops.simulation.plan import Load, load
from archipelago.ops.watch.doctor.checks import Finding, ok, warning
from archipelago.ops.watch.formatting import seconds_text, size

#: A low estimate of a core's speed. If a model would be too slow at this speed, no step is timed.
CPU_FLOPS = 4e9
TRIAL_SECONDS_MAX = 20.0
TRIALS = 4


@dataclass(frozen=True)
class Codec:
    """A sync of the largest fragment with one codec of contributions.

    Attributes:
        name: The codec.
        sync_bytes: The bytes up and down together, before zstd.
        up_seconds: The time to upload.
        down_seconds: The time to download.
        hidden: The share of the transfer that inner steps hide. The rest stretches the interval, and no island waits.
        fits: Whether an island would use it. Otherwise it falls back to the codec for thin links.
    """

    name: str
    sync_bytes: int
    up_seconds: float
    down_seconds: float
    hidden: float
    fits: bool


@dataclass(frozen=True)
class Estimate:
    """The estimate for one island.

    Attributes:
        step_seconds: The time of an inner step.
        stride_seconds: The time between two syncs.
        fragments: The number of fragments.
        link: The rates of the link.
        load: The mean load on the link.
        codecs: The run's codec, and the one for thin links, if any.
    """

    step_seconds: float
    stride_seconds: float
    fragments: int
    link: Bandwidth
    load: Load
    codecs: tuple[Codec, ...]


def estimate(
    config: RunConfig, sizes: Sequence[int], step_seconds: float, link: Bandwidth, round_trip_seconds: float
) -> Estimate:
    """Estimate the syncs of an island.

    Args:
        config: The run's config.
        sizes: The elements of each fragment.
        step_seconds: The time of an inner step.
        link: The rates of the link. A link without rates counts as infinitely fast.
        round_trip_seconds: The round trip to the Redis.
    """
    stride_seconds = step_seconds * config.sync.interval / len(sizes)
    names = dict.fromkeys(name for name in (config.wire.up, config.wire.thin) if name)
    found = tuple(_codec(config, name, max(sizes), stride_seconds, link, round_trip_seconds) for name in names)
    need = load(
        sum(sizes), 1, step_seconds, config.sync.interval, len(sizes), config.wire.up, config.wire.down, link.up
    )
    return Estimate(step_seconds, stride_seconds, len(sizes), link, need, found)


def _codec(
    config: RunConfig, name: str, elements: int, stride_seconds: float, link: Bandwidth, round_trip_seconds: float
) -> Codec:
    from archipelago.islands.sync.connection.uplink import Uplink

    up, down = (codec(each).encoded_size(elements) for each in (name, config.wire.down))
    seconds_a_byte = 1 / link.up if link.up else 0.0
    up_seconds = round_trip_seconds + up * seconds_a_byte
    down_seconds = round_trip_seconds + (down / link.down if link.down else 0.0)
    slower = max(up * seconds_a_byte, down_seconds - round_trip_seconds)  # Both directions run at once.
    return Codec(
        name,
        up + down,
        up_seconds,
        down_seconds,
        min(1.0, stride_seconds / slower) if slower else 1.0,
        Uplink(seconds_a_byte=seconds_a_byte).fits(up, stride_seconds),
    )


def lines(found: Estimate, whose: str) -> list[tuple[str, str]]:
    """Return the estimate as labels and texts. `whose` says where the step time comes from."""
    per_round, thin = found.codecs[0], found.codecs[1:]
    out = [
        ("step", f"an inner step takes {seconds_text(found.step_seconds)} ({whose})"),
        ("sync", f"{size(per_round.sync_bytes)} every {seconds_text(found.stride_seconds)} with {per_round.name}: "
                 f"{size(found.load.up)}/s up, {size(found.load.down)}/s down"),
    ]  # fmt: skip
    if not (found.link.up and found.link.down):
        return out  # The link was not measured.
    out.append(("hidden", _hidden(per_round)))
    for other in thin:
        instead = "it is not needed" if per_round.fits else "the island would use it"
        out.append(("thin", f"{other.name} would be {size(other.sync_bytes)}, {other.hidden:.0%} hidden: {instead}"))
    return out


def _hidden(found: Codec) -> str:
    way = f"up {seconds_text(found.up_seconds)}, down {seconds_text(found.down_seconds)} on this link"
    stretched = f": intervals stretch {1 / found.hidden:.1f} times" if found.hidden < 1.0 else ""
    return f"{found.hidden:.0%} of it behind inner steps ({way}){stretched}"


def spectra(tensors: Sequence[Tensor], config: RunConfig, step_seconds: float) -> Finding | None:
    """Measure what a merger on this machine would take for the spectra of a cycle; None if the run changes none.

    Args:
        tensors: The tensors of the model.
        config: The run's config.
        step_seconds: The time of an inner step; NaN if it is unknown.
    """
    if not cycle_operations(tensors, config.merge):
        return None
    count = default_threads()
    return spectra_finding(
        spectra_load(tensors, config.merge, count, measured_rate(count), config.sync.interval * step_seconds)
    )


def spectra_finding(found: SpectraLoad) -> Finding:
    """Judge whether a merger would keep up."""
    what = f"A merger here: {found.describe()}."
    if not found.fits:
        return warning("spectra.slow", f"{what} Islands would wait for it, and stretch their interval.", found.remedy)
    if math.isnan(found.interval_seconds):
        what += f" Intervals should take at least {seconds_text(found.seconds / SHARE_MAX)}."
    return ok("spectra", what)


def merger_finding(found: Cycle, available: int, interval_seconds: float) -> Finding:
    """Judge whether a merger fits into this machine's memory, and keeps up without spectra.

    Args:
        found: The prediction for a merger of the run's largest shard on this machine.
        available: The memory that is available here.
        interval_seconds: H times the time of an inner step; NaN if that is unknown.
    """
    whose = f"A merger here, of one of {found.shards} shards:" if found.shards > 1 else "A merger here:"
    what = f"{whose} {found.describe()}."
    count = 2 * found.shards
    if found.merger_bytes > available:
        what += f" {memory_text(available)} are available: it may be killed."
        remedy = "Run the merger on a machine with more memory, or begin a run of more shards (`init --shards {}`)."
        return warning("merger.memory", what, remedy.format(count))
    if found.merge_seconds > SHARE_MAX * interval_seconds:
        what += f" The interval is {seconds_text(interval_seconds)}: islands would wait for it, and stretch it."
        return warning("merger.slow", what, f"Begin a run of more shards (`init --shards {count}`).")
    return ok("merger", what)


def trial_seconds(parameters: int, config: RunConfig, cores: int) -> float:
    """Estimate an inner step on a CPU: six operations per parameter and token (Kaplan et al. 2020)."""
    return 6.0 * parameters * config.tokens_per_step / (CPU_FLOPS * max(1, cores))


def step_seconds_here(config: RunConfig, parameters: int, cores: int) -> float:
    """Measure an inner step of the model on this machine's first device; NaN where that would take too long."""
    import jax

    if jax.devices()[0].platform == "cpu" and TRIALS * trial_seconds(parameters, config, cores) > TRIAL_SECONDS_MAX:
        return math.nan
    return _median_step_seconds(config)


def _median_step_seconds(config: RunConfig) -> float:
    """Time TRIALS inner steps on zeros, after one that compiles the program."""
    import jax.numpy as jnp

    from archipelago.islands.inner import begin, compile_steps
    from archipelago.islands.models.registry import build

    model = build(config.model)
    steps, state = compile_steps(model, config.inner), begin(config.inner, model.init(config.seed))
    batch = jnp.zeros((1, config.data.batch_size, config.data.sequence_length + 1), jnp.uint8)
    seconds = []
    for _ in range(TRIALS + 1):
        began = time.perf_counter()
        state, losses_n = steps(state, batch, jnp.asarray(0, jnp.int32))
        losses_n.block_until_ready()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])
