"""`archipelago simulate plan`: choose M, H, P, S and codec for a run, and estimate its traffic, memory and goodput."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from archipelago.broker.config import DataConfig, MergeConfig, ModelConfig, RunConfig, checked
from archipelago.broker.errors import ConfigError, require_number
from archipelago.broker.manifest import SHARDS_MAX, Tensor
from archipelago.broker.observe.merge_load import few_syncs
from archipelago.broker.process import print_json
from archipelago.ops.settings import flags, say
from archipelago.ops.simulation.cycle import (
    LADDER,
    THREADS,
    Cycle,
    SpectraLoad,
    Way,
    cycle,
    decoder,
    fitting_cycle,
    spectra_loads,
)
from archipelago.ops.simulation.failures import YEAR_SECONDS, FailureModel, simulate
from archipelago.ops.simulation.tables import count_text
from archipelago.ops.watch.formatting import seconds_text, size

#: The defaults are tuned for up to this number of islands, and the paper has no more.
ISLANDS_MAX = 16
#: The goodput that twice as many islands must gain, because each island costs some quality.
GAIN_WORTHWHILE = 0.03
UPTIME_WANTED = 0.99
#: The share of a link that syncs may fill. Snapshots and contributions come in bursts.
LINK_SHARE = 0.7
FAILURES_SIMULATED = 4000.0
FRAGMENTS_MAX = 24
#: The most islands and slices that are simulated, which takes time.
ISLANDS_SIMULATED, SLICES_SIMULATED = 4096, 1 << 20
#: The share of an inner step in which data-parallel has no gradients to send yet.
FORWARD_SHARE = 1.0 / 3.0
#: The least of what has to be positive.
TINY = 1e-12


@dataclass(frozen=True)
class PlanOptions:
    """Plan a run on one page: M, H, P, S and codec for the machines and links that you have.

    The answer comes from the model of `archipelago simulate tables`; docs/results/simulation.md lists its assumptions.
    """

    model: str = "1b"
    """The parameters (5e9, 5B, 120M), or a model by name (tiny, small, base, 124m, 1b)."""
    tokens: str = "20x"
    """The tokens to train on: a number (26B), or a multiple of the parameters (20x)."""
    sites: int = 2
    """The places that share only the Redis. Each has at least one island."""
    chips: int = 16
    """The accelerators in all sites together."""
    tokens_per_second: float = 10_000.0
    """The tokens per second that one chip trains on."""
    batch_tokens: int = 500_000
    """The tokens of one inner step of all islands together."""
    link_mbits: float = 1000.0
    """The link between a site and the Redis, each way."""
    redis_mbits: float = 10_000.0
    """The link of the machine with the Redis and the merger, each way."""
    hours_between: float = YEAR_SECONDS / 3600.0
    """The mean time between two interruptions of one chip. The default is a year. Spot machines: a few hours to a few
    days.
    """
    slice_chips: int = 8
    """The chips that one failure stops: those of a machine or of a slice."""
    return_seconds: float = 300.0
    """The mean time until these chips return."""
    pause_seconds: float = 30.0
    """The time that an island loses when it restarts."""
    islands: int = 0
    """The number of islands M, if you want to set it yourself."""
    merger_gb: float = 64.0
    """The memory of a machine with a merger, in GB. A model that needs more gets several shards."""
    redis_gb: float = 64.0
    """The memory of a machine with a Redis primary, in GB."""
    merge: MergeConfig = field(default_factory=MergeConfig)
    """The merge rules, as for `archipelago init`."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True)
class Load:
    """Bytes per second before zstd: of one island each way, and of all shards' Redis, with their mergers."""

    up: float
    down: float
    redis_in: float
    redis_out: float


class Fleet(NamedTuple):
    """A number of islands with its simulated goodput and uptime."""

    islands: int
    goodput: float
    uptime: float


@dataclass(frozen=True)
class RunPlan:
    """The answer.

    Attributes:
        fleets: All numbers of islands that were simulated.
        fits: Whether the links carry the load.
        seconds: Time of training, with failures.
        spectra: What changing spectra takes, by kind of merger, if each shard has one on a machine of its own.
        cycle: Memory and bytes of a cycle, and the number of shards.
        has_room: Whether any number of shards fits into the machines. Otherwise `cycle` is that of the most.
    """

    parameters: int
    tokens: int
    fleets: tuple[Fleet, ...]
    fleet: Fleet
    way: Way
    fragments: int
    step_seconds: float
    load: Load
    fits: bool
    islands_a_site: int
    seconds: float
    data_parallel_goodput: float
    data_parallel_gbits: float
    spectra: tuple[SpectraLoad, ...]
    cycle: Cycle
    has_room: bool


