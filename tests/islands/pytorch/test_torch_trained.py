"""PyTorch runs that train some parameters of a module: the others are frozen, and equal to those of JAX islands."""

from __future__ import annotations

import uuid
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import archipelago
from archipelago import SyncConfig
from archipelago.broker.errors import ConfigError
from archipelago.islands.user_loop.parameters import frozen_values
from archipelago.islands.user_loop.tree import TreeLayout
from tests import pytorch
from tests.failing import failing
from tests.islands.user_loop.any_framework import merged_by, served

torch = pytorch.required()

from archipelago.islands.pytorch.host import FrozenTensors  # noqa: E402 - it imports torch
from archipelago.islands.pytorch.module import ModuleParameters  # noqa: E402 - it imports torch
from tests.islands.pytorch.torch_runs import module  # noqa: E402

SYNC = SyncConfig(interval=4, fragments=2, quorum=1, grace=0.0)


def adapted() -> Any:
    """Return a module whose second linear layer alone requires gradients."""
    model = module()
    model.requires_grad_(False)
    model[2].requires_grad_(True)
    return model


@pytest.fixture
def made() -> str:
    url = f"fakeredis://{uuid.uuid4().hex}"
    assert archipelago.pytorch.create(url, "own", adapted(), sync=SYNC, steps=1000)
    return url


def test_only_what_is_trained_moves(made: str) -> None:
    model = adapted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with served(made) as merger, archipelago.pytorch.join(made, "own", model, optimizer, island="a") as run:
        while merger.state.closed < 4:
            for parameter in model[2].parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            run.sync()
        assert sum(merger.manifest.sizes) == 20
    for (name, one), other in zip(model.named_parameters(), module().parameters(), strict=True):
        assert torch.equal(one, other) != name.startswith("2."), name


def test_a_tensor_that_layers_share_is_found_by_any_of_its_names() -> None:
    """The first and the last layer share their weight."""
    for trained in (r"^3\.weight", lambda name: name == "3.weight", r"^0\."):
        assert set(ModuleParameters(module(), trained=trained).tensors) == {"0.weight"}
    renamed = {"0.weight": "embedding", "3.weight": "head"}
    for trained in ("embedding", "head"):
        assert set(ModuleParameters(module(), trained=trained, names=renamed).tensors) == {"embedding"}


def test_jax_has_the_same_digests() -> None:
    values = np.random.default_rng(0).integers(-100, 100, (3, 5))
    for dtype in ("float32", "bfloat16", "float16", "float8_e4m3fn", "int8"):
        model = torch.nn.Module()
        frozen = torch.tensor(values).to(getattr(torch, dtype))
        model.base = torch.nn.Parameter(frozen.t().contiguous().t(), requires_grad=False)  # not in row-major order
        model.adapter = torch.nn.Parameter(torch.ones(2))
        tree = {"base": jnp.asarray(values).astype(dtype), "adapter": jnp.ones(2)}
        (ours,) = ModuleParameters(model).frozen_values()
        (theirs,) = frozen_values(TreeLayout.of(tree, "adapter"))
        assert ours.named() == theirs.named(), dtype


def test_an_optimiser_that_does_not_fit_is_refused() -> None:
    model = module()
    for wrong in ("adam", module().parameters(), [None], torch.optim.SGD(module().parameters(), lr=0.1)):
        with failing(ConfigError, "loop.argument"):
            archipelago.pytorch.join("fakeredis://never", "own", model, wrong)


def counted_write(weight: Any) -> None:
    with torch.no_grad():
        weight *= 0.99


def uncounted_write(weight: Any) -> None:
    weight.data[2] += 1.0


@pytest.mark.parametrize("write", [counted_write, uncounted_write])
def test_a_frozen_parameter_that_changes_is_an_error(made: str, write: Any) -> None:
    """PyTorch does not count writes to `.data`. They are noticed when the island leaves."""
    model = adapted()
    joined = archipelago.pytorch.join(made, "own", model)
    with failing(ConfigError, "loop.frozen-changed") as caught, served(made), joined as run:
        run.sync()
        write(model[1].weight)
        while write is counted_write:
            run.sync()
    assert "1.weight" in caught.value.what
    assert "trained=" in caught.value.remedy


def test_what_the_script_updates_without_gradients_can_be_chosen() -> None:
    url, model = f"fakeredis://{uuid.uuid4().hex}", adapted()
    archipelago.pytorch.create(url, "own", model, trained=r"^[12]\.", sync=SYNC, steps=1000)
    with served(url) as merger, archipelago.pytorch.join(url, "own", model, trained=r"^[12]\.") as run:
        while merger.state.closed < 4:
            counted_write(model[1].weight)
            run.sync()
        assert merged_by(merger)["1.weight"].max() < module()[1].weight.min()


def test_frozen_tensors_of_all_dtypes_are_added_up() -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.complex64, torch.float64)
    made = {str(dtype): torch.ones(7, 3).to(dtype) for dtype in dtypes}
    for changed in made:
        frozen = FrozenTensors(made)
        frozen.note()
        frozen.require_same()
        before = made[changed].data.clone()
        made[changed].data[6, 2] = 0
        with failing(ConfigError, "loop.frozen-changed") as caught:
            frozen.require_same()
        assert changed in caught.value.what
        made[changed].data.copy_(before)
        assert made[changed]._version == 0
