"""What users write and read of a plan: a model, a task and tokens in words, and the plan as one page."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from archipelago.broker.config import RunConfig
from archipelago.broker.errors import ConfigError
from archipelago.broker.manifest import Tensor
from archipelago.ops.settings import flags
from archipelago.ops.simulation.cycle import SpectraLoad, decoder
from archipelago.ops.watch.formatting import seconds_text, size

if TYPE_CHECKING:
    from archipelago.ops.simulation.plan import PlanOptions, RunPlan

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def _number(text: str, what: str) -> float:
    found = re.fullmatch(r"\s*([0-9][0-9_]*\.?[0-9]*(?:e[+-]?[0-9]{1,3})?)\s*([kmbgt]?)\s*", text.lower())
    value = float(found[1].replace("_", "")) * _UNITS[found[2]] if found else math.nan
    if not 1 <= value <= 1e18:
        raise ConfigError(f"{what} cannot be {text!r}", "Write a number such as 5e9, 5B or 120M.", code="config.value")
    return value


def parameters_of(model: str) -> int:
    """Return the parameters of a model by name, or the number in the text. Raise ConfigError for anything else."""
    if _is_number(model):
        return round(_number(model, "--model"))
    return sum(tensor.size for tensor in tensors_of(model))


def tensors_of(model: str) -> Sequence[Tensor]:
    """Return the tensors of a model by name, or those of a usual decoder of that many parameters."""
    if _is_number(model):
        return decoder(_number(model, "--model"))
    from archipelago.islands.models.registry import build

    return build(model).tensors


def _is_number(model: str) -> bool:
    is_number = re.fullmatch(r"[0-9][0-9_.]*(e[+-]?[0-9]+)?[kmbgt]?", model.lower())
    return bool(is_number) and model not in ("124m", "1b")


def tokens_of(tokens: str, parameters: int) -> int:
    """Return a number of tokens, given as a number or as a multiple of the parameters. Raise ConfigError otherwise."""
    if tokens.lower().endswith("x"):
        return round(_number(tokens[:-1], "--tokens") * parameters)
    return round(_number(tokens, "--tokens"))


# -- the page ----------------------------------------------------------------------------------------------------------


def page(options: PlanOptions, found: RunPlan) -> list[str]:
    """Return the lines of the page."""
    way, need, fleet = found.way, found.load, found.fleet
    interval_seconds = way.interval * found.step_seconds
    fails, settings = seconds_text(options.hours_between * 3600), f"--sync.interval {way.interval}"
    settings += f" --sync.fragments {found.fragments} --wire.up {way.up} --wire.down {way.down}"
    settings += f" --shards {found.cycle.shards}" if found.cycle.shards > 1 else ""
    settings = " ".join([settings, *flags(RunConfig(merge=options.merge))])
    return [
        f"plan     {count_text(found.parameters)} parameters on {count_text(found.tokens)} tokens: {options.chips:,} "
        f"chips in {options.sites} sites, {options.link_mbits:,.0f} Mbit/s each; a chip fails every {fails}",
        "",
        f"M = {fleet.islands:<5} islands, {found.islands_a_site} a site, {options.chips / fleet.islands:g} chips each",
        f"H = {way.interval:<5} inner steps between two syncs of a fragment: {seconds_text(interval_seconds)}",
        f"P = {found.fragments:<5} fragments, one sync every {seconds_text(interval_seconds / found.fragments)}",
        _shards_line(options, found),
        f"codec    {way.up} up, {way.down} down: {way.why}",
        "",
        f"goodput  {fleet.goodput:.1%} of the chips' time, uptime {fleet.uptime:.2%}; data-parallel over all sites: "
        f"{found.data_parallel_goodput:.1%}",
        *(f"         M = {f.islands:<3} {f.goodput:6.1%}  uptime {f.uptime:7.2%}" for f in found.fleets),
        "",
        f"time     {seconds_text(found.seconds)} for {math.ceil(found.tokens / options.batch_tokens):,} steps of "
        f"{seconds_text(found.step_seconds)} (without failures {seconds_text(found.seconds * fleet.goodput)})",
        f"bytes    an island {_rate(need.up)} up, {_rate(need.down)} down; Redis {_rate(need.redis_in)} in, "
        f"{_rate(need.redis_out)} out",
        f"         in all {size((need.redis_in + need.redis_out) * found.seconds)}; data-parallel at 95 % utilisation "
        f"needs {found.data_parallel_gbits:,.3g} Gbit/s between sites",
        _link_line(options, found),
        _memory_line(found),
        _merger_line(found),
        *(_spectra_line(found, each) for each in found.spectra),
        "",
        f"start    archipelago init redis://… --run NAME {settings}",
    ]


def _link_line(options: PlanOptions, found: RunPlan) -> str:
    if not found.fits:
        return ("link     TOO THIN: islands would stretch their intervals by themselves, and learn less. Take fewer "
                "islands a site, a smaller model, larger batches, or a better link.")  # fmt: skip
    link = options.link_mbits * 1e6 / 8 / found.islands_a_site
    redis = options.redis_mbits * 1e6 / 8
    used = max(found.load.up, found.load.down) / link
    there = max(found.load.redis_in, found.load.redis_out) / redis
    return f"link     {used:.0%} of an island's share of its site's link, {there:.0%} of the Redis's"


def _shards_line(options: PlanOptions, found: RunPlan) -> str:
    shards = found.cycle.shards
    machines = f"{options.merger_gb:g} GB for a merger and {options.redis_gb:g} GB for a Redis"
    if not found.has_room:
        return f"S = ?     TOO LARGE for machines of {machines}, with any number of shards"
    if shards == 1:
        return f"S = 1     shard: machines of {machines} are enough"
    return f"S = {shards:<5} shards, each with a merger and a Redis on machines of {machines}"


def _memory_line(found: RunPlan) -> str:
    need = found.cycle
    return (f"memory   a merger {size(need.merger_bytes)}; a Redis {size(need.redis_first_bytes)} after the first "
            f"cycle, {size(need.redis_bytes)} at most between two compactions")  # fmt: skip


def _merger_line(found: RunPlan) -> str:
    need, none = found.cycle, "" if found.spectra else "; these rules change no spectra"
    return (f"merger   merges {seconds_text(need.merge_seconds)} a cycle besides spectra; another one needs "
            f"{seconds_text(need.restart_seconds)} at most to take over{none}")  # fmt: skip


def _spectra_line(found: RunPlan, by: SpectraLoad) -> str:
    mergers, interval = (math.ceil(count * by.stretch) for count in (found.cycle.shards, found.way.interval))
    fault = f": TOO SLOW, needs H = {interval:,} or {mergers:,} mergers" if by.stretch > 1.0 else ""
    return f"         with {by.way}, {by.describe()}{fault}"


def count_text(value: float) -> str:
    """Format a number of parameters, tokens or chips, such as 150k or 1.2M."""
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:g}"


def _rate(bytes_a_second: float) -> str:
    return f"{size(bytes_a_second)}/s"
