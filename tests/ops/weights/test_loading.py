"""`load`: exports, checkpoints and live runs come into trees and modules, and what does not fit is named."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import archipelago
from archipelago.broker.errors import ArchipelagoError
from archipelago.ops.weights.export import RunParameters, write
from tests.failing import failing
from tests.islands.user_loop.own_runs import OwnRun, tree
from tests.ops.weights.small_runs import checkpointed, found_of


@pytest.fixture
def url() -> str:
    return f"fakeredis://{uuid.uuid4().hex}"


def exported(out: Path, run: OwnRun, dtype: str = "float32") -> str:
    write(RunParameters(run.manifest, run.merged(), 3, 12, "a test"), out, dtype)
    return str(out)


def assert_filled(found: Any, run: OwnRun) -> None:
    np.testing.assert_array_equal(np.asarray(found["layers"][1]["kernel"], np.float32), run.merged()["layers.1.kernel"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_comes_into_a_tree(tmp_path: Path, dtype: str) -> None:
    run = OwnRun(tree())
    folder = exported(tmp_path / "out", run, dtype)
    assert_filled(archipelago.load(folder, like=tree(more=2.0)), run)
    assert_filled(archipelago.load(Path(folder) / "model.safetensors", like=tree(jnp.bfloat16)), run)
    assert archipelago.load(folder).keys() == run.merged().keys()


def test_a_live_run_and_a_checkpoint_come_into_a_tree(tmp_path: Path, url: str) -> None:
    archipelago.create(url, "own", tree(more=1.0), steps=100)
    assert_filled(archipelago.load(url, like=tree(), run="own"), OwnRun(tree(more=1.0)))
    found = found_of()
    checkpointed(found, tmp_path / "mine" / "merger")
    like = {name: jnp.zeros(values.shape) for name, values in found.params.items()}
    for source in (str(tmp_path / "mine"), exported_llama(found, tmp_path / "llama")):
        taken = archipelago.load(source, like=like)
        assert all(np.array_equal(taken[name], found.params[name]) for name in like)


def exported_llama(found: RunParameters, out: Path) -> str:
    assert write(found, out, "float32") == "llama"
    return str(out)


def test_frozen_tensors_are_compared(tmp_path: Path) -> None:
    run = OwnRun(tree(), trained="kernel")
    folder = exported(tmp_path / "out", run)
    assert_filled(archipelago.load(folder, like=tree()), run)
    with failing(ArchipelagoError, "loop.other-frozen"):
        archipelago.load(folder, like=replace_bias(tree()))


def test_tensors_without_elements_are_left_out_as_in_runs(tmp_path: Path) -> None:
    like = {"weight": jnp.zeros(2), "none": jnp.zeros((0, 3))}
    save_file({"weight": np.ones(2, np.float32), "none": np.zeros((0, 3), np.float32)}, tmp_path / "own.safetensors")
    found = archipelago.load(tmp_path, like=like)
    assert (found["weight"].tolist(), found["none"].shape) == ([1.0, 1.0], (0, 3))


def replace_bias(params: Any) -> Any:
    return {**params, "embedding": params["embedding"] + 1.0}


def test_what_cannot_be_loaded_is_named(tmp_path: Path, url: str) -> None:
    folder = exported(tmp_path / "out", OwnRun(tree()))
    for like in ({"other": jnp.ones(3)}, {**tree(), "more": jnp.ones(3)}):
        with failing(ArchipelagoError, "loop.other-tensors"):
            archipelago.load(folder, like=like)
    (tmp_path / "torn.safetensors").write_bytes(b"torn")
    for source, code in (
        (tmp_path / "torn.safetensors", "weights.damaged"), (tmp_path / "none.safetensors", "weights.missing"),
        (tmp_path / "none", "checkpoint.missing"), (url, "config.which-run"),
    ):  # fmt: skip
        with failing(ArchipelagoError, code):
            archipelago.load(source, like=tree())
    with failing(ArchipelagoError, "broker.unknown-run"):
        archipelago.load(url, like=tree(), run="none")
    shutil.copy(tmp_path / "out" / "model.safetensors", tmp_path / "out" / "other.safetensors")
    with failing(ArchipelagoError, "weights.damaged"):
        archipelago.load(folder)
