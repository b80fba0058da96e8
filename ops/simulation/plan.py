"""`archipelago plan`: before a run, which M, H, P and codec; how many bytes a second, how long, what goodput."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from archipelago.broker.errors import ConfigError
from archipelago.broker.process import print_json
from archipelago.ops.settings import say
from archipelago.ops.simulation.failures import YEAR_SECONDS, FailureModel, simulate
from archipelago.ops.simulation.links import Load, data_parallel_gbits, load

ISLANDS_MAX = 16
"""what the defaults are made for, and the most that was published"""
GAIN_WORTHWHILE = 0.03
"""twice the islands must bring this much goodput: each costs some quality"""
UPTIME_WANTED = 0.99
LINK_SHARE = 0.7
"""of a link that syncs may fill: snapshots and contributions come in bursts"""
FAILURES_SIMULATED = 4000.0
FRAGMENTS_MAX = 24
WINDOW = 2


class Way(NamedTuple):
    """How a run syncs."""

    interval: int
    """H"""
    up: str
    down: str
    why: str


LADDER = (
    Way(24, "bfloat16", "float32", "16 bits up, all 32 down: what rounding leaves out is sent with the next"),
    Way(24, "int8", "int8", "8 bits both ways, which costs next to nothing"),
    Way(24, "int4", "int4", "4 bits both ways, which costs little (published: +0.09 % validation loss)"),
    Way(50, "int4", "int4", "4 bits both ways and twice the interval"),
    Way(100, "int4", "int4", "4 bits both ways and four times the interval"),
    Way(200, "int4", "int4", "4 bits both ways and the longest interval that is tried and stable"),
    Way(200, "top3", "int4", "the largest 3 % up, 4 bits down, and the longest interval"),
)
"""from the least loss of quality to the least traffic: fewer bits cost less than longer intervals"""


@dataclass(frozen=True)
class PlanOptions:
    """Before a run: which M, H, P and codec; how many bytes a second, how long, what goodput. One page.

    Say what you have; `archipelago simulate` is the model behind the answer, and its documentation says what it
    assumes.
    """

    model: str = "1b"
    """parameters (5e9, 5B, 120M), or a model by name (tiny, small, base, 124m, 1b)"""
    tokens: str = "20x"
    """to train on: a number (26B), or a multiple of the parameters (20x)"""
    sites: int = 2
    """places that share nothing but the Redis; each has at least one island"""
    chips: int = 16
    """accelerators in all sites together"""
    tokens_per_second: float = 10_000.0
    """that one chip trains on"""
    batch_tokens: int = 500_000
    """of one inner step of all islands together"""
    link_mbits: float = 1000.0
    """between a site and the Redis, each way"""
    redis_mbits: float = 10_000.0
    """of the machine with the Redis and the merger, each way"""
    hours_between: float = YEAR_SECONDS / 3600.0
    """mean time between two interruptions of one chip; default a year. Spot machines: a few hours to a few days"""
    slice_chips: int = 8
    """chips that one failure takes away: those of a machine, or of a slice"""
    return_seconds: float = 300.0
    """mean time until they are back"""
    pause_seconds: float = 30.0
    """what an island loses when it goes on with other slices, or starts again"""
    elastic: bool = False
    """whether your islands go on with the slices that are left; ours do not: a slice is an island's all"""
    islands: int = 0
    """M, if you have made up your mind"""
    seed: int = 0
    """of the simulation"""
    json: bool = False
    """print one JSON object"""


class Fleet(NamedTuple):
    """A number of islands, and what the simulation says of it."""

    islands: int
    goodput: float
    uptime: float


@dataclass(frozen=True)
class Plan:
    """The answer."""

    parameters: int
    tokens: int
    fleets: tuple[Fleet, ...]
    """all that were simulated"""
    fleet: Fleet
    """the one to take"""
    way: Way
    fragments: int
    step_seconds: float
    load: Load
    fits: bool
    """whether the links carry it"""
    islands_a_site: int
    seconds: float
    """of training, with failures"""
    data_parallel_goodput: float
    data_parallel_gbits: float


def main(options: PlanOptions) -> int:
    """Plans, and prints one page."""
    found = plan(options)
    if options.json:
        print_json(dataclasses.asdict(found))
    else:
        for line in page(options, found):
            say(line)
    return 0


