"""Corpora of tokens: preparation, opening, batches, evaluation per byte, and mismatches with a model."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from archipelago.broker.config import ModelConfig, RunConfig
from archipelago.broker.errors import ConfigError, DataError, MismatchError
from archipelago.broker.manifest import Manifest
from archipelago.islands.data.batches import held_out
from archipelago.islands.data.corpus import OpenCorpus, open_corpus
from archipelago.islands.data.preparation import prepare_text
from archipelago.islands.data.tokenizer import byte_tokenizer
from archipelago.islands.models.interface import Model, Params
from archipelago.islands.models.registry import learning_rate
from archipelago.islands.tasks.ours import fitted, our_work
from tests.failing import failing
from tests.islands.models import mini
from tests.learned import learned

TEXT = "".join(f"{n} islands, {n * n % 97} ships; häfen, 港\n" for n in range(2500))
VOCABULARY = 500


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of two corpora: `text` in bytes, and `tokens`."""
    made, source = tmp_path_factory.mktemp("corpora"), tmp_path_factory.mktemp("source") / "text"
    source.write_text(TEXT, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ARCHIPELAGO_DATA", str(made))
        prepare_text(source, "text")
        prepare_text(source, "tokens", learned((TEXT,), VOCABULARY))
    return made


@pytest.fixture(autouse=True)
def data(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ARCHIPELAGO_DATA", str(folder))
    return folder


@pytest.fixture
def tokens() -> OpenCorpus:
    return open_corpus("tokens")


def test_the_splits_decode_to_the_text_and_the_card_describes_them(tokens: OpenCorpus, data: Path) -> None:
    tokenizer = tokens.open_tokenizer()
    splits = [tokenizer.bytes_of(split.tolist()).decode() for split in (tokens.train, tokens.valid, tokens.test)]
    assert "".join(splits) == TEXT
    assert tuple(len(split.encode()) for split in splits) == tokens.text_sizes
    assert len(splits[0].encode()) == pytest.approx(0.9 * len(TEXT.encode()), abs=4)
    assert tokens.train.dtype == np.uint16
    assert not tokens.train.flags.writeable
    assert int(tokens.train.max()) < tokens.vocabulary == VOCABULARY
    assert tokens.train.size < 0.5 * tokens.text_sizes[0]
    card = json.loads((data / "tokens" / "corpus.json").read_text())
    assert (card["dtype"], card["vocabulary"], card["tokenizer"]) == ("uint16", VOCABULARY, tokens.tokenizer)
    assert card["text_bytes"] == dict(zip(("train", "valid", "test"), tokens.text_sizes, strict=True))
    assert card["bytes"] == 2 * sum(card["splits"].values())


def test_a_card_that_contradicts_itself_or_another_tokenizer_is_refused(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = shutil.copytree(data / "tokens", tmp_path / "data" / "tokens")
    monkeypatch.setenv("ARCHIPELAGO_DATA", str(tmp_path / "data"))
    text = (mine / "corpus.json").read_text()
    for change in (
        {"dtype": "uint8"},
        {"vocabulary": 256},
        {"tokenizer": ""},
        {"text_bytes": None},
        {"vocabulary": 70_000},
        {"bytes": 4},
    ):
        (mine / "corpus.json").write_text(json.dumps({**json.loads(text), **change}))
        with failing(DataError, "data.damaged"):
            pytest.fail(f"{change}: {open_corpus('tokens')}")
    (mine / "corpus.json").write_text(text)
    (mine / "tokenizer.json").write_text(byte_tokenizer().to_json(), encoding="utf-8")
    with failing(DataError, "data.damaged"):
        open_corpus("tokens").open_tokenizer()


CONFIG = replace(RunConfig(), data=replace(RunConfig().data, sequence_length=16, batch_size=4, shards=8))
CONFIG = replace(CONFIG, inner=replace(CONFIG.inner, learning_rate=2e-3))
WIDE = replace(CONFIG, model=ModelConfig(vocabulary=VOCABULARY))


def test_the_model_takes_the_vocabulary_of_its_corpus(tokens: OpenCorpus) -> None:
    assert fitted(CONFIG, tokens) == WIDE
    assert fitted(CONFIG, open_corpus("text")) == CONFIG
    chosen = replace(CONFIG, model=ModelConfig(vocabulary=512))
    assert fitted(chosen, tokens) == chosen, "a model with a larger vocabulary can read it"


def test_the_model_determines_the_default_learning_rate() -> None:
    for size in ("tiny", "small", "tiny-moe"):
        config = replace(RunConfig(), model=ModelConfig(size))
        assert fitted(config, open_corpus("text")).inner.learning_rate == learning_rate(size)
        named = replace(config, inner=replace(config.inner, learning_rate=0.5))
        assert fitted(named, open_corpus("text")) == named


def test_a_corpus_that_the_model_cannot_read_is_refused(tokens: OpenCorpus) -> None:
    narrow = replace(CONFIG, model=ModelConfig(vocabulary=400))
    with failing(ConfigError, "config.value"):
        fitted(narrow, tokens)


def test_the_loss_is_per_byte_under_any_tokenizer(tokens: OpenCorpus) -> None:
    def uniform(params: Params, tokens_BxT: jax.Array) -> jax.Array:
        return jnp.zeros((*tokens_BxT.shape, VOCABULARY), jnp.float32)

    def loss(params: Params, tokens_BxT1: jax.Array) -> jax.Array:
        return jnp.asarray(math.log(VOCABULARY), jnp.float32)

    model = Model(lambda seed: {}, loss, (), uniform)
    text = held_out(tokens.valid, 8, 16)
    bits = math.log2(VOCABULARY) * tokens.valid.size / tokens.text_sizes[1]
    assert mini.measures(model, text, {}, tokens.bytes_per_token).bits == pytest.approx(bits)
    assert mini.measures(model, text, {}).bits == pytest.approx(math.log2(VOCABULARY))


def test_the_manifest_pins_the_tokenizer(tokens: OpenCorpus) -> None:
    manifest = our_work(WIDE, tokens).describe("run")
    embedding = next(tensor for tensor in manifest.tensors if tensor.name == "embedding")
    assert embedding.shape == (VOCABULARY, 64)
    assert Manifest.from_fields(manifest.to_fields()) == manifest
    with failing(MismatchError):
        manifest.require_same(replace(manifest, corpus=tokens.identity._replace(tokenizer="0" * 32)))
