"""Weights that a run can begin from: their files, names and mistakes."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.flax import save_file as save_jax
from safetensors.numpy import save_file

from archipelago.broker.errors import ConfigError, DataError
from archipelago.islands.models.llama import to_llama
from archipelago.ops.weights.safetensors_files import WeightFiles
from tests.failing import failing
from tests.ops.weights.small_runs import TINY, found_of, same


def llama_tensors() -> dict[str, Any]:
    found = found_of().params
    return {to_llama(n).name: np.array(p.T if to_llama(n).transposed else p, order="C") for n, p in found.items()}


def test_several_files_under_either_naming(tmp_path: Path) -> None:
    held, expected = llama_tensors(), found_of().params
    names = sorted(held)
    save_file({name: held[name] for name in names[:8]}, tmp_path / "a.safetensors")
    save_file({name: held[name].astype(np.float64) for name in names[8:]}, tmp_path / "b.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names[:8], "a.safetensors")}))
    assert same(WeightFiles(tmp_path).load(TINY.tensors), expected)
    index.write_text(json.dumps({"weight_map": {names[0]: "a.safetensors", names[8]: "c.safetensors"}}))
    with failing(DataError, "weights.missing") as caught:
        WeightFiles(tmp_path)
    assert "c.safetensors" in caught.value.what
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


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    held = llama_tensors()
    for value in (np.nan, np.inf, -np.inf):
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


def test_weights_of_another_llama_are_refused(tmp_path: Path, exported: Path) -> None:
    shutil.copytree(exported, tmp_path / "out")
    config = json.loads((exported / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    with failing(ConfigError, "llama.different"):
        WeightFiles(tmp_path / "out")
    for damaged in ("{", "[]"):
        (tmp_path / "out" / "config.json").write_text(damaged)
        with failing(DataError, "weights.damaged"):
            WeightFiles(tmp_path / "out")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
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
        TINY.tensors[0]._replace(name="embedding", shape=(4, 2)),
        TINY.tensors[0]._replace(name="norm.scale", shape=(64,)),
    )
    try:
        loaded = WeightFiles(path).load(tensors)
    except DataError as error:
        assert error.remedy
        return
    assert {name: value.shape for name, value in loaded.items()} == {"embedding": (4, 2), "norm.scale": (64,)}
    assert all(bool(jnp.all(jnp.isfinite(value))) for value in loaded.values())
