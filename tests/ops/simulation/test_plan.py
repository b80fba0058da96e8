"""`archipelago simulate plan`: its choices, the consistency of its numbers, and its page."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from archipelago.broker.config import MergeConfig, ModelConfig
from archipelago.broker.errors import ConfigError
from archipelago.islands.models.registry import build
from archipelago.ops.commands import run
from archipelago.ops.simulation.cycle import LADDER, SHARE_MAX
from archipelago.ops.simulation.plan import (
    LINK_SHARE,
    Fleet,
    PlanOptions,
    choose,
    data_parallel_gbits,
    page,
    parameters_of,
    plan,
    tokens_of,
)
from tests.failing import failing

SPOT = PlanOptions(model="1e8", tokens="2B", sites=2, chips=16, slice_chips=1, hours_between=2.0, batch_tokens=100_000)
TWO_ISLANDS = PlanOptions(model="1e9", tokens="1B", sites=2, chips=16, islands=2)


def test_more_islands_are_taken_while_they_bring_goodput() -> None:
    assert choose([Fleet(2, 0.60, 1.0), Fleet(4, 0.80, 1.0), Fleet(8, 0.81, 1.0)]).islands == 4
    assert choose([Fleet(2, 0.97, 0.95), Fleet(4, 0.98, 1.0), Fleet(8, 0.99, 1.0)]).islands == 4, "for the uptime"
    assert choose([Fleet(2, 0.99, 1.0), Fleet(4, 0.995, 1.0)]).islands == 2
    assert choose([Fleet(3, 0.1, 0.1)]).islands == 3


def test_machines_that_fail_often_want_more_islands() -> None:
    often, seldom = plan(SPOT), plan(replace(SPOT, hours_between=PlanOptions().hours_between))
    assert often.fleet.islands > seldom.fleet.islands == 2
    assert often.fleet.goodput < seldom.fleet.goodput
    assert often.data_parallel_goodput < often.fleet.goodput
    goodputs = [fleet.goodput for fleet in often.fleets]
    assert goodputs == sorted(goodputs)


@pytest.mark.parametrize(
    ("step_seconds", "sites", "published"),
    [
        (1.0, 2, (49, 81, 104, 113)),
        (5.0, 2, (9.5, 16, 21, 23)),
        (1.0, 8, (85, 140, 183, 198)),
        (5.0, 8, (17, 28, 37, 40)),
    ],
)
def test_data_parallel_needs_the_links_of_table_13_of_the_paper(
    step_seconds: float, sites: int, published: tuple[float, ...]
) -> None:
    shares = (0.5, 0.75, 0.9, 0.95)
    assert [data_parallel_gbits(5e9, 16.0, step_seconds, sites, each) for each in shares] == pytest.approx(
        published, rel=0.06
    )


def test_thinner_links_get_fewer_bits_then_longer_intervals() -> None:
    rates = (1e6, 1e5, 3000.0, 300.0, 100.0, 30.0, 10.0, 1.0)
    plans = [plan(replace(TWO_ISLANDS, link_mbits=mbits)) for mbits in rates]
    for mbits, found in zip(rates, plans, strict=True):
        assert found.fits == (max(found.load.up, found.load.down) <= LINK_SHARE * mbits * 1e6 / 8), mbits
    ways = [LADDER.index(found.way) for found in plans]
    assert ways == sorted(ways)
    assert ways[0] == 0
    assert len(set(ways)) >= 5
    assert not plans[-1].fits, "1 Mbit/s for a billion parameters"


def test_the_numbers_follow_from_each_other() -> None:
    found = plan(SPOT)
    assert found.step_seconds == pytest.approx(100_000 / (16 * 10_000))
    assert found.seconds * found.fleet.goodput == pytest.approx(2e9 / 160_000)
    interval_seconds = found.way.interval * found.step_seconds
    assert found.load.up * interval_seconds == pytest.approx(found.cycle.bytes_up)
    assert found == plan(SPOT), "the same seed"


def test_the_start_line_begins_the_run_that_was_planned() -> None:
    short = replace(TWO_ISLANDS, tokens="20_000_001", batch_tokens=100_000, chips=17)
    found = plan(short)
    lines = page(short, found)
    assert "--inner.steps 201 --data.batch-size 391 " in lines[-1], "100,000 tokens are 391 sequences of two islands"
    assert any("M = 2     islands, 1 a site, 8.5 chips each" in line for line in lines)
    assert any(f"only {201 / found.way.interval:.1f} syncs" in line for line in lines)
    tiny = page(replace(short, batch_tokens=10), found)
    assert "--data.batch-size 1 " in tiny[-1] and not any("syncs, so" in line for line in tiny)


def test_a_merger_that_cannot_keep_up_is_predicted() -> None:
    spectra = MergeConfig(embedding="isotropic", rest="isotropic", isotropic_side_max=2048)
    options = replace(SPOT, model="1b", merge=spectra, batch_tokens=160_000)  # a step takes 1 s
    found, lines = plan(options), page(options, plan(options))
    slow = [each for each in found.spectra if each.stretch > 1.0]
    assert "8 threads" in {each.way for each in slow} < {each.way for each in found.spectra}
    for each in slow:
        assert each.stretch == pytest.approx(each.seconds / (SHARE_MAX * found.way.interval))
        needed = f"needs H = {math.ceil(each.stretch * found.way.interval):,} or "
        assert any(f"with {each.way}," in line and needed in line for line in lines)
    assert sum("TOO SLOW" in line for line in lines) == len(slow)
    assert "--merge.isotropic-side-max 2048" in lines[-1]
    blocks = plan(replace(options, merge=replace(spectra, isotropic_side_max=128)))
    assert all(each.stretch == 1.0 for each in blocks.spectra)
    none = replace(options, merge=replace(spectra, embedding="average", rest="rda"))
    assert not plan(none).spectra
    assert not any("TOO SLOW" in line for line in page(none, plan(none)))


def test_a_model_that_needs_several_machines_gets_shards() -> None:
    options = replace(SPOT, model="8B", tokens="1B", islands=2)
    found, lines = plan(options), page(options, plan(options))
    shards = found.cycle.shards
    assert found.has_room
    assert shards > 1
    assert found.fragments == 24 * shards
    assert any(line.startswith(f"S = {shards} ") for line in lines)
    assert any(line.startswith("memory ") for line in lines)
    assert f"--shards {shards}" in lines[-1]
    at_one_redis = max(found.load.redis_in, found.load.redis_out) / shards * 8e-6  # in Mbit/s
    assert plan(replace(options, redis_mbits=2 * at_one_redis)).way == found.way
    larger = plan(replace(options, merger_gb=640.0, redis_gb=640.0))
    assert larger.cycle.shards < shards
    tiny = replace(options, merger_gb=0.1)
    assert not plan(tiny).has_room
    few = page(tiny, plan(tiny))
    assert any("TOO FEW" in line for line in few) and not any("archipelago init" in line for line in few)
    one = page(SPOT, plan(SPOT))
    assert any(line.startswith("S = 1 ") for line in one)
    assert "--shards" not in one[-1] and "--model.size" not in one[-1]
    named = replace(SPOT, model="tiny")
    assert plan(named).fragments == len(build(ModelConfig("tiny")).tensors) < 24
    assert "--model.size tiny" in page(named, plan(named))[-1]
    tight = plan(replace(named, model="1b", merger_gb=4.0))
    assert tight.cycle.shards > 1 and tight.fragments == len(build(ModelConfig("1b")).tensors)


def test_a_plan_is_one_page(capsys: pytest.CaptureFixture[str]) -> None:
    thin = PlanOptions(model="8B", link_mbits=1.0)
    pages = [page(options, plan(options)) for options in (SPOT, thin)]
    for lines in pages:
        assert len(lines) < 30
        for word in ("M = ", "H = ", "P = ", "S = ", "codec", "memory", "goodput", "time", "bytes", "archipelago init"):
            assert any(word in line for line in lines), word
    assert "TOO THIN" in "\n".join(pages[1])
    assert run(["simulate", "plan", "--model", "tiny", "--tokens", "3M", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == 117_056
    assert found["tokens"] == 3_000_000


def test_models_and_tokens_are_given_in_several_ways() -> None:
    for text, parameters in (("5e9", 5e9), ("5B", 5e9), ("120M", 1.2e8), ("1.5b", 1.5e9), ("7", 7), ("tiny", 117_056)):
        assert parameters_of(text) == parameters, text
    assert tokens_of("26B", 5) == 26_000_000_000
    assert tokens_of("20x", 1000) == 20_000
    for text in ("", "x", "-3", "many", "1e99", "nan"):
        with failing(ConfigError, "config.value"):
            tokens_of(text, 1000)


def test_impossible_options_are_refused() -> None:
    for wrong in (
        {"chips": 1}, {"link_mbits": 0.0}, {"islands": -1}, {"hours_between": float("inf")}, {"chips": 4, "islands": 8},
        {"pause_seconds": -1.0}, {"return_seconds": float("nan")}, {"islands": 5000, "chips": 5000}, {"chips": 1 << 24},
    ):  # fmt: skip
        with failing(ConfigError, "config.value"):
            plan(replace(PlanOptions(), **wrong))
