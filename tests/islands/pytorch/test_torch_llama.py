"""A Llama of transformers in PyTorch is our dense transformer under other names, and joins a run of it."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np
import pytest

import archipelago
from archipelago import SyncConfig
from archipelago.broker.config import ModelConfig
from archipelago.broker.errors import ConfigError
from archipelago.islands.models import llama
from archipelago.islands.models.llama import DENSE
from archipelago.islands.models.registry import build
from tests import pytorch
from tests.failing import failing
from tests.islands.user_loop.any_framework import CONFIG, merged_by, served

torch = pytorch.required()
transformers = pytorch.required("transformers")

from archipelago.islands.pytorch.module import ModuleParameters  # noqa: E402 - it imports torch
from archipelago.pytorch import LLAMA, Place  # noqa: E402 - it imports torch

pytestmark = pytest.mark.full

SYNC = SyncConfig(interval=4, fragments=2, quorum=1, grace=0.0)


def llama_of(size: str = "tiny", **changes: Any) -> Any:
    """Return a new Llama of the dimensions of one of our models."""
    config = llama.config_of(DENSE[size], 256, 128, "float32")
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**config, **changes}))


def fresh(seed: int = 0) -> dict[str, Any]:
    """Return parameters of ours. Their scales are not all 1, which would hide scales in the wrong places."""
    rng = np.random.default_rng(seed)
    first = build(ModelConfig("tiny", compute_dtype="float32")).init(seed)
    return {name: value * (1 + 0.1 * rng.normal(size=value.shape).astype(np.float32)) for name, value in first.items()}


@pytest.mark.parametrize("size", ["tiny", "small"])
def test_the_table_names_every_parameter_once(size: str) -> None:
    tensors = ModuleParameters(llama_of(size), names=LLAMA).manifest_tensors(lambda name: "rest")
    assert {tensor.name: tensor.shape for tensor in tensors} == {
        t.name: t.shape for t in build(ModelConfig(size)).tensors
    }


def test_a_llama_trains_in_a_run_that_was_created_in_jax() -> None:
    url, params = f"fakeredis://{uuid.uuid4().hex}", fresh()
    archipelago.create(url, "own", params, sync=SYNC, merge=CONFIG.merge, steps=1000)
    model = llama_of()
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    with served(url) as merger, archipelago.pytorch.join(url, "own", model, island="a", names=LLAMA) as run:
        named = ModuleParameters(model, names=LLAMA).named()
        for name, value in params.items():
            np.testing.assert_array_equal(named[name].detach().numpy(), np.asarray(value))
        with torch.no_grad():  # one element moves, which tells its place under both layouts
            model.model.layers[0].mlp.gate_proj.weight[3, 5] += 1.0
        while merger.state.closed < SYNC.fragments:
            run.sync()
    moved = merged_by(merger)["layers.0.mlp.gate.kernel"] - np.asarray(params["layers.0.mlp.gate.kernel"])
    assert np.unravel_index(np.abs(moved).argmax(), moved.shape) == (5, 3)
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == before


def test_a_table_that_does_not_fit_is_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 3))
    table: dict[str, str | Place] = {"0.weight": Place("dense.kernel", transposed=True), "1.bias": "bias"}
    named = ModuleParameters(model, names=table).named()
    assert {name: tuple(tensor.shape) for name, tensor in named.items()} == {
        "dense.kernel": (2, 3), "0.bias": (3,), "1.weight": (3, 3), "bias": (3,),
    }  # fmt: skip
    wrongs: list[Any] = [
        {"0.bias": "1.bias"},
        {"0.bias": Place("bias", transposed=True)},
        {"0.bias": ("bias", True)},
        {"0.bias": ""},
        {"0.bias": "bias"}.get,
        ["bias"],
    ]
    for wrong in wrongs:
        with failing(ConfigError, "loop.names"):
            archipelago.pytorch.create("fakeredis://never", "own", model, steps=10, names=wrong)
        with failing(ConfigError, "loop.names"):
            ModuleParameters(model, names=wrong)
