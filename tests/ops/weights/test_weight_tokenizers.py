"""Weights begin a run only on text of the tokenizer that they were trained with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from archipelago.broker.config import ModelConfig, RunConfig
from archipelago.broker.errors import ConfigError, DataError
from archipelago.broker.memory.transport import MemoryBroker
from archipelago.islands.creation import describe
from archipelago.islands.data.corpus import OpenCorpus, open_corpus
from archipelago.islands.data.preparation import prepare_text
from archipelago.islands.data.tokenizer import FILE, byte_tokenizer, encoding_of, train
from archipelago.islands.models.registry import build
from archipelago.ops.commands import run
from archipelago.ops.launch.init import create, require_usable
from archipelago.ops.weights.export import write
from archipelago.ops.weights.generate import open_text_model
from archipelago.ops.weights.parameters import RunParameters
from archipelago.ops.weights.safetensors_files import WeightFiles
from archipelago.ops.weights.tokenizers import require_tokenizer
from tests.failing import failing

LINES = [f"{n} islands and {n * n % 997} ships\n" for n in range(4000)]
VOCABULARY = 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a text, corpora of its bytes and of two tokenizers of one size, and exports of two runs."""
    root = tmp_path_factory.mktemp("tokenizers")
    (root / "text").write_text("".join(LINES), encoding="utf-8")
    (root / "other").write_text("".join(line.upper() for line in LINES), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ARCHIPELAGO_DATA", str(root / "data"))
        prepare_text(root / "text", "bytes")
        prepare_text(root / "text", "tokens", VOCABULARY)
        prepare_text(root / "other", "others", VOCABULARY)
        for name in ("bytes", "tokens"):
            write(found_of(open_corpus(name)), root / f"of-{name}", "safetensors", "float32")
    return root


@pytest.fixture(autouse=True)
def data(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARCHIPELAGO_DATA", str(folder / "data"))


def config_of(corpus: str) -> RunConfig:
    return replace(RunConfig(), data=replace(RunConfig().data, corpus=corpus, sequence_length=32, shards=8))


def found_of(corpus: OpenCorpus) -> RunParameters:
    model = ModelConfig(vocabulary=corpus.vocabulary)
    manifest = describe("run", replace(config_of(corpus.name), model=model), corpus.identity)
    return RunParameters(manifest, build(model).init(1), 1, 1, "a test")


def copied(source: Path, target: Path, *names: str) -> Path:
    """Copy files of an export into another folder."""
    target.mkdir()
    for name in names:
        (target / name).write_bytes((source / name).read_bytes())
    return target


@pytest.mark.parametrize(
    ("weights", "corpus", "fits"),
    [
        ("of-tokens", "tokens", True),
        ("of-tokens", "others", False),
        ("of-tokens", "bytes", False),
        ("of-bytes", "bytes", True),
        ("of-bytes", "tokens", False),
    ],
)
def test_weights_need_text_of_their_tokenizer(folder: Path, weights: str, corpus: str, fits: bool) -> None:
    if fits:
        require_usable(config_of(corpus), folder / weights)
        return
    with failing(DataError, "weights.tokenizer"):
        require_usable(config_of(corpus), folder / weights)
    with failing(DataError, "weights.tokenizer"):
        create(MemoryBroker().connect("run"), config_of(corpus), folder / weights, may_replace=True)


def test_the_file_alone_knows_its_tokenizer(folder: Path, tmp_path: Path) -> None:
    alone = copied(folder / "of-tokens", tmp_path / "alone", "model.safetensors")
    with failing(DataError, "weights.tokenizer"):
        require_usable(config_of("others"), alone / "model.safetensors")


def test_weights_of_another_program_are_compared_by_the_tokenizer_beside_them(folder: Path, tmp_path: Path) -> None:
    theirs = copied(folder / "of-tokens", tmp_path / "theirs", "config.json", FILE)
    without_metadata(folder / "of-tokens" / "model.safetensors", theirs / "model.safetensors")
    content = json.loads((theirs / FILE).read_text(encoding="utf-8"))
    (theirs / FILE).write_text(json.dumps(content), encoding="utf-8")  # The same tokenizer, written in another way.
    require_usable(config_of("tokens"), theirs)
    with failing(DataError, "weights.tokenizer"):
        require_usable(config_of("others"), theirs)
    (theirs / FILE).unlink()
    assert not require_tokenizer(WeightFiles(theirs), open_corpus("others"))  # Nothing says what they need.


def without_metadata(source: Path, target: Path) -> None:
    from safetensors.numpy import load_file, save_file

    save_file(load_file(source), target)


def test_text_can_be_prepared_for_weights(folder: Path, tmp_path: Path) -> None:
    made = prepare_text(folder / "other", "for-them", encoding_of(str(folder / "of-tokens")))
    assert made.tokenizer == open_corpus("tokens").tokenizer
    assert made.vocabulary == VOCABULARY
    splits = (made.train, made.valid, made.test)
    text = b"".join(made.open_tokenizer().bytes_of(split.tolist()) for split in splits)
    assert text == (folder / "other").read_bytes()
    require_usable(config_of("for-them"), folder / "of-tokens")
    plain = prepare_text(folder / "other", "plain", encoding_of(str(folder / "of-bytes" / FILE)))
    assert (plain.tokenizer, plain.vocabulary) == ("", 256)


def test_the_verb_takes_a_folder_of_text_and_a_tokenizer(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for start in range(0, len(LINES), 10):
        (texts / f"{start}.txt").write_text("".join(LINES[start : start + 10]), encoding="utf-8")
    (texts / "image.png").write_bytes(b"\x89PNG\0")
    arguments = ["prepare", str(texts), "--name", "folder", "--tokenizer", str(folder / "of-tokens")]
    assert run([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokenizer"] == open_corpus("tokens").tokenizer
    assert (found["reading"]["files"], found["reading"]["skipped"]) == (400, {"binary": 1})
    assert 0 < found["reading"]["held_out"] < found["reading"]["documents"] == 400
    assert run(arguments) == 0
    assert "400 files read, 1 skipped (1 binary)" in capsys.readouterr().err
    with failing(ConfigError, "tokenizer.bad-name"):
        run([*arguments[:-1], str(tmp_path / "absent.json")])


def test_weights_with_room_for_more_tokens_need_a_larger_vocabulary(folder: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "of-tokens" / "model.safetensors")
    name = next(name for name in tensors if "embed" in name)
    tensors[name] = np.concatenate([tensors[name], tensors[name][:16]])
    (tmp_path / "padded").mkdir()
    save_file(tensors, tmp_path / "padded" / "model.safetensors")
    with failing(DataError, "weights.unfit") as caught:
        require_usable(config_of("tokens"), tmp_path / "padded")
    assert f"--model.vocabulary {VOCABULARY + 16}" in caught.value.remedy
    wide = replace(config_of("tokens"), model=ModelConfig(vocabulary=VOCABULARY + 16))
    require_usable(wide, tmp_path / "padded")


def test_generate_refuses_another_tokenizer_than_the_weights_have(folder: Path, tmp_path: Path) -> None:
    names = ("model.safetensors", "config.json", FILE)
    export = copied(folder / "of-tokens", tmp_path / "export", *names)
    assert open_text_model(str(export), None).tokenizer.vocabulary == VOCABULARY
    for other in (train((line.upper() for line in LINES), VOCABULARY), byte_tokenizer()):
        (export / FILE).write_text(other.to_json(), encoding="utf-8")
        with failing(DataError, "weights.tokenizer"):
            open_text_model(str(export), None)
