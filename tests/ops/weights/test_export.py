"""Exports that other programs read, runs that begin from weights, and text generated from both."""

from __future__ import annotations

import json
import logging
import math
import re
import resource
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.flax import save_file as save_jax
from safetensors.numpy import load_file, save_file

from archipelago.broker.buckets.bundles import Bundles
from archipelago.broker.buckets.folder import BucketFolder
from archipelago.broker.config import ModelConfig, RunConfig
from archipelago.broker.errors import (
    ArchipelagoError,
    BadUrlError,
    ConfigError,
    DataError,
    UnknownRunError,
    UnreachableError,
)
from archipelago.broker.manifest import Corpus
from archipelago.broker.process import guarded
from archipelago.broker.redis.transport import connect
from archipelago.islands.creation import describe, first_snapshots, fitted
from archipelago.islands.data.corpus import open_corpus
from archipelago.islands.data.preparation import prepare_text
from archipelago.islands.models.llama import to_llama
from archipelago.islands.models.registry import Params, build
from archipelago.merger.checkpoint import CheckpointStore
from archipelago.ops.commands import run
from archipelago.ops.launch.embedded_redis import Server
from archipelago.ops.weights.export import write
from archipelago.ops.weights.generate import open_text_model, show, tokens_per_second
from archipelago.ops.weights.parameters import RunParameters, find
from archipelago.ops.weights.safetensors_files import WeightFiles
from tests import samples
from tests.broker.buckets.faulty_bucket import FaultyFileSystem
from tests.failing import failing
from tests.servers import empty_database

