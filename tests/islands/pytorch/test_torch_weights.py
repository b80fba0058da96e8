"""Parameters of a run in modules of PyTorch: `follow`, `load`, and exports that transformers loads."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archipelago
from archipelago.broker.errors import ArchipelagoError
from archipelago.ops.weights.export import find, write
from tests import pytorch
from tests.failing import failing

torch = pytorch.required()
transformers = pytorch.required("transformers")
pytestmark = pytest.mark.full


def gpt2(seed: int) -> Any:
    """Return a model whose output shares the embedding."""
    torch.manual_seed(seed)
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=16, vocab_size=50)
    return transformers.GPT2LMHeadModel(config).eval()


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(torch.arange(8)[None]).logits.numpy()


@pytest.fixture
def url() -> str:
    return f"fakeredis://{uuid.uuid4().hex}"


def test_an_export_of_a_model_of_transformers_loads(url: str, tmp_path: Path) -> None:
    first = gpt2(0)
    assert archipelago.pytorch.create(url, "gpt", first, steps=100)
    assert write(find(url, "gpt"), tmp_path / "out", "float32") == "gpt2"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert isinstance(loaded, transformers.GPT2LMHeadModel)
    np.testing.assert_array_equal(logits(loaded.eval()), logits(first))
    for source in (url, tmp_path / "out"):
        into = gpt2(1).requires_grad_(False)
        assert archipelago.load(source, like=into, run="gpt") is into
        np.testing.assert_array_equal(logits(into), logits(first))


def test_a_run_of_adapters_is_followed_by_the_whole_model(url: str, tmp_path: Path) -> None:
    base = gpt2(0)
    assert archipelago.pytorch.create(url, "mlp", base, steps=100, trained="mlp")
    with archipelago.follow(url, "mlp", like=(into := gpt2(0))) as listener:
        with torch.no_grad():
            into.transformer.h[0].mlp.c_fc.weight.zero_()
        assert next(listener).params is into
    np.testing.assert_array_equal(logits(into), logits(base))
    with failing(ArchipelagoError, "loop.other-frozen"):
        archipelago.follow(url, "mlp", like=gpt2(1))
    assert write(find(url, "mlp"), tmp_path / "out", "float32") == "archipelago", "it is not the whole model"
    np.testing.assert_array_equal(logits(archipelago.load(tmp_path / "out", like=gpt2(0))), logits(base))
    with failing(ArchipelagoError, "loop.other-tensors"):
        archipelago.load(tmp_path / "out", like=torch.nn.Linear(3, 3))
