"""The estimate of a run's memory, compared with peaks that were measured."""

from __future__ import annotations

from dataclasses import replace

from archipelago.broker.config import DataConfig, RunConfig, SyncConfig
from archipelago.broker.footprint import footprint, shortage
from archipelago.broker.manifest import Corpus, Manifest, Tensor, synced

#: 13 layers of width 896: the run `124m` with its default batch of 8 sequences of 128 bytes.
WIDTH, LAYERS, HIDDEN = 896, 13, 2368


def of(config: RunConfig) -> Manifest:
    tensors = [Tensor("embedding", (256, WIDTH)), Tensor("norm", (WIDTH,))]
    for layer in range(LAYERS):
        tensors += [Tensor(f"{layer}.norm{k}", (WIDTH,)) for k in range(2)]
        tensors += [Tensor(f"{layer}.attention{k}", (WIDTH, WIDTH)) for k in range(4)]
        tensors += [Tensor(f"{layer}.mlp{k}", (WIDTH, HIDDEN)) for k in range(3)]
    return Manifest("x", config, tuple(tensors), (tuple(t.name for t in tensors),), Corpus("t", "0" * 32, 1), {})


def test_the_estimate_is_near_the_peaks_that_were_measured() -> None:
    found = footprint(of(RunConfig()))
    for estimated, measured in ((found.island, 8.8e9), (found.merger, 5.5e9)):
        assert 0.8 < estimated / measured < 1.25
    assert 2.4e9 < found.redis < 2 * 2.4e9  # that run had not filled the kept differences


def test_a_larger_batch_takes_more_memory_in_an_island_only() -> None:
    small, large = (footprint(of(RunConfig(data=DataConfig(batch_size=size)))) for size in (8, 64))
    assert large.island > small.island + 5e9
    assert replace(large, island=0) == replace(small, island=0)


def test_first_moments_take_more_memory_everywhere() -> None:
    own = of(RunConfig())
    tensors, fragments = synced(own.tensors, replace(own.config, sync=SyncConfig(fragments=1, moments="average")))
    averaged = replace(own, tensors=tensors, fragments=fragments)
    assert averaged.parameters == own.parameters
    assert averaged.elements == 2 * own.elements
    before, after = footprint(own), footprint(averaged)
    assert after.redis == 2 * before.redis
    assert 1.1 * before.island < after.island < 1.5 * before.island
    assert 1.5 * before.merger < after.merger < 2 * before.merger


def test_what_does_not_fit_is_said() -> None:
    assert not shortage("the merger", 5, 5)
    assert "the merger" in shortage("the merger", 6, 5)