SMALL = replace(RunConfig(), data=replace(RunConfig().data, corpus="small", sequence_length=32, shards=8))
TINY = build("tiny")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of two corpora: `small`, in bytes, and `tokens`."""
    made, source = tmp_path_factory.mktemp("corpora"), tmp_path_factory.mktemp("source") / "text"
    source.write_text("".join(f"{n} islands and {n * n % 997} ships\n" for n in range(4000)), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ARCHIPELAGO_DATA", str(made))
        prepare_text(source, "small")
        prepare_text(source, "tokens", 400)
    return made


@pytest.fixture(autouse=True)
def _keep_signals_and_loggers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ARCHIPELAGO_DATA", str(folder))
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = list(logging.getLogger().handlers)
    yield
    for number, handler in signals.items():
        signal.signal(number, handler)
    logging.getLogger().handlers[:] = handlers


@pytest.fixture
def url(server: Server) -> Iterator[str]:
    """Return the URL of a database without runs."""
    with empty_database(server, 9) as url:
        yield url


@pytest.fixture(scope="module")
def exported(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of a small run."""
    out = tmp_path_factory.mktemp("exported") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ARCHIPELAGO_DATA", str(folder))
        write(found_of(), out, "safetensors", "float32")
    return out


Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Run a command. Return its exit status, standard output and standard error."""

    def made(*args: str) -> tuple[int, str, str]:
        capsys.readouterr()
        return (guarded(lambda: run(args)), *capsys.readouterr())

    return made


def perturbed(params: Params) -> Params:
    """Change all parameters. Fresh scales are all 1, so scales in the wrong places would go unnoticed."""
    rng = np.random.default_rng(0)
    return {n: p + 0.1 * jnp.asarray(rng.normal(size=p.shape), jnp.float32) for n, p in params.items()}


def found_of(config: RunConfig = SMALL, corpus: Corpus | None = None) -> RunParameters:
    """Return the parameters of a run."""
    manifest = describe("mine", config, corpus or open_corpus(config.data.corpus).identity)
    return RunParameters(manifest, perturbed(build(config.model).init(3)), 7, 40, "a test")


def of_tokens() -> RunParameters:
    corpus = open_corpus("tokens")
    return found_of(fitted(replace(SMALL, data=replace(SMALL.data, corpus="tokens")), corpus), corpus.identity)


def tensors_in(folder: Path) -> dict[str, Any]:
    with safe_open(folder / "model.safetensors", framework="flax") as file:
        return {name: np.asarray(file.get_tensor(name).astype(jnp.float32)) for name in file.keys()}  # noqa: SIM118


def same(one: Params, other: Params) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def checkpointed(found: RunParameters, folder: Path) -> None:
    """Write a checkpoint of the run into the folder of a merger."""
    image = replace(
        samples.image(found.manifest, []), snapshots=first_snapshots(found.manifest, found.params), tape=(),
        outers=[b""] * len(found.manifest.sizes), state="",
    )  # fmt: skip
    CheckpointStore(folder / "checkpoints").save(image)


# -- export ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [pytest.param(found_of, marks=pytest.mark.full), of_tokens])
def test_a_dense_model_is_written_as_a_llama(made: Callable[[], RunParameters], tmp_path: Path) -> None:
    found, out = made(), tmp_path / "out"
    assert write(found, out, "safetensors", "float32") == "llama"
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
    writer = open_text_model(str(out), None)
    assert same(writer.params, found.params)
    text = "17 islands, äöü"
    expected = open_corpus(found.manifest.corpus.name).open_tokenizer().encode(text)
    assert writer.tokenizer.encode(text) == expected


def test_bfloat16_halves_the_file(tmp_path: Path) -> None:
    found = found_of()
    write(found, tmp_path / "out", "safetensors", "bfloat16")
    loaded = WeightFiles(tmp_path / "out").load(TINY.tensors)
    assert same(loaded, {n: p.astype(jnp.bfloat16).astype(jnp.float32) for n, p in found.params.items()})
    assert (tmp_path / "out" / "model.safetensors").stat().st_size < 2.1 * found.manifest.parameters


@pytest.mark.full
def test_experts_keep_their_own_names(tmp_path: Path) -> None:
    found = found_of(replace(SMALL, model=ModelConfig("tiny-moe")))
    assert write(found, tmp_path / "out", "safetensors", "float32") == "archipelago"
    assert tensors_in(tmp_path / "out").keys() == found.params.keys()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "archipelago"
    assert same(open_text_model(str(tmp_path / "out"), None).params, found.params)


def test_orbax_restores_it_without_us(tmp_path: Path) -> None:
    found = found_of()
    write(found, tmp_path / "out", "orbax", "bfloat16")
    like = {"embedding": np.zeros((256, 64), jnp.bfloat16)}
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.restore(
            tmp_path / "out" / "orbax",
            args=ocp.args.PyTreeRestore(like, restore_args={"embedding": ocp.RestoreArgs(restore_type=np.ndarray)},
                                        partial_restore=True),
        )  # fmt: skip
        names = checkpointer.metadata(tmp_path / "out" / "orbax").item_metadata.tree
    assert np.array_equal(tree["embedding"], np.asarray(found.params["embedding"].astype(jnp.bfloat16)))
    assert names["layers"]["1"]["mlp"]["down"]["kernel"].shape == (176, 64)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    with failing(ConfigError, "export.exists"):
        run(("export", "runs/none", "--out", "out"))
    (tmp_path / "file").write_text("")
    with failing(ConfigError, "export.unwritable"):
        write(found_of(), tmp_path / "file" / "below", "safetensors", "float32")


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    found = found_of()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))  # Python ignores SIGXFSZ, so writes fail.
    try:
        with failing(ConfigError, "export.unwritable"):
            write(found, tmp_path / "out", "safetensors", "float32")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


# -- where parameters are found -------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["mine", "runs/mine", "runs/mine/merger", "runs/mine/merger/checkpoints"])
def test_a_checkpoint_is_found_in_its_folders(tmp_path: Path, place: str) -> None:
    made = found_of()
    checkpointed(made, tmp_path / "runs" / "mine" / "merger")
    found = find(place, None)
    assert same(found.params, made.params)
    assert "checkpoint 3" in found.origin


@pytest.mark.parametrize("place", ["mine", "mine/merger"])
def test_a_checkpoint_is_found_in_a_bucket(bucket: BucketFolder, tmp_path: Path, place: str) -> None:
    made = found_of()
    checkpointed(made, tmp_path)
    Bundles(bucket.child("mine", "merger", "checkpoints")).put(3, tmp_path / "checkpoints" / "3", {})
    found = find(bucket.child(place).address, None)
    assert same(found.params, made.params)
    assert found.origin == f"checkpoint 3 in {bucket.child(place)}"
    with failing(ConfigError, "checkpoint.missing"):
        find(bucket.child("other").address, None)


def test_an_export_goes_to_a_bucket(bucket: BucketFolder, tmp_path: Path, call: Call) -> None:
    checkpointed(found_of(), tmp_path / "runs" / "mine" / "merger")
    out = bucket.child("llama")
    status, _, said = call("export", "mine", "--out", out.address)
    assert (status, "llama" in said) == (0, True)
    assert {"config.json", "model.safetensors"} <= out.tree().keys()
    puts = [path for request, path in FaultyFileSystem.requests if request == "put"]
    assert puts[-1].endswith("config.json")  # last, so that part of an export is not taken for one
    for name in out.tree():
        out.download(name, tmp_path / "copy" / name)
    assert same(open_text_model(str(tmp_path / "copy"), None).params, found_of().params)
    status, _, said = call("export", "mine", "--out", out.address)
    assert status == 2


def test_without_a_redis_the_runs_own_checkpoint_is_read(tmp_path: Path, call: Call) -> None:
    checkpointed(found_of(), tmp_path / "runs" / "mine" / "merger")
    assert "checkpoint 3" in find(None, "mine").origin
    status, _, said = call("export", "redis://127.0.0.1:1", "--run", "mine", "--out", "out")
    assert status == 0
    assert "runs/mine" in said
    assert same(open_text_model("out", None).params, found_of().params)


@pytest.mark.parametrize(
    ("args", "kind"),
    [
        ([], ConfigError),
        (["--run", "mine"], ConfigError),
        (["nowhere"], ConfigError),
        (["redis://127.0.0.1:1", "--run", "mine"], UnreachableError),
        (["http://x", "--run", "mine"], BadUrlError),
    ],
)
def test_without_parameters_nothing_is_written(
    tmp_path: Path, call: Call, args: list[str], kind: type[ArchipelagoError]
) -> None:
    for verb in (["export", "--out", "out"], ["generate"]):
        with pytest.raises(kind):
            run([*verb, *args])
        status, out, err = call(*verb, *args)
        assert (status, out, err.count("\n")) == (2, "", 1)
    assert list(tmp_path.iterdir()) == []


def test_another_runs_checkpoint_is_not_taken(tmp_path: Path) -> None:
    checkpointed(found_of(), tmp_path / "runs" / "mine" / "merger")
    with pytest.raises(UnknownRunError):
        find("runs/mine", "other")


# -- import----------------------------------------------------------------------------------------------------------

SETTINGS = ["--data.corpus", "small", "--data.shards", "8", "--data.sequence-length", "32"]


def test_a_run_begins_where_an_export_ended(tmp_path: Path, url: str, call: Call) -> None:
    made = found_of()
    write(made, tmp_path / "first", "safetensors", "float32")
    status, out, _ = call("init", url, "--run", "again", "--from", "first", *SETTINGS, "--json")
    assert (status, json.loads(out)["created"]) == (0, True)
    status, out, _ = call("export", url, "--run", "again", "--out", "second", "--json")
    assert (status, json.loads(out)["origin"]) == (0, "its Redis")
    # The files may differ, because safetensors writes its metadata in any order.
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert {k: v.tobytes() for k, v in first.items()} == {k: v.tobytes() for k, v in second.items()}
    manifest = connect(url, "again").reader.manifest()
    assert re.fullmatch("first [0-9a-f]{32}", manifest.versions["weights"])
    assert call("init", url, "--run", "again", *SETTINGS)[0] == 0  # The run exists already, with the same settings.


def test_weights_of_another_model_create_no_run(tmp_path: Path, url: str) -> None:
    write(found_of(), tmp_path / "first", "safetensors", "float32")
    flags = ["--run", "x", "--from", "first", *SETTINGS]
    for command in (["init", url], ["up"]):
        with failing(DataError, "weights.unfit"):
            run([*command, *flags, "--model.size", "small"])
    with failing(DataError, "weights.missing"):
        run(["init", url, *flags, "--from", "absent"])
    assert connect(url, "x").reader.runs() == []
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


def llama_tensors() -> dict[str, Any]:
    found = found_of().params
    return {to_llama(n).name: np.array(p.T if to_llama(n).transposed else p, order="C") for n, p in found.items()}


def test_several_files_under_either_naming(tmp_path: Path) -> None:
    held, expected = llama_tensors(), found_of().params
    names = sorted(held)
    save_file({name: held[name] for name in names[:8]}, tmp_path / "a.safetensors")
    save_file({name: held[name].astype(np.float64) for name in names[8:]}, tmp_path / "b.safetensors")
    assert same(WeightFiles(tmp_path).load(TINY.tensors), expected)
    save_jax({name: jnp.asarray(value) for name, value in expected.items()}, str(tmp_path / "own"))
    assert same(WeightFiles(tmp_path / "own").load(TINY.tensors), expected)


def test_redundant_tensors_are_ignored_unless_they_contradict(tmp_path: Path) -> None:
    held = llama_tensors()
    spare = {"lm_head.weight": held["model.embed_tokens.weight"].copy(),
             "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(16, np.float32)}  # fmt: skip
    save_file(held | spare, tmp_path / "m.safetensors")
    assert same(WeightFiles(tmp_path / "m.safetensors").load(TINY.tensors), found_of().params)
    save_file(held | {"lm_head.weight": held["model.embed_tokens.weight"] + 1}, tmp_path / "m.safetensors")
    with failing(DataError, "weights.unfit"):
        WeightFiles(tmp_path / "m.safetensors").load(TINY.tensors)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    held = llama_tensors()
    held["model.norm.weight"][5] = value
    save_file(held, tmp_path / "m.safetensors")
    with failing(DataError, "weights.not-finite"):
        WeightFiles(tmp_path / "m.safetensors").load(TINY.tensors)


def test_one_error_names_everything_that_does_not_fit(tmp_path: Path) -> None:
    held = llama_tensors()
    del held["model.norm.weight"]
    held["model.layers.0.self_attn.q_proj.weight"] = np.zeros((64, 32), np.float32)
    held["model.layers.0.mlp.up_proj.weight"] = held["model.layers.0.mlp.up_proj.weight"].astype(np.int32)
    held |= {f"model.layers.{n}.mlp.extra": np.zeros(1, np.float32) for n in range(5)}
    save_file(held, tmp_path / "m.safetensors")
    with failing(DataError, "weights.unfit") as error:
        WeightFiles(tmp_path / "m.safetensors").load(TINY.tensors)
    said = str(error.value)
    named = ["norm.scale", "layers.0.mlp.extra", "layers.0.self_attn.q_proj.weight", "layers.0.mlp.up_proj.weight"]
    assert [name for name in named if name not in said] == []
    assert "layers.4.mlp.extra" not in said, "a message that names every tensor is too long"


def test_a_duplicate_tensor_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file(llama_tensors(), tmp_path / f"{name}.safetensors")
    with failing(DataError, "weights.damaged"):
        WeightFiles(tmp_path)


def test_weights_of_another_llama_are_refused(tmp_path: Path) -> None:
    write(found_of(), tmp_path / "out", "safetensors", "float32")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    with failing(ConfigError, "llama.different"):
        WeightFiles(tmp_path / "out")
    for damaged in ("{", "[]"):
        (tmp_path / "out" / "config.json").write_text(damaged)
        with failing(DataError, "weights.damaged"):
            WeightFiles(tmp_path / "out")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small file of weights."""
    path = tmp_path_factory.mktemp("whole") / "m.safetensors"
    save_file({"norm.scale": np.ones(64, np.float32), "embedding": np.ones((4, 2), np.float16)}, path)
    return path.read_bytes()