def main(options: PlanOptions) -> int:
    found = plan(options)
    if options.json:
        print_json(dataclasses.asdict(found))
    else:
        for line in page(options, found):
            say(line)
    return 0


def plan(options: PlanOptions) -> RunPlan:
    """Choose the fewest islands that have most of the goodput, and the first way of LADDER that the links carry."""
    _check(options)
    parameters = parameters_of(options.model)
    tokens = tokens_of(options.tokens, parameters)
    step_seconds = options.batch_tokens / (options.chips * options.tokens_per_second)
    fleets = [_fleet(options, count, step_seconds) for count in _counts(options)]
    fleet = choose(fleets)
    islands_a_site = math.ceil(fleet.islands / options.sites)
    way, need, fits, planned, has_room = _way(options, parameters, fleet.islands, islands_a_site, step_seconds)
    alone = _fleet(options, 1, step_seconds)
    return RunPlan(
        parameters=parameters,
        tokens=tokens,
        fleets=tuple(fleets),
        fleet=fleet,
        way=way,
        fragments=min(min(way.interval, FRAGMENTS_MAX) * planned.shards, len(tensors_of(options.model))),
        step_seconds=step_seconds,
        load=need,
        fits=fits,
        islands_a_site=islands_a_site,
        seconds=tokens / (options.chips * options.tokens_per_second * max(fleet.goodput, 1e-9)),
        data_parallel_goodput=alone.goodput,
        data_parallel_gbits=data_parallel_gbits(parameters, 16.0, step_seconds, max(2, options.sites), 0.95),
        spectra=spectra_loads(tensors_of(options.model), options.merge, way.interval * step_seconds, planned.shards),
        cycle=planned,
        has_room=has_room,
    )


def choose(fleets: Sequence[Fleet]) -> Fleet:
    """Double the islands while that gains GAIN_WORTHWHILE, or while UPTIME_WANTED is not reached."""
    chosen = fleets[0]
    for fleet in fleets[1:]:
        if fleet.goodput - chosen.goodput < GAIN_WORTHWHILE and chosen.uptime >= UPTIME_WANTED:
            break
        if fleet.goodput > chosen.goodput or fleet.uptime > chosen.uptime:
            chosen = fleet
    return chosen


def _check(options: PlanOptions) -> None:
    positive = ("sites", "chips", "tokens_per_second", "batch_tokens", "link_mbits", "redis_mbits", "hours_between",
                "slice_chips", "merger_gb", "redis_gb")  # fmt: skip
    for name in positive:
        require_number(f"--{name.replace('_', '-')}", getattr(options, name), "Give more than 0.", TINY)
    for name in ("pause_seconds", "return_seconds"):
        require_number(f"--{name.replace('_', '-')}", getattr(options, name), "Give 0 or more.")
    require_number("--islands", options.islands, "Give a number, or leave it out.", most=ISLANDS_SIMULATED)
    require_number("--sites", options.sites, "Give fewer.", 1, ISLANDS_SIMULATED)
    slices = "Give fewer, or a larger --slice-chips."
    require_number("--chips", options.chips, slices, 1, SLICES_SIMULATED * options.slice_chips)
    most = max(options.sites, options.islands)
    if options.chips < most:
        what = f"{options.chips} chips are too few for {most} islands"
        raise ConfigError(what, "Each site and island needs at least one.", code="config.value")


def _counts(options: PlanOptions) -> list[int]:
    """Return the numbers of islands to simulate: one a site, then twice as many each time."""
    if options.islands:
        return [options.islands]
    counts, islands = [], max(1, options.sites)
    while islands <= max(ISLANDS_MAX, options.sites) and islands <= max(options.sites, _slices(options)):
        counts.append(islands)
        islands *= 2
    return counts


def _slices(options: PlanOptions) -> int:
    return math.ceil(options.chips / options.slice_chips)


def _fleet(options: PlanOptions, islands: int, step_seconds: float) -> Fleet:
    """Simulate until FAILURES_SIMULATED failures are expected, and at least a thousand steps."""
    model = FailureModel(
        chips=options.chips,
        islands=islands,
        slices=max(islands, _slices(options)),
        years_between=options.hours_between * 3600.0 / YEAR_SECONDS,
        step_seconds=step_seconds,
        pause_seconds=options.pause_seconds,
        return_seconds=options.return_seconds,
        elastic=False,
    )
    seconds = max(1000.0 * step_seconds, FAILURES_SIMULATED * options.hours_between * 3600.0 / options.chips)
    outcome = simulate(model, seconds, np.random.default_rng([0, islands]))
    return Fleet(islands, outcome.goodput, outcome.uptime)


