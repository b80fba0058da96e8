"""Exports that other programs read, where parameters are found, runs that begin from weights, and generated text."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from archipelago.broker.buckets.bundles import Bundles
from archipelago.broker.buckets.folder import BucketFolder
from archipelago.broker.config import ModelConfig
from archipelago.broker.errors import (
    ConfigError,
    DataError,
    MismatchError,
    UnknownRunError,
)
from archipelago.broker.redis.transport import connect
from archipelago.islands.data.corpus import open_corpus
from archipelago.islands.data.tokenizer import FILE, from_file
from archipelago.islands.models.llama import to_llama
from archipelago.ops.commands import run
from archipelago.ops.launch.embedded_redis import RedisServer
from archipelago.ops.weights.export import RunParameters, find, require_new, write
from archipelago.ops.weights.generate import show
from archipelago.ops.weights.safetensors_files import WeightFiles
from tests.failing import failing
from tests.ops.conftest import Call
from tests.ops.weights.small_runs import SMALL, checkpointed, found_of, of_tokens, same
from tests.servers import empty_database


@pytest.fixture
def url(server: RedisServer) -> Iterator[str]:
    """Return the URL of a database without runs."""
    with empty_database(server, 9) as url:
        yield url


def tensors_in(folder: Path) -> dict[str, Any]:
    with safe_open(folder / "model.safetensors", framework="flax") as file:
        return {name: np.asarray(file.get_tensor(name).astype(jnp.float32)) for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("made", [pytest.param(found_of, marks=pytest.mark.full), of_tokens])
def test_a_dense_model_is_written_as_a_llama(made: Callable[[], RunParameters], tmp_path: Path) -> None:
    found, out = made(), tmp_path / "out"
    assert write(found, out, "float32") == "llama"
    held = tensors_in(out)
    assert held.keys() == {to_llama(name).name for name in found.params}
    assert np.array_equal(held["model.layers.1.mlp.down_proj.weight"], found.params["layers.1.mlp.down.kernel"].T)
    assert np.array_equal(held["model.embed_tokens.weight"], found.params["embedding"])
    config = json.loads((out / "config.json").read_text())
    assert (config["architectures"], config["tie_word_embeddings"]) == (["LlamaForCausalLM"], True)
    assert config["vocab_size"] == found.manifest.config.model.vocabulary
    assert config["archipelago"]["run"] == "mine"
    assert {path.name for path in out.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert same(WeightFiles(out).load(found.manifest.tensors), found.params)
    text = "17 islands, äöü"
    expected = open_corpus(found.manifest.corpus.name).open_tokenizer().encode(text)
    assert from_file(out / FILE).encode(text) == expected


@pytest.mark.full
def test_experts_keep_their_own_names(tmp_path: Path) -> None:
    found = found_of(replace(SMALL, model=ModelConfig("tiny-moe")))
    assert write(found, tmp_path / "out", "float32") == "archipelago"
    assert tensors_in(tmp_path / "out").keys() == found.params.keys()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "archipelago"
    assert same(WeightFiles(tmp_path / "out").load(found.manifest.tensors), found.params)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        write(found_of(), tmp_path / "file" / "below", "float32")


def test_what_a_new_folder_cannot_replace_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    for out in (".", "link", tmp_path, "/"):
        with failing(ConfigError, "export.exists"):
            require_new(Path(out))
    require_new(Path("folder"))


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    found = found_of()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))  # Python ignores SIGXFSZ, so writes fail.
    try:
        with failing(ConfigError, "file.disk-full"):
            write(found, tmp_path / "out", "float32")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


# -- where parameters are found -------------------------------------------------------------------------------------


def test_a_checkpoint_is_found_in_its_folders() -> None:
    checkpointed(found_of())
    for place in ("mine", "runs/mine", "runs/mine/merger"):
        found = find(place, None)
        assert same(found.params, found_of().params)
        assert "checkpoint 3" in found.origin
    with pytest.raises(UnknownRunError):
        find("runs/mine", "other")


def test_a_checkpoint_is_found_in_a_bucket(bucket: BucketFolder, tmp_path: Path) -> None:
    checkpointed(found_of(), tmp_path)
    Bundles(bucket.child("mine", "merger", "checkpoints")).put(3, tmp_path / "checkpoints" / "3", {})
    for place in ("mine", "mine/merger"):
        found = find(bucket.child(place).address, None)
        assert same(found.params, found_of().params)
        assert found.origin == f"checkpoint 3 in {bucket.child(place)}"
    with failing(ConfigError, "checkpoint.missing"):
        find(bucket.child("other").address, None)


def test_without_a_redis_the_runs_own_checkpoint_is_read() -> None:
    checkpointed(found_of())
    assert "checkpoint 3" in find(None, "mine").origin


# -- runs that begin from weights -----------------------------------------------------------------------------------

SETTINGS = ["--data.corpus", "small", "--data.shards", "8", "--data.sequence-length", "32"]


def test_a_run_begins_where_an_export_ended(tmp_path: Path, url: str, call: Call) -> None:
    write(found_of(), tmp_path / "first", "float32")
    status, out, _ = call("init", url, "--run", "again", "--from", "first", *SETTINGS, "--json")
    assert (status, json.loads(out)["created"]) == (0, True)
    status, out, _ = call("export", url, "--run", "again", "--out", "second", "--json")
    assert (status, json.loads(out)["origin"]) == (0, "its Redis")
    # The files may differ, because safetensors writes its metadata in any order.
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert {k: v.tobytes() for k, v in first.items()} == {k: v.tobytes() for k, v in second.items()}
    manifest = connect(url, "again").reader.manifest()
    assert manifest.versions["weights"] == "first"
    assert call("init", url, "--run", "again", *SETTINGS)[0] == 0  # The run exists already, with the same settings.
    assert call("init", url, "--run", "again", "--from", "first", *SETTINGS)[0] == 0
    assert call("init", url, "--run", "new", *SETTINGS)[0] == 0
    with failing(MismatchError, "config.other-settings"):
        run(["init", url, "--run", "new", "--from", "first", *SETTINGS])
    status, _, said = call("init", url, "--run", "again", "--from", "second", *SETTINGS)
    assert (status, "--from changes nothing" in said) == (0, True)


def test_weights_of_another_model_create_no_run(tmp_path: Path, url: str) -> None:
    write(found_of(), tmp_path / "first", "float32")
    flags = ["--run", "x", "--from", "first", *SETTINGS]
    for command in (["init", url], ["up"]):
        with failing(DataError, "weights.unfit"):
            run([*command, *flags, "--model.size", "small"])
    config = json.loads(Path("first/config.json").read_text())
    for other in ({"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}, {"model_type": "mistral"}):
        Path("first/config.json").write_text(json.dumps(config | other))
        for command in (["init", url], ["up"]):
            with failing(ConfigError, "llama.different"):
                run([*command, *flags])
    assert connect(url, "x").reader.runs() == []
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


def test_a_run_takes_its_vocabulary_from_the_corpus(url: str, call: Call) -> None:
    flags = ["--data.corpus", "tokens", "--data.shards", "8", "--data.sequence-length", "32"]
    assert call("init", url, "--run", "t", *flags)[0] == 0
    assert connect(url, "t").reader.manifest().config.model.vocabulary == 400
    assert call("init", url, "--run", "t", *flags)[0] == 0
    with failing(ConfigError, "config.value"):
        run(["init", url, "--run", "u", *flags, "--model.vocabulary", "300"])


# -- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_seed_determines_the_generated_text(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    checkpointed(found_of())
    flags = ["generate", "mine", "--prompt", "17 isl", "--tokens", "40", "--seed", "5"]
    status, text, _ = call(*flags)
    assert status == 0
    found = json.loads(call(*flags, "--json")[1])
    assert (found["tokens"], found["seed"], found["prompt"]) == (40, 5, "17 isl")
    assert len(found["text"]) <= 40
    show(found["text"] + "\n")
    assert capsys.readouterr().out == text
    assert call(*flags[:-1], "6")[1] != text


def test_control_characters_are_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    show("a\x1b[2J\tb\r\nc\x9b\x7fä")
    assert capsys.readouterr().out == "a\ufffd[2J\tb\ufffd\nc\ufffd\ufffdä"


def test_a_checkpoint_of_a_tokenised_corpus_generates_text(call: Call) -> None:
    checkpointed(of_tokens())
    status, out, _ = call("generate", "--run", "mine", "--tokens", "12", "--temperature", "0", "--prompt", "", "--json")
    assert status == 0
    assert json.loads(out)["tokens"] == 12
    assert json.loads(out)["text"]
