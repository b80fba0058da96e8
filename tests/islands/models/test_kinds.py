"""Mixtures of experts, Muon and images train through the same islands, broker and merger as dense text."""

from __future__ import annotations

import math
import sysconfig
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from archipelago.broker.config import DataConfig, InnerConfig, ModelConfig, RunConfig, SyncConfig
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.islands.data.preparation import prepare_examples, prepare_text
from archipelago.islands.data.sharding import held_out
from archipelago.islands.evaluation import Measures, published
from archipelago.islands.inner import InnerSteps, compile_steps, counts
from archipelago.islands.models import moe, registry, transformer, vision
from archipelago.islands.models.dimensions import Size
from archipelago.islands.models.moe import Routing
from archipelago.islands.models.registry import Entry
from archipelago.islands.models.vision import Images
from archipelago.islands.tasks.ours import our_work
from archipelago.ops.experiments.baselines import one_process
from archipelago.ops.experiments.virtual_time import VirtualRun
from tests.measures import measures

#: The models, Muon and virtual runs are covered by quicker tests as well.
pytestmark = pytest.mark.full

SMALL = Size(width=16, layers=1, heads=2, hidden=32)
MODELS = {
    "mini": Entry(partial(transformer.transformer, SMALL)),
    "mini-moe": Entry(partial(moe.transformer, SMALL, Routing(experts=4, choices=2))),
    "mini-images": Entry(
        partial(vision.classifier, SMALL, Images(side=8, patch=4, brightest=16, classes=4)), reads_text=False
    ),
}


@dataclass(frozen=True)
class Kind:
    """A task, with its corpus and its compiled inner steps."""

    config: RunConfig
    corpus: OpenCorpus
    steps: InnerSteps

    def start(self, *speeds: float) -> VirtualRun:
        return VirtualRun(our_work(self.config, self.corpus), speeds)

    def measure(self, run: VirtualRun) -> Measures:
        """Evaluate the parameters that the merger has published."""
        data = self.config.data
        text = held_out(self.corpus.valid, data.held_out_sequences, data.sequence_length)
        return measures(registry.build(self.config.model.size), text, published(run.transport, run.manifest)[0])


@cache
def compiled(size: str, inner: InnerConfig) -> InnerSteps:
    """Compile the inner steps once for all tests."""
    return compile_steps(registry.build(size), inner)


def text() -> OpenCorpus:
    return prepare_text(Path(sysconfig.get_path("stdlib")) / "typing.py", "text")


def images() -> OpenCorpus:
    """Examples of four shapes in noise."""
    random = np.random.default_rng(0)
    shapes_4xSS = random.integers(0, 2, (4, 64)) * 8
    labels_N = random.integers(0, 4, 1200)
    pixels = shapes_4xSS[labels_N] + random.integers(0, 9, (1200, 64))
    return prepare_examples(np.concatenate([pixels, labels_N[:, None]], axis=1).astype(np.uint8), "images", "chance")


@pytest.fixture(params=["experts", "muon", "images"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Kind:
    monkeypatch.setenv("ARCHIPELAGO_DATA", str(tmp_path))
    for name, entry in MODELS.items():
        monkeypatch.setitem(registry.MODELS, name, entry)
    size, length = {"experts": ("mini-moe", 32), "muon": ("mini", 32), "images": ("mini-images", 64)}[request.param]
    config = RunConfig(
        record=True,
        model=ModelConfig(size=size),
        data=DataConfig(sequence_length=length, batch_size=4, shards=8, held_out_sequences=96),
        inner=InnerConfig(steps=96, warmup_steps=8, optimizer="muon" if request.param == "muon" else "adamw"),
        sync=SyncConfig(interval=8, fragments=4),
    )
    corpus = images() if request.param == "images" else text()
    return Kind(config, corpus, compiled(size, config.inner))


def test_two_islands_learn_nearly_as_much_as_one_process(kind: Kind) -> None:
    run = kind.start(1.0, 1.1)
    islands = list(run.islands.values())
    before, accuracy_before = kind.measure(run)
    run.finish()
    after, accuracy = kind.measure(run)
    tokens = sum(island.totals.tokens for island in islands)
    single = one_process(our_work(kind.config, kind.corpus), tokens, lambda point: None)
    assert single[0].bits_per_byte == pytest.approx(before, rel=1e-4)
    assert after < 0.75 * before
    assert accuracy > accuracy_before + 0.1
    assert before - after > 0.75 * (before - single[-1].bits_per_byte)
    books = run.transport.reader.books()
    assert (books.refused, run.transport.reader.backlog()) == (0, 0)
    assert books.published == books.merged > 0


def test_a_newcomer_takes_a_peers_moments_and_contributes(kind: Kind) -> None:
    run = kind.start(1.0, 1.1)
    run.advance_until(lambda: run.merger.rounds.closed >= 12)
    newcomer = run.add_island("newcomer", 1.0, moments="peer")
    assert newcomer.moments.startswith("peer ")
    seen = {int(count) for count in counts(newcomer.inner.optimizer)}
    peer = run.islands[newcomer.moments.removeprefix("peer ")]
    assert seen == {peer.totals.steps}
    run.advance_until(lambda: newcomer.totals.steps >= 16)
    recent = [member.island for entry in run.transport.reader.tape(4) for member in entry.members]
    assert "newcomer" in recent
    assert math.isfinite(newcomer.losses.mean)
    assert run.transport.reader.books().refused == 0


def test_a_scan_equals_the_same_number_of_single_steps(kind: Kind) -> None:
    """Equal up to rounding in float32, which grows over the steps."""
    one, many = kind.start(1.0), kind.start(1.0)
    batches = one.islands["island-0"].batches.next(4)
    state, losses_n = kind.steps(many.islands["island-0"].inner, jnp.asarray(batches), jnp.asarray(0, jnp.int32))
    single, singles = one.islands["island-0"].inner, []
    for step in range(4):
        single, loss = kind.steps(single, jnp.asarray(batches[step : step + 1]), jnp.asarray(step, jnp.int32))
        singles += loss.tolist()
    assert singles == pytest.approx(losses_n.tolist(), rel=1e-4)
    for name, value in state.params.items():
        np.testing.assert_allclose(np.asarray(single.params[name]), np.asarray(value), atol=1e-4, err_msg=name)