@given(data=st.data())
def test_damaged_files_are_refused(whole: bytes, tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    place = data.draw(st.integers(0, header - 1), label="place")
    kind = data.draw(st.sampled_from(["byte", "cut", "length", "header"]), label="kind")
    if kind == "byte":
        changed = whole[:place] + bytes([data.draw(st.integers(0, 255))]) + whole[place + 1 :]
    elif kind == "cut":
        changed = whole[: data.draw(st.integers(0, len(whole) - 1))]
    elif kind == "length":
        changed = struct.pack("<Q", data.draw(st.integers(0, (1 << 64) - 1))) + whole[8:]
    else:
        text = data.draw(st.binary(max_size=200))
        changed = struct.pack("<Q", len(text)) + text + whole[header:]
    path = tmp_path_factory.mktemp("damaged") / "m.safetensors"
    path.write_bytes(changed)
    tensors = (
        replace(TINY.tensors[0], name="embedding", shape=(4, 2)),
        replace(TINY.tensors[0], name="norm.scale", shape=(64,)),
    )
    try:
        loaded = WeightFiles(path).load(tensors)
    except DataError as error:
        assert error.remedy
        return
    assert {name: value.shape for name, value in loaded.items()} == {"embedding": (4, 2), "norm.scale": (64,)}
    assert all(bool(jnp.all(jnp.isfinite(value))) for value in loaded.values())


# -- text -----------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_seed_determines_the_generated_text(tmp_path: Path, call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    write(found_of(), tmp_path / "out", "safetensors", "float32")
    flags = ["generate", "out", "--prompt", "17 isl", "--tokens", "40", "--seed", "5"]
    status, text, _ = call(*flags)
    assert status == 0
    found = json.loads(call(*flags, "--json")[1])
    assert (found["tokens"], found["seed"], found["prompt"]) == (40, 5, "17 isl")
    assert len(found["text"]) <= 40
    show(found["text"] + "\n")
    assert capsys.readouterr().out == text
    assert call(*flags)[1] == text
    assert call(*flags[:-1], "6")[1] != text


def test_control_characters_are_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    show("a\x1b[2J\tb\r\nc\x9b\x7fä")
    assert capsys.readouterr().out == "a\ufffd[2J\tb\ufffd\nc\ufffd\ufffdä"


def test_a_checkpoint_of_a_tokenised_corpus_generates_text(tmp_path: Path, call: Call) -> None:
    checkpointed(of_tokens(), tmp_path / "runs" / "mine" / "merger")
    status, out, _ = call("generate", "--run", "mine", "--tokens", "12", "--temperature", "0", "--prompt", "", "--json")
    assert status == 0
    assert json.loads(out)["tokens"] == 12
    assert json.loads(out)["text"]


def test_a_model_of_images_generates_no_text(tmp_path: Path, call: Call) -> None:
    config = replace(SMALL, model=ModelConfig("digits"))
    found = found_of(config, Corpus("digits", "0" * 32, 65))
    checkpointed(found, tmp_path / "runs" / "mine" / "merger")
    assert call("export", "--run", "mine", "--out", "out")[0] == 0
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    for source in (["--run", "mine"], ["out"]):
        with failing(ConfigError, "model.no-text"):
            run(["generate", *source])


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--temperature", "-1"),
        ("--temperature", "nan"),
        ("--top-p", "0"),
        ("--top-k", "-3"),
        ("--tokens", "0"),
        ("--seed", "-1"),
    ],
)
def test_an_option_out_of_range_is_refused(exported: Path, flag: str, value: str) -> None:
    with failing(ConfigError, "generate.bad-flag") as caught:
        run(["generate", str(exported), flag, value])
    assert flag in caught.value.what


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "bert"},
        {"vocab_size": "many"},
        {"vocab_size": -1},
        {"vocab_size": math.inf},
        {"hidden_size": math.inf},
        {"max_position_embeddings": math.inf},
        {"num_hidden_layers": 10**9},
        {"model_type": "archipelago", "archipelago": {}},
    ],
    ids=str,
)
def test_a_config_that_is_not_ours_is_refused(tmp_path: Path, exported: Path, change: dict[str, Any]) -> None:
    shutil.copytree(exported, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ArchipelagoError) as caught:
        run(["generate", "out"])
    assert caught.value.code in {"export.damaged", "export.foreign", "llama.damaged", "weights.unfit"}


