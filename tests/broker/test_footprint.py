"""The estimate of a run's memory, compared with peaks that were measured."""

from __future__ import annotations

from dataclasses import replace

from archipelago.broker.commits import TAPE_BYTES, TAPE_KEPT, tape_kept
from archipelago.broker.config import OWN_MODEL, DataConfig, InnerConfig, ModelConfig, RunConfig
from archipelago.broker.footprint import (
    ISLAND_BASE,
    ISLAND_PER_PARAMETER,
    STATE_PER_ISLAND,
    USER_LOOP_PER_PARAMETER,
    footprint,
    redis_parts,
)
from archipelago.broker.manifest import Corpus, Manifest, Tensor, balanced
from archipelago.merger.weights import spectra_bytes

#: 13 layers of width 896: the run `124m` with its default batch of 8 sequences of 128 bytes.
WIDTH, LAYERS, HIDDEN = 896, 13, 2368


def of(config: RunConfig, fragments: int = 6) -> Manifest:
    tensors = [Tensor("embedding", (256, WIDTH)), Tensor("norm", (WIDTH,))]
    for layer in range(LAYERS):
        tensors += [Tensor(f"{layer}.norm{k}", (WIDTH,)) for k in range(2)]
        tensors += [Tensor(f"{layer}.attention{k}", (WIDTH, WIDTH)) for k in range(4)]
        tensors += [Tensor(f"{layer}.mlp{k}", (WIDTH, HIDDEN)) for k in range(3)]
    return Manifest("x", config, tuple(tensors), balanced(tensors, fragments), Corpus("t", "0" * 32, 1), {})


def test_the_estimate_is_near_the_peaks_that_were_measured() -> None:
    run = of(RunConfig())
    found = footprint(run, spectra_bytes(run.tensors, run.config.merge, max(run.sizes), threads=2))
    for estimated, measured in ((found["an island"], 8.8e9), (found["the merger"], 5.5e9)):
        assert 0.8 < estimated / measured < 1.25
    # Runs of one fragment took 64 to 78 bytes an element (docs/results/performance.md).
    alone = of(RunConfig(), fragments=1)
    assert 64 * 0.8 < footprint(alone, 0)["Redis"] / alone.parameters < 78 * 1.25


def test_a_larger_batch_takes_more_memory_in_an_island_only() -> None:
    """Parts of a batch and rematerialisation take less."""
    small, large = (RunConfig(data=DataConfig(batch_size=size)) for size in (8, 64))
    in_parts = replace(large, inner=InnerConfig(micro_batches=8))
    again = replace(large, model=ModelConfig(rematerialise="always"))
    least, most, *less = (footprint(of(config), 0) for config in (small, large, in_parts, again))
    assert most["an island"] > least["an island"] + 5e9
    assert most | {"an island": 0} == least | {"an island": 0}
    assert all(found["an island"] < 0.6 * most["an island"] for found in less)


def test_a_task_takes_the_memory_of_our_worker_and_a_script_that_of_its_link() -> None:
    script = of(RunConfig(model=ModelConfig(size=OWN_MODEL)))
    of_script, of_task = (footprint(run, 0)["an island"] for run in (script, replace(script, task="mine")))
    assert of_script == USER_LOOP_PER_PARAMETER * script.parameters
    assert of_task == ISLAND_BASE + ISLAND_PER_PARAMETER * script.parameters


def test_many_islands_take_bounded_memory_in_redis() -> None:
    """4,096 rounds of 1,000 islands would take 1.2 GB, about 300 bytes for each contribution."""
    config, sizes = RunConfig(), (10**6, 10**5)
    few, many = (redis_parts(config, *sizes, islands, 128) for islands in (4, 1000))
    assert few["the tape"] < 10e6 < many["the tape"] < 1.1 * TAPE_BYTES
    assert few["the merger's state"] < many["the merger's state"] == STATE_PER_ISLAND * 1000
    assert few["contributions"] < many["contributions"]
    assert (tape_kept(1000, 0), tape_kept(TAPE_BYTES, 7), tape_kept(0, 0)) == (TAPE_KEPT, 7, TAPE_KEPT)
