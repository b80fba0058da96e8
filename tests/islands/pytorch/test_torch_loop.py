"""A PyTorch loop in virtual time: what it sends, what it adopts in place, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from archipelago.broker.config import AdoptConfig, WireConfig
from archipelago.broker.errors import ConfigError, DivergedError
from archipelago.broker.messages import LIVE_SECONDS
from archipelago.islands.own_loop import loop as own_loop
from tests import pytorch
from tests.failing import failing
from tests.islands.own_loop.any_framework import CONFIG

torch = pytorch.required()

from archipelago.islands.pytorch.module import ModuleParameters  # noqa: E402 - it imports torch
from tests.islands.pytorch.torch_runs import TorchRun, as_float32, module, of, trained  # noqa: E402

pytestmark = pytest.mark.full


def test_one_island_moves_the_run_by_its_own_steps() -> None:
    run = TorchRun()
    island = run.island()
    island.play(16)
    assert run.transport.reader.books().merged == run.merger.state.closed >= 6
    for name, merged in run.merged().items():
        moved = (run.first[name] - merged) / 0.125
        assert np.ptp(moved) == 0.0, name
        assert moved.flat[0] in range(10, 17), "every step counts once"


def test_parameters_keep_their_identity_and_buffers_stay() -> None:
    run = TorchRun()
    island = run.island()
    before = dict(island.model.named_parameters())
    island.model[1].running_mean.fill_(7.0)
    island.play(9)
    assert run.merger.state.closed
    after = dict(island.model.named_parameters())
    assert before.keys() == after.keys() == run.merged().keys()
    assert all(after[name] is before[name] for name in before)
    assert all(parameter.requires_grad for parameter in after.values())
    assert island.model[1].running_mean.tolist() == [7.0] * 4


def test_a_shared_parameter_is_one_tensor() -> None:
    run = TorchRun()
    assert [tensor.name for tensor in run.manifest.tensors] == [
        "0.weight", "1.weight", "1.bias", "2.weight", "2.bias", "3.bias"
    ]  # fmt: skip
    island = run.island()
    island.play(8)
    assert island.model[3].weight is island.model[0].weight


def test_named_buffers_are_merged() -> None:
    run = TorchRun(buffers=("1.running_mean",))
    island = run.island()
    for _ in range(12):
        island.model[1].running_mean += 0.5
        island.sync()
    assert run.merged()["1.running_mean"].min() > 1.0
    assert "1.running_var" not in run.merged()
    with failing(ConfigError, "loop.buffer"):
        ModuleParameters(module(), ["1.nothing"])
    with failing(ConfigError, "loop.buffer") as caught:
        ModuleParameters(module(), "1.running_mean")
    assert "['1.running_mean']" in caught.value.remedy


def test_two_islands_follow_the_run() -> None:
    run = TorchRun(config=of(CONFIG, adopt=AdoptConfig(rule="overwrite")))
    one, other = run.island("a"), run.island("b")
    for _ in range(12):
        trained(one.model)
        one.sync()
        trained(other.model, 0.25)
        other.sync()
    for mine, theirs in zip(one.loop.ledger.counts, other.loop.ledger.counts, strict=True):
        assert mine.version >= 4
        assert abs(mine.version - theirs.version) <= 1, "only the newest round is on its way"
    assert run.transport.reader.books().refused == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rule", ["overwrite", "carry"])
def test_rounding_to_a_narrow_dtype_is_no_progress(dtype: str, rule: Any) -> None:
    """An island that never steps must not pull the run to the numbers that its dtype has."""
    exact = module()
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter += 0.001
    run = TorchRun(exact, of(CONFIG, adopt=AdoptConfig(rule=rule)))
    island = run.island(model=module(getattr(torch, dtype)))
    island.play(16, lambda model: None)
    assert run.merger.state.closed >= 4
    for name, value in run.merged().items():
        np.testing.assert_allclose(value, run.first[name], rtol=0, atol=1e-7)
    assert all(parameter.dtype == getattr(torch, dtype) for parameter in island.model.parameters())


@pytest.mark.parametrize("up", ["int8", "int4", "e3m0", "top3"])
def test_what_rounding_leaves_out_stays_owed(up: Any) -> None:
    """All progress arrives in the end, because the reference moves only to what the merger reads."""
    run = TorchRun(config=of(CONFIG, wire=WireConfig(up=up, thin="", down="float32")))
    island = run.island()
    with torch.no_grad():
        torch.manual_seed(1)
        for parameter in island.model.parameters():
            parameter += torch.randn(parameter.shape)
    wanted = {name: as_float32(parameter) for name, parameter in island.model.named_parameters()}
    island.play(80, lambda model: None)
    for name, value in run.merged().items():
        np.testing.assert_allclose(value, wanted[name], atol=0.05)


def test_names_are_those_of_the_module_inside_of_wrappers() -> None:
    wrapped = torch.nn.DataParallel(module())
    assert ModuleParameters(wrapped).tensors.keys() == ModuleParameters(module()).tensors.keys()
    compiled = torch.compile(module(), backend="eager")
    assert ModuleParameters(compiled).tensors.keys() == ModuleParameters(module()).tensors.keys()


# -- what cannot be merged is named ---------------------------------------------------------------------------------


def changed(part: str, to: Any) -> Any:
    model = module()
    layer, _, name = part.partition(".")
    setattr(model[int(layer)], name, torch.nn.Parameter(to, requires_grad=True))
    return model


@pytest.mark.parametrize(
    ("tensor", "code"),
    [
        (torch.zeros(4, device="meta"), "loop.meta"),
        (torch.zeros(4, dtype=torch.float64), "loop.dtype"),
        (torch.zeros(4, dtype=torch.complex64), "loop.dtype"),
    ],
)
def test_what_cannot_be_merged_is_named(tensor: Any, code: str) -> None:
    with failing(ConfigError, code) as caught:
        ModuleParameters(changed("2.bias", tensor))
    assert "'2.bias'" in caught.value.what


def test_a_model_on_two_devices_is_refused() -> None:
    elsewhere = type("Elsewhere", (torch.nn.Parameter,), {"device": torch.device("cuda", 1)})
    model = module()
    model[2].bias = elsewhere(torch.zeros(4))
    with failing(ConfigError, "loop.mixed-devices") as caught:
        ModuleParameters(model)
    assert "'2.bias'" in caught.value.what


def test_a_lazy_layer_and_a_model_without_parameters_are_errors() -> None:
    with failing(ConfigError, "loop.meta"):
        ModuleParameters(torch.nn.Sequential(torch.nn.LazyLinear(3)))
    with failing(ConfigError, "loop.nothing"):
        ModuleParameters(torch.nn.ReLU())
    integers = torch.nn.ParameterList([torch.nn.Parameter(torch.arange(4), requires_grad=False)])
    with failing(ConfigError, "loop.nothing"):
        ModuleParameters(integers)


def _replaced(model: Any) -> None:
    model[2].bias = torch.nn.Parameter(torch.zeros(4))


def _of_another_shape(model: Any) -> None:
    model[2].bias.data = torch.zeros(5)


def _halved(model: Any) -> None:
    model[2].half()


def _removed(model: Any) -> None:
    model[2].bias = None


@pytest.mark.parametrize(
    ("change", "code", "named"),
    [
        (_replaced, "loop.other-tree", "'2.bias'"),
        (_removed, "loop.other-tree", "'2.bias'"),
        (_of_another_shape, "loop.shape", "'2.bias'"),
        (_halved, "loop.dtype", "'2.weight'"),
    ],
)
def test_a_parameter_that_changed_since_the_join_is_named(change: Any, code: str, named: str) -> None:
    island = TorchRun().island()
    change(island.model)
    with failing(ConfigError, code) as caught:
        island.play(8, lambda model: None)
    assert named in caught.value.what


@pytest.mark.parametrize("up", ["float32", "bfloat16", "int8", "int4", "e3m0", "top3"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nothing_that_is_not_finite_is_sent(up: Any, value: float) -> None:
    run = TorchRun(config=of(CONFIG, wire=WireConfig(up=up, thin="", down="float32")))
    island = run.island()

    def spoil(model: Any) -> None:
        with torch.no_grad():
            model[2].bias[2] = value

    with failing(DivergedError, "loop.not-finite") as caught:
        island.play(12, spoil)
    assert "'2.bias'" in caught.value.what
    assert all(np.isfinite(value).all() for value in run.merged().values())
    assert run.transport.reader.books().refused == 0


def test_islands_of_different_dtypes_share_a_run() -> None:
    run = TorchRun(config=of(CONFIG, sync=replace(CONFIG.sync, quorum=2)))
    wide, narrow = run.island("a"), run.island("b", module(torch.bfloat16))
    for _ in range(12):
        trained(wide.model)
        wide.sync()
        trained(narrow.model)
        narrow.sync()
    assert run.transport.reader.books().refused == 0
    for one, other in zip(wide.model.parameters(), narrow.model.parameters(), strict=True):
        np.testing.assert_allclose(as_float32(one), as_float32(other), atol=0.3)


def test_a_loop_that_stops_is_not_waited_for_and_comes_back() -> None:
    run = TorchRun()
    island, other = run.island("a"), run.island("b")
    for each in (island, other):
        each.play(4)
    for _ in range(int(own_loop.STALL_SECONDS + LIVE_SECONDS + 5)):
        island.link.pump()  # its threads live, and its loop does not sync
        other.play(1)
    assert run.merger.live == {"b"}
    for _ in range(6):
        island.play(1)
        other.play(1)
    assert run.merger.live == {"a", "b"}
    for mine, theirs in zip(island.loop.ledger.counts, other.loop.ledger.counts, strict=True):
        assert abs(mine.version - theirs.version) <= 1