def _way(
    options: PlanOptions, parameters: int, islands: int, islands_a_site: int, step_seconds: float
) -> tuple[Way, Load, bool, Cycle, bool]:
    """Return the first way of LADDER that the links carry, or the last and False; its cycle; whether that has room."""
    link, redis = (LINK_SHARE * mbits * 1e6 / 8 for mbits in (options.link_mbits / islands_a_site, options.redis_mbits))
    merger_bytes, redis_bytes = 1e9 * options.merger_gb, 1e9 * options.redis_gb
    tensors = tensors_of(options.model)
    most = len(tensors)  # fragments: each has a whole tensor at least
    for way in LADDER:
        config = dataclasses.replace(checked({"wire": {"up": way.up, "down": way.down}}), merge=options.merge)
        of_run = (config, parameters, min(way.interval, FRAGMENTS_MAX, most), islands)
        fitting = fitting_cycle(*of_run, merger_bytes=merger_bytes, redis_bytes=redis_bytes, tensors=tensors)
        planned = fitting or cycle(config, parameters, most, islands, min(SHARDS_MAX, most), tensors=tensors)
        up, down = (each / (way.interval * step_seconds) for each in (planned.bytes_up, planned.bytes_down))
        need = Load(up, down, redis_in=islands * up + down, redis_out=islands * (up + down))
        at_redis = max(need.redis_in, need.redis_out) / planned.shards  # each of which has a Redis and a link
        fits = max(up, down) <= link and at_redis <= redis
        if fits or way is LADDER[-1]:
            return way, need, fits, planned, fitting is not None
    raise AssertionError("the ladder has a last way")


def data_parallel_gbits(parameters: float, bits: float, step_seconds: float, sites: int, utilisation: float) -> float:
    """Return the Gbit/s between sites with which data-parallel computes for this share of the time, a share below 1.

    A ring over D sites carries ring = 2(D − 1)/D of the bytes over each link. A step takes T/CU in all. Gradients leave
    during the backward pass, so everything but the forward pass can send them:
    B = ring · N · bits / (T/CU − T · FORWARD_SHARE).
    """
    ring = 2.0 * (sites - 1) / sites
    return ring * parameters * bits / 1e9 / (step_seconds * (1.0 / utilisation - FORWARD_SHARE))


# -- models and tokens in words ---------------------------------------------------------------------------------------

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def _number(text: str) -> float:
    """Return the number in a text such as 5e9, 5B or 120M; NaN for a text without one, or one out of range."""
    found = re.fullmatch(r"\s*([0-9][0-9_]*\.?[0-9]*(?:e[+-]?[0-9]{1,3})?)\s*([kmbgt]?)\s*", text.lower())
    value = float(found[1].replace("_", "")) * _UNITS[found[2]] if found else math.nan
    return value if 1 <= value <= 1e18 else math.nan


def _is_named(model: str) -> bool:
    """Return whether the text is no number of parameters, and so the name of a model."""
    return model in ("124m", "1b") or math.isnan(_number(model))


def parameters_of(model: str) -> int:
    """Return the parameters of a model by name, or the number in the text. Raise ConfigError for anything else."""
    return sum(tensor.size for tensor in tensors_of(model)) if _is_named(model) else round(_number(model))


def tensors_of(model: str) -> Sequence[Tensor]:
    """Return the tensors of a model by name, or those of a usual decoder of that many parameters."""
    if not _is_named(model):
        return decoder(_number(model))
    from archipelago.islands.models.registry import build

    return build(ModelConfig(model)).tensors


def tokens_of(tokens: str, parameters: int) -> int:
    """Return a number of tokens, given as a number or as a multiple of the parameters. Raise ConfigError otherwise."""
    is_multiple = tokens.lower().endswith("x")
    found = _number(tokens[:-1]) * parameters if is_multiple else _number(tokens)
    if math.isnan(found):
        remedy = "Write a number such as 5e9, 5B or 120M, or a multiple of the parameters such as 20x."
        raise ConfigError(f"--tokens cannot be {tokens!r}", remedy, code="config.value")
    return round(found)


# -- the page ----------------------------------------------------------------------------------------------------------