def plan(options: PlanOptions) -> Plan:
    """The fewest islands whose goodput more would not raise by much, and the first way that the links carry."""
    _check(options)
    parameters = parameters_of(options.model)
    tokens = tokens_of(options.tokens, parameters)
    step_seconds = options.batch_tokens / (options.chips * options.tokens_per_second)
    fleets = [_fleet(options, count, step_seconds) for count in _counts(options)]
    fleet = choose(fleets)
    islands_a_site = math.ceil(fleet.islands / options.sites)
    way, fragments, need, fits = _way(options, parameters, fleet.islands, islands_a_site, step_seconds)
    alone = _fleet(options, 1, step_seconds)
    return Plan(
        parameters=parameters,
        tokens=tokens,
        fleets=tuple(fleets),
        fleet=fleet,
        way=way,
        fragments=fragments,
        step_seconds=step_seconds,
        load=need,
        fits=fits,
        islands_a_site=islands_a_site,
        seconds=tokens / (options.chips * options.tokens_per_second * max(fleet.goodput, 1e-9)),
        data_parallel_goodput=alone.goodput,
        data_parallel_gbits=data_parallel_gbits(parameters, 16.0, step_seconds, max(2, options.sites), 0.95),
    )


def choose(fleets: Sequence[Fleet]) -> Fleet:
    """The first one, unless twice the islands bring GAIN_WORTHWHILE, or are needed for UPTIME_WANTED; and so on."""
    chosen = fleets[0]
    for fleet in fleets[1:]:
        if fleet.goodput - chosen.goodput < GAIN_WORTHWHILE and chosen.uptime >= UPTIME_WANTED:
            break
        if fleet.goodput > chosen.goodput or fleet.uptime > chosen.uptime:
            chosen = fleet
    return chosen


def _check(options: PlanOptions) -> None:
    positive = ("sites", "chips", "tokens_per_second", "batch_tokens", "link_mbits", "redis_mbits", "hours_between",
                "slice_chips")  # fmt: skip
    for name in positive:
        if not 0 < getattr(options, name) < math.inf:
            flag = name.replace("_", "-")
            raise ConfigError(
                f"--{flag} cannot be {getattr(options, name)}", "Give more than 0.", code=f"config.{flag}"
            )
    most = max(options.sites, options.islands)
    if options.chips < most:
        raise ConfigError(
            f"{options.chips} chips are too few for {most} islands",
            "Each site and each island needs at least one.",
            code="config.chips",
        )
    if options.islands < 0:
        raise ConfigError(
            f"--islands cannot be {options.islands}", "Give a number, or leave it out.", code="config.islands"
        )


def _counts(options: PlanOptions) -> list[int]:
    """M to look at: one a site, then twice as many, and so on; at least two."""
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
    """Simulated over as long as brings FAILURES_SIMULATED, and at least a thousand steps."""
    model = FailureModel(
        chips=options.chips,
        islands=islands,
        slices=max(islands, _slices(options)),
        years_between=options.hours_between * 3600.0 / YEAR_SECONDS,
        step_seconds=step_seconds,
        pause_seconds=options.pause_seconds,
        return_seconds=options.return_seconds,
        elastic=options.elastic,
    )
    seconds = max(1000.0 * step_seconds, FAILURES_SIMULATED * options.hours_between * 3600.0 / options.chips)
    outcome = simulate(model, seconds, np.random.default_rng([options.seed, islands]))
    return Fleet(islands, outcome.goodput, outcome.uptime)


def _way(
    options: PlanOptions, parameters: int, islands: int, islands_a_site: int, step_seconds: float
) -> tuple[Way, int, Load, bool]:
    """The first of the ladder that the links carry; else the last, and that they do not."""
    link = options.link_mbits * 1e6 / 8 / islands_a_site
    for way in LADDER:
        fragments = min(way.interval, FRAGMENTS_MAX)
        need = load(parameters, islands, step_seconds, way.interval, fragments, way.up, way.down, LINK_SHARE * link)
        redis = LINK_SHARE * options.redis_mbits * 1e6 / 8
        in_time = need.fragment_up_seconds <= WINDOW * step_seconds * way.interval / fragments
        fits = max(need.up, need.down) <= LINK_SHARE * link and max(need.redis_in, need.redis_out) <= redis and in_time
        if fits or way is LADDER[-1]:
            return way, fragments, need, fits
    raise AssertionError("the ladder has a last way")


