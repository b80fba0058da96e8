"""The prediction of what a cycle takes: its parts, the shards that a model needs, and what spectra cost a merger."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from archipelago.broker.codecs import codec
from archipelago.broker.config import MergeConfig, ModelConfig, RunConfig, WireConfig
from archipelago.broker.footprint import MERGER_BASE, footprint, merger_parts, redis_parts
from archipelago.broker.manifest import NO_CORPUS, SHARDS_MAX, Manifest, Tensor
from archipelago.broker.transport import MEMORY_SHARE_MAX
from archipelago.islands.models.registry import build
from archipelago.merger.spectra import default_threads
from archipelago.merger.weights import cycle_work, spectra_bytes
from archipelago.ops.simulation.cycle import (
    MERGER_SHARE_MAX,
    REDIS_BASE,
    WAYS,
    cycle,
    decoder,
    fitting_cycle,
    footprint_here,
    spectra_loads,
)

CONFIG = RunConfig()
PARAMETERS = 1 << 30


def test_bytes_are_those_of_the_codecs() -> None:
    found = cycle(CONFIG, PARAMETERS, 128, 3)
    int4 = codec("int4").encoded_size(PARAMETERS)
    assert (found.bytes_up, found.bytes_down) == (int4, int4)
    # Version 0 in full, three contributions, and one difference.
    assert found.redis_first_bytes == REDIS_BASE + 4 * PARAMETERS + 4 * int4
    rounded = cycle(replace(CONFIG, wire=WireConfig(up="top3", down="bfloat16")), PARAMETERS, 128, 3)
    assert rounded.bytes_up == codec("top3").encoded_size(PARAMETERS)
    assert rounded.bytes_down == 2 * PARAMETERS


def test_shards_divide_what_one_machine_holds_and_does() -> None:
    one, four = cycle(CONFIG, PARAMETERS, 128, 2), cycle(CONFIG, PARAMETERS, 128, 2, 4)
    fragment = PARAMETERS // 128
    assert four.redis_first_bytes - REDIS_BASE == pytest.approx((one.redis_first_bytes - REDIS_BASE) / 4)
    assert four.merger_bytes - MERGER_BASE > (one.merger_bytes - MERGER_BASE) / 4, "a fragment stays whole"
    assert four.merger_bytes - MERGER_BASE < (one.merger_bytes - MERGER_BASE) / 4 + 100 * fragment
    assert four.bytes_up == one.bytes_up, "an island sends them all"


def shards_needed(*args: Any, **machines: Any) -> int:
    found = fitting_cycle(*args, **machines)
    return found.shards if found else 0


def test_a_model_gets_as_many_shards_as_its_machines_need() -> None:
    roomy: dict[str, Any] = {"merger_bytes": 1e15, "redis_bytes": 1e15}
    assert shards_needed(CONFIG, PARAMETERS, 24, 2, **roomy) == 1
    for limit in ({"merger_bytes": 16e9}, {"redis_bytes": 16e9}):
        found = shards_needed(CONFIG, PARAMETERS, 24, 2, **{**roomy, **limit})
        assert found > 1, limit
        assert shards_needed(CONFIG, 2 * PARAMETERS, 48, 2, **{**roomy, **limit}) > found
    small = shards_needed(CONFIG, PARAMETERS, 24, 2, **{**roomy, "merger_bytes": 16e9})
    fitting, tight = (cycle(CONFIG, PARAMETERS, 24 * s, 2, s).merger_bytes for s in (small, small - 1))
    assert fitting <= MERGER_SHARE_MAX * 16e9 < tight
    assert shards_needed(CONFIG, PARAMETERS, 24, 2, **{**roomy, "merger_bytes": 1e8}) == 0, "not even the process"
    most, more = (cycle(CONFIG, PARAMETERS, 24 * s, 2, s).redis_bytes / MEMORY_SHARE_MAX for s in (64, 65))
    assert shards_needed(CONFIG, PARAMETERS, 24, 2, **{**roomy, "redis_bytes": most + 1}) == SHARDS_MAX
    assert shards_needed(CONFIG, PARAMETERS, 24, 2, **{**roomy, "redis_bytes": more + 1}) == 0, "no run has as many"


def test_the_largest_shard_and_fragment_of_a_run_are_predicted() -> None:
    """A fragment has a whole tensor at least, so a large one needs the memory of its merger, whatever the shards."""
    tensors = (Tensor("embedding", (1000, 100)), *(Tensor(str(n), (100, 100)) for n in range(20)))
    config, parameters = replace(CONFIG, merge=MergeConfig(embedding="rda", rest="rda")), 300_000
    found, even = (cycle(config, parameters, 20, 2, 4, tensors=given) for given in (tensors, ()))
    parts = merger_parts(config, 100_000, 100_000, 0, checkpoints=True)
    assert found.merger_bytes == sum(parts.values()) > even.merger_bytes
    assert found.redis_bytes == REDIS_BASE + sum(redis_parts(config, 100_000, 100_000, 2, 7).values())


# -- spectra -----------------------------------------------------------------------------------------------------------

ISOTROPIC = MergeConfig(embedding="isotropic", rest="isotropic", embedding_exponent=0.5, rest_exponent=0.0)
TENSORS = (Tensor("embedding", (256, 64), "embedding"), Tensor("a", (64, 64)), Tensor("b", (3, 100, 400)))


def test_longer_intervals_more_mergers_and_smaller_blocks_make_spectra_fit() -> None:
    for way in WAYS:
        (slow,) = spectra_loads(TENSORS, ISOTROPIC, 1e-6, ways=[way])
        work = cycle_work(TENSORS, ISOTROPIC)
        assert work[1] == sum(tensor.size for tensor in TENSORS)
        assert slow.seconds == pytest.approx(work[0] / way.rate + work[1] * way.copy_seconds)
        assert slow.stretch > 1.0
        more = spectra_loads(TENSORS, ISOTROPIC, 1e-6, math.ceil(slow.stretch), ways=[way])
        for (fits,) in (spectra_loads(TENSORS, ISOTROPIC, slow.stretch * 1.0001e-6, ways=[way]), more):
            assert fits.stretch == 1.0
        (blocks,) = spectra_loads(TENSORS, replace(ISOTROPIC, isotropic_side_max=64), 1e-6, ways=[way])
        assert blocks.seconds < slow.seconds
    assert not spectra_loads(TENSORS, MergeConfig(embedding="rda", rest="rda"), 1.0)


def test_the_memory_of_a_merger_includes_its_spectra() -> None:
    """Each fragment has one matrix."""
    fragments = 3 * 100 * 400, 3
    tensors = tuple(Tensor(name, (1, 100, 400)) for name in "abc")
    rules = (MergeConfig(embedding="rda", rest="rda"), ISOTROPIC)
    by_rda, found = (cycle(replace(CONFIG, merge=rule), *fragments, 2, tensors=tensors).merger_bytes for rule in rules)
    assert found - by_rda == 52 * 100 * 400 + 48 * 100 * 100
    manifest = Manifest("x", replace(CONFIG, merge=ISOTROPIC), tensors, (("a", "b", "c"),), NO_CORPUS, {})
    changed, kept = footprint_here(manifest), footprint(manifest, 0)
    of_threads = spectra_bytes(tensors, ISOTROPIC, 120_000, default_threads())
    assert changed == kept | {"the merger": kept["the merger"] + of_threads}


def test_the_default_limit_lets_eight_threads_serve_124_million_parameters() -> None:
    """An interval of 24 steps of one second, with any vocabulary. 1 B needs smaller blocks or more threads."""
    for vocabulary in (256, 50_257):
        tensors = build(ModelConfig("124m", vocabulary)).tensors
        assert cycle_work(tensors, ISOTROPIC)[0] > 2e12, "all hidden matrices are changed"
        assert spectra_loads(tensors, ISOTROPIC, 24.0)[0].stretch == 1.0
    large = build(ModelConfig("1b")).tensors
    assert spectra_loads(large, ISOTROPIC, 24.0)[0].stretch > 1.0
    assert spectra_loads(large, replace(ISOTROPIC, isotropic_side_max=128), 24.0)[0].stretch == 1.0


def test_a_number_of_parameters_stands_for_a_usual_decoder() -> None:
    whole = replace(ISOTROPIC, isotropic_side_max=4096)
    for name in ("base", "124m", "1b"):
        tensors = build(ModelConfig(name)).tensors
        parameters = sum(tensor.size for tensor in tensors)
        assumed = decoder(parameters)
        assert sum(tensor.size for tensor in assumed) == pytest.approx(parameters, rel=0.05), name
        assert cycle_work(assumed, whole)[0] == pytest.approx(cycle_work(tensors, whole)[0], rel=0.5), name