def test_the_rate_leaves_out_compilation() -> None:
    assert tokens_per_second([0.0, 5.0, 5.5, 6.0]) == 2.0
    assert tokens_per_second([0.0, 5.0]) == tokens_per_second([]) == 0.0


# -- tokens ---------------------------------------------------------------------------------------------------------


def test_prepare_learns_a_tokenizer(tmp_path: Path, call: Call) -> None:
    (tmp_path / "fleet.txt").write_text("".join(f"{n} ships and {n % 7} boats\n" for n in range(4000)))
    status, out, _ = call("prepare", "fleet.txt", "--tokenizer", "bpe:300", "--json")
    found = json.loads(out)
    assert (status, found["corpus"], found["vocabulary"], found["dtype"]) == (0, "fleet-bpe300", 300, "uint16")
    assert found["train_bytes"] + found["valid_bytes"] + found["test_bytes"] == (tmp_path / "fleet.txt").stat().st_size
    assert open_corpus("fleet-bpe300").tokenizer == found["tokenizer"]
    assert call("prepare", "fleet.txt", "--tokenizer", "bpe:300")[0] == 0
    with failing(ConfigError, "tokenizer.bad-name"):
        run(["prepare", "fleet.txt", "--tokenizer", "bpe:16"])
    for useless in (["stdlib", "--name", "x"], ["fleet.txt", "--path", "x"]):
        with failing(ConfigError, "prepare.useless-flag"):
            run(["prepare", *useless])


def test_a_run_takes_its_vocabulary_from_the_corpus(url: str, call: Call) -> None:
    flags = ["--data.corpus", "tokens", "--data.shards", "8", "--data.sequence-length", "32"]
    assert call("init", url, "--run", "t", *flags)[0] == 0
    assert connect(url, "t").reader.manifest().config.model.vocabulary == 400
    assert call("init", url, "--run", "t", *flags)[0] == 0
    with failing(ConfigError, "config.vocabulary"):
        run(["init", url, "--run", "u", *flags, "--model.vocabulary", "300"])