_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def _number(text: str, what: str) -> float:
    found = re.fullmatch(r"\s*([0-9][0-9_]*\.?[0-9]*(?:e[+-]?[0-9]{1,3})?)\s*([kmbgt]?)\s*", text.lower())
    value = float(found[1].replace("_", "")) * _UNITS[found[2]] if found else math.nan
    if not 1 <= value <= 1e18:
        raise ConfigError(
            f"{what} cannot be {text!r}", "Write a number such as 5e9, 5B or 120M.", code=f"config.{what[2:]}"
        )
    return value


def parameters_of(model: str) -> int:
    """Parameters of a model by name, or the number that the text is. Raises ConfigError."""
    if re.fullmatch(r"[0-9][0-9_.]*(e[+-]?[0-9]+)?[kmbgt]?", model.lower()) and model not in ("124m", "1b"):
        return round(_number(model, "--model"))
    from archipelago.islands.models.registry import build

    return sum(math.prod(tensor.shape) for tensor in build(model).tensors)


def tokens_of(tokens: str, parameters: int) -> int:
    """Tokens as a number, or as a multiple of the parameters. Raises ConfigError."""
    if tokens.lower().endswith("x"):
        return round(_number(tokens[:-1], "--tokens") * parameters)
    return round(_number(tokens, "--tokens"))


# -- the page ---------------------------------------------------------------------------------------------------------


def page(options: PlanOptions, found: Plan) -> list[str]:
    """The answer for people."""
    way, need, fleet = found.way, found.load, found.fleet
    interval_seconds = way.interval * found.step_seconds
    fails, settings = _time(options.hours_between * 3600), f"--sync.interval {way.interval}"
    settings += f" --sync.fragments {found.fragments} --wire.up {way.up} --wire.down {way.down}"
    return [
        f"plan     {_count(found.parameters)} parameters on {_count(found.tokens)} tokens: {options.chips:,} chips in "
        f"{options.sites} sites, {options.link_mbits:,.0f} Mbit/s each; a chip fails every {fails}",
        "",
        f"M = {fleet.islands:<5} islands, {found.islands_a_site} a site, {options.chips / fleet.islands:g} chips each",
        f"H = {way.interval:<5} inner steps between two syncs of a fragment: {_time(interval_seconds)}",
        f"P = {found.fragments:<5} fragments, one sync every {_time(interval_seconds / found.fragments)}",
        f"codec    {way.up} up, {way.down} down: {way.why}",
        "",
        f"goodput  {fleet.goodput:.1%} of the chips' time, uptime {fleet.uptime:.2%}; data-parallel over all sites: "
        f"{found.data_parallel_goodput:.1%}",
        *(f"         M = {f.islands:<3} {f.goodput:6.1%}  uptime {f.uptime:7.2%}" for f in found.fleets),
        "",
        f"time     {_time(found.seconds)} for {math.ceil(found.tokens / options.batch_tokens):,} steps of "
        f"{_time(found.step_seconds)} (without failures {_time(found.seconds * fleet.goodput)})",
        f"bytes    an island {_rate(need.up)} up, {_rate(need.down)} down; Redis {_rate(need.redis_in)} in, "
        f"{_rate(need.redis_out)} out",
        f"         in all {_size((need.redis_in + need.redis_out) * found.seconds)}; data-parallel at 95 % utilisation "
        f"needs {found.data_parallel_gbits:,.3g} Gbit/s between sites",
        _link_line(options, found),
        "",
        f"start    archipelago init redis://… --run NAME {settings}",
    ]


def _link_line(options: PlanOptions, found: Plan) -> str:
    if not found.fits:
        return ("link     TOO THIN even so: islands would stretch their intervals by themselves, and learn less. Fewer "
                "islands a site, a smaller model, larger batches, or a better link.")  # fmt: skip
    link = options.link_mbits * 1e6 / 8 / found.islands_a_site
    redis = options.redis_mbits * 1e6 / 8
    used = max(found.load.up, found.load.down) / link
    there = max(found.load.redis_in, found.load.redis_out) / redis
    return f"link     {used:.0%} of an island's share of its site's link, {there:.0%} of the Redis's"


def _count(value: float) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:g}"


def _size(bytes_: float) -> str:
    for unit, size in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if bytes_ >= size:
            return f"{bytes_ / size:.3g} {unit}"
    return f"{bytes_:.0f} B"


def _rate(bytes_a_second: float) -> str:
    return f"{_size(bytes_a_second)}/s"


def _time(seconds: float) -> str:
    if 0.99 < seconds / YEAR_SECONDS < 1.01:
        return "year"
    for unit, size in (("years", YEAR_SECONDS), ("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
