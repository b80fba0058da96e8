"""Mixtures of experts and images train, with Muon, through the same islands, broker and merger as dense text."""

from __future__ import annotations

import sysconfig
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from archipelago.broker.config import DataConfig, InnerConfig, ModelConfig, RunConfig, SyncConfig
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.islands.data.preparation import prepare_examples, prepare_text
from archipelago.islands.data.sharding import held_out
from archipelago.islands.evaluation import Measures, published
from archipelago.islands.models import moe, registry, vision
from archipelago.islands.models.dimensions import Size
from archipelago.islands.models.moe import Routing
from archipelago.islands.models.registry import Entry
from archipelago.islands.models.vision import Images
from archipelago.islands.tasks.ours import our_work
from archipelago.ops.experiments.baselines import one_process
from archipelago.ops.experiments.virtual_time import VirtualRun
from tests.islands.models import mini

#: The models, Muon and virtual runs are covered by quicker tests as well.
pytestmark = pytest.mark.full

SMALL = Size(width=16, layers=1, heads=2, hidden=32)
MODELS = {
    "mini-moe": Entry(partial(moe.transformer, SMALL, Routing(experts=4, choices=2))),
    "mini-images": Entry(
        partial(vision.classifier, SMALL, Images(side=8, patch=4, brightest=16, classes=4)), reads_text=False
    ),
}


def text() -> OpenCorpus:
    return prepare_text(Path(sysconfig.get_path("stdlib")) / "typing.py", "text")


def images() -> OpenCorpus:
    """Examples of four shapes in noise."""
    random = np.random.default_rng(0)
    shapes_4xSS = random.integers(0, 2, (4, 64)) * 8
    labels_N = random.integers(0, 4, 1200)
    pixels = shapes_4xSS[labels_N] + random.integers(0, 9, (1200, 64))
    return prepare_examples(np.concatenate([pixels, labels_N[:, None]], axis=1).astype(np.uint8), "images", "chance")


@pytest.mark.parametrize("kind", ["experts", "images"])
def test_two_islands_learn_nearly_as_much_as_one_process(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ARCHIPELAGO_DATA", str(tmp_path))
    for name, entry in MODELS.items():
        monkeypatch.setitem(registry.MODELS, name, entry)
    size, length = {"experts": ("mini-moe", 32), "images": ("mini-images", 64)}[kind]
    config = RunConfig(
        record=True,
        model=ModelConfig(size=size),
        data=DataConfig(sequence_length=length, batch_size=4, shards=8, held_out_sequences=96),
        inner=InnerConfig(steps=96, warmup_steps=8, optimizer="muon"),
        sync=SyncConfig(interval=8, fragments=4),
    )
    corpus = images() if kind == "images" else text()
    work, valid = our_work(config, corpus), held_out(corpus.valid, 96, length)
    run = VirtualRun(work, (1.0, 1.1))

    def measured() -> Measures:
        """Evaluate the parameters that the merger has published."""
        return mini.measures(registry.build(size), valid, published(run.transport, run.manifest)[0])

    before, accuracy_before = measured()
    run.finish()
    after, accuracy = measured()
    tokens = sum(island.totals.tokens for island in run.islands.values())
    single = one_process(work, tokens, lambda point: None)
    assert single[0].bits_per_byte == pytest.approx(before, rel=1e-4)
    assert after < 0.75 * before
    assert accuracy > accuracy_before + 0.1
    assert before - after > 0.75 * (before - single[-1].bits_per_byte)
    books = run.transport.reader.books()
    assert (books.refused, run.transport.reader.backlog()) == (0, 0)
    assert books.published == books.merged > 0
