"""A small run learns nearly as well as data-parallel training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from archipelago.broker.config import RunConfig
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.islands.tasks.ours import our_work
from archipelago.ops.experiments.baselines import Point, data_parallel
from archipelago.ops.experiments.parity import islands

#: Twenty syncs of each fragment, which are so few that they cost a gap of a few per cent.
STEPS = 240
RATIO_MAX = 1.1


def drawn(name: str, points: Sequence[Point]) -> str:
    """Return a curve as text, with a line for each evaluation."""
    lines = [f"{p.tokens:>9,} {p.bits_per_byte:6.3f} {'#' * round(10 * p.bits_per_byte)}" for p in points]
    return "\n".join([name, *lines])


@pytest.mark.full
@pytest.mark.parametrize("slow", [1.0, 3.0], ids=["equals", "one-slow"])
def test_three_islands_keep_up_with_data_parallel(config: RunConfig, corpus: OpenCorpus, slow: float) -> None:
    """The run has the default rules and codecs. A failure prints both curves."""
    config = replace(
        config,
        data=replace(config.data, corpus="small-text", held_out_sequences=128),
        inner=replace(config.inner, steps=STEPS, warmup_steps=24),
    )
    ours, run = islands(our_work(config, corpus), 3, slow)
    steps = round(STEPS * (2 + 1 / slow) / 3)
    parallel = replace(config, inner=replace(config.inner, steps=steps))
    theirs = data_parallel(our_work(parallel, corpus), 3, lambda point: None)
    books = run.transport.reader.books()
    assert books.published == books.merged + books.refused
    assert ours[-1].bits_per_byte < RATIO_MAX * theirs[-1].bits_per_byte, "\n".join(
        [f"seed {config.seed}", drawn("three islands", ours), drawn("data-parallel", theirs)]
    )
