"""Weights begin a run only on text of the tokenizer that they were trained with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from archipelago.broker.config import ModelConfig, RunConfig
from archipelago.broker.errors import ConfigError, DataError
from archipelago.broker.redis.transport import connect
from archipelago.islands.data.corpus import open_corpus
from archipelago.islands.data.preparation import prepare_text
from archipelago.islands.data.tokenizer import FILE, tokenizer_at
from archipelago.ops.commands import run
from archipelago.ops.launch.init import create, workload_of
from archipelago.ops.weights.export import write
from archipelago.ops.weights.safetensors_files import WeightFiles, require_tokenizer
from tests.failing import failing
from tests.learned import learned
from tests.ops.weights.small_runs import LINES, SMALL, VOCABULARY, of_tokens


@pytest.fixture(scope="module")
def exports(folder: Path, exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the exports of two runs, and a text whose corpus `others` has another tokenizer."""
    root = tmp_path_factory.mktemp("tokenizers")
    others = tuple(line.upper() for line in LINES)
    (root / "other").write_text("".join(others), encoding="utf-8")
    (root / "of-bytes").symlink_to(exported)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ARCHIPELAGO_DATA", str(folder))
        prepare_text(root / "other", "others", learned(others, VOCABULARY))
        write(of_tokens(), root / "of-tokens", "float32")
    return root


def config_of(corpus: str) -> RunConfig:
    return replace(SMALL, data=replace(SMALL.data, corpus=corpus))


def copied(source: Path, target: Path, *names: str) -> Path:
    target.mkdir()
    for name in names:
        (target / name).write_bytes((source / name).read_bytes())
    return target


def test_weights_need_text_of_their_tokenizer(exports: Path) -> None:
    for weights, fitting in (("of-tokens", "tokens"), ("of-bytes", "small")):
        for corpus in ("tokens", "others", "small"):
            if corpus == fitting:
                workload_of(config_of(corpus), None, exports / weights)
                continue
            with failing(DataError, "weights.tokenizer"):
                workload_of(config_of(corpus), None, exports / weights)
            with failing(DataError, "weights.tokenizer"):
                create(connect("fakeredis://tokenizers", "run"), config_of(corpus), exports / weights)


def test_weights_of_another_program_are_compared_by_the_tokenizer_beside_them(exports: Path, tmp_path: Path) -> None:
    theirs = copied(exports / "of-tokens", tmp_path / "theirs", "config.json", FILE)
    save_file(load_file(exports / "of-tokens" / "model.safetensors"), theirs / "model.safetensors")  # no metadata
    content = json.loads((theirs / FILE).read_text(encoding="utf-8"))
    (theirs / FILE).write_text(json.dumps(content), encoding="utf-8")  # The same tokenizer, written in another way.
    workload_of(config_of("tokens"), None, theirs)
    with failing(DataError, "weights.tokenizer"):
        workload_of(config_of("others"), None, theirs)
    (theirs / FILE).unlink()
    assert not require_tokenizer(WeightFiles(theirs), open_corpus("others"))  # Nothing says what they need.


def test_text_can_be_prepared_for_weights(exports: Path, tmp_path: Path) -> None:
    made = prepare_text(exports / "other", "for-them", tokenizer_at(str(exports / "of-tokens")))
    assert made.tokenizer == open_corpus("tokens").tokenizer
    assert made.vocabulary == VOCABULARY
    splits = (made.train, made.valid, made.test)
    text = b"".join(made.open_tokenizer().bytes_of(split.tolist()) for split in splits)
    assert text == (exports / "other").read_bytes()
    workload_of(config_of("for-them"), None, exports / "of-tokens")
    plain = prepare_text(exports / "other", "plain", tokenizer_at(str(exports / "of-bytes" / FILE)))
    assert (plain.tokenizer, plain.vocabulary) == ("", 256)


def test_the_verb_takes_a_folder_of_text_and_a_tokenizer(
    exports: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for start in range(0, len(LINES), 10):
        (texts / f"{start}.txt").write_text("".join(LINES[start : start + 10]), encoding="utf-8")
    (texts / "image.png").write_bytes(b"\x89PNG\0")
    arguments = ["prepare", str(texts), "--name", "folder", "--tokenizer", str(exports / "of-tokens")]
    assert run([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokenizer"] == open_corpus("tokens").tokenizer
    assert (found["reading"]["files"], found["reading"]["skipped"]) == (400, {"binary": 1})
    assert 0 < found["reading"]["held_out"] < found["reading"]["documents"] == 400
    assert run(arguments) == 0
    assert "400 files read, 1 skipped (1 binary)" in capsys.readouterr().err
    with failing(ConfigError, "tokenizer.bad-name"):
        run([*arguments[:-1], str(tmp_path / "absent.json")])


def test_weights_with_room_for_more_tokens_need_a_larger_vocabulary(exports: Path, tmp_path: Path) -> None:
    tensors = load_file(exports / "of-tokens" / "model.safetensors")
    name = next(name for name in tensors if "embed" in name)
    tensors[name] = np.concatenate([tensors[name], tensors[name][:16]])
    (tmp_path / "padded").mkdir()
    save_file(tensors, tmp_path / "padded" / "model.safetensors")
    with failing(DataError, "weights.unfit") as caught:
        workload_of(config_of("tokens"), None, tmp_path / "padded")
    assert f"--model.vocabulary {VOCABULARY + 16}" in caught.value.remedy
    wide = replace(config_of("tokens"), model=ModelConfig(vocabulary=VOCABULARY + 16))
    workload_of(wide, None, tmp_path / "padded")
