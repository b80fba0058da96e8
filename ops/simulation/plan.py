"""`archipelago simulate plan`: choose M, H, P, S and codec for a run, and estimate its traffic, memory and goodput."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from archipelago.broker.codecs import codec
from archipelago.broker.config import MergeConfig, checked
from archipelago.broker.errors import ConfigError, require_number
from archipelago.broker.process import print_json
from archipelago.ops.settings import say
from archipelago.ops.simulation.cycle import (
    Cycle,
    SpectraLoad,
    cycle,
    fitting_cycle,
    spectra_loads,
)
from archipelago.ops.simulation.failures import YEAR_SECONDS, FailureModel, simulate
from archipelago.ops.simulation.plan_text import page, parameters_of, tensors_of, tokens_of
from archipelago.ops.simulation.tables import data_parallel_gbits

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
#: The least of what has to be positive.
TINY = 1e-12


class Way(NamedTuple):
    """A choice of interval H and of the codecs `up` and `down`, with the reason `why`."""

    interval: int
    up: str
    down: str
    why: str


#: From the least loss of quality to the least traffic. Fewer bits cost less quality than longer intervals.
LADDER = (
    Way(24, "bfloat16", "float32", "16 bits up, all 32 down; rounding errors are sent with the next contribution"),
    Way(24, "int8", "int8", "8 bits both ways, at hardly any cost"),
    Way(24, "int4", "int4", "4 bits both ways, which costs little (published: +0.09 % validation loss)"),
    Way(50, "int4", "int4", "4 bits both ways and twice the interval"),
    Way(100, "int4", "int4", "4 bits both ways and four times the interval"),
    Way(200, "int4", "int4", "4 bits both ways and the longest interval that was tried and is stable"),
    Way(200, "top3", "int4", "the largest 3 % up, 4 bits down, and the longest interval"),
)


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
    merger_slowness: float = 1.0
    """The time that a core of the merger takes to merge, over that of the machine of docs/results/performance.md."""
    merger_gb: float = 64.0
    """The memory of a machine with a merger, in GB. A model that needs more gets several shards."""
    redis_gb: float = 64.0
    """The memory of a machine with a Redis primary, in GB."""
    merge: MergeConfig = field(default_factory=MergeConfig)
    """The merge rules, as for `archipelago init`."""
    json: bool = False
    """Print one JSON object."""


class Fleet(NamedTuple):
    """A number of islands with its simulated goodput and uptime."""

    islands: int
    goodput: float
    uptime: float


@dataclass(frozen=True)
class Load:
    """Bytes per second of our own run, whose islands share one Redis, before zstd.

    Attributes:
        up: From one island to Redis.
        down: From Redis to one island.
        redis_in: Into Redis, from all islands and from the merger beside it.
        redis_out: Out of Redis, to all islands and to the merger.
    """

    up: float
    down: float
    redis_in: float
    redis_out: float


def load(parameters: int, islands: int, interval_seconds: float, way: Way) -> Load:
    """Return the load of a run whose islands send each fragment once in `interval_seconds`."""
    up, down = (codec(name).encoded_size(parameters) / interval_seconds for name in (way.up, way.down))
    return Load(up=up, down=down, redis_in=islands * up + down, redis_out=islands * (up + down))


@dataclass(frozen=True)
class RunPlan:
    """The answer.

    Attributes:
        fleets: All numbers of islands that were simulated.
        fleet: The chosen one.
        fits: Whether the links carry the load.
        seconds: Time of training, with failures.
        spectra: What changing spectra takes, by kind of merger, if each shard has one on a machine of its own.
        cycle: Memory, bytes and time of a cycle, and the number of shards.
        has_room: Whether any number of shards fits into the machines. Otherwise `cycle` is that of one.
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
    """Plan, and print one page."""
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
    way, fragments, need, fits = _way(options, parameters, fleet.islands, islands_a_site, step_seconds)
    alone = _fleet(options, 1, step_seconds)
    interval_seconds = way.interval * step_seconds
    need_of_cycle, has_room = _cycle(options, way, parameters, fragments, fleet.islands, interval_seconds)
    return RunPlan(
        parameters=parameters,
        tokens=tokens,
        fleets=tuple(fleets),
        fleet=fleet,
        way=way,
        fragments=fragments * need_of_cycle.shards,
        step_seconds=step_seconds,
        load=need,
        fits=fits,
        islands_a_site=islands_a_site,
        seconds=tokens / (options.chips * options.tokens_per_second * max(fleet.goodput, 1e-9)),
        data_parallel_goodput=alone.goodput,
        data_parallel_gbits=data_parallel_gbits(parameters, 16.0, step_seconds, max(2, options.sites), 0.95),
        spectra=spectra_loads(tensors_of(options.model), options.merge, interval_seconds, need_of_cycle.shards),
        cycle=need_of_cycle,
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
                "slice_chips", "merger_slowness", "merger_gb",
                "redis_gb")  # fmt: skip
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
) -> tuple[Way, int, Load, bool]:
    """Return the first way of LADDER that the links carry, or the last one and False."""
    link, redis = (LINK_SHARE * mbits * 1e6 / 8 for mbits in (options.link_mbits / islands_a_site, options.redis_mbits))
    for way in LADDER:
        fragments = min(way.interval, FRAGMENTS_MAX)
        need = load(parameters, islands, way.interval * step_seconds, way)
        fits = max(need.up, need.down) <= link and max(need.redis_in, need.redis_out) <= redis
        if fits or way is LADDER[-1]:
            return way, fragments, need, fits
    raise AssertionError("the ladder has a last way")


def _cycle(
    options: PlanOptions, way: Way, parameters: int, fragments: int, islands: int, interval_seconds: float
) -> tuple[Cycle, bool]:
    """Return a cycle with as few shards as fit, or with one and False. Each shard has that many fragments."""
    config, slowness = checked({"wire": {"up": way.up, "down": way.down}}), options.merger_slowness
    found = fitting_cycle(
        config, parameters, fragments, islands, merger_bytes=1e9 * options.merger_gb,
        redis_bytes=1e9 * options.redis_gb, interval_seconds=interval_seconds, slowness=slowness,
    )  # fmt: skip
    return found or cycle(config, parameters, fragments, islands, slowness=slowness), found is not None
