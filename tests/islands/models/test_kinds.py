"""A mixture of experts trains, with Muon, through the same islands, broker and merger as a dense model."""

from __future__ import annotations

import sysconfig
from functools import partial
from pathlib import Path

import pytest

from archipelago.broker.config import DataConfig, InnerConfig, ModelConfig, RunConfig, SyncConfig
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.islands.data.preparation import prepare_text
from archipelago.islands.data.ranges import held_out
from archipelago.islands.evaluation import Measures, published
from archipelago.islands.models import moe, registry
from archipelago.islands.models.llama import Size
from archipelago.islands.models.moe import Routing
from archipelago.islands.models.registry import Entry
from archipelago.islands.tasks.ours import our_work
from archipelago.ops.experiments.baselines import one_process
from archipelago.ops.experiments.virtual_time import VirtualRun
from tests.islands.models import mini

#: The models, Muon and virtual runs are covered by quicker tests as well.
pytestmark = pytest.mark.full

SMALL = Size(width=16, layers=1, heads=2, hidden=32)
EXPERTS = Entry(partial(moe.transformer, SMALL, Routing(experts=4, choices=2)))


def text() -> OpenCorpus:
    return prepare_text(Path(sysconfig.get_path("stdlib")) / "typing.py", "text")


def test_two_islands_learn_nearly_as_much_as_one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ARCHIPELAGO_DATA", str(tmp_path))
    monkeypatch.setitem(registry.MODELS, "mini-moe", EXPERTS)
    config = RunConfig(
        record=True,
        model=ModelConfig(size="mini-moe"),
        data=DataConfig(sequence_length=32, batch_size=4, shards=8, held_out_sequences=96),
        inner=InnerConfig(steps=96, warmup_steps=8, optimizer="muon"),
        sync=SyncConfig(interval=8, fragments=4),
    )
    corpus = text()
    work, valid = our_work(config, corpus), held_out(corpus.valid, 96, 32)
    run = VirtualRun(work, (1.0, 1.1))

    def measured() -> Measures:
        """Evaluate the parameters that the merger has published."""
        return mini.measures(registry.build("mini-moe"), valid, published(run.transport, run.manifest)[0])

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