def page(options: PlanOptions, found: RunPlan) -> list[str]:
    """Return the lines of the page."""
    way, need, fleet = found.way, found.load, found.fleet
    interval_seconds = way.interval * found.step_seconds
    fails = seconds_text(options.hours_between * 3600)
    steps = math.ceil(found.tokens / options.batch_tokens)
    batch_size = max(1, round(options.batch_tokens / fleet.islands / DataConfig().sequence_length))
    settings = f"--model.size {options.model} " if _is_named(options.model) else ""
    settings += f"--inner.steps {steps} --data.batch-size {batch_size} "
    settings += f"--sync.interval {way.interval} --sync.fragments {found.fragments}"
    settings += f" --wire.up {way.up} --wire.down {way.down}"
    settings += f" --shards {found.cycle.shards}" if found.cycle.shards > 1 else ""
    settings = " ".join([settings, *flags(RunConfig(merge=options.merge))])
    return [
        f"plan     {count_text(found.parameters)} parameters on {count_text(found.tokens)} tokens: {options.chips:,} "
        f"chips in {options.sites} sites, {options.link_mbits:,.0f} Mbit/s each; a chip fails every {fails}",
        "",
        f"M = {fleet.islands:<5} islands, {found.islands_a_site} a site, "
        f"{round(options.chips / fleet.islands, 2):,.10g} chips each",
        f"H = {way.interval:<5} inner steps between two syncs of a fragment: {seconds_text(interval_seconds)}",
        f"P = {found.fragments:<5} fragments, one sync every {seconds_text(interval_seconds / found.fragments)}",
        _shards_line(options, found),
        f"codec    {way.up} up, {way.down} down: {way.why}",
        "",
        f"goodput  {fleet.goodput:.1%} of the chips' time, uptime {fleet.uptime:.2%}; data-parallel over all sites: "
        f"{found.data_parallel_goodput:.1%}",
        *(f"         M = {f.islands:<3} {f.goodput:6.1%}  uptime {f.uptime:7.2%}" for f in found.fleets),
        "",
        f"time     {seconds_text(found.seconds)} for {steps:,} steps of "
        f"{seconds_text(found.step_seconds)} (without failures {seconds_text(found.seconds * fleet.goodput)})",
        *(f"syncs    {fault}" for fault in [few_syncs(steps / way.interval, "will have")] if fault),
        f"bytes    an island {_rate(need.up)} up, {_rate(need.down)} down; Redis {_rate(need.redis_in)} in, "
        f"{_rate(need.redis_out)} out",
        f"         in all {size((need.redis_in + need.redis_out) * found.seconds)}; data-parallel at 95 % utilisation "
        f"needs {found.data_parallel_gbits:,.3g} Gbit/s between sites",
        _link_line(options, found),
        f"memory   a merger {size(found.cycle.merger_bytes)} with {THREADS} threads; a Redis "
        f"{size(found.cycle.redis_first_bytes)} after the first cycle, {size(found.cycle.redis_bytes)} at most between "
        "two compactions",
        *(_spectra_line(found, each) for each in found.spectra),
        *([] if found.spectra else ["merger   changes no spectra by these rules"]),
        *(["", f"start    archipelago init redis://… --run NAME {settings}"] if found.has_room else []),
    ]


def _link_line(options: PlanOptions, found: RunPlan) -> str:
    if not found.fits:
        return ("link     TOO THIN: islands would stretch their intervals by themselves, and learn less. Take fewer "
                "islands a site, a smaller model, larger batches, or a better link.")  # fmt: skip
    link = options.link_mbits * 1e6 / 8 / found.islands_a_site
    redis = options.redis_mbits * 1e6 / 8
    used = max(found.load.up, found.load.down) / link
    there = max(found.load.redis_in, found.load.redis_out) / redis / found.cycle.shards
    return f"link     {used:.0%} of an island's share of its site's link, {there:.0%} of a Redis's"


def _shards_line(options: PlanOptions, found: RunPlan) -> str:
    shards = found.cycle.shards
    machines = f"{options.merger_gb:g} GB for a merger and {options.redis_gb:g} GB for a Redis"
    if not found.has_room:
        largest = max(tensor.size for tensor in tensors_of(options.model))
        return (f"S = {shards:<5} shards are TOO FEW for machines of {machines}. No run can have more. A fragment "
                f"holds at least one whole tensor, and the largest has {count_text(largest)} elements")  # fmt: skip
    if shards == 1:
        return f"S = 1     shard: machines of {machines} are enough"
    return f"S = {shards:<5} shards, each with a merger and a Redis on machines of {machines}"


def _spectra_line(found: RunPlan, by: SpectraLoad) -> str:
    mergers, interval = (math.ceil(count * by.stretch) for count in (found.cycle.shards, found.way.interval))
    fault = f": TOO SLOW, needs H = {interval:,} or {mergers:,} mergers" if by.stretch > 1.0 else ""
    return f"merger   with {by.way}, {by.describe()}{fault}"


def _rate(bytes_a_second: float) -> str:
    return f"{size(bytes_a_second)}/s"
